"""GPUs that compute with two floats in one instruction get the bits of those that do not."""

import pytest

from gradkit._cuda.launch.kernels import options_of, source_of
from testbed.nvrtc import compile_ptx, cupy_options
from tests import golden
from tests.devices.emulated import on_device, ptx_backend

ROWS = {"DATA_T": "bfloat16", "STAT_T": "float32", "PARAM_T": "bfloat16", "VEC": 8, "CHUNKS": 1}
GRADIENT = ROWS | {"CENTRED": 1, "FROM_OUTPUT": 0}
FILES = {
    "grad_stats": {"CAPACITY": 90, "LIST_T": "bfloat16"},
    "layer_norm": ROWS | {"CENTRED": 1},
    "layer_norm_grad": GRADIENT | {"LONG": 0},
    "layer_norm_grad_cluster": GRADIENT,
    "layer_norm_grad_wide": GRADIENT,
    "norm": {"CAPACITY": 90, "LIST_T": "bfloat16", "ORDER": "SumOfSquares"},
}
CASES = (
    "layer_norm bfloat16-float32-bfloat16 70x256",
    "layer_norm_grad bfloat16-float32-bfloat16 37x64",
    "layer_norm_grad bfloat16-float32-bfloat16 3x1027",
    "invertible_layer_norm_grad bfloat16-float32-bfloat16 37x64",
    "grad_norm p=2 bfloat16 4 arrays",
    "grad_stats bfloat16 4 arrays",
)


@pytest.mark.ptx
@pytest.mark.parametrize("file", FILES)
def test_which_gpus_have_such_instructions(file):
    for architecture, expected in ((90, False), (100, True), (120, False)):
        options = cupy_options(options_of(FILES[file]), architecture)
        assert ("f32x2" in compile_ptx(source_of(file), options)) == expected, architecture


@pytest.mark.ptx
@pytest.mark.parametrize("name", CASES)
def test_bits(name):
    backend = ptx_backend(architecture=100, **golden.DEVICE)
    (case,) = (case for case in golden.cases() if case.name == name)
    found = case.call(lambda host: on_device(backend.device.xp.array(host), backend))
    assert golden.digest(found) == golden.recorded()[name]

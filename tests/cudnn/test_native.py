"""gradkit's own kernels take every case that cuDNN takes, within the same bounds."""

import pytest

from gradkit._cuda import CudaBackend
from testbed.emulator.compiler import compiler_path
from testbed.emulator.device import EmulatedDevice
from tests.cudnn.cases import COMBINATIONS, MIXTURES, SHAPES, Case, ForwardCase, has_variance

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(compiler_path() is None, reason="no g++ on this machine"),
]
# A device's allocations and elements are aligned; one byte off is the host's alone.
REAL = [row for row in MIXTURES if "misaligned" not in row]
CASES = [(shape, axis, ("C", "C", "C")) for shape in SHAPES for axis in range(len(shape))]
CASES += [((2, 3, 4, 5), axis, row) for row in REAL for axis in (1, 3)]


@pytest.fixture(scope="module")
def native():
    return CudaBackend(EmulatedDevice(multiprocessors=1))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("types", COMBINATIONS, ids=lambda row: "-".join(map(str, row)))
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [Case, ForwardCase])
def test_every_case(native, types, affine, kind):
    for shape, axis, layouts in CASES:
        if kind is ForwardCase and not has_variance(shape, axis):
            continue
        layouts = layouts if kind is Case else layouts[1:]
        case = kind(shape, axis, types, layouts=layouts, affine=affine)
        case.run(native, "native")
        case.check()

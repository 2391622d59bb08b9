"""Calls that are captured into a CUDA graph: replays find all memory where it was.

A graph reads and writes the same addresses at each replay. What the caller holds stays there;
whatever else a call has made, results that nobody took among it, has to be kept.
"""

import gc
import weakref

import numpy as np
import pytest

import gradkit
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch import kernels
from testbed.emulated import on_device
from testbed.emulator import EmulatedDevice
from tests.layouts import LAYOUTS
from tests.problems import make

pytestmark = pytest.mark.emulated


class Capturing(EmulatedDevice):
    """Remembers whose memory its kernels were given, without holding it."""

    def __init__(self):
        super().__init__(multiprocessors=1)
        self.given = []

    def capturing(self):
        return True

    def pointers(self, arrays, *, write):
        self.remember(arrays)
        return super().pointers(arrays, write=write)

    def remember(self, arrays):
        self.given += [weakref.ref(owner_of(array)) for array in arrays]


def owner_of(array):
    """The array whose memory an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.fixture
def device(monkeypatch):
    device = Capturing()
    launch = kernels.LoadedKernel.__call__

    def remembering(kernel, grid, block, args, shared_mem=0):
        arrays = (
            arg for arg in args if isinstance(arg, np.ndarray) and arg.dtype.type is not np.void
        )
        device.remember(arrays)
        return launch(kernel, grid, block, args, shared_mem)

    monkeypatch.setattr(kernels.LoadedKernel, "__call__", remembering)
    return device


def lists(on, lay):
    rng = np.random.default_rng(0)
    return [on(lay(rng.standard_normal((5, k + 1)).astype(np.float32))) for k in range(120)]


def rows(on, lay, names, shape=(7, 36), **options):
    p = make(shape, ("float16", "float32", "float32"), **options)
    return {name: on(lay(getattr(p, name))) for name in names.split()}


IMAGES = {"shape": (3, 5, 4, 4), "batch": True, "axis": 1}
NORM = np.array([3.0, np.nan, 0.5])
CALLS = {
    "grad_norm": lambda on, lay: gradkit.grad_norm(lists(on, lay)),
    "norms": lambda on, lay: gradkit.grad_norm(lists(on, lay), 3, per_tensor=True),
    "clip_grad_norm": lambda on, lay: gradkit.clip_grad_norm(lists(on, lay), 1.0),
    "clip_by_global_norm": lambda on, lay: gradkit.clip_by_global_norm(lists(on, lay), 1.0),
    "clip_coefficient": lambda on, lay: gradkit.clip_coefficient(on(lay(NORM)), 1.0),
    "spike_guard_update": lambda on, lay: gradkit.spike_guard_update(
        on(lay(np.array([30.0, 2.0, 0.5]))), on(np.array(9.0))
    ),
    "spike_guard_update of a number": lambda on, lay: gradkit.spike_guard_update(
        on(lay(np.array([30.0, 2.0, 0.5]))), 9.0
    ),
    "clip_grad_value": lambda on, lay: gradkit.clip_grad_value(lists(on, lay), 0.5),
    "scale_grads": lambda on, lay: gradkit.scale_grads(lists(on, lay), on(np.array(0.5))),
    "zero_grad": lambda on, lay: gradkit.zero_grad(lists(on, lay)),
    "accumulate_grad": lambda on, lay: gradkit.accumulate_grad(
        on(lay(np.ones((3, 4), np.float32))), on(lay(np.ones(4, np.float32))), scale=0.5
    ),
    "layer_norm": lambda on, lay: gradkit.layer_norm(**rows(on, lay, "x scale bias")),
    "layer_norm_grad": lambda on, lay: gradkit.layer_norm_grad(
        **rows(on, lay, "dy x scale mean inv_std")
    ),
    "long rows": lambda on, lay: gradkit.layer_norm_grad(
        **rows(on, lay, "dy x scale mean inv_std", (2, 20000))
    ),
    "one row, whose statistics are scalars": lambda on, lay: gradkit.layer_norm_grad(
        **rows(on, lay, "dy x scale", (36,)), mean=np.float32(0), inv_std=np.float32(1)
    ),
    "layer_norm_inverse": lambda on, lay: gradkit.layer_norm_inverse(
        y=on(lay(np.ones((7, 36), np.float16))), **rows(on, lay, "scale bias mean inv_std")
    ),
    "invertible_layer_norm_grad": lambda on, lay: gradkit.invertible_layer_norm_grad(
        y=on(lay(np.ones((7, 36), np.float16))), **rows(on, lay, "dy scale bias inv_std")
    ),
    "rms_norm": lambda on, lay: gradkit.rms_norm(**rows(on, lay, "x scale")),
    "rms_norm_grad": lambda on, lay: gradkit.rms_norm_grad(
        **rows(on, lay, "dy x scale inv_std", centred=False)
    ),
    "batch_norm": lambda on, lay: gradkit.batch_norm(**rows(on, lay, "x scale bias", **IMAGES)),
    "batch_norm_grad": lambda on, lay: gradkit.batch_norm_grad(
        **rows(on, lay, "dy x scale mean inv_std", **IMAGES)
    ),
}


def run(device, call, layout):
    """The arguments of a call whose results nobody has taken."""
    backend, own = CudaBackend(device), []

    def on(host):
        own.append(owner_of(host))
        return on_device(host, backend)

    CALLS[call](on, LAYOUTS[layout])
    gc.collect()
    return own


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["C", "stepped", "misaligned"])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_graph_will_use_again_is_kept(device, call, layout):
    own = run(device, call, layout)
    assert own
    assert device.given
    assert all(ref() is not None for ref in device.given)


def test_nothing_is_kept_outside_of_a_capture(device, monkeypatch):
    monkeypatch.setattr(Capturing, "capturing", lambda _: False)
    own = run(device, "layer_norm_grad", "C")
    found = [ref() for ref in device.given]
    assert any(array is None for array in found)
    assert {id(array) for array in found if array is not None} == set(map(id, own))

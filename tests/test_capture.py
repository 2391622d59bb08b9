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
from testbed.emulator import EmulatedDevice
from tests.devices.emulated import Emulated, on_device
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


class Devices:
    """A group of two, of which the other rank has what this one has."""

    rank, size, on_device = 0, 2, True

    def __init__(self, on):
        self.faults, self._rows = on(np.zeros(2)), on(np.zeros((2, 6)))

    def allgather(self, state):
        self._rows[...] = state
        return self._rows

    def check(self):
        """Find nothing."""


IMAGES = {"shape": (3, 5, 4, 4), "batch": True, "axis": 1}
NORM = np.array([3.0, np.nan, 0.5])
CALLS = {
    "grad_norm": lambda on, lay: gradkit.grad_norm(lists(on, lay)),
    "norms": lambda on, lay: gradkit.per_tensor_norms(lists(on, lay), 3, flat=True),
    "clip_grad_norm": lambda on, lay: gradkit.clip_grad_norm(lists(on, lay), 1.0),
    "a norm over devices": lambda on, lay: gradkit.grad_norm(lists(on, lay), group=Devices(on)),
    "a clip over devices": lambda on, lay: gradkit.clip_grad_norm(
        lists(on, lay), on(np.array(2.0)), scale=on(np.array(0.5)), group=Devices(on), replicas=2
    ),
    "clip_by_global_norm": lambda on, lay: gradkit.clip_by_global_norm(lists(on, lay), 1.0),
    "clip_coefficient": lambda on, lay: gradkit.clip_coefficient(on(lay(NORM)), 1.0),
    "spike_guard_update": lambda on, lay: gradkit.spike_guard_update(
        on(lay(np.array([30.0, 2.0, 0.5]))), on(np.array(9.0))
    ),
    "spike_guard_update of a number": lambda on, lay: gradkit.spike_guard_update(
        on(lay(np.array([30.0, 2.0, 0.5]))), 9.0
    ),
    "clip_grad_value": lambda on, lay: gradkit.clip_grad_value(lists(on, lay), 0.5),
    "clip_grad_block_norm": lambda on, lay: gradkit.clip_grad_block_norm(
        lists(on, lay), 0.5, axis=0
    ),
    "clip_by_adaptive_norm": lambda on, lay: gradkit.clip_by_adaptive_norm(
        lists(on, lay), lists(on, lay), axis=1
    ),
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
    "add_layer_norm": lambda on, lay: gradkit.add_layer_norm(
        **rows(on, lay, "x scale bias"), residual=on(lay(np.ones((7, 36), np.float16)))
    ),
    "add_rms_norm": lambda on, lay: gradkit.add_rms_norm(
        **rows(on, lay, "x scale"), residual=on(lay(np.ones((7, 36), np.float16)))
    ),
    "rms_norm_grad with ds": lambda on, lay: gradkit.rms_norm_grad(
        **rows(on, lay, "dy x scale inv_std", centred=False),
        ds=on(lay(np.ones((7, 36), np.float16))),
    ),
    "batch_norm": lambda on, lay: gradkit.batch_norm(**rows(on, lay, "x scale bias", **IMAGES)),
    "batch_norm_grad": lambda on, lay: gradkit.batch_norm_grad(
        **rows(on, lay, "dy x scale mean inv_std", **IMAGES)
    ),
    "running statistics": lambda on, lay: gradkit.batch_norm(
        **rows(on, lay, "x", **IMAGES),
        running_mean=on(lay(np.ones(5, np.float32))),
        running_var=on(lay(np.ones(5, np.float32))),
    ),
    "update_running_statistics": lambda on, lay: gradkit.update_running_statistics(
        *(on(lay(np.ones(5, np.float32))) for _ in range(4)), on(np.array(96, np.float32))
    ),
    "batch_norm_inference": lambda on, lay: gradkit.batch_norm_inference(
        **rows(on, lay, "x scale bias mean", **IMAGES), var=on(lay(np.ones(5, np.float32)))
    ),
    "batch_norm_inference_grad": lambda on, lay: gradkit.batch_norm_inference_grad(
        **rows(on, lay, "dy x scale mean", **IMAGES), var=on(lay(np.ones(5, np.float32)))
    ),
    "group_norm": lambda on, lay: gradkit.group_norm(
        num_groups=5, **rows(on, lay, "x scale bias", **IMAGES)
    ),
    "group_norm_grad": lambda on, lay: gradkit.group_norm_grad(
        **rows(on, lay, "dy x scale", **IMAGES),
        mean=on(lay(np.zeros((3, 5), np.float32))),
        inv_std=on(lay(np.ones((3, 5), np.float32))),
    ),
    "batch_norm_stats": lambda on, lay: gradkit.batch_norm_stats(**rows(on, lay, "x", **IMAGES)),
    "combine_stats": lambda on, lay: gradkit.combine_stats(
        *(on(lay(np.ones(n, np.float32))) for n in ((3, 5), (3, 5), 3))
    ),
    "batch_norm_apply": lambda on, lay: gradkit.batch_norm_apply(
        **rows(on, lay, "x scale bias mean", **IMAGES), var=on(lay(np.ones(5)))
    ),
    "batch_norm_grad_sums": lambda on, lay: gradkit.batch_norm_grad_sums(
        **rows(on, lay, "dy x mean inv_std", **IMAGES)
    ),
    "batch_norm_grad_apply": lambda on, lay: gradkit.batch_norm_grad_apply(
        **rows(on, lay, "dy x scale mean inv_std", **IMAGES),
        sum_dy_xhat=on(lay(np.ones(5))),
        sum_dy=on(lay(np.ones(5, np.float32))),
        count=on(np.array(96, np.float32)),
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


@pytest.mark.sampled(7)
@pytest.mark.parametrize("layout", ["C", "stepped", "misaligned"])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_graph_will_use_again_is_kept(device, call, layout):
    own = run(device, call, layout)
    assert own
    assert device.given
    assert all(ref() is not None for ref in device.given)


@pytest.mark.parametrize("call", ["layer_norm_grad", "batch_norm", "group_norm", "rms_norm"])
def test_results_that_are_the_backends_own_arrays_are_kept(device, monkeypatch, call):
    """As CuPy's are: they are allocated all at once."""
    monkeypatch.setattr(Emulated, "returns_views", True)
    own = run(device, call, "C")
    assert own
    assert all(ref() is not None for ref in device.given)


def test_nothing_is_kept_outside_of_a_capture(device, monkeypatch):
    monkeypatch.setattr(Capturing, "capturing", lambda _: False)
    own = run(device, "layer_norm_grad", "C")
    found = [ref() for ref in device.given]
    assert any(array is None for array in found)
    assert {id(array) for array in found if array is not None} == set(map(id, own))


WAITING = {
    "raise": lambda grad: gradkit.clip_grad_norm([grad], 1.0, nonfinite="raise"),
    "each": lambda grad: gradkit.clip_grad_block_norm([grad], 1.0, nonfinite="raise"),
    "ranks": lambda grad: gradkit.clip_grad_norm(
        [grad], 1.0, group=OfTwo(), scale=on_device(np.array(0.5), grad.backend)
    ),
}


class OfTwo:
    """A group that exchanges numbers in host memory; the other rank says what this one does."""

    rank, size = 0, 2

    def allgather(self, state):
        return np.stack([state, state])


@pytest.mark.parametrize("call", WAITING)
def test_what_waits_for_the_device_is_refused(device, call):
    """CUDA ends a capture in which something waits, and says no more than that it did."""
    grad = on_device(np.array([3.0, 4.0]), CudaBackend(device))
    with pytest.raises(RuntimeError, match="would synchronise with the device, which is not"):
        WAITING[call](grad)
    assert list(grad) == [3.0, 4.0]

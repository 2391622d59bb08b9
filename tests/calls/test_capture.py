"""Calls that are captured into a CUDA graph: replays find all memory where it was.

A graph reads and writes the same addresses at each replay. What the caller holds stays there;
whatever else a call has made, results that nobody took among it, has to be kept.
"""

import gc
import weakref
from functools import partial

import numpy as np
import pytest

import gradkit
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch import kernels
from testbed.emulator import EmulatedDevice
from tests import operations
from tests.devices.emulated import Emulated, on_device
from tests.layouts import LAYOUTS
from tests.operations import OPERATIONS, calls, drawn

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
    launch = kernels.Launch.__call__

    def remembering(of, *args):
        arrays = (
            arg for arg in args if isinstance(arg, np.ndarray) and arg.dtype.type is not np.void
        )
        if of.kernel.device is device:  # and no dry run
            device.remember(arrays)
        return launch(of, *args)

    monkeypatch.setattr(kernels.Launch, "__call__", remembering)
    return device


TYPES = ("float16", "float32", "float32")
LISTS = [((5, k + 1), "float32") for k in range(120)]  # too many for a launch's parameters


class Devices:
    """A group of two, of which the other rank has what this one has."""

    rank, size, on_device = 0, 2, True

    def __init__(self, make):
        self.faults, self._rows = (make("norm", shape, "float64") for shape in (2, (2, 6)))

    def allgather(self, state):
        self._rows[...] = state
        return self._rows

    def check(self):
        """Find nothing."""


def every_call(make):
    """Of every function, and ways to compute that its row does not have."""
    one = lambda: make("norm", (), "float64")  # noqa: E731
    given = {"types": TYPES, "shape": (3, 6, 2, 36), "lists": LISTS}
    halves = {"types": ("float16",) * 3, "lists": [((5, k + 1), "float16") for k in range(120)]}
    long = {"types": TYPES, "shape": (2, 20000)}

    def of(name, options=given, **changes):
        arguments = OPERATIONS[name].arguments(make, **options)
        return getattr(gradkit, name)(**arguments | changes)

    def into(name):
        """Outputs in the layout of the arguments, so that most have gaps."""
        results = of(name)
        single = not isinstance(results, tuple)
        outs = [make("out", r.shape, r.dtype.name) for r in ((results,) if single else results)]
        of(name, out=outs[0] if single else tuple(outs))

    short = {"types": ("float32",) * 3, "shape": (3, 6, 2, 36), "lists": LISTS[:3]}
    all_calls, few = calls(make, **given), calls(make, **short)
    all_calls |= {f"{each.name} of few": few[each.name] for each in operations.of("lists")}
    for each in operations.of("rows", "channels", "groups"):
        all_calls[f"{each.name} with out"] = partial(into, each.name)
    return all_calls | {
        "few sums and their norm": lambda: of("accumulate_grads", short, norm_out=one()),
        "norms": lambda: of("per_tensor_norms", norm_type=3, flat=True),
        "a norm over devices": lambda: of("grad_norm", group=Devices(make)),
        "a clip over devices": lambda: of(
            "clip_grad_norm", max_norm=one(), scale=one(), group=Devices(make), replicas=2
        ),
        "a coefficient": lambda: of("scale_grads", coefficient=one()),
        "three norms": lambda: of("clip_coefficient", norm=make("norm", (3,), "float64")),
        "a norm that is a number": lambda: of("spike_guard_update", norm=9.0),
        "a scaled gradient": lambda: of("accumulate_grad", scale=0.5),
        "at random": lambda: of("accumulate_grads", halves, rounding="stochastic", seed=3),
        "scales per sample": lambda: of(
            "layer_norm_grad", scale=make("scale", (3, 1, 1, 36), "float32")
        ),
        "long rows": lambda: of("layer_norm_grad", long),
        "one row, whose statistics are scalars": lambda: of(
            "layer_norm_grad", {**given, "shape": (36,)}, mean=np.float32(0), inv_std=np.float32(1)
        ),
    }


def run(device, call, layout):
    """The arguments of a call whose results nobody has taken."""
    backend, own = CudaBackend(device), []

    def make(*spec):
        host = LAYOUTS[layout](drawn(*spec))
        own.append(owner_of(host))
        return on_device(host, backend)

    every_call(make)[call]()
    gc.collect()
    return own


@pytest.mark.guarantee("Captured")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("layout", ["C", "stepped", "misaligned"])
@pytest.mark.parametrize("call", every_call(drawn))
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

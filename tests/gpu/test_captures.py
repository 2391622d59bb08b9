"""Every function in a graph: replays give its bits and touch no memory that others have by then."""

import gc

import numpy as np
import pytest

import gradkit
from gradkit.errors import KernelError
from tests.backends import ON_GPU, CuPy
from tests.layouts import LAYOUTS
from tests.operations import OPERATIONS, drawn, leaves, leaving_nothing

pytestmark = ON_GPU

BACKEND = CuPy()
SHAPE = (3, 6, 2, 36)
# Further arguments, by title.
MORE = {
    "layer_norm into an array": {"out": (("y", SHAPE, "float32"), None, None)},
    "accumulate_grads and their norm": {"norm_out": ("norm", (), "float64")},
}
CALLS = {
    f"{each.name} {variant}".rstrip(): (each, variant, {})
    for each in OPERATIONS.values()
    for variant in ("", *each.variants)
} | {title: (OPERATIONS[title.split()[0]], "", more) for title, more in MORE.items()}
# Rows that one block does not hold or a block's shared memory does not, and lists of more arrays
# than a launch takes.
LARGE = {
    f"{each.name} {shape}": (each, "", {"shape": shape})
    for each in OPERATIONS.values()
    for shape in ((65, 1025), (9, 20000))
    if each.family in ("rows", "channels")
} | {
    f"{name} of 200": (
        OPERATIONS[name],
        "",
        {"lists": [((7, k + 1), "data") for k in range(200)]},
    )
    for name in ("clip_grad_norm", "accumulate_grads")
}
FILLING = 77
SIZES = [512 * k for k in (1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)]


class Arguments:
    """Arrays of a call, whose values can be had back after it wrote some of them."""

    def __init__(self, operation, variant, more, layout):
        self._own, self._layout = [], LAYOUTS[layout]
        sizes = {"shape": more.get("shape", SHAPE), "lists": more.get("lists")}
        types = ("float32",) * 3
        self.given = operation.arguments(self._make, types, variant=variant, **sizes)
        if "norm_out" in more:
            self.given["norm_out"] = self._make(*more["norm_out"])
        if "out" in more:
            self.given["out"] = tuple(spec and self._make(*spec) for spec in more["out"])

    def _make(self, *spec):
        host = self._layout(drawn(*spec))
        array = BACKEND.asarray(host)
        self._own.append((array, host))
        return array

    @property
    def count(self):
        """Number of arrays."""
        return len(self._own)

    def restore(self, change=np.array):
        """Give arrays the values that they were made with, or those changed."""
        for array, host in self._own:
            BACKEND.assign(array, change(host))

    def bits(self, results):
        """Of the results and of all arguments."""
        arrays = [*(array for array, _ in self._own), *leaves(results)]
        return [BACKEND.memory(array) for array in arrays if hasattr(array, "data")]


def others(cupy):
    """Allocate as other work does: memory that a graph has not kept is among it."""
    made = [cupy.ndarray(size, np.uint8) for size in SIZES for _ in range(4)]
    for array in made:
        array.fill(FILLING)
    return made


@pytest.mark.guarantee("Captured")
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, layout) for name in CALLS for layout in ("C", "stepped")),
     *((name, "stepped") for name in LARGE)],
)  # fmt: skip
def test_a_replay_is_the_call(name, layout):
    """Also on new values, and once nobody holds the results."""
    import cupy

    operation, variant, more = (CALLS | LARGE)[name]
    arguments, expected = Arguments(operation, variant, more, layout), {}
    for change in (np.flip, np.array):
        arguments.restore(change)
        with BACKEND.active(), leaving_nothing():
            expected[change] = arguments.bits(operation(**arguments.given))
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with BACKEND.active(), stream:
        operation(**arguments.given)  # fills the stream's pool
        stream.begin_capture()
        results = operation(**arguments.given)
        graph = stream.end_capture()
        gc.collect()
        beside = others(cupy)
        for change, wanted in expected.items():
            arguments.restore(change)
            graph.launch(stream)
            stream.synchronize()
            assert arguments.bits(results) == wanted
        del results  # which a graph writes all the same
        gc.collect()
        beside += others(cupy)
        arguments.restore()
        graph.launch(stream)
        stream.synchronize()
        assert arguments.bits(()) == wanted[: arguments.count]
        for array in beside:
            assert set(array.get().tolist()) == {FILLING}


def test_what_waits_for_the_device_is_refused_and_the_capture_goes_on():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        grads = [cupy.arange(4.0)]
        gradkit.clip_grad_norm(grads, 1.0)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="not allowed during graph capture"):
            gradkit.clip_grad_norm(grads, 0.5, nonfinite="raise")
        gradkit.clip_grad_norm(grads, 0.5)
        graph = stream.end_capture()
        graph.launch(stream)
        norm = gradkit.grad_norm(grads)
        stream.synchronize()
    assert float(norm) == pytest.approx(0.5)


def test_the_legacy_stream_while_one_that_it_waits_for_is_captured():
    """CUDA refuses the launch, which the error names, and already to say what is captured."""
    import cupy

    grads = [cupy.arange(4.0)]
    gradkit.grad_norm(grads)
    blocking = cupy.cuda.Stream()
    blocking.begin_capture()
    try:
        with pytest.raises(KernelError, match="norm_partials"):
            gradkit.grad_norm(grads)
    finally:
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):  # which ended the capture
            blocking.end_capture()

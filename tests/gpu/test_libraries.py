"""Results for JAX and TensorFlow on a GPU come from their own allocators.

Neither library is here for GPUs. Stand-ins have what gradkit calls of them, arrays in CuPy's
memory, and an allocator that reuses memory in the order of the library's own stream, as theirs do.
"""

import ctypes
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit import _arrays
from tests.backends import has_gpu
from tests.tolerances import assert_same_bits

plugin = sys.modules.get("testbed.driver.plugin")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu() or plugin is None, reason="not on the testbed's driver"),
]
CUDA = 2  # DLPack's number
GPU = type("Device", (), {"platform": "gpu"})()


class Library:
    """A stream, and memory that is used again in its order."""

    def __init__(self, *, exports_wait):
        import cupy

        self.cupy, self.made = cupy, 0
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.exports_wait = exports_wait  # for the device, and not the consumer's stream for ours
        self._free = {}
        library = self

        class Array:
            def __init__(self, shape, dtype):
                self.shape, self.dtype = tuple(shape), np.dtype(dtype)
                self.ndim, self.device = len(self.shape), "GPU:0"
                memory = library.allocated(max(1, self.nbytes))
                self.own = cupy.ndarray(self.shape, self.dtype, memory)

            nbytes = property(lambda self: int(np.prod(self.shape)) * self.dtype.itemsize)

            def __dlpack_device__(self):
                return CUDA, 0

            def __dlpack__(self, stream=None, **_):
                if library.exports_wait:
                    library.stream.synchronize()
                else:
                    theirs, event = 0 if stream in (None, 1) else stream, library.stream.record()
                    cupy.cuda.runtime.streamWaitEvent(theirs, event.ptr)
                return self.own.__dlpack__()

            def devices(self):
                return {GPU}

            def is_deleted(self):
                return False

        self.Array = Array

    def allocated(self, size):
        """Memory that our stream overwrites, as with what used it before."""
        self.made += 1
        found = self._free.setdefault(size, [])
        with self.stream:  # of CuPy's pool, whose memory is each stream's own
            memory = found.pop() if found else self.cupy.cuda.alloc(size)
        self.cupy.cuda.runtime.memsetAsync(memory.ptr, 0x7F, size, self.stream.ptr)
        owner = type("Owner", (), {})()
        weakref.finalize(owner, found.append, memory)
        view = self.cupy.cuda.UnownedMemory(memory.ptr, size, owner, 0)
        return self.cupy.cuda.MemoryPointer(view, 0)

    def array(self, host):
        made = self.Array(host.shape, host.dtype)
        with self.stream:
            made.own.set(host)
        return made


def jax():
    library = Library(exports_wait=False)
    return library, {
        "Array": library.Array,
        "core": SimpleNamespace(Tracer=type("Tracer", (), {})),
        "config": SimpleNamespace(jax_enable_x64=False),
        "ensure_compile_time_eval": nullcontext,
        "numpy": SimpleNamespace(empty=lambda shape, dtype, **_: library.Array(shape, dtype)),
    }


def tensorflow():
    library = Library(exports_wait=True)
    return library, {
        "Tensor": library.Array,
        "Variable": type("Variable", (), {}),
        "IndexedSlices": type("IndexedSlices", (), {}),
        "is_symbolic_tensor": lambda _: False,
        "init_scope": nullcontext,
        "device": nullcontext,
        "fill": lambda shape, value: library.Array(shape, type(value)),
        "raw_ops": SimpleNamespace(Empty=lambda shape, dtype, **_: library.Array(shape, dtype)),
    }


class Exposed(Library):
    """A library that says which stream it computes on."""

    def array(self, host):
        made = super().array(host)
        made.__cuda_array_interface__ = {"stream": self.stream.ptr}
        return made


@pytest.fixture(params=[jax, tensorflow], ids=["jax", "tensorflow"])
def library(request, monkeypatch):
    made, names = request.param()
    monkeypatch.setitem(sys.modules, request.param.__name__, SimpleNamespace(**names))
    for kind in [*_arrays._BY_TYPE]:
        monkeypatch.delitem(_arrays._BY_TYPE, kind)
    yield made
    made.cupy.cuda.runtime.deviceSynchronize()


def hosts(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (6, 40), (6, 40), (40,), (6,), (6,)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def calls(dy, x, scale, mean, inv_std):
    """Results of the dtypes that there are: JAX's norm is float64 on the way."""
    clipped, norm = gradkit.clip_by_global_norm([dy, x], 1.0)
    return (
        *gradkit.layer_norm_grad(dy, x, scale, mean, inv_std),
        *(*clipped, norm, gradkit.step_verdict(norm, limit=1.0)),
    )


def test_results_are_the_librarys_own_and_right(library):
    expected = calls(*map(library.cupy.asarray, hosts()))
    found = calls(*map(library.array, hosts()))
    before = library.made
    assert all(type(array) is library.Array for array in found)
    for array, other in zip(found, expected, strict=True):
        assert_same_bits(array.own.get(), other.get().astype(array.dtype))
    assert library.made == before


def test_no_memory_of_cuda_in_the_steady_state(library):
    given = list(map(library.array, hosts()))
    for _ in range(2):
        calls(*given)
    names = ("cuMemAlloc_v2", "cuMemFree_v2", "cuCtxSynchronize", "cuMemHostAlloc")
    before = [plugin.driver.calls(name) for name in names]
    for _ in range(5):
        calls(*given)
    assert before == [plugin.driver.calls(name) for name in names]


def test_work_of_the_library_that_comes_next_comes_after_ours(library):
    """Its stream is not ours: once a call has returned, it may overwrite what the call read."""
    given = list(map(library.array, hosts()))
    expected = [array.own.get() for array in calls(*map(library.array, hosts()))]
    found = calls(*given)
    for array in given:
        with library.stream:
            array.own.fill(0)
    library.stream.synchronize()
    for array, other in zip(found, expected, strict=True):
        assert_same_bits(array.own.get(), other)


def test_empty_results(library):
    empty = library.array(np.empty((0, 4), np.float32))
    (clipped,), norm = gradkit.clip_by_global_norm([empty], 1.0)
    assert type(clipped) is library.Array
    assert clipped.shape == (0, 4)
    assert float(norm.own.get()) == 0


def test_a_stream_that_is_exposed_waits_and_the_host_does_not():
    library = Exposed(exports_wait=False)
    dy, x = map(library.array, hosts()[:2])
    before = plugin.driver.calls("cuStreamSynchronize")
    gradkit.accumulate_grad(dy, x)
    assert plugin.driver.calls("cuStreamSynchronize") == before
    with library.stream:  # what comes next there
        x.own.fill(0)
        total = dy.own + 1
    library.stream.synchronize()
    first, second = hosts()[:2]
    np.testing.assert_array_equal(total.get(), first + second + 1)


def test_the_host_waits_for_the_device_of_a_library_that_exposes_no_stream():
    """Which is not the current one: its memory, here the CPU's own, is read without a wait."""
    import cupy

    with cupy.cuda.Device(1):
        own = cupy.asarray(hosts()[0])
        cupy.cuda.runtime.deviceSynchronize()

    class Array:
        def __dlpack_device__(self):
            return CUDA, 1

        def __dlpack__(self, stream=None, **_):
            with cupy.cuda.Device(1):
                return own.__dlpack__()

    gradkit.zero_grad([Array()])
    assert not any(ctypes.string_at(own.data.ptr, own.nbytes))

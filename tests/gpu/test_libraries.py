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
from gradkit import _arrays, spikes
from gradkit._arrays import dlpack
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
        made.__cuda_array_interface__ = made.own.__cuda_array_interface__ | {
            "stream": self.stream.ptr
        }
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
        *gradkit.group_norm(x, 4, scale),
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
    """That device is not current: its memory, here the CPU's own, is read without a wait."""
    import cupy

    with cupy.cuda.Device(1):
        own = cupy.asarray(hosts()[0])
        cupy.cuda.runtime.deviceSynchronize()

    class Array:
        def __dlpack_device__(self):
            return CUDA, 1

        def __dlpack__(self, stream=None, **asked):
            with cupy.cuda.Device(1):
                return own.__dlpack__(**asked)

    gradkit.zero_grad([Array()])
    assert not any(ctypes.string_at(own.data.ptr, own.nbytes))


class Producer:
    """An array of an unknown library on the device, whose exports have these flags."""

    READ_ONLY, IS_COPIED = 1, 2

    def __init__(self, own, flags):
        self.own, self.dtype, self.flags = own, str(getattr(own, "dtype", "")), flags

    def __dlpack_device__(self):
        return self.own.__dlpack_device__()

    def __dlpack__(self, **asked):
        capsule = self.own.__dlpack__(**asked)
        if "max_version" in asked:
            at = dlpack._pointer_in(capsule, b"dltensor_versioned") + 24
            ctypes.c_uint64.from_address(at).value |= self.flags
        return capsule


class Old(Producer):
    """One from before DLPack 1.0, whose exports say nothing."""

    def __dlpack__(self, stream=None):
        return self.own.__dlpack__(stream=stream)


def attempts(produce, own):
    """Calls that would write an array of the shape (6, 40), and what they say of one."""
    other, zeros = own.copy(), own[:, 0].copy()
    norm = other, other, own[0].copy(), *([zeros.astype("float32")] * 2)
    whole, first = produce(own), produce(other)
    given = tuple(map(produce, norm))
    return {
        "grads is read-only.*; use clip_by_global": lambda: gradkit.clip_grad_norm(whole, 1.0),
        r"grads\['w'\] is read-only": lambda: gradkit.scale_grads({"w": whole}, 2.0),
        "buffer is read-only.*; compute": lambda: gradkit.accumulate_grad(whole, first),
        r"buffers\[0\] is read-only": lambda: gradkit.accumulate_grads([whole], [first]),
        r"averages\[0\] is read-only": lambda: gradkit.ema_update([whole], [produce(-other)], 0.9),
        r"out\[0\] is read-only": lambda: gradkit.layer_norm_grad(*given, out=(whole, None, None)),
        r"out\[0\] is read-only.*; leave": lambda: gradkit.clip_by_global_norm(
            first, 1.0, out=(whole, None)
        ),
        r"grads\[1\] is read-only.*; make new zeros": lambda: gradkit.zero_grad([first, whole]),
    }


@pytest.fixture(params=["asks", "does not ask"])
def consumer(request, monkeypatch):
    """CuPy 14, which asks for flags, and what CuPy 13 does, which does not."""
    import cupy

    if request.param == "asks":
        return
    take = cupy.from_dlpack
    monkeypatch.setattr(cupy, "from_dlpack", lambda array: take(Old(array, 0)))


@pytest.mark.usefixtures("consumer")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", [Producer.READ_ONLY, Producer.IS_COPIED])
def test_what_is_exported_to_be_read_is_not_written(flags, dtype):
    import cupy

    if dtype == "bfloat16" and int(cupy.__version__.split(".")[0]) < 14:
        pytest.skip(f"CuPy {cupy.__version__} has no bfloat16")
    own = cupy.asarray(hosts()[0].astype(dtype))
    before = own.get()
    calls = attempts(lambda array: Producer(array, flags * (array is own)), own)
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
        assert_same_bits(own.get(), before)
    assert float(gradkit.grad_norm([Producer(own, flags)])) > 0


@pytest.mark.usefixtures("consumer")
def test_what_is_exported_to_be_written_is():
    import cupy

    own = cupy.asarray(hosts()[0])
    for call in attempts(lambda array: Producer(array, 0), own).values():
        own.set(before := hosts()[0])
        call()
        assert (own.get() != before).any()


def test_without_flags_the_cuda_interface_says_what_may_be_written():
    import cupy

    own = cupy.asarray(hosts()[0])
    before = own.get()
    old = Old(own, 0)
    for read_only in (None, True):
        if read_only is not None:
            old.__cuda_array_interface__ = own.__cuda_array_interface__ | {
                "data": (own.data.ptr, read_only)
            }
        with pytest.raises(ValueError, match="grads is read-only"):
            gradkit.scale_grads(old, 2.0)
        assert_same_bits(own.get(), before)
    old.__cuda_array_interface__ = own.__cuda_array_interface__
    gradkit.scale_grads(old, 2.0)
    assert_same_bits(own.get(), 2 * before)


def test_a_guards_state_that_is_exported_to_be_read_is_replaced():
    import cupy

    for flags, written in ((0, True), (Producer.READ_ONLY, False), (Producer.IS_COPIED, False)):
        assert spikes._may_be_written(Producer(cupy.zeros(3), flags)) is written

"""Device memory and streams of other libraries, seen from CuPy.

CuPy is imported here when the first array of any library arrives that is on a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np

from gradkit._arrays.base import HOW_TO_INSTALL_CUPY
from gradkit._backend import Array, Shape
from gradkit._calls.backend import Backend
from gradkit.errors import BackendUnavailableError


def cupy() -> Any:
    """The cupy module."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"an array is on a CUDA device, which requires CuPy; {HOW_TO_INSTALL_CUPY}"
        ) from error
    except OSError as error:  # importing CuPy 14 makes its cache folder
        raise BackendUnavailableError(
            f"an array is on a CUDA device, which requires CuPy, and {without_cache(error)}"
        ) from error
    return cupy


def without_cache(error: OSError) -> str:
    """Explain why CuPy cannot be imported."""
    return f"CuPy cannot be imported: {error}. Set CUPY_CACHE_DIR to a writable folder."


def check_driver() -> None:
    """Raise if no CUDA device can be used, whatever an array says of itself."""
    runtime = cupy().cuda.runtime
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"an array says that it is on a CUDA device, and CUDA cannot be used: {error}. Check "
            "that nvidia-smi lists a GPU, or pass arrays on the host."
        ) from error


def borrow(
    owner: Any, address: int, device: int, shape: Shape, strides: Shape, dtype: np.dtype[Any]
) -> Array:
    """Memory that ``owner`` keeps alive, as a CuPy array.

    This does not synchronise: use it only on the stream that the owner's work runs on.
    """
    size = _extent(shape, strides, dtype.itemsize)
    return cupy().ndarray(shape, dtype, pointer_of(owner, address, size, device), strides)


def read_only(view: Array) -> Array:
    """The same elements in memory that `is_read_only` recognises; CuPy has no flag for it."""
    kind = _read_only_memory(cupy().cuda.UnownedMemory)
    memory = kind(view.data.ptr, view.data.mem.size, view, view.data.device_id)
    pointer = cupy().cuda.MemoryPointer(memory, 0)
    return cupy().ndarray(view.shape, view.dtype, pointer, view.strides)


def is_read_only(view: Array) -> bool:
    """True if a view on a device, or what it is a part of, came from `read_only`."""
    return getattr(getattr(view.data, "mem", None), "is_read_only", False)


@cache
def _read_only_memory(kind: type) -> type:
    return type("ReadOnlyMemory", (kind,), {"is_read_only": True})


@lru_cache
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    """The bytes from the first of an array's elements to the end of its last one."""
    reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    return 0 if 0 in shape else reach + size


def pointer_of(owner: Any, address: int, size: int, device: int) -> Any:
    """Memory that ``owner`` keeps alive, as CuPy's allocators give it."""
    memory = cupy().cuda
    return memory.MemoryPointer(memory.UnownedMemory(address, size, owner, device), 0)


def unpooled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """New memory, allocated outside CuPy's pool, for a library whose streams the pool ignores.

    ``cudaFree`` frees it, which waits for the device, so no stream can still read the memory when
    it is used again.
    """
    cp = cupy()
    memory = cp.cuda.Memory(max(1, int(np.prod(shape)) * dtype.itemsize))
    return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))


class on_stream:  # noqa: N801 - a function, but for the microsecond of `contextmanager`
    """A context that queues work on another library's stream, given by its address.

    ``allocate`` gives CuPy its memory. That library holds most of the device's memory, of which its
    allocator has some left when CUDA has none for CuPy's pool; and while the stream is captured
    into a graph, CUDA's default mode of capturing forbids the pool to ask.
    """

    __slots__ = ("_contexts",)

    def __init__(self, device: int, stream: int, allocate: Callable[[int], Any]):
        cuda = cupy().cuda
        self._contexts = [_external(stream, device), cuda.using_allocator(allocate)]
        if cuda.runtime.getDevice() != device:  # to switch takes a microsecond
            self._contexts.insert(0, cuda.Device(device))

    def __enter__(self) -> None:
        entered = 0
        try:
            for context in self._contexts:
                context.__enter__()
                entered += 1
        except BaseException:
            del self._contexts[entered:]
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


@contextmanager
def producer_waits(array: Any, device: int) -> Iterator[None]:
    """A context that queues work on CuPy's current stream, which the array's producer waits for.

    Afterwards the producer's stream waits on our event, if it exposes one in
    ``__cuda_array_interface__``; otherwise the host blocks, because the producer may write or free
    the memory on an unknown stream as soon as the call returns.
    """
    cp = cupy()
    with cp.cuda.Device(device):
        try:
            yield
        finally:
            ours = cp.cuda.get_current_stream()
            theirs = getattr(array, "__cuda_array_interface__", {}).get("stream")
            if theirs is None:
                ours.synchronize()
            else:
                _external(theirs, device).wait_event(ours.record())


class _Stream:
    """A stream's address as an object of the CUDA stream protocol.

    Not every library's own stream has the protocol: PyTorch's has it since 2.10.
    """

    def __init__(self, address: int):
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@cache
def backends() -> Any:
    """The module of the CUDA backend, imported once: that takes a microsecond in each call."""
    from gradkit import _cuda

    return _cuda


def known_backend(device: int) -> Backend | None:
    """Backend of the device of that number, if it was used before."""
    by_device: dict[int, Backend] = backends().backends
    return by_device.get(device)


def _external(address: int, device: int) -> Any:
    """Another library's stream as a CuPy stream; the device must be current."""
    return _wrapped(cupy().cuda.Stream, address, device)


@lru_cache(maxsize=64)
def _wrapped(kind: Any, address: int, device: int) -> Any:
    if hasattr(kind, "from_external"):  # CuPy 14
        return kind.from_external(_Stream(address))
    return cupy().cuda.ExternalStream(address, device)

"""Device memory and streams of other libraries, seen from CuPy.

CuPy is imported here when the first array arrives that is on a GPU, whoever made it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit.errors import BackendUnavailableError


def cupy() -> Any:
    """The cupy module."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            "an array is on a CUDA device, and computing there needs CuPy: "
            "pip install 'gradkit[cuda12]' or 'gradkit[cuda13]'"
        ) from error
    except OSError as error:  # CuPy 14 makes its cache folder when it is imported
        raise BackendUnavailableError(
            "an array is on a CUDA device, and computing there needs CuPy, which cannot be "
            f"imported: {error}. Set CUPY_CACHE_DIR to a folder that can be written."
        ) from error
    return cupy


def borrow(
    owner: Any,
    address: int,
    device: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Array:
    """Memory that ``owner`` keeps alive, as a CuPy array.

    Nothing is ordered here: the work must run on the stream that the owner's work runs on.
    """
    cp = cupy()
    size = dtype.itemsize
    for length, step in zip(shape, strides, strict=True):
        size += (length - 1) * step
    size = 0 if 0 in shape else size
    memory = cp.cuda.UnownedMemory(address, size, owner, device)
    return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0), strides)


def unpooled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """New memory for a library whose streams CuPy's pool does not know.

    It comes from outside the pool and goes back through ``cudaFree``, which waits for the
    device: no stream can still be reading when the memory is used again.
    """
    cp = cupy()
    memory = cp.cuda.Memory(max(1, int(np.prod(shape)) * dtype.itemsize))
    return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))


@contextmanager
def on_stream(device: int, stream: Any) -> Iterator[None]:
    """Queue work on another library's stream (an object with ``__cuda_stream__``)."""
    cp = cupy()
    with cp.cuda.Device(device), _external(stream, device):
        yield


@contextmanager
def handing_over(array: Any, device: int) -> Iterator[None]:
    """Queue work on CuPy's current stream, and order the producer's next work behind it.

    A library that names its stream (in ``__cuda_array_interface__``) is made to wait there
    by an event. Any other may touch or free its memory once the call is back, on a stream
    that cannot be known: the host waits.
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
                _external(_Stream(theirs), device).wait_event(ours.record())


class _Stream:
    """A stream's address, as the CUDA stream protocol has it."""

    def __init__(self, address: int):
        self.cuda_stream = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


def _external(stream: Any, device: int) -> Any:
    """Another library's stream as CuPy's; the device must be the current one."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external"):  # CuPy 14
        return streams.Stream.from_external(stream)
    return streams.ExternalStream(stream.cuda_stream, device)

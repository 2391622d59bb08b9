"""Interface of launchers to a GPU, and its implementation by CuPy.

Launchers use only ``Device``, so the same code runs on CuPy and, in the tests, on an emulator over
NumPy arrays.
"""

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from gradkit import _host
from gradkit._backend import Array, Shape
from gradkit._cuda.launch.packing import PackedModule

_address = attrgetter("data.ptr")
SHARING = 132  # of an H100 and an H200, on which the grids of sums were measured
_PER_THREAD = 2  # the handle of CUDA's per-thread default stream


class Kernel(Protocol):
    """A compiled ``extern "C"`` function."""

    max_dynamic_shared_size_bytes: int  # the limit for a launch

    def __call__(self, grid: Shape, block: Shape, args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch on the current stream; grid and block have three dimensions.

        ``args`` are arrays (passed as pointers), NumPy scalars, ``None`` for a null pointer, and
        NumPy arrays of one element of raw bytes or fields (``np.void``), which are passed by value.
        A Python integer is an address; other Python numbers are not allowed: they have no size.
        """


class Module(Protocol):
    """Compiled source."""

    def get_function(self, name: str) -> Kernel:
        """The kernel of that name."""


class Device(Protocol):
    """One GPU."""

    xp: Any
    number: int  # CUDA's device number
    multiprocessors: int
    sharing: int  # multiprocessors that sums are divided among, the same on every GPU
    max_shared_memory: int  # bytes of dynamic shared memory that a block may have
    clusters: bool  # whether blocks can form clusters: from compute capability 9.0 on
    parameter_bytes: int  # that a launch can have
    launch_errors: tuple[type[Exception], ...]  # raised if a kernel does not launch
    replays: bool  # whether a call may have the launches of an earlier one

    def __hash__(self) -> int:
        """Devices are hashed by identity."""

    @property
    def stream(self) -> Hashable:
        """A key for the current stream."""

    def cuda_stream(self) -> int | None:
        """The address of the current stream; ``None`` if NVIDIA's libraries cannot use it."""

    def capturing(self) -> bool:
        """True if the current stream is being captured into a graph."""

    def empty(self, shape: int | Shape, dtype: Any) -> Array:
        """A new array whose contents are undefined."""

    def allocate(self, size: int, /) -> Any:
        """So many bytes that only kernels use, as they take them: an array or a pointer."""

    def compile(self, source: str, options: tuple[str, ...]) -> Module:
        """Compile CUDA C++ for this device."""

    def resident(self, kernel: Kernel, threads: int, shared_mem: int) -> int:
        """Number of blocks of this size that a multiprocessor holds at once."""

    def pointer(self, array: Array) -> int:
        """The address of an array's first element, to be stored in a structure."""

    def pointers(self, arrays: Sequence[Array], *, write: bool) -> tuple[int, ...]:
        """The addresses of many arrays; ``write``: kernels may write there."""

    def upload(self, host: np.ndarray[Any, Any]) -> Array:
        """A copy of a host array on the device, in stream order."""

    def synchronize(self) -> None:
        """Wait for all work on the current device."""

    def active(self) -> AbstractContextManager[Any]:
        """A context in which this device is current."""

    def record(self) -> Any:
        """An event behind all work on the current stream."""

    def wait(self, event: Any) -> None:
        """Let the current stream, and not the host, wait for an event of any device."""

    def fetch(self, source: Array, origin: int, target: Array) -> None:
        """Queue a copy of a contiguous array from the device of that number."""


class Notes:
    """Notes of all that a call does on a device.

    ``launches`` with their arguments; ``rooms``: memory that they share, and its bytes; ``lists``
    whose arrays launches know; ``others``: whether it does anything else.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, Sequence[Any]]] = []
        self.rooms: list[tuple[Any, int]] = []
        self.lists: list[Any] = []
        self.others = False


class _Thread(threading.local):
    notes: Notes | None = None


_thread = _Thread()


@contextmanager
def noting() -> Iterator[Notes]:
    """Note what calls in this thread do on a device; within another, nothing is noted of it."""
    before, notes = _thread.notes, Notes()
    _thread.notes = notes
    try:
        yield notes
    finally:
        _thread.notes = before


def noted() -> Notes | None:
    """The notes that this thread keeps, if any."""
    return _thread.notes


def note_others() -> None:
    """Note that a call does what is no launch."""
    if _thread.notes is not None:
        _thread.notes.others = True


_recorded: list[Array] = []


def keep_if_captured(device: Device, array: Array) -> Array:
    """Return ``array``, kept for the life of the process if the call is captured into a graph.

    Each replay of a graph reads and writes the array's memory again. The pool must not reuse it.
    """
    if device.capturing():
        _recorded.append(array)
    return array


def scratch(device: Device, shape: int | Shape, dtype: Any) -> Array:
    """A new array on the device, whose contents are undefined."""
    array = keep_if_captured(device, device.empty(shape, dtype))
    if _thread.notes is not None:
        _thread.notes.rooms.append((array, array.nbytes))
    return array


def workspace(device: Device, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Memory that only kernels use, as an argument for them."""
    size = math.prod(shape) * dtype.itemsize
    memory = keep_if_captured(device, device.allocate(size))
    if _thread.notes is not None:
        _thread.notes.rooms.append((memory, size))
    return memory


class CupyDevice:
    """A GPU through CuPy: memory from its pool, work on its current stream."""

    replays = True

    def __init__(self, number: int):
        import cupy

        self.xp = cupy
        self.number = number
        device = cupy.cuda.Device(number)
        attributes = device.attributes
        self.multiprocessors: int = attributes["MultiProcessorCount"]
        self.sharing = SHARING
        self.max_shared_memory: int = attributes["MaxSharedMemoryPerBlockOptin"]
        # "90", "120"; the attributes do not have it.
        capability = int(device.compute_capability)
        self.clusters: bool = capability >= 90
        driver, compiler = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.nvrtc.getVersion()
        # CUDA 12.1 has raised the limit, for Volta and later.
        much = capability >= 70 and driver >= 12010 and compiler >= (12, 1)
        self.parameter_bytes = 32764 if much else 4096
        # `cupy.empty` calls this, and a third of its time goes into other options.
        self.empty: Callable[[int | Shape, Any], Array] = cupy.ndarray
        # A pointer, which CuPy makes in a fifth of the time that an array takes.
        self.allocate: Callable[[int], Any] = cupy.cuda.alloc
        self.launch_errors: tuple[type[Exception], ...] = (
            cupy.cuda.driver.CUDADriverError,
            cupy.cuda.runtime.CUDARuntimeError,
        )

    @property
    def stream(self) -> Hashable:
        """The stream's handle; with the thread for the per-thread default stream."""
        handle = self.xp.cuda.get_current_stream().ptr
        return (handle, threading.get_ident()) if handle == _PER_THREAD else handle

    def capturing(self) -> bool:
        """Ask the driver, because any code may have begun a capture."""
        stream = self.xp.cuda.get_current_stream()
        return bool(stream.ptr and stream.is_capturing())  # the legacy stream cannot be captured

    def compile(self, source: str, options: tuple[str, ...]) -> Module:
        """Compile with NVRTC, through CuPy's cache on disk.

        Macros go into the text: for each new set of options CuPy compiles an empty file, which
        takes longer than all else of a kernel that is in the cache.
        """
        macros = [option[2:].split("=", 1) for option in options if option.startswith("-D")]
        lines = [f"#define {name} {value}\n" for name, value in macros]
        text = "".join([*lines, "#line 1\n", source])
        others = tuple(option for option in options if not option.startswith("-D"))
        return PackedModule(self.xp.cuda, self.xp.RawModule(code=text, options=others))

    def resident(self, kernel: Any, threads: int, shared_mem: int) -> int:
        """Ask the driver, which knows the kernel's registers and its own shared memory.

        In the device's context: in a thread without one, CuPy 13.6 prints an error and answers 0.
        """
        cuda = self.xp.cuda
        cuda.runtime.setDevice(self.number)
        ask = cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        return int(ask(kernel.address, threads, shared_mem))

    def pointer(self, array: Array) -> int:
        """The address of an array's first element."""
        return int(array.data.ptr)

    def pointers(self, arrays: Sequence[Array], *, write: bool) -> tuple[int, ...]:  # noqa: ARG002
        """The addresses of many arrays."""
        if isinstance(arrays, _host.Table):
            return arrays.addresses
        return tuple(map(_address, arrays))

    def upload(self, host: np.ndarray[Any, Any]) -> Array:
        """Copy through pinned memory, which CuPy keeps until the stream has read it.

        So it is in CuPy 13.6 and 14 (``_array_default`` in ``cupy/_core/core.pyx``) for an array of
        one dimension: CuPy fills a pinned buffer, queues the copy and an event behind it, and
        reuses the buffer only after that event.
        """
        return self.xp.asarray(np.ascontiguousarray(host).reshape(-1).view(np.uint8))

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        self.xp.cuda.runtime.deviceSynchronize()

    def active(self) -> AbstractContextManager[Any]:
        """Switch devices only if another is current, because a switch costs a microsecond."""
        if self.xp.cuda.runtime.getDevice() == self.number:
            return nullcontext()
        return self.xp.cuda.Device(self.number)

    def cuda_stream(self) -> int:
        """The address of CuPy's current stream."""
        return int(self.xp.cuda.get_current_stream().ptr)

    def record(self) -> Any:
        """An event behind all work on the current stream."""
        return self.xp.cuda.get_current_stream().record()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event, which may be another device's."""
        self.xp.cuda.get_current_stream().wait_event(event)

    def fetch(self, source: Array, origin: int, target: Array) -> None:
        """Copy between devices; without peer access CUDA stages it, and the host goes on too."""
        copy = self.xp.cuda.runtime.memcpyPeerAsync
        ends = target.data.ptr, self.number, source.data.ptr, origin
        copy(*ends, source.nbytes, self.cuda_stream())

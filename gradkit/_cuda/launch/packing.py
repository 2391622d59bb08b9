"""Launch CuPy's kernels with all parameters in one buffer.

CuPy makes an object for each argument of a launch, which takes most of a small call's time. The
driver also takes one buffer in which parameters lie as in a C struct, and copies it in the launch:
into a graph too, if the stream is captured.

A call's second kernel may start before its first has ended, and waits for it on the device
(programmatic dependent launch, ``kernels/dependent.cuh``), which hides the time that a start takes.
CuPy cannot launch so: the driver is called through ctypes. In a capture such a launch is a plain
one: graphs have edges for it only since CUDA 12.3, functions that show a graph's edges then fail on
them, and some devices refuse the capture (github.com/sgl-project/sglang/pull/18596).
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from struct import Struct
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from gradkit._backend import Address, Shape

_Result = TypeVar("_Result")
_Configured: TypeAlias = tuple[Any, ctypes.c_void_p]
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed. CUlaunchConfig:
# the grid, the block, bytes of shared memory, stream, attributes and their number.
_DEPENDENT = ctypes.create_string_buffer(Struct("I4xi60x").pack(6, 1))
_CONFIGURATION = Struct("@7IPPI4x")
_STREAMS = 16  # for which a launch keeps its configuration
_pointer, _address = attrgetter("ptr"), attrgetter("data.ptr")


def _as_pointer(argument: Any) -> Any:
    """Return an address, or none, as the number that CuPy passes as a pointer.

    CuPy up to 13 does not pass None as null: github.com/cupy/cupy/issues/9046.
    """
    return np.uint64(argument or 0) if argument is None or type(argument) is Address else argument


def bind_context(cuda: Any, error: Any) -> None:
    """Bind the current device's context to this thread, whose lack of one is the driver's error.

    CUDA's runtime does so at a thread's first call that needs a context. A call of gradkit may make
    none before it asks the driver: CuPy's pool serves allocations from what it has. ``setDevice``
    waits for nothing, and may be called while a stream is captured.
    """
    if error.status != _NO_CONTEXT:
        raise error
    cuda.runtime.setDevice(cuda.runtime.getDevice())


def in_context(cuda: Any, call: Callable[[], _Result]) -> _Result:
    """Call a function that calls the driver, and once again if this thread had no context."""
    try:
        return call()
    except cuda.driver.CUDADriverError as error:
        bind_context(cuda, error)
    return call()


@cache
def of_driver(name: str) -> Callable[..., int] | None:
    """A function of the driver that CuPy lacks; ``None`` before CUDA 11.8."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return cast("Callable[..., int]", getattr(library, name))
    except (OSError, AttributeError):
        return None


class PackedModule:
    """CuPy's compiled source, whose kernels are packed."""

    def __init__(self, cuda: Any, module: Any):
        self._cuda, self.module = cuda, module

    def get_function(self, name: str) -> "PackedKernel":
        """The kernel of that name."""
        function = in_context(self._cuda, lambda: self.module.get_function(name))
        return PackedKernel(self._cuda, function)


class PackedKernel:
    """A kernel of CuPy's; the first launch with arguments of some types is CuPy's own."""

    def __init__(self, cuda: Any, function: Any):
        self.function = function
        self._cuda = cuda
        self._packings: dict[tuple[type, ...], _Packing] = {}

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The limit for a launch."""
        return self.function.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, limit: int) -> None:
        name = "max_dynamic_shared_size_bytes"
        in_context(self._cuda, lambda: setattr(self.function, name, limit))

    @property
    def address(self) -> int:
        """The driver's handle."""
        return self.function.kernel.ptr

    def clusters(self, size: int, threads: int) -> int | None:
        """Clusters of so many blocks that the device holds at once, if its driver tells."""
        ask = of_driver("cuOccupancyMaxActiveClusters")
        if ask is None:
            return None
        found, one = ctypes.c_int(), _CONFIGURATION.pack(size, 1, 1, threads, 1, 1, 0, 0, 0, 0)
        status = ask(ctypes.byref(found), ctypes.c_void_p(self.address), one)
        return None if status else found.value

    def __call__(self, grid: Shape, block: Shape, args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch on the current stream; grid and block have three dimensions."""
        self.on(grid, block, shared_mem)(args)

    def on(
        self, grid: Shape, block: Shape, shared_mem: int, *, dependent: bool = False
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function that launches arguments; ``dependent``: early, but in a capture."""
        cuda, packings, first = self._cuda, self._packings, self._launch_first
        start, current_stream = cuda.driver.launchKernel, cuda.get_current_stream
        driver_error = cuda.driver.CUDADriverError
        where = *grid, *block, shared_mem
        start_early = of_driver("cuLaunchKernelEx") if dependent else None
        configured: dict[int, _Configured] = {}  # by stream

        def launch(args: Sequence[Any]) -> None:
            packing = packings.get((*map(type, args),))
            if packing is None:
                first(grid, block, args, shared_mem)
                return
            try:
                buffer = packing.free.pop()
            except IndexError:
                buffer = _Buffer(packing.size)
            if packing.converted:
                args = [*args]
                for k, number_of in packing.converted:
                    args[k] = number_of(args[k])
            packing.fill(buffer.memory, 0, *args)
            stream = current_stream()
            handle = stream.ptr
            try:
                if start_early is None or (handle and stream.is_capturing()):
                    start(packing.kernel, *where, handle, 0, buffer.extra)
                else:
                    entry = configured.get(handle) or self._configure(configured, where, handle)
                    configuration, function = entry
                    if status := start_early(configuration, function, None, buffer.table):
                        cuda.driver.check_status(status)
            except driver_error as error:
                bind_context(cuda, error)
                start(packing.kernel, *where, handle, 0, buffer.extra)
            packing.free.append(buffer)

        return launch

    def _configure(
        self, configured: dict[int, _Configured], where: Shape, stream: int
    ) -> _Configured:
        """Describe an early launch on a stream for the driver, as ctypes passes it on fastest."""
        if len(configured) >= _STREAMS:
            configured.clear()
        packed = _CONFIGURATION.pack(*where, stream, ctypes.addressof(_DEPENDENT), 1)
        memory = ctypes.create_string_buffer(packed)
        launch = configured[stream] = ctypes.byref(memory), ctypes.c_void_p(self.address)
        return launch

    def _launch_first(
        self, grid: Shape, block: Shape, args: Sequence[Any], shared_mem: int
    ) -> None:
        arguments = [_as_pointer(argument) for argument in args]
        launch = partial(self.function, grid, block, arguments, shared_mem=shared_mem)
        in_context(self._cuda, launch)
        kinds = (*map(type, args),)
        if kinds not in self._packings:
            self._packings[kinds] = _Packing(self.address, [*map(self._form, args)])

    def _form(self, argument: Any) -> tuple[str, Callable[[Any], Any] | None]:
        """An argument's format, as ``struct`` has it, and what makes that of it if it is none."""
        if argument is None:
            return "Q", bool
        if type(argument) is Address:
            return "Q", None
        if isinstance(argument, np.generic):
            return np.dtype(type(argument)).char, None
        if isinstance(argument, np.ndarray):  # a structure, which holds fields of 8 bytes
            return f"0Q{argument.nbytes}s", np.ndarray.tobytes
        return "Q", _pointer if isinstance(argument, self._cuda.MemoryPointer) else _address


class _Packing:
    """Layout of arguments of some types in a buffer.

    ``converted`` are the positions of what is no number, with what makes one of it. ``free`` are
    buffers that no launch uses: each takes one for itself, whatever thread it is in.
    """

    __slots__ = ("converted", "fill", "free", "kernel", "size")

    def __init__(self, kernel: int, forms: Sequence[tuple[str, Callable[[Any], Any] | None]]):
        layout = Struct("".join(form for form, _ in forms))
        self.kernel, self.fill, self.size = kernel, layout.pack_into, layout.size
        self.converted = [(k, number_of) for k, (_, number_of) in enumerate(forms) if number_of]
        self.free: list[_Buffer] = []


class _Buffer:
    """Memory for a launch's parameters, and the address of what tells the driver of it."""

    __slots__ = ("_length", "extra", "memory", "table")

    def __init__(self, size: int):
        self.memory = ctypes.create_string_buffer(size)
        length = ctypes.c_size_t(size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END, with the addresses of both.
        entries = 1, ctypes.addressof(self.memory), 2, ctypes.addressof(length), 0
        self.table = (ctypes.c_void_p * len(entries))(*entries)
        self._length = length
        self.extra = ctypes.addressof(self.table)

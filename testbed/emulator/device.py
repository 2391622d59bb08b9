"""The emulated device: the launchers' view of a GPU, over NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .compiler import build_runtime, compile_source
from .faults import Index
from .memory import Array, Memory
from .module import EmulatedModule
from .runtime import SCHEDULES, Launch, Runtime


@dataclass
class Traffic:
    """Bytes of global memory that kernels asked for, each thread's own accesses counted.

    ``by_array`` tells parameters apart, as ``{(kernel, parameter): (read, written)}``: there a
    value that every thread of a block reads counts once for each of them, as it does in ``read``.
    """

    read: int = 0
    written: int = 0
    launches: int = 0
    accesses: int = 0
    by_array: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def add(self, other: Traffic) -> None:
        """Add another launch's bytes to these."""
        self.read += other.read
        self.written += other.written
        self.launches += other.launches
        self.accesses += other.accesses
        for key, (read, written) in other.by_array.items():
            before = self.by_array.get(key, (0, 0))
            self.by_array[key] = (before[0] + read, before[1] + written)


class ArrayNamespace:
    """Stands in for the ``cupy`` module: arrays on the device, which here are NumPy's.

    Whatever is not defined here is NumPy's own function of that name.
    """

    ndarray = np.ndarray

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> Array:
        """Return an array that nobody may read before it was written."""
        return self._memory.empty(shape, dtype)

    def empty_like(self, array: Array, dtype: npt.DTypeLike | None = None) -> Array:
        """Return what `empty` does, with the shape and the dtype of ``array``."""
        return self._memory.empty(array.shape, array.dtype if dtype is None else dtype)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> Array:
        """Return an array of zeros."""
        array = self._memory.allocate(shape, dtype)
        array.fill(0)
        return array

    def full(self, shape: int | Sequence[int], value: Any, dtype: npt.DTypeLike) -> Array:
        """Return an array of one number, repeated."""
        array = self._memory.allocate(shape, dtype)
        array.fill(value)
        return array

    def asarray(self, array: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
        """Return a copy on the device, so that no kernel writes into the host's array.

        What is on the device already comes back as it is, as CuPy does it.
        """
        host = np.asarray(array, dtype)
        if host is array and self._memory.allocated(host):
            return host
        copy = self._memory.allocate(host.shape, host.dtype)
        copy[...] = host
        return copy

    array = asarray

    def asnumpy(self, array: Array) -> Array:
        """Return a copy on the host."""
        return np.array(array)

    def ascontiguousarray(self, array: Array) -> Array:
        """Return ``array`` itself where it is contiguous, else a copy on the device."""
        return array if array.flags.c_contiguous else self.asarray(array)


class EmulatedDevice:
    """Compiles CUDA sources with g++ and runs their kernels on the CPU, checked.

    ``schedule`` is one of `SCHEDULES` and decides which thread goes on where several can; ``seed``
    varies those that draw lots. ``multiprocessors``, and the ``resident_threads`` that one of them
    holds, are what launchers size their grids by: 1 to 3 of the first make every grid-stride loop
    really loop. ``sharing``: how many launchers divide sums among, as many if not given.
    ``clusters``: whether blocks can form clusters, as from compute capability 9.0 on.
    ``grid_limit`` clamps ``gridDim.x`` on top of that, either of all kernels or, as a
    mapping, of those named; use it only for kernels whose result does not need the grid that the
    launcher asked for.
    """

    warp_size = 32
    number = 0
    launch_errors: tuple[type[Exception], ...] = ()  # faults of the emulator stay as they are
    stream = 0
    replays = False  # each call says which addresses its kernels may load

    def __init__(
        self,
        *,
        schedule: str = "ascending",
        seed: int = 0,
        clusters: bool = False,
        multiprocessors: int = 2,
        sharing: int | None = None,
        max_shared_memory: int = 227 * 1024,
        parameter_bytes: int = 4096,
        resident_threads: int = 1024,
        grid_limit: int | Mapping[str, int] | None = None,
        portable_fibers: bool = False,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}: one of {', '.join(SCHEDULES)} is needed")
        self.schedule = schedule
        self.seed = seed
        self.clusters = clusters
        self.multiprocessors = multiprocessors
        self.sharing = multiprocessors if sharing is None else sharing
        self.max_shared_memory = max_shared_memory
        self.parameter_bytes = parameter_bytes
        self.resident_threads = resident_threads
        self.grid_limit = grid_limit
        self.traffic = Traffic()
        self.total_traffic = Traffic()
        self._portable_fibers = portable_fibers
        self._only_blocks: Sequence[int] | None = None
        self.runtime, self.memory = _load_runtime(portable_fibers)
        self.xp = ArrayNamespace(self.memory)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an array that nobody may read before it was written."""
        return self.xp.empty(shape, dtype)

    def allocate(self, size: int) -> Array:
        """Return a new array of bytes, so that what kernels do there is checked."""
        return self.empty(size, np.uint8)

    def compile(self, source: str, options: tuple[str, ...] = ()) -> EmulatedModule:
        """Return a module of ``source``, compiled with the options that CuPy would pass.

        Libraries are cached on disk.
        """
        compiled = compile_source(source, options, portable_fibers=self._portable_fibers)
        return EmulatedModule(self, source, compiled)

    def resident(self, kernel: Any, threads: int, shared_mem: int) -> int:  # noqa: ARG002
        """Return how many blocks a multiprocessor holds, by their threads and shared memory."""
        by_shared = self.max_shared_memory // shared_mem if shared_mem else self.resident_threads
        return min(self.resident_threads // threads, by_shared)

    def pointer(self, array: Array) -> int:
        """Return the address of ``array``, which kernels may from now on load from memory.

        It stays reachable while the array's memory lives.
        """
        return self.pointers([array], write=False)[0]

    def pointers(self, arrays: Sequence[Array], *, write: bool) -> tuple[int, ...]:
        """Return the addresses of many arrays; the last call decides whether kernels may write."""
        return tuple(self.memory.register(array, write=write) for array in arrays)

    def upload(self, host: Array) -> Array:
        """Return a copy of a host array's bytes on the device, of a structure's too."""
        return self.xp.asarray(np.ascontiguousarray(host).reshape(-1).view(np.uint8))

    def synchronize(self) -> None:
        """Wait for nothing: a launch returns when its kernel has run."""

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which this is the current device, which it always is."""
        return nullcontext()

    def record(self) -> Any:
        """Return an event: that all work has been done, as it always is."""

    def wait(self, event: Any) -> None:
        """Wait for nothing."""

    def fetch(self, source: Array, origin: int, target: Array) -> None:  # noqa: ARG002
        """Copy an array of another emulated device."""
        start, size = target.ctypes.data, target.nbytes
        ctypes.memmove(start, source.ctypes.data, size)
        # Bytes of 0xFF, such as a NaN's, would else count as never written.
        self.runtime.mark_initialised(start, start + size)

    def cuda_stream(self) -> None:
        """Return the stream that NVIDIA's libraries could use, which is none."""

    def capturing(self) -> bool:
        """Return whether work is recorded instead of run: never."""
        return False

    @contextmanager
    def only_blocks(self, numbers: Sequence[int]) -> Iterator[None]:
        """Return a context in which only these blocks run, by their flat numbers.

        Negative numbers count from the last.

        With `memory.sparse_array` this shows what a kernel does beyond 2^32 elements.
        """
        before, self._only_blocks = self._only_blocks, numbers
        try:
            yield
        finally:
            self._only_blocks = before

    def chosen_blocks(self, count: int) -> list[int] | None:
        """Return the flat numbers of the blocks to run, None for all ``count`` of them."""
        if self._only_blocks is None:
            return None
        return [range(count)[number] for number in self._only_blocks]

    def limit_grid(self, kernel: str, grid: Index) -> Index:
        """Return a kernel's grid after `grid_limit`."""
        limit = self.grid_limit
        if isinstance(limit, Mapping):
            limit = limit.get(kernel)
        return grid if limit is None else (min(grid[0], limit), *grid[1:])

    def record_traffic(
        self, kernel: str, launch: Launch, by_array: Mapping[str, tuple[int, int]]
    ) -> None:
        """Take over a launch's counters."""
        self.traffic = Traffic(
            launch.read_bytes + sum(read for read, _ in by_array.values()),
            launch.written_bytes + sum(written for _, written in by_array.values()),
            launches=1,
            accesses=launch.accesses,
            by_array={(kernel, name): counts for name, counts in by_array.items()},
        )
        self.total_traffic.add(self.traffic)


@functools.cache
def _load_runtime(portable_fibers: bool) -> tuple[Runtime, Memory]:
    runtime = Runtime(build_runtime(portable_fibers))
    return runtime, Memory(runtime)

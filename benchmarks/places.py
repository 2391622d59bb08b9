"""Where arrays live and how calls on them are timed: the host, a GPU, the emulator of one."""

# ruff: noqa: D102  (the protocol says what the methods do)

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

Array = Any
Call = Callable[[], object]

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_FASTEST = 3_000_000  # kHz, for a device that does not report its clock rate
_TOUCHED, _PAGE = 1 << 30, 1 << 12  # bytes
_NUMBERS = (
    1 << 20
) + 8  # distinct random numbers; larger arrays repeat them, but rows of 2^k never coincide


class Place(Protocol):
    """What the harness and the cases for devices need."""

    copied: int  # bytes that ``copy`` reads; it writes as many

    def copy(self) -> object:
        """Copy ``copied`` bytes by the library's own copy."""

    def timer(self, call: Call) -> float:
        """Seconds that the work of one call takes on the device."""

    def wall(self, call: Call) -> float | None:
        """Seconds per call of many in a row; ``None`` if that is what ``timer`` measures."""

    def drop(self) -> None:
        """Free the memory of the last case."""


class Host:
    """NumPy arrays, timed by the clock."""

    copied = 64 << 20

    def __init__(self) -> None:
        self._source = np.ones(self.copied, np.uint8)
        self._target = np.zeros_like(self._source)
        self.drop()

    def copy(self) -> object:
        return np.copyto(self._target, self._source)

    @staticmethod
    def timer(call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def wall(self, call: Call) -> None:  # noqa: ARG002
        return None

    def drop(self) -> None:
        """Touch the memory that the next case's results will be written to.

        A virtual machine may get a page from its host only at the first touch, which is fifty
        times slower than later ones, and may lose a free page again.
        """
        np.empty(_TOUCHED, np.uint8)[::_PAGE] = 1


class Arrays:
    """Arrays of ``xp``, a library like NumPy, in a device's memory."""

    tiny = False  # whether to run only the smallest shapes
    xp: Any

    def array(self, host: Any) -> Array:
        """A copy of a host array on the device."""
        raise NotImplementedError

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
        """Numbers from a normal distribution: a million of them, repeated."""
        count = int(np.prod(shape))
        bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[DTYPES[dtype].itemsize]
        block = self.xp.roll(self._numbers(dtype).view(bits), 4099 * seed)
        out = self.xp.empty(count, bits)
        for start in range(0, count, _NUMBERS):
            out[start : start + _NUMBERS] = block[: count - start]
        return self.array(out.view(DTYPES[dtype]).reshape(shape))

    @cache  # noqa: B019  there is one place per process
    def _numbers(self, dtype: str) -> Array:
        host = np.random.default_rng(0).standard_normal(_NUMBERS, np.float32)
        return self.xp.asarray(host.astype(DTYPES[dtype]).view(np.uint8))

    def empty_like(self, array: Array) -> Array:
        """An empty array for a result, with the same memory order."""
        return self.array(self.xp.empty_like(array))

    def exact(self, array: Array) -> Array:
        """An array's values in float64."""
        if array.dtype == DTYPES["bfloat16"]:  # by its bits: CuPy 13 does not have it
            array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64)


class Cuda(Arrays):
    """CuPy arrays, timed by events on the device.

    Before each timed call the L2 cache is emptied by reading other memory (clean lines, which need
    not be written back), and the device is kept busy until the host has issued the whole call. So
    the time is that of the device's work, without gaps caused by a slow host.
    """

    copied = 512 << 20
    _SHORTEST, _LONGEST = 1e-4, 5e-2  # limits, in seconds, on how long the device is kept busy
    _TRIES = 4
    _WALL = 0.02  # seconds of calls in a row, for ``wall``

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        attributes = cupy.cuda.Device().attributes
        self._cycles = attributes.get("ClockRate", _FASTEST) * 1e3  # a second, at most
        self._blocks = 8 * attributes["MultiProcessorCount"]
        self._other = cupy.zeros(attributes["L2CacheSize"], cupy.float32)  # four times its bytes
        self._sum = cupy.zeros(1, cupy.float32)
        self._module = cupy.RawModule(code=Path(__file__).with_name("timing.cu").read_text())
        self._evict, self._hold = map(self._module.get_function, ("evict", "hold"))
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self._held: WeakKeyDictionary[Call, float] = WeakKeyDictionary()
        self._source = self.normal((self.copied // 4,), "float32")
        self._target = cupy.zeros_like(self._source)

    def array(self, host: Any) -> Array:
        return self.xp.asarray(host)

    def copy(self) -> object:
        return self.xp.copyto(self._target, self._source)

    def timer(self, call: Call) -> float:
        for _ in range(self._TRIES):
            held = self._held.get(call, self._SHORTEST)
            count = np.int64(self._other.size // 4)
            self._evict((self._blocks,), (256,), (self._other, count, self._sum))
            self._hold((1,), (1,), (np.int64(held * self._cycles),))
            began = time.perf_counter()
            self._start.record()
            call()
            self._stop.record()
            issued = time.perf_counter() - began
            self._stop.synchronize()
            if issued < held or held >= self._LONGEST:
                break
            self._held[call] = min(2 * issued, self._LONGEST)
        return float(self.xp.cuda.get_elapsed_time(self._start, self._stop)) / 1e3

    def wall(self, call: Call) -> float:
        self._seconds(call, 1)
        count = max(1, int(self._WALL / self._seconds(call, 1)))
        return self._seconds(call, count) / count

    def launch(self) -> Call:
        """A launch by CuPy itself of a kernel that does nothing, with three arguments."""
        nothing = self._module.get_function("nothing")
        return lambda: nothing((1,), (32,), (self._sum, self._other, np.int64(0)))

    def drop(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()

    def _seconds(self, call: Call, count: int) -> float:
        wait = self.xp.cuda.get_current_stream().synchronize
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return time.perf_counter() - start


class Emulated(Arrays):
    """The tests' emulator, timed by the clock: a test of the benchmarks, not a measurement."""

    tiny = True
    copied = 4096

    def __init__(self) -> None:
        from tests.devices import emulated

        self._backend = emulated.emulated_backend(multiprocessors=1)
        self._on_device = emulated.on_device
        self.xp = np
        self._source, self._target = (np.ones(self.copied, np.uint8) for _ in range(2))

    def array(self, host: Any) -> Array:
        return self._on_device(self._backend.device.xp.asarray(np.asarray(host)), self._backend)

    def exact(self, array: Array) -> Array:
        return super().exact(np.asarray(array))

    def copy(self) -> object:
        return np.copyto(self._target, self._source)

    def timer(self, call: Call) -> float:
        return Host.timer(call)

    def wall(self, call: Call) -> float:
        return Host.timer(call)

    def launch(self) -> None:
        """None: the emulator has no launch to compare with."""

    def drop(self) -> None:
        pass

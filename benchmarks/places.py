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
_FASTEST = 3_000_000  # kHz, where a device does not say how fast it is
_TOUCHED, _PAGE = 1 << 30, 1 << 12  # bytes
_NUMBERS = (1 << 20) + 8  # drawn at random; larger arrays repeat them, but no row of 2^k another


class Place(Protocol):
    """What the harness and the cases of devices need."""

    copied: int  # bytes that ``copy`` reads, and again that it writes

    def copy(self) -> object:
        """Copy ``copied`` bytes, as fast as the library's own copy does."""

    def timer(self, call: Call) -> float:
        """Seconds that the work of one call takes where it is done."""

    def wall(self, call: Call) -> float | None:
        """Seconds a call for one who makes many in a row; ``None`` where ``timer`` says that."""

    def drop(self) -> None:
        """Give back the memory of the last case."""


class Host:
    """NumPy arrays; what a call takes is what the clock says."""

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
        """Touch what the next case's results will be written to.

        A virtual machine may get memory from its host at the first touch only, fifty times
        slower than from then on, and may lose it again while nobody has it.
        """
        np.empty(_TOUCHED, np.uint8)[::_PAGE] = 1


class Arrays:
    """Arrays of a library like NumPy's, ``xp``, in some device's memory."""

    tiny = False  # whether only the smallest shapes are worth the time
    xp: Any

    def array(self, host: Any) -> Array:
        """A host array on the device."""
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

    @cache  # noqa: B019  there is one place, for as long as the process lives
    def _numbers(self, dtype: str) -> Array:
        host = np.random.default_rng(0).standard_normal(_NUMBERS, np.float32)
        return self.xp.asarray(host.astype(DTYPES[dtype]).view(np.uint8))

    def empty_like(self, array: Array) -> Array:
        """Memory for a result, in the same order."""
        return self.array(self.xp.empty_like(array))

    def exact(self, array: Array) -> Array:
        """An array's values in float64."""
        if array.dtype == DTYPES["bfloat16"]:  # by its bits: CuPy 13 does not know it
            array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64)


class Cuda(Arrays):
    """CuPy arrays, timed by events on the device.

    Before each timed call the L2 cache is emptied by reading other memory (clean lines, so that
    nobody pays for writing them back), and the device is kept busy until the host has issued the
    whole call: what is timed is the device's work, without the gaps of a slow host.
    """

    copied = 512 << 20
    _SHORTEST, _LONGEST = 1e-4, 5e-2  # seconds that the device is kept busy
    _TRIES = 4
    _WALL = 0.02  # seconds of calls in a row

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
        """CuPy's own launch of a kernel that does nothing, with three arguments."""
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
    """The emulator, timed by the clock: to see that everything runs, never how fast."""

    tiny = True
    copied = 4096

    def __init__(self) -> None:
        from testbed import emulated

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
        """The emulator has no launch to compare with."""

    def drop(self) -> None:
        pass

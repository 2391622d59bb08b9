"""Devices that a benchmark's arrays lie on, and their clocks: a CPU, a GPU, its emulator."""

import time
from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

Array = Any
Call = Callable[[], object]

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
}
_FASTEST = 3_000_000  # kHz, for a GPU that does not report its clock rate
_PAGE = 1 << 12  # bytes
# Seconds until no library's idle threads keep a core busy: PyTorch's spin for 8 ms after a call.
_PAUSE = 0.01
# Distinct random numbers; larger arrays repeat them, but rows of 2^k never coincide.
_NUMBERS = (1 << 20) + 8


class Device:
    """Arrays of ``xp``, a library like NumPy, and a timer of calls on them."""

    name: str
    xp: Any
    copied: int  # bytes that ``copy`` reads; it writes as many
    tiny = False  # whether to run only the smallest shapes
    wide_scale = False  # whether PyTorch wants 16-bit data's scale in float32

    def array(self, host: Any) -> Array:
        """Return a copy of a host array on the device."""
        raise NotImplementedError

    def copy(self) -> object:
        """Copy ``copied`` bytes by the library's own copy: the unit for bandwidths."""
        raise NotImplementedError

    def copy_of(self, size: int) -> Call | None:  # noqa: ARG002
        """Return a copy that reads so many bytes, if that says more than ``copy``."""
        return None

    def timer(self, call: Call) -> float:
        """Return the seconds that the work of one call takes."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def wall(self, call: Call) -> float | None:  # noqa: ARG002
        """Return the seconds per call of many in a row, or None if ``timer`` measures that."""
        return None

    def launch(self) -> Call | None:
        """Return the launch of a kernel that does nothing, if the device has kernels."""
        return None

    def drop(self) -> None:
        """Get the memory ready for the next case."""

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
        """Return normally distributed numbers: a million of them, repeated."""
        count = int(np.prod(shape))
        bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[DTYPES[dtype].itemsize]
        block = self.xp.roll(self._numbers(dtype).view(bits), 4099 * seed)
        out = self.xp.empty(count, bits)
        for start in range(0, count, _NUMBERS):
            out[start : start + _NUMBERS] = block[: count - start]
        return self.array(out.view(DTYPES[dtype]).reshape(shape))

    @cache  # noqa: B019  there is one device per process
    def _numbers(self, dtype: str) -> Array:
        host = np.random.default_rng(0).standard_normal(_NUMBERS, np.float32)
        return self.xp.asarray(host.astype(DTYPES[dtype]).view(np.uint8))

    def empty_like(self, array: Array) -> Array:
        """Return an array for a result, with the same memory order."""
        return self.array(self.xp.empty_like(array))

    def exact(self, array: Array) -> Array:
        """Return an array's values in float64."""
        if array.dtype == DTYPES["bfloat16"]:  # by its bits: CuPy 13 does not have it
            array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float64)


class Cpu(Device):
    """NumPy arrays, timed by the clock."""

    name, xp, wide_scale = "cpu", np, True
    copied, touched = 64 << 20, 1 << 30  # bytes

    @cached_property
    def _copies(self) -> tuple[Array, Array]:
        return np.zeros(self.copied, np.uint8), np.ones(self.copied, np.uint8)

    def array(self, host: Any) -> Array:
        """Return the array itself."""
        return host

    def copy(self) -> object:
        """Copy by NumPy."""
        return np.copyto(*self._copies)

    def timer(self, call: Call) -> float:
        """Return the seconds of a call with cold caches, while threads of earlier calls are asleep.

        Copies fill the pause: after a sleep, calls take up to half as long again.
        """
        end = time.perf_counter() + _PAUSE
        while time.perf_counter() < end:
            self.copy()
        return super().timer(call)

    def drop(self) -> None:
        """Touch the memory that the next case's results will be written to.

        A virtual machine may get a page from its host only at the first touch, which is fifty
        times slower than later ones, and may lose a free page again.
        """
        np.empty(self.touched, np.uint8)[::_PAGE] = 1


class Cuda(Device):
    """CuPy arrays, timed by events on the device.

    Before each timed call the L2 cache is emptied by reading other memory (clean lines, which need
    not be written back), and the device is kept busy until the host has issued the whole call. So
    the time is that of the device's work, without gaps caused by a slow host.
    """

    name, copied = "cuda", 512 << 20
    _SHORTEST, _LONGEST = 1e-4, 5e-2  # limits, in seconds, on how long the device is kept busy
    _TRIES = 4
    _WALL = 0.01  # seconds of calls in a row, for ``wall``

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
        """Return a CuPy array."""
        return self.xp.asarray(host)

    def copy(self) -> object:
        """Copy by CuPy."""
        return self.xp.copyto(self._target, self._source)

    def copy_of(self, size: int) -> Call | None:
        """Return a copy of fewer bytes, whose start and last blocks take as long as a larger's."""
        part = slice(size // 4)
        fits = 0 < size <= self.copied
        return partial(self.xp.copyto, self._target[part], self._source[part]) if fits else None

    def timer(self, call: Call) -> float:
        """Return the seconds between two events, with a cold L2 and the host ahead."""
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
        """Return the seconds per call, with Python and launches."""
        once = self._seconds(call, 1)
        count = int(self._WALL / once)
        return self._seconds(call, count) / count if count > 1 else once

    def launch(self) -> Call:
        """Return CuPy's own launch of a kernel with three arguments that does nothing."""
        nothing = self._module.get_function("nothing")
        return lambda: nothing((1,), (32,), (self._sum, self._other, np.int64(0)))

    def drop(self) -> None:
        """Free the memory of the last case."""
        self.xp.get_default_memory_pool().free_all_blocks()

    def _seconds(self, call: Call, count: int) -> float:
        wait = self.xp.cuda.get_current_stream().synchronize
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return time.perf_counter() - start


class Emulated(Cpu):
    """The tests' emulator, timed by the clock: a test of the benchmarks, not a measurement."""

    name, copied, touched, tiny = "emulated", 4096, 0, True

    def __init__(self) -> None:
        from tests.devices import emulated

        self._backend = emulated.emulated_backend(multiprocessors=1)
        self._on_device = emulated.on_device

    def array(self, host: Any) -> Array:
        """Return an array on which the emulator computes."""
        return self._on_device(self._backend.device.xp.asarray(np.asarray(host)), self._backend)

    def copy_of(self, size: int) -> Call | None:
        """Return ``copy``, as a test of the record."""
        return self.copy if size else None

    def exact(self, array: Array) -> Array:
        """Return a NumPy array of the values in float64."""
        return super().exact(np.asarray(array))

    def wall(self, call: Call) -> float:
        """Return what ``timer`` returns."""
        return self.timer(call)


DEVICES: dict[str, type[Device]] = {kind.name: kind for kind in (Cpu, Cuda, Emulated)}

"""How rows are dealt out to threads and blocks."""

import math
from dataclasses import dataclass

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.device import Device
from gradkit._dtypes import float_name, float_of

RESIDENT_THREADS = 1024  # on a multiprocessor, of a kernel with up to 64 registers
RESIDENT_HEAVY = 512  # and with up to 128


def accumulator(array: Array) -> str:
    """The name of the dtype in which sums of the array's elements are held."""
    return float_of(array.dtype).accumulation


def dtype_name(array: Array) -> str:
    """The name of an array's dtype: quicker than NumPy's own, which is made anew each time."""
    return str(float_name(array.dtype))


def rows_of(shape: Shape, axis: int) -> tuple[int, int]:
    """An array whose axes from ``axis`` on are normalised as (rows, width)."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of ``rows`` rows with ``threads`` threads each, and how many there are."""

    threads: int
    rows: int
    count: int

    @property
    def block(self) -> tuple[int, int]:
        """The block's shape."""
        return self.threads, self.rows


def row_blocks(
    device: Device, rows: int, packs: int, longest: int, resident_threads: int = RESIDENT_THREADS
) -> RowBlocks:
    """Deal out rows to blocks; a row wants ``packs`` threads but gets at most ``longest``.

    ``resident_threads`` is how many of the kernel's threads a multiprocessor holds at once.
    Blocks have 256 threads, or as many as one row takes, or fewer if that spreads few rows over
    the whole device; there are as many as can be resident at once, or as rows need.
    """
    threads = min(power_of_two(packs), longest)
    few = power_of_two(-(-rows // device.multiprocessors))
    side_by_side = max(1, 32 // threads, min(256 // threads, few))
    resident = max(1, resident_threads // (threads * side_by_side))
    needed = -(-rows // side_by_side)
    return RowBlocks(threads, side_by_side, min(needed, resident * device.multiprocessors))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

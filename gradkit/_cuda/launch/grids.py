"""How rows are divided among threads and blocks."""

import math
from dataclasses import dataclass

from gradkit._backend import Shape
from gradkit._cuda.launch.device import Device

RESIDENT_THREADS = 1024  # per multiprocessor, for a kernel with up to 64 registers
RESIDENT_HEAVY = 512  # the same with up to 128 registers


def rows_of(shape: Shape, axis: int) -> tuple[int, int]:
    """(rows, width) of an array that is normalised over the dimensions from ``axis`` on."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


@dataclass(frozen=True)
class RowBlocks:
    """``count`` blocks of ``rows`` rows, with ``threads`` threads per row."""

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
    """Divide rows among blocks. A row can use ``packs`` threads and gets at most ``longest``.

    A multiprocessor holds ``resident_threads`` of the kernel's threads at once. A block has 256
    threads; more if one row needs more; fewer if that spreads few rows over the whole device. There
    are as many blocks as the device holds at once, or fewer if the rows need fewer.
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

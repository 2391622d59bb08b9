"""Division of rows among threads and blocks.

What is added up over rows is divided by shapes and dtypes alone, as if each GPU were an H100, so
that a sum has the same bits on all of them. Others run more blocks than they have places for, or
fewer. The rest is divided by the places that a device has for the compiled kernel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gradkit._backend import Shape
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import Launch, Macros, kernel

_WARP = 32
_ROWS_AT_ONCE = 4  # that a thread loads at most: kernels/columns.cuh
_WAVES, _FULL = 8, 0.9  # waves of blocks, at most; the part of their places that is enough
_PART = 16  # multiprocessors of a part of an H100, within which a cluster lies
_SURE = 4  # blocks on each, from which on parts with two more make up for those with two fewer

# The places that there are for blocks of so many threads.
Places: TypeAlias = Callable[[int], int]


def rows_of(shape: Shape, axis: int) -> tuple[int, int]:
    """(rows, width) of an array that is normalised over the dimensions from ``axis`` on."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


CLUSTER = 8  # blocks that share a row: kernels/cluster.cuh
CLUSTER_THREADS = 512  # of each, at most


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


def sharing_places(device: Device, held: int) -> Places:
    """The places among which sums are divided, of blocks that are ``held`` threads together."""
    return lambda threads: max(1, held // threads) * device.sharing


def sharing_clusters(device: Device, held: int) -> Places:
    """The same for clusters: one fewer if there may be too few, as waiting doubles the time."""
    part = min(device.sharing, _PART)

    def places(threads: int) -> int:
        blocks = max(1, held // threads)
        clusters = device.sharing // part * (part * blocks // CLUSTER)
        return max(1, clusters - (blocks < _SURE))

    return places


def row_blocks(
    places: Places, multiprocessors: int, rows: int, packs: int, longest: int, samples: int = 1
) -> RowBlocks:
    """Divide rows among a kernel's blocks. A row can use ``packs`` threads, at most ``longest``.

    A block has 256 threads; more if one row needs more; fewer if that spreads few rows over all
    multiprocessors. There are as many blocks as places, or fewer if the rows need fewer. With
    several samples of ``rows`` rows, ``count`` is the number of blocks of each.
    """
    threads = row_threads(packs, longest)
    few = min(power_of_two(rows), power_of_two(-(-rows * samples // multiprocessors)))
    side_by_side = max(1, 32 // threads, min(256 // threads, few))
    needed = -(-rows // side_by_side)
    most = -(-places(threads * side_by_side) // samples)
    return RowBlocks(threads, side_by_side, min(needed, most))


def row_clusters(places: Places, rows: int, packs: int, samples: int = 1) -> RowBlocks:
    """Divide rows among ``count`` clusters of blocks; a row can use ``packs`` threads."""
    threads = -(-packs // (32 * CLUSTER)) * 32
    return RowBlocks(threads, 1, min(rows, max(1, places(threads) // samples)))


def row_threads(packs: int, longest: int) -> int:
    """Threads that share ``packs``, at most ``longest``: whole warps, or a power of two in one.

    Longer rows take turns, in each of which nearly all threads have work.
    """
    if packs <= _WARP:
        return power_of_two(packs)
    turns = -(-packs // longest)
    return -(-packs // (_WARP * turns)) * _WARP


def chunks_of(packs: int, fewest: int, most: int, longest: int) -> int:
    """Packs per thread: ``most``, or ``fewest`` if more than a third would be padding.

    Then ``fewest``, if so many threads can work on a row and less is left over.
    """
    padded = [chunks * row_threads(-(-packs // chunks), longest) for chunks in (fewest, most)]
    few = packs <= fewest * longest and padded[0] < padded[1] and 3 * packs < 2 * padded[1]
    return fewest if few else most


def shares_of(tiles: int, resident: int, most: int) -> int:
    """Blocks that share each tile, at most ``most``: the number that leaves the fewest idle.

    A device of ``resident`` places may take as long for a few more blocks as for twice as many.
    If one wave of blocks would leave over a tenth of their places empty, there are more waves, of
    shorter blocks.
    """
    best, used = 1, 0.0
    for waves in range(1, _WAVES + 1):
        shares = max(1, min(most, waves * resident // max(1, tiles)))
        blocks = max(1, shares * tiles)
        filled = blocks / (-(-blocks // resident) * resident)
        if filled > used:
            best, used = shares, filled
        if used >= _FULL:
            break
    return best


def column_block(
    multiprocessors: int, columns: int, planes: int, rows: int | None = None
) -> tuple[int, int]:
    """The block of up to 1024 threads that sums the rows of matrices, column by column.

    32 columns side by side; fewer, down to the 32 bytes that memory gives at once, if that brings
    more multiprocessors to work. If the number of rows is known, no more threads share a column
    than have rows to load at once: barriers of many threads take longer than few rows.
    """
    across = 32
    while across > 8 and -(-columns // across) * planes < multiprocessors:
        across //= 2
    if rows is None:
        return across, 1024 // across
    down = min(1024 // across, power_of_two(-(-rows // _ROWS_AT_ONCE)))
    return max(across, _WARP // down), down


def column_sums(
    device: Device,
    accumulator: str,
    parameter: str,
    width: int,
    planes: int,
    samples: int = 1,
    rows: int | None = None,
) -> Launch:
    """The last kernel of a gradient: partial rows of the accumulator's dtype, added by column."""
    macros: Macros = {"ACC_T": accumulator, "PARAM_T": parameter}
    block = column_block(device.sharing, width, planes * samples, rows)
    loaded = kernel(device, "column_sums", "column_sums", **macros)
    return Launch(loaded, (-(-width // block[0]), planes, samples), block, dependent=True)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

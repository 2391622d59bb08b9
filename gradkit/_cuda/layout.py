"""How arrays lie in memory, and how rows are dealt out to threads and blocks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradkit._cuda.device import Array, Device
from gradkit._dtypes import accumulation_name

Macros: TypeAlias = dict[str, str | int]

MULTIPROCESSOR_THREADS = 768  # that a kernel with about 80 registers leaves room for
_VECTOR = 16  # bytes that one access moves at most


def contiguous(device: Device, array: Array | None) -> Array | None:
    """The array itself where a kernel can read it as a gapless run of elements, else a copy."""
    return array if array is None or _plain(device, array) else array.copy(order="C")


def room_for(device: Device, out: Array) -> Array:
    """Where a kernel writes what belongs into ``out``: itself, or scratch in C order."""
    return out if _plain(device, out) else device.xp.empty(out.shape, out.dtype)


def settle(out: Array, room: Array) -> None:
    """Bring results from the scratch of ``room_for`` to where they belong."""
    if room is not out:
        out[...] = room


def _plain(device: Device, array: Array) -> bool:
    """Whether an array lies gapless in C order, and where its dtype may begin."""
    gapless: bool = array.flags.c_contiguous
    return gapless and device.pointer(array) % array.dtype.itemsize == 0


def accumulator(array: Array) -> str:
    """The name of the dtype that sums of the array's elements are held in."""
    return accumulation_name(str(array.dtype))


def rows_of(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
    """An array whose axes from ``axis`` on are normalised as (rows, width)."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def vector_of(device: Device, run: int, data: Iterable[Array], other: Iterable[Any] = ()) -> int:
    """How many elements of ``data`` one access may move: 16 bytes' worth, or one.

    ``run`` is the length of the runs that the kernel reads from their beginning; ``other`` are
    arrays (or ``None``) that are read in runs of as many elements.
    """
    arrays = list(data)
    count: int = _VECTOR // arrays[0].dtype.itemsize
    arrays += [array for array in other if array is not None]
    aligned = all(device.pointer(array) % _VECTOR == 0 for array in arrays)
    return count if aligned and run % count == 0 else 1


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


def row_blocks(device: Device, rows: int, packs: int, longest: int) -> RowBlocks:
    """Deal out rows to blocks, where a row wants ``packs`` threads but gets at most ``longest``.

    Blocks have 256 threads, or as many as one row takes, or fewer where that spreads few rows
    over the whole device; there are as many as can be resident at once, or as rows need.
    """
    threads = min(power_of_two(packs), longest)
    few = power_of_two(-(-rows // device.multiprocessors))
    side_by_side = max(1, 32 // threads, min(256 // threads, few))
    resident = max(1, MULTIPROCESSOR_THREADS // (threads * side_by_side))
    needed = -(-rows // side_by_side)
    return RowBlocks(threads, side_by_side, min(needed, resident * device.multiprocessors))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

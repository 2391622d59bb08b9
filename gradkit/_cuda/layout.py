"""How arrays lie in memory, and how rows are dealt out to threads and blocks."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gradkit._cuda.device import Array, Device, kept, scratch
from gradkit._dtypes import accumulation_name, float_name

Macros: TypeAlias = dict[str, str | int]

RESIDENT_THREADS = 1024  # on a multiprocessor, of a kernel with up to 64 registers
RESIDENT_HEAVY = 512  # and with up to 128
_VECTOR = 16  # bytes that one access moves at most


def vector_of(data: Array, run: int) -> int:
    """How many elements one access moves: 16 bytes' worth where runs of ``run`` divide so.

    Shapes alone decide, so that results do not depend on where arrays lie in memory.
    """
    count: int = _VECTOR // data.dtype.itemsize
    return 1 if run % count else count


def contiguous(device: Device, array: Array | None, vector: int = 1) -> Array | None:
    """The array itself where a kernel can read it in vectors from end to end, else a copy."""
    if array is None or _plain(array, vector):
        return array
    return kept(device, array.copy(order="C"))


def room_for(device: Device, out: Array, vector: int = 1) -> Array:
    """Where a kernel writes what belongs into ``out``: itself, or scratch that is like it."""
    return out if _plain(out, vector) else scratch(device, out.shape, out.dtype)


def settle(out: Array, room: Array) -> None:
    """Bring results from the scratch of ``room_for`` to where they belong."""
    if room is not out:
        out[...] = room


def _plain(array: Array, vector: int) -> bool:
    """Whether an array lies gapless in C order, and begins where its first access may."""
    alignment = _VECTOR if vector > 1 else array.dtype.itemsize
    gapless: bool = array.flags.c_contiguous
    return gapless and _address(array) % alignment == 0


def _address(array: Array) -> int:
    """Where an array begins, to ask about its alignment; kernels are given the array."""
    address: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return address


def accumulator(array: Array) -> str:
    """The name of the dtype that sums of the array's elements are held in."""
    return accumulation_name(dtype_name(array))


def dtype_name(array: Array) -> str:
    """The name of an array's dtype: quicker than NumPy's own, which is made anew each time."""
    return str(float_name(array.dtype))


def rows_of(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
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
    device: Device, rows: int, packs: int, longest: int, room: int = RESIDENT_THREADS
) -> RowBlocks:
    """Deal out rows to blocks, where a row wants ``packs`` threads but gets at most ``longest``.

    ``room`` is how many of the kernel's threads a multiprocessor holds at once. Blocks have
    256 threads, or as many as one row takes, or fewer where that spreads few rows over the
    whole device; there are as many as can be resident at once, or as rows need.
    """
    threads = min(power_of_two(packs), longest)
    few = power_of_two(-(-rows // device.multiprocessors))
    side_by_side = max(1, 32 // threads, min(256 // threads, few))
    resident = max(1, room // (threads * side_by_side))
    needed = -(-rows // side_by_side)
    return RowBlocks(threads, side_by_side, min(needed, resident * device.multiprocessors))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

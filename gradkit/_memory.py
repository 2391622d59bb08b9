"""Which bytes an array covers, and whether arrays may be written side by side.

Works on addresses, shapes and strides alone, so that host and device arrays go through the
same code and no element is read.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import numpy as np

_WORK = 100_000  # steps of the exact overlap search before it gives up (microseconds)
_base_of = attrgetter("base")


def address_of(array: Any) -> int:
    """The address of the array's first element."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


def byte_range(array: Any) -> tuple[int, int]:
    """First byte and one past the last; equal for an array without elements."""
    low = high = address_of(array)
    if array.size == 0:
        return low, high
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + array.itemsize


def is_contiguous(array: Any) -> bool:
    """Whether the array's bytes are one gapless run, in C or Fortran order."""
    flags = array.flags
    return bool(flags.c_contiguous or flags.f_contiguous)


def in_memory_order(array: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """An array's shape with its axes as they lie in memory, and how to transpose them back.

    ``None`` where there is nothing to transpose.
    """
    if array.flags.c_contiguous:
        return array.shape, None
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    places = sorted(range(array.ndim), key=order.__getitem__)
    return tuple(array.shape[axis] for axis in order), tuple(places)


def overlaps_itself(array: Any) -> bool:
    """Whether two elements of the array may share memory (a broadcast view, say).

    Exact for every view that indexing, transposing and broadcasting can make; a window made
    by hand out of strides that interleave without touching counts as overlapping.
    """
    if array.size <= 1 or is_contiguous(array):
        return False
    covered = array.itemsize
    for stride, length in sorted(
        (abs(stride), length)
        for stride, length in zip(array.strides, array.shape, strict=True)
        if length > 1
    ):
        if stride < covered:
            return True
        covered += (length - 1) * stride
    return False


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays share a byte. A search that takes too long counts as sharing."""
    if not (a.size and b.size):
        return False
    try:
        return np.shares_memory(_layout(a), _layout(b), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same_elements(a: Any, b: Any) -> bool:
    """Whether two arrays are the very same elements in the same order."""
    return a is b or bool(
        a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
        and address_of(a) == address_of(b)
    )


def first_overlap(arrays: Sequence[Any]) -> tuple[int, int] | None:
    """The positions of two arrays that share memory, or ``None``. O(n log n)."""
    if len(arrays) < 2:
        return None
    # Owners of distinct allocations: only the same object twice can overlap.
    owners = set(map(type, arrays)) == {np.ndarray} and all(
        map(is_, map(_base_of, arrays), repeat(None))
    )
    if owners and len(set(map(id, arrays))) == len(arrays):
        return None
    ranges = sorted((*byte_range(array), index) for index, array in enumerate(arrays))
    active: list[tuple[int, int]] = []  # (end, index) of ranges that reach into the next one
    for low, high, index in ranges:
        if low == high:
            continue
        active = [(end, other) for end, other in active if end > low]
        for _, other in active:
            if overlap(arrays[other], arrays[index]):
                return (other, index) if other < index else (index, other)
        active.append((high, index))
    return None


class _Layout:
    """Stands for memory at an address that is never read."""

    def __init__(self, array: Any):
        self.__array_interface__ = {
            "data": (address_of(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }


def _layout(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else np.asarray(_Layout(array))

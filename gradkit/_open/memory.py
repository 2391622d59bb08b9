"""Which bytes an array covers, and whether arrays may be written side by side.

Works on addresses, shapes and strides alone, so that host and device arrays go through the
same code and no element is read.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, product, repeat
from operator import attrgetter, is_
from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit._calls.backend import Backend

_WORK = 100_000  # steps of the exact overlap search before it gives up (microseconds)
_FEW = 64  # pairs of arrays that are sooner compared than sorted
_base_of = attrgetter("base")
Named = Sequence[tuple[str, Array]]


def byte_range(backend: Backend, array: Array) -> tuple[int, int]:
    """First byte and one past the last; equal for an array without elements."""
    low = high = backend.address(array)
    if array.flags.c_contiguous:  # nearly always, and an array without elements is
        return low, high + array.nbytes
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + array.itemsize


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of the array may share memory (a broadcast view, say).

    Exact for every view that indexing, transposing and broadcasting can make; a window made
    by hand from strides that interleave without touching counts as overlapping.
    """
    flags = array.flags
    if flags.c_contiguous or flags.f_contiguous or array.size <= 1:
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


def writable(array: Array, label: str, instead: str) -> None:
    """Raise unless every element of the array can be written on its own."""
    if not getattr(array.flags, "writeable", True):
        raise ValueError(f"{label} is read-only, but it would be written in place; {instead}")
    if overlaps_itself(array):
        raise ValueError(
            f"{label} overlaps itself in memory (shape {array.shape}, strides {array.strides}: a "
            "broadcast view?), so it cannot be written in place; pass a copy"
        )


def plainly_apart(written: Sequence[Array | None], read: Sequence[Array | None]) -> bool:
    """Whether a quick look shows that NumPy arrays can be written; a no may be wrong.

    An array lies in the memory of its base, and all bases must be different.
    """
    owners, count = set(), 0
    for array in written:
        if array is not None:
            if type(array) is not np.ndarray or not array.flags.carray:
                return False
            owner = array if array.base is None else array.base
            if type(owner) is not np.ndarray or owner.base is not None:
                return False
            owners.add(id(owner))
            count += 1
    if len(owners) < count:
        return False
    for array in read:
        if array is not None:
            owner = array if array.base is None else array.base
            if type(owner) is not np.ndarray or owner.base is not None or id(owner) in owners:
                return False
    return True


def whole_and_apart(
    backend: Backend, written: Sequence[Array | None], read: Sequence[Array | None]
) -> bool:
    """Whether gapless arrays on a device are apart where they are written; a no may be wrong."""
    ends: dict[int, int] = {}  # of the ranges that begin at an address
    for array in read:
        if array is not None:
            low = backend.address(array)
            ends[low] = max(ends.get(low, 0), low + array.nbytes)
    for array in written:
        if array is not None:
            low = backend.address(array)
            if low in ends:
                return False
            ends[low] = low + array.nbytes
    end = 0
    for low in sorted(ends):
        if low < end:
            return False
        end = ends[low]
    return True


def overlap(backend: Backend, a: Array, b: Array) -> bool:
    """Whether two arrays share a byte. A search that takes too long counts as sharing."""
    if not (a.size and b.size):
        return False
    try:
        return np.shares_memory(_layout(backend, a), _layout(backend, b), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def lie_apart(backend: Backend, arrays: Sequence[Array]) -> bool:
    """Whether no two different arrays have bytes in one range; a no may be wrong."""
    if arrays and type(arrays[0]) is np.ndarray:  # NumPy's own search is quicker
        return False
    different = {id(array): array for array in arrays}.values()
    ranges = sorted([byte_range(backend, array) for array in different])
    end = 0
    for low, high in ranges:
        if low < end:
            return False
        end = high
    return True


def meetings(
    backend: Backend, written: Sequence[Array], read: Sequence[Array]
) -> Iterator[tuple[int, int]]:
    """Positions in ``written`` and in ``read`` of arrays whose ranges of bytes meet.

    O(n log n) where few do.
    """
    if _own_memory(written) and _own_memory(read):
        places: dict[int, list[int]] = {}
        for index, array in enumerate(read):
            places.setdefault(id(array), []).append(index)
        for position, found in enumerate(map(places.get, map(id, written))):
            yield from zip(repeat(position), found or ())
        return
    if len(written) * len(read) <= _FEW and set(map(type, (*written, *read))) == {np.ndarray}:
        for pair in product(range(len(written)), range(len(read))):
            if np.may_share_memory(written[pair[0]], read[pair[1]]):
                yield pair
        return
    ranges = sorted((*byte_range(backend, array), index) for index, array in enumerate(read))
    lows = [low for low, _, _ in ranges]
    furthest = list(accumulate((high for _, high, _ in ranges), max))
    for position, array in enumerate(written):
        low, high = byte_range(backend, array)
        before = bisect_left(lows, high)
        while before and furthest[before - 1] > low:
            before -= 1
            _, end, index = ranges[before]
            if end > low:
                yield position, index


def same_elements(backend: Backend, a: Array, b: Array) -> bool:
    """Whether two arrays are the very same elements in the same order."""
    return a is b or bool(
        a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
        and backend.address(a) == backend.address(b)
    )


def first_overlap(backend: Backend, arrays: Sequence[Array]) -> tuple[int, int] | None:
    """The positions of two arrays that share memory, or ``None``. O(n log n)."""
    if len(arrays) < 2:
        return None
    if _own_memory(arrays) and len(set(map(id, arrays))) == len(arrays):
        return None
    ranges = sorted((*byte_range(backend, array), index) for index, array in enumerate(arrays))
    active: list[tuple[int, int]] = []  # (end, index) of ranges that reach into the next one
    for low, high, index in ranges:
        if low == high:
            continue
        active = [(end, other) for end, other in active if end > low]
        for _, other in active:
            if overlap(backend, arrays[other], arrays[index]):
                return (other, index) if other < index else (index, other)
        active.append((high, index))
    return None


def _own_memory(arrays: Sequence[Array]) -> bool:
    """Whether each is an allocation of its own, so that it overlaps no other object."""
    return set(map(type, arrays)) <= {np.ndarray} and all(
        map(is_, map(_base_of, arrays), repeat(None))
    )


class _AtAddress:
    """Stands for memory at an address that is never read."""

    def __init__(self, backend: Backend, array: Array):
        self.__array_interface__ = {
            "data": (backend.address(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }


def _layout(backend: Backend, array: Array) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(_AtAddress(backend, array))

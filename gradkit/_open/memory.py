"""Bytes that an array covers, and arrays that may be written side by side.

Works on addresses, shapes and strides alone, so that host and device arrays go through the
same code and no element is read.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from gradkit import _host
from gradkit._arrays import cuda
from gradkit._backend import Array
from gradkit._calls.backend import Backend

_WORK = 100_000  # steps of the exact overlap search before it gives up (microseconds)
_ANYWHERE = 1 << 40  # an address where that matters not
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
    """True if two elements of the array may share memory (a broadcast view, say).

    A search that takes too long, which no view that slicing makes does, counts as overlapping.
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
            return _meets_itself(array)
        covered += (length - 1) * stride
    return False


def _meets_itself(array: Array) -> bool:
    """True if elements at different indices share memory, at index 0 of an axis and a later one."""
    whole = np.asarray(_AtAddress(_ANYWHERE, array))
    for axis, length in enumerate(array.shape):
        before = (slice(None),) * axis
        if length > 1 and _share(whole[(*before, slice(1))], whole[(*before, slice(1, None))]):
            return True
    return False


def has_no_gaps(array: Array) -> bool:
    """True if the elements fill their memory, the first of it first, in any order of axes."""
    if array.flags.c_contiguous:
        return True
    size = array.itemsize
    for stride, length in sorted(zip(array.strides, array.shape, strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True


def is_writable(array: Array) -> bool:
    """True if its library lets it be written; CuPy does, but in memory that it borrowed to read."""
    flags = array.flags
    return flags.writeable if hasattr(flags, "writeable") else not cuda.is_read_only(array)


def writable(array: Array, label: str, instead: str) -> None:
    """Raise unless every element of the array can be written on its own."""
    if not is_writable(array):
        raise ValueError(f"{label} is read-only, but it would be written in place; {instead}")
    if overlaps_itself(array):
        raise ValueError(
            f"{label} overlaps itself in memory (shape {array.shape}, strides {array.strides}: a "
            "broadcast view?), so it cannot be written in place; pass a copy"
        )


def plainly_apart(written: Sequence[Array | None], read: Sequence[Array | None]) -> bool:
    """True if a quick look shows that NumPy arrays can be written; a no may be wrong."""
    return _host.code is not None and _host.code.apart(written, read)


def whole_and_apart(
    backend: Backend, written: Sequence[Array | None], read: Iterable[Array | None]
) -> bool:
    """True if gapless arrays on a device are apart where they are written; a no may be wrong."""
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
    """True if two arrays share a byte. A search that takes too long counts as sharing."""
    return bool(a.size and b.size) and _share(_layout(backend, a), _layout(backend, b))


def _share(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def lie_apart(backend: Backend, arrays: Sequence[Array]) -> bool:
    """True if no two different arrays have bytes in one range; a no may be wrong."""
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
) -> Iterable[tuple[int, int]]:
    """Positions in ``written`` and in ``read`` of arrays whose ranges of bytes meet.

    In the order of ``written``; O(n log n) where few do.
    """
    if _host.code is not None and all(
        isinstance(arrays, _host.Table) or {np.ndarray}.issuperset(map(type, arrays))
        for arrays in (written, read)
    ):
        return sorted(_host.code.meetings(written, read))
    return _meetings(backend, written, read)


def _meetings(
    backend: Backend, written: Sequence[Array], read: Sequence[Array]
) -> Iterable[tuple[int, int]]:
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
    """True if two arrays are the very same elements in the same order."""
    return a is b or bool(
        a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
        and backend.address(a) == backend.address(b)
    )


def first_overlap(backend: Backend, arrays: Sequence[Array]) -> tuple[int, int] | None:
    """The positions of two arrays that share memory, or ``None``. O(n log n)."""
    for first, second in meetings(backend, arrays, arrays):
        if first < second and overlap(backend, arrays[first], arrays[second]):
            return first, second
    return None


class _AtAddress:
    """Stands for memory at an address that is never read."""

    def __init__(self, address: int, array: Array):
        self.__array_interface__ = {
            "data": (address, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }


def _layout(backend: Backend, array: Array) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(_AtAddress(backend.address(array), array))

"""Arrays cut into blocks: working memory is bounded whatever the size of the input."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]
Index: TypeAlias = tuple[slice, ...]


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[Index]:
    """Index tuples of slices that tile ``shape`` in order, at most ``limit`` elements each.

    A block is a run of whole slices along the first axis if one fits, and is cut along the
    next axis if none does.
    """
    if not shape:
        yield ()
        return
    inner = 1
    for length in shape[1:]:
        inner *= length
    if inner > limit:
        for i in range(shape[0]):
            for rest in blocks(shape[1:], limit):
                yield (slice(i, i + 1), *rest)
    elif inner:
        step = limit // inner
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])),)


def matched(*arrays: Array, limit: int) -> Iterator[tuple[Array, ...]]:
    """Views that tile arrays of one shape side by side, a block at a time.

    Arrays that are all contiguous in the same order are walked as one dimension; any other
    arrays are walked along their axes, without a copy.
    """
    if arrays[0].size == 0:
        return
    if all(array.flags.c_contiguous for array in arrays):
        arrays = tuple(array.reshape(-1) for array in arrays)
    elif all(array.flags.f_contiguous for array in arrays):
        arrays = tuple(array.T.reshape(-1) for array in arrays)
    if arrays[0].size <= limit:
        yield arrays
        return
    for index in blocks(arrays[0].shape, limit):
        yield tuple(array[index] for array in arrays)


def by_halves(values: Array, few: int = 1) -> Array:
    """``values``, which it overwrites, summed along the first axis until few are left.

    Equal terms double without an error; one running total of them drifts by a unit for every
    four.
    """
    while len(values) > few:
        half = len(values) // 2
        values[:half] += values[-half:]
        values = values[: len(values) - half]
    return values

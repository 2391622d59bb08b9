"""Arrays cut into blocks, and blocks brought into the dtype in which they are computed.

Every operation of this backend visits its arrays a block at a time and reuses one strip's
scratch, so that working memory is bounded whatever the size of the input.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from gradkit._numpy import tuning
from gradkit._numpy.casts import narrow, widen

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


def even_step(length: int, most: int) -> int:
    """How many rows a piece gets if it may have ``most``: the strips' shares even out."""
    strips = tuning.STRIPS
    pieces = -(-length // most)
    if pieces > strips:
        pieces = -(-pieces // strips) * strips
    else:
        pieces = next(n for n in (1, 2, 4, strips) if n >= pieces)
    step = -(-length // pieces)
    return max(1, min(most, -(-step // 8) * 8))  # BLAS takes rows by the four or eight


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


def load(block: Array, dtype: DType, room: Array, shape: tuple[int, ...] = (-1,)) -> Array:
    """A block's values as ``dtype`` in ``shape``: the block itself, or a copy in the room."""
    shaped = block.shape == shape or block.ndim == len(shape) == 1
    if shaped and block.dtype == dtype and _suits_blas(block):
        return block
    return copied(block, room).reshape(shape)


def copied(block: Array, room: Array) -> Array:
    """A block's values as a copy in the room, in its dtype."""
    copy: Array = room[: block.size].reshape(block.shape)
    widen(block, copy)
    return copy


def _suits_blas(block: Array) -> bool:
    """Whether products of the block go through BLAS.

    What NumPy does instead, for a stride of 0 say, is slow and has one running total.
    """
    if not block.flags.aligned:
        return False
    size = block.itemsize
    rows = (
        block.ndim == 2 and block.strides[1] == size and block.strides[0] >= block.shape[1] * size
    )
    return rows or bool(block.flags.c_contiguous)


def store(values: Array, target: Array, room: Array) -> None:
    """Write a block's values into a view of any shape and dtype; overwrites them and the room."""
    narrow(values.reshape(target.shape), target, room)


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

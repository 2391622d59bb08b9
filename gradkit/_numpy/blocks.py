"""Arrays cut into blocks: working memory is bounded whatever the size of the input."""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Index: TypeAlias = tuple[slice, ...]

BLOCK = 1 << 16  # elements that are computed at a time; of float64 numbers, 512 KiB


def blocks(shape: tuple[int, ...], limit: int = BLOCK) -> Iterator[Index]:
    """Tuples with a slice for each axis that tile ``shape`` in order, ``limit`` elements at most.

    A block is a run of whole slices along the first axis if one fits, and is cut along the
    next axis if none does.
    """
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    if inner > limit:
        for i in range(shape[0]):
            for rest in blocks(shape[1:], limit):
                yield (slice(i, i + 1), *rest)
    elif inner:
        step = limit // inner
        for start in range(0, shape[0], step):
            run = slice(start, min(start + step, shape[0]))
            yield (run, *(slice(None) for _ in shape[1:]))


def part(array: Array, index: Index) -> Array:
    """Select by an index; a single number is an array, too."""
    whole: Any = (*index, ...)
    return array[whole]


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

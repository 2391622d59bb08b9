"""Data of rows and columns, a block at a time: working memory is bounded for arrays of any size."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradkit._numpy import writes
from gradkit._numpy.blocks import BLOCK, Array, Index, blocks, part


class Rows:
    """Arrays whose axes up to ``axis`` are rows, and whose other axes are columns.

    A block is a float64 copy of shape (rows, columns). It has whole rows if one fits.
    """

    def __init__(self, shape: tuple[int, ...], axis: int):
        self.lead, self.tail = shape[:axis], shape[axis:]
        self.width = math.prod(self.tail)
        self.columns = list(blocks(self.tail))

    @property
    def rows(self) -> Iterator[Index]:
        """The rows of each block."""
        return blocks(self.lead, max(1, BLOCK // max(1, self.width)))

    def block(self, array: Array, row: Index, column: Index) -> Array:
        """A block of the data."""
        view = part(array, row + column)
        length = math.prod(view.shape[: len(row)])
        return view.astype(np.float64, order="C").reshape(length, -1)

    def statistic(self, array: Array, row: Index) -> Array:
        """A number for each row of a block."""
        return part(array, row).astype(np.float64).reshape(-1, 1)

    def parameter(self, array: Array | None, column: Index, absent: float) -> Array:
        """A number for each column of a block."""
        numbers = np.float64(absent) if array is None else part(array, column)
        return numbers.astype(np.float64).reshape(-1)

    def shifted_scale(self, call: Any, column: Index) -> Array:
        """The scale of a call, to which an offset is added in the dtype of statistics."""
        scale, offset = call.scale, getattr(call, "scale_offset", 0.0)
        if scale is not None and offset:
            kind = call.inv_std.dtype
            return self.parameter(part(scale, column).astype(kind) + kind.type(offset), (), 1.0)
        return self.parameter(scale, column, 1.0)

    def mean(self, term: Callable[[Index], Array]) -> Array:
        """The mean over each row of a block of what ``term`` makes of its columns."""
        sums = [term(column).sum(axis=1, keepdims=True) for column in self.columns]
        return sum(sums) / self.width


def column_sums(block: Array) -> Array:
    """The sum over the rows of a block, which NumPy adds up pairwise if they have no gaps."""
    return np.ascontiguousarray(block.T).sum(axis=1)


def store(values: Array, target: Array) -> None:
    """``target = values``, float64 numbers in rows that are rounded once."""
    writes.store(values.reshape(target.shape), target)

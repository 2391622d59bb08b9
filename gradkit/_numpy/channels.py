"""Arrays as cells: elements that share a mean and a variance, a block of them at a time.

A batch norm's cells are channels: its axes are (channels, all others). A group norm's are the
groups of each sample: (samples, groups, channels of a group, space).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradkit._numpy.blocks import BLOCK, Array, Index, blocks

# Times this, float64 numbers, their differences and squares add up without overflow. What it takes
# from the smallest counts for nothing beside those that overflowed.
_SMALL = 2.0**-600


class Moments(NamedTuple):
    """Mean and variance of each cell; the mean is a sum of two numbers, for precision."""

    centre: Array
    rest: Array
    variance: Array

    @property
    def mean(self) -> Array:
        """The mean as one number."""
        return self.centre + self.rest


class Cells:
    """Blocks of an array of this shape whose first ``lead`` axes lead from cell to cell.

    A block is an index of cells and one of their elements. It has whole cells if one fits.
    """

    def __init__(self, shape: tuple[int, ...], lead: int):
        self.lead = lead
        self.size = int(np.prod(shape[lead:], dtype=np.int64))  # elements of a cell
        self._shape = shape
        self.elements = list(blocks(shape[lead:], BLOCK))

    @property
    def cells(self) -> Iterator[Index]:
        """The cells of each block."""
        return blocks(self._shape[: self.lead], max(1, BLOCK // max(1, self.size)))

    def sum(self, term: Callable[[Index], Array]) -> Array:
        """The sum over each of some cells of what ``term`` makes of a block of their elements."""
        total: Array = np.zeros(1)
        for element in self.elements:
            total = total + sums(term(element), range(self.lead))
        return total

    def column(self, numbers: Array) -> Array:
        """A number for each of some cells, to be broadcast over their elements."""
        ones = (1,) * (len(self._shape) - self.lead)
        return numbers.reshape(*numbers.shape, *ones)

    def moments(self, x: Array, cell: Index) -> Moments:
        """Mean and variance of some cells."""
        unscaled = self._moments(x, cell, 1.0)
        finite = np.isfinite(unscaled.variance)
        if x.dtype != np.float64 or finite.all():
            return unscaled
        small = self._moments(x, cell, _SMALL)
        squares = small.variance / _SMALL / _SMALL
        pieces = zip(unscaled, (small.centre / _SMALL, small.rest / _SMALL, squares), strict=True)
        return Moments(*(np.where(finite, large, other) for large, other in pieces))

    def _moments(self, x: Array, cell: Index, factor: float) -> Moments:
        """Return the moments of ``factor * x``; those of an empty cell are 0.

        Distances from a cell's first element are 0 if all are equal. Those from the mean correct
        what was rounded.
        """
        if self.size == 0:
            zero = np.zeros(x[cell].shape[: self.lead])
            return Moments(zero, zero, zero)
        corner: Any = (..., *(0,) * (x.ndim - self.lead))
        first = x[cell][corner].astype(np.float64) * factor

        def distance(element: Index, point: Array) -> Array:
            return load(x, cell + element) * factor - self.column(point)

        centre = first + self.sum(lambda element: distance(element, first)) / self.size
        rest = self.sum(lambda element: distance(element, centre)) / self.size
        square = self.sum(lambda element: np.square(distance(element, centre))) / self.size
        return Moments(centre, rest, np.maximum(square - np.square(rest), 0))


def load(array: Array, index: Index) -> Array:
    """A block's values in float64, without gaps."""
    return array[index].astype(np.float64, order="C")


def sums(values: Array, axes: range) -> Array:
    """The sum over all axes but those that are kept, which NumPy adds up pairwise."""
    moved = np.moveaxis(values, axes, range(len(axes)))
    flat = np.ascontiguousarray(moved).reshape(*moved.shape[: len(axes)], -1)
    return flat.sum(axis=-1)


def spread(numbers: Any, absent: float, shape: tuple[int, ...], axes: range) -> Array:
    """Numbers along some axes, broadcast to a shape without a copy."""
    if numbers is None:
        return np.broadcast_to(np.float64(absent), shape)
    lengths = [shape[axis] if axis in axes else 1 for axis in range(len(shape))]
    return np.broadcast_to(numbers.reshape(lengths), shape)

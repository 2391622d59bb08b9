"""Tiles of a normalisation: blocks of rows and columns in the accumulation dtype.

An array whose trailing axes from ``axis`` on are normalised is seen as M rows of D columns.
Sums along either direction run through BLAS in stretches short enough to keep float32's
error to a few units, and are carried on in float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from gradkit._numpy.blocks import (
    Array,
    DType,
    Index,
    Item,
    Result,
    blocks,
    by_halves,
    even_step,
    in_strips,
    load,
    room_for,
    scratch,
    store,
)

# Equal elements, as the gradient of a sum has them, round the same way each time; so few of
# them in one running total keep the error of their sum below some 16 units.
_STRETCH = 1024  # elements of a row that one BLAS call adds up in the accumulation dtype
_COLUMN_STRETCH = 128  # and of a column
_NARROW = 256  # columns up to which a product with a matrix is as exact as a dot product
# A tile has so many columns and rows at most: a few and a dozen float64 numbers are kept for each.
_WIDEST = 1 << 14
_LONGEST = 1 << 13


class Rows:
    """How arrays of one shape are cut into tiles of rows x columns.

    ``rows`` and ``columns`` list the index tuples; there is one entry of ``columns`` unless
    a row is longer than a tile.
    """

    def __init__(self, arrays: Sequence[Array | None], axis: int, dtype: DType):
        """``arrays``: data, whose shape counts, and whatever will be written, if wanted."""
        data, *_ = present = [array for array in arrays if array is not None]
        self.lead, self.tail = data.shape[:axis], data.shape[axis:]
        self.plain = all(array.flags.c_contiguous for array in present)
        self.count = prod(self.lead)
        self.width = prod(self.tail)
        if self.plain:
            self.lead, self.tail = (self.count,), (self.width,)
        elif not self.lead:
            self.lead = (1,)
        self.dtype = dtype
        # Data that is read where it lies leaves its share of the scratch to the others.
        full = [array for array in present if array.shape == data.shape]
        there = all(array.dtype == dtype and array.flags.aligned for array in full)
        self.rooms = 2 if self.plain and there else 3
        limit = room_for(self.rooms, dtype)
        across = max(1, min(self.width, limit, _WIDEST))
        self.columns: list[Index] = list(blocks(self.tail, across))
        step = even_step(self.count, min(_LONGEST, limit // across))
        self.rows: list[Index] = [
            index + (slice(None),) * (len(self.lead) - len(index))
            for index in blocks(self.lead, step)
        ]

    def view(self, array: Array) -> Array:
        """An array of the full shape as it is indexed by ``rows`` + ``columns``."""
        return array.reshape(self.lead + self.tail)

    def per_row(self, statistic: Array) -> Array:
        """A statistic of one number a row as it is indexed by ``rows``."""
        return statistic.reshape(self.lead)

    def per_column(self, parameter: Array | None) -> Array | None:
        """A parameter of one number a column as it is indexed by ``columns``."""
        return None if parameter is None else parameter.reshape(self.tail)

    def tiles(self) -> list[tuple[Index, Index]]:
        """The index pairs of every tile."""
        return list(product(self.rows, self.columns))

    def numbered(self) -> Iterator[tuple[Index, slice]]:
        """Each entry of ``rows`` with the numbers of its rows, counted from 0."""
        start = 0
        for index in self.rows:
            lengths = (
                len(range(*cut.indices(length)))
                for cut, length in zip(index, self.lead, strict=True)
            )
            stop = start + math.prod(lengths)
            yield index, slice(start, stop)
            start = stop

    def in_strips(
        self, work: Callable[[Sequence[Item]], Result], items: Sequence[Item], *, width: int = 1
    ) -> list[Result]:
        """``work`` over strips of rows, columns or tiles."""
        return in_strips(work, items, self.count * self.width, width=width, run=self.width)

    def scratch(self) -> AbstractContextManager[list[Array]]:
        """Room for three tiles, or two where none need be loaded."""
        return scratch(self.rooms, self.dtype)

    def load(self, view: Array, room: Array) -> Array:
        """One tile of a full-shape array as (rows, columns) in the accumulation dtype."""
        columns = prod(view.shape[len(self.lead) :])
        return load(view, self.dtype, room, (view.size // max(1, columns), columns))

    def loader(self, view: Array, row: Index, room: Array) -> Callable[[Index], Array]:
        """What gives the tile of a column, again and again; loaded once if there is one column."""

        def load_tile(column: Index) -> Array:
            return self.load(view[row + column], room)

        if len(self.columns) > 1:
            return load_tile
        only = load_tile(self.columns[0])
        return lambda _: only

    def target(self, view: Array, room: Array) -> Array:
        """Where to compute one tile of an output: in the output itself, or in the room."""
        if view.ndim == 2 and view.dtype == self.dtype:
            return view
        columns = prod(view.shape[len(self.lead) :])
        return room[: view.size].reshape(-1, columns)

    def store(self, values: Array, view: Array, room: Array) -> None:
        """Bring a tile from where ``target`` had it computed to the output; spoils the room."""
        if values is not view:
            store(values, view, room)

    def row_values(self, statistic: Array) -> Array:
        """One tile's part of a statistic as a column vector."""
        return statistic.astype(self.dtype, copy=False).reshape(-1, 1)

    def column_values(self, parameter: Array) -> Array:
        """One tile's part of a parameter as a flat vector."""
        return parameter.astype(self.dtype, copy=False).reshape(-1)


def row_sums(tile: Array, weights: Array | None) -> Array:
    """``tile @ weights`` (of ones where ``None``) in float64."""
    total = np.zeros(tile.shape[0])
    for start in range(0, tile.shape[1], _STRETCH):
        part = tile[:, start : start + _STRETCH]
        across = (
            _ones(part.shape[1], tile.dtype)
            if weights is None
            else weights[start : start + _STRETCH]
        )
        # A matrix product has one running total or few, a dot product one a vector lane.
        total += part @ across if part.shape[1] <= _NARROW else np.vecdot(part, across)
    return total


def row_squares(tile: Array) -> Array:
    """The sum of squares of each row of a tile in float64."""
    total = np.zeros(tile.shape[0])
    for start in range(0, tile.shape[1], _STRETCH):
        part = tile[:, start : start + _STRETCH]
        total += np.vecdot(part, part)
    return total


def column_sums(tile: Array) -> Array:
    """The sum over the rows of a tile in float64."""
    # BLAS adds rows one after the other here, and error grows with their number.
    whole = len(tile) // _COLUMN_STRETCH * _COLUMN_STRETCH
    total = (_ones(len(tile) - whole, tile.dtype) @ tile[whole:]).astype(np.float64)
    if whole:
        runs = tile[:whole].reshape(-1, _COLUMN_STRETCH, tile.shape[1])
        total += by_halves((_ones(_COLUMN_STRETCH, tile.dtype) @ runs).astype(np.float64))[0]
    return total


@lru_cache(maxsize=16)
def _ones(count: int, dtype: DType) -> Array:
    ones = np.ones(count, dtype)
    ones.flags.writeable = False
    return ones

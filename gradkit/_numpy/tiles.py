"""Tiles of a normalisation: blocks of rows and columns in the accumulation dtype.

An array whose trailing axes from ``axis`` on are normalised is seen as M rows of D columns.
Sums along either direction run through BLAS in stretches short enough to keep float32's
error to a few units, and are carried on in float64.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import product

import numpy as np

from gradkit._numpy.blocks import (
    Array,
    DType,
    Index,
    Item,
    Result,
    blocks,
    even_step,
    in_strips,
    load,
    room_for,
    scratch,
    store,
)

_STRETCH = 2048  # elements of a row that one BLAS call adds up in the accumulation dtype
_COLUMN_STRETCH = 256  # and of a column


class Rows:
    """How arrays of one shape are cut into tiles of rows x columns.

    ``rows`` and ``columns`` list the index tuples; there is one entry of ``columns`` unless
    a single row is longer than a block.
    """

    def __init__(self, arrays: Sequence[Array | None], axis: int, dtype: DType):
        """``arrays``: data, whose shape counts, and whatever will be written, if wanted."""
        data, *_ = present = [array for array in arrays if array is not None]
        self.lead, self.tail = data.shape[:axis], data.shape[axis:]
        self.plain = all(array.flags.c_contiguous for array in present)
        self.count = int(np.prod(self.lead, dtype=np.int64))
        self.width = int(np.prod(self.tail, dtype=np.int64))
        if self.plain:
            self.lead, self.tail = (self.count,), (self.width,)
        elif not self.lead:
            self.lead = (1,)
        self.dtype = dtype
        # Data that is read where it lies leaves its share of the scratch to the others.
        full = [array for array in present if array.shape == data.shape]
        self.rooms = 2 if self.plain and all(array.dtype == dtype for array in full) else 3
        limit = room_for(self.rooms, dtype)
        self.columns: list[Index] = list(blocks(self.tail, limit))
        across = self.width if len(self.columns) == 1 else limit
        step = even_step(self.count, max(1, limit // max(1, across)))
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
        columns = int(np.prod(view.shape[len(self.lead) :], dtype=np.int64))
        return load(view, self.dtype, room, (view.size // max(1, columns), columns))

    def target(self, view: Array, room: Array) -> Array:
        """Where to compute one tile of an output: in the output itself, or in the room."""
        if view.ndim == 2 and view.dtype == self.dtype:
            return view
        columns = int(np.prod(view.shape[len(self.lead) :], dtype=np.int64))
        return room[: view.size].reshape(-1, columns)

    def store(self, values: Array, view: Array) -> None:
        """Bring a tile from where ``target`` had it computed to the output."""
        if values is not view:
            store(values, view)

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
        total += part @ across
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
    runs, rest = tile[:whole].reshape(-1, _COLUMN_STRETCH, tile.shape[1]), tile[whole:]
    total = np.asarray(_ones(len(rest), tile.dtype) @ rest, np.float64)
    if whole:
        total += (_ones(_COLUMN_STRETCH, tile.dtype) @ runs).sum(axis=0, dtype=np.float64)
    return total


def _ones(count: int, dtype: DType) -> Array:
    return np.ones(count, dtype)

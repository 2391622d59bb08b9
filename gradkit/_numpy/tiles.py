"""How a norm over rows cuts its arrays: into tiles of rows and columns.

An array whose axes from ``axis`` on are normalised is M rows of D columns.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, TypeAlias

import numpy as np

from gradkit._numpy import scratch, threads, tuning
from gradkit._numpy.blocks import Array, DType, Index, blocks, copied, even_step, load, store
from gradkit._numpy.casts import narrow, widen
from gradkit._numpy.threads import Item, Result


class Rows:
    """How arrays of one shape are cut into tiles of rows x columns.

    ``rows`` and ``columns`` list the index tuples; there is one entry of ``columns`` unless
    a row is longer than a tile, and one of each, which selects everything, in a small call. How
    arrays lie in memory has no influence on the tiles, and so none on results.
    """

    def __init__(
        self, shape: tuple[int, ...], axis: int, dtype: DType, *, native: bool, gapless: bool
    ):
        """``native``: the data has that dtype; ``gapless``: and is contiguous.

        Such data is read in place. Other data of that dtype is copied a tile at a time, into
        scratch that is no larger: ``reloads`` says that a tile of dy is overwritten by products
        with it, and has to be loaded anew.
        """
        self.axis, self.lead, self.tail = axis, shape[:axis], shape[axis:]
        self.count, self.width = math.prod(self.lead), math.prod(self.tail)
        self.divisor = np.array(float(self.width))  # NumPy takes its time to make one of an int
        self.dtype, self._in_place = dtype, native and gapless
        self.reloads = native and not gapless
        self._rooms = 2 if native else 3
        size = self.count * self.width
        limit = scratch.elements(self._rooms, dtype)
        across = max(1, min(self.width, limit, tuning.TILE_COLUMNS))
        step = even_step(self.count, min(tuning.TILE_ROWS, limit // across)) if size else 1
        self.small = 0 < size <= tuning.SMALL_BYTES // dtype.itemsize // self._rooms
        self._streams = size * dtype.itemsize >= tuning.STREAMED_BYTES
        self.small = self.small and across == self.width and step >= self.count
        self.columns: list[Index] = [()] if self.small else list(blocks((self.width,), across))
        self.rows: list[Index] = [()] if self.small else list(blocks((self.count,), step))

    @classmethod
    def of(cls, arrays: Sequence[Array | None], axis: int, dtype: DType) -> "Rows":
        """``arrays``: data, whose shape counts, and whatever has that shape, if wanted."""
        data, native, gapless = arrays[0], True, True
        assert data is not None
        shape = data.shape
        for array in arrays:
            if array is not None and array.shape == shape:
                flags = array.flags
                native = native and array.dtype == dtype and flags.aligned
                gapless = gapless and flags.c_contiguous
        return _rows(shape, axis, dtype, native, gapless)

    def view(self, array: Array) -> "Array | Scattered":
        """A view of a full-shape array that is indexed by ``rows`` + ``columns``."""
        shape = self.count, self.width
        if array.shape == shape:
            return array
        if array.flags.c_contiguous or _strides(array, self.axis) is not None:
            return array.reshape(shape)
        return Scattered(array, self)

    def per_row(self, statistic: Array) -> "Array | SpreadRows":
        """A statistic of one number per row that is indexed by ``rows``."""
        return _vector(statistic)

    def per_column(self, parameter: Array | None) -> "Array | SpreadRows | None":
        """A parameter of one number per column that is indexed by ``columns``."""
        return None if parameter is None else _vector(parameter)

    def tiles(self) -> list[tuple[Index, Index]]:
        """The index pairs of every tile."""
        return list(product(self.rows, self.columns))

    def numbered(self) -> Iterator[tuple[Index, slice]]:
        """Each entry of ``rows`` with the numbers of its rows, counted from 0."""
        for index in self.rows:
            yield index, index[0]

    def in_strips(
        self, work: Callable[[Sequence[Item]], Result], items: Sequence[Item], *, width: int = 1
    ) -> list[Result]:
        """``work`` over strips of rows, columns or tiles."""
        size = self.count * self.width
        return threads.in_strips(work, items, size, width=width, run=self.width)

    def scratch(self) -> AbstractContextManager[list[Any]]:
        """Room for three tiles, or two if the data has the dtype of the computation."""
        if self.small:
            return nullcontext(self.small_scratch())
        return scratch.arrays(self._rooms, self.dtype)

    def small_scratch(self) -> list[Array]:
        """The same for a small call, which allocates it."""
        size = self.count * self.width
        return [np.empty(size, self.dtype) for _ in range(self._rooms)]

    def load(self, block: "Array | Pieces", room: Array) -> Array:
        """One tile of a full-shape array as (rows, columns) in the accumulation dtype."""
        if isinstance(block, Pieces):
            return block.load(room)
        if self._in_place:
            return block
        # BLAS has code of its own, and so other bits, for matrices with no gaps between rows.
        whole = len(self.columns) == 1
        if whole and block.strides[0] != block.shape[1] * block.itemsize:
            return copied(block, room)
        return load(block, self.dtype, room, block.shape)

    def loader(
        self, array: "Array | Scattered", row: Index, room: Array
    ) -> Callable[[Index], Array]:
        """What gives the tile of a column, again and again; loaded once if there is one column."""

        def load_tile(column: Index) -> Array:
            return self.load(array[row + column], room)

        if len(self.columns) > 1:
            return load_tile
        only = load_tile(self.columns[0])
        return lambda _: only

    def target(self, block: "Array | Pieces", room: Array) -> Array:
        """Where to compute one tile of an output: in the output itself, or in the room."""
        if not self._streams and not isinstance(block, Pieces) and block.dtype == self.dtype:
            return block
        return room[: block.size].reshape(block.shape)

    def store(self, values: Array, block: "Array | Pieces", room: Array) -> None:
        """Copy a tile to the output, unless it is there already; overwrites it and the room."""
        if isinstance(block, Pieces):
            block.store(values, room)
        elif values is not block:
            store(values, block, room)

    def row_values(self, statistic: Array) -> Array:
        """One tile's part of a statistic as a column vector."""
        return statistic.astype(self.dtype, copy=False).reshape(-1, 1)

    def column_values(self, parameter: Array, offset: float = 0.0) -> Array:
        """One tile's part of a parameter, with an offset."""
        values = parameter.astype(self.dtype, copy=False)
        return values + self.dtype.type(offset) if offset else values


class Scattered:
    """A full-shape array whose rows no single stride connects, or whose columns none does."""

    __slots__ = ("_array", "_rows")

    def __init__(self, array: Array, rows: Rows):
        self._array, self._rows = array, rows

    def __getitem__(self, index: Index) -> "Pieces":
        rows = self._rows
        row, column = index or (slice(0, rows.count), slice(0, rows.width))
        return Pieces(
            self._array,
            (row.stop - row.start, column.stop - column.start),
            _pieces(rows.lead, row.start, row.stop),
            _pieces(rows.tail, column.start, column.stop),
        )

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._array.size


class SpreadRows:
    """A statistic or parameter whose elements no single stride connects."""

    __slots__ = ("_array",)

    def __init__(self, array: Array):
        self._array = array

    def __getitem__(self, index: Index) -> Array:
        pieces, size = self._pieces(index)
        found = np.empty(size, self._array.dtype)
        for part, box in pieces:
            found[part] = self._array[box].reshape(-1)
        return found

    def __setitem__(self, index: Index, values: Array) -> None:
        for part, box in self._pieces(index)[0]:
            block = self._array[box]
            block[...] = values[part].reshape(block.shape)

    def _pieces(self, index: Index) -> "tuple[Sequence[Piece], int]":
        (cut,) = index or (slice(0, self._array.size),)
        return _pieces(self._array.shape, cut.start, cut.stop), cut.stop - cut.start


def _vector(array: Array) -> Array | SpreadRows:
    """An array in C order, as one dimension."""
    if array.ndim == 1:
        return array
    if array.flags.c_contiguous or _one_stride(array.shape, array.strides) is not None:
        return array.reshape(-1)
    return SpreadRows(array)


# A part of a run of elements: where it is in the run, and what selects it from the array.
Piece: TypeAlias = tuple[slice, Index]


class Pieces:
    """One tile of such an array, which is copied a few rectangular pieces at a time."""

    __slots__ = ("_array", "_columns", "_rows", "shape", "size")

    def __init__(
        self,
        array: Array,
        shape: tuple[int, int],
        rows: Sequence[Piece],
        columns: Sequence[Piece],
    ):
        self._array, self.shape, self._rows, self._columns = array, shape, rows, columns
        self.size = math.prod(shape)

    def load(self, room: Array) -> Array:
        """The tile as a copy in the room, in its dtype."""
        copy = room[: self.size].reshape(self.shape)
        for block, part in self._blocks(copy):
            widen(block, part)
        return copy

    def store(self, values: Array, room: Array) -> None:
        """Write values, rounded, to the array; overwrites them and the room."""
        for block, part in self._blocks(values):
            narrow(part, block, room)

    def _blocks(self, tile: Array) -> Iterator[tuple[Array, Array]]:
        """Each piece of the array with the part of the tile that belongs to it."""
        for (row, lead), (column, tail) in product(self._rows, self._columns):
            block = self._array[lead + tail]
            yield block, tile[row, column].reshape(block.shape)


@lru_cache(maxsize=4096)
def _pieces(shape: tuple[int, ...], start: int, stop: int) -> list[Piece]:
    """What covers elements ``start`` to ``stop`` of an array of a shape, in C order."""
    found: list[Piece] = []
    at = 0
    for index in _boxes(shape, start, stop):
        size = math.prod(cut.stop - cut.start for cut in index)
        found.append((slice(at, at + size), index))
        at += size
    return found


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Index]:
    """The same as index tuples that name every axis."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    whole = tuple(slice(0, length) for length in shape[1:])
    inner = math.prod(shape[1:])
    (first, before), (last, after) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        for rest in _boxes(shape[1:], before, after):
            yield (slice(first, first + 1), *rest)
        return
    if before:
        for rest in _boxes(shape[1:], before, inner):
            yield (slice(first, first + 1), *rest)
        first += 1
    if first < last:
        yield (slice(first, last), *whole)
    for rest in _boxes(shape[1:], 0, after):
        yield (slice(last, last + 1), *rest)


def _strides(array: Array, axis: int) -> tuple[int, int] | None:
    """An array's strides as rows x columns, if it is that without a copy."""
    return _merged_strides(array.shape, array.strides, axis, array.itemsize)


@lru_cache(maxsize=4096)
def _merged_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: int, itemsize: int
) -> tuple[int, int] | None:
    rows = _one_stride(shape[:axis], strides[:axis])
    columns = _one_stride(shape[axis:], strides[axis:])
    if rows is None or columns is None:
        return None
    # A single row or column has no stride: what BLAS would expect.
    column = itemsize if columns == () else columns[0]
    return math.prod(shape[axis:]) * column if rows == () else rows[0], column


def _one_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The stride that leads through all elements, () if there is one of them, None if none does."""
    dims = [dim for dim in zip(shape, strides, strict=True) if dim[0] != 1]
    if not dims:
        return ()
    for (_, outer), (length, step) in pairwise(dims):
        if outer != length * step:
            return None
    return (dims[-1][1],)


@lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], axis: int, dtype: DType, native: bool, gapless: bool) -> Rows:
    """Cut once for each signature."""
    return Rows(shape, axis, dtype, native=native, gapless=gapless)

"""How a norm over rows cuts its arrays: into tiles of rows and columns.

An array whose axes from ``axis`` on are normalised is M rows of D columns.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from gradkit._numpy import scratch, threads, tuning
from gradkit._numpy.blocks import Array, DType, Index, blocks, even_step, load, store
from gradkit._numpy.threads import Item, Result


class Rows:
    """How arrays of one shape are cut into tiles of rows x columns.

    ``rows`` and ``columns`` list the index tuples; there is one entry of ``columns`` unless
    a row is longer than a tile, and one of each, which selects everything, in a small call.
    """

    def __init__(
        self, shape: tuple[int, ...], axis: int, dtype: DType, *, contiguous: bool, in_place: bool
    ):
        """``in_place``: the data is read in place, so it needs no scratch."""
        self.lead, self.tail = shape[:axis], shape[axis:]
        self.count, self.width = math.prod(self.lead), math.prod(self.tail)
        self.divisor = np.array(float(self.width))  # NumPy takes its time to make one of an int
        self.dtype, self._in_place = dtype, in_place
        if contiguous:
            self.lead, self.tail = (self.count,), (self.width,)
        elif not self.lead:
            self.lead = (1,)
        self._rooms = 2 if in_place else 3
        size = self.count * self.width
        limit = scratch.elements(self._rooms, dtype)
        across = max(1, min(self.width, limit, tuning.TILE_COLUMNS))
        step = even_step(self.count, min(tuning.TILE_ROWS, limit // across)) if size else 1
        self.small = contiguous and 0 < size <= tuning.SMALL_BYTES // dtype.itemsize // self._rooms
        self.small = self.small and across == self.width and step >= self.count
        self.columns: list[Index] = [()] if self.small else list(blocks(self.tail, across))
        self.rows: list[Index] = [()] if self.small else self._cut_rows(step)

    @classmethod
    def of(cls, arrays: Sequence[Array | None], axis: int, dtype: DType) -> "Rows":
        """``arrays``: data, whose shape counts, and whatever will be written, if wanted."""
        data, contiguous, in_place = arrays[0], True, True
        assert data is not None
        shape = data.shape
        for array in arrays:
            if array is not None:
                flags = array.flags
                contiguous = contiguous and flags.c_contiguous
                if array.dtype != dtype or not flags.aligned:
                    in_place = in_place and array.shape != shape
        return _rows(shape, axis, dtype, contiguous, in_place and contiguous)

    def _cut_rows(self, step: int) -> list[Index]:
        """Blocks of rows, each index with an entry for every axis of ``lead``."""
        rank = len(self.lead)
        return [index + (slice(None),) * (rank - len(index)) for index in blocks(self.lead, step)]

    def view(self, array: Array) -> Array:
        """A view of a full-shape array that is indexed by ``rows`` + ``columns``."""
        shape = self.lead + self.tail
        return array if array.shape == shape else array.reshape(shape)

    def per_row(self, statistic: Array) -> Array:
        """A statistic of one number per row that is indexed by ``rows``."""
        return statistic if statistic.shape == self.lead else statistic.reshape(self.lead)

    def per_column(self, parameter: Array | None) -> Array | None:
        """A parameter of one number per column that is indexed by ``columns``."""
        if parameter is None or parameter.shape == self.tail:
            return parameter
        return parameter.reshape(self.tail)

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
        size = self.count * self.width
        return threads.in_strips(work, items, size, width=width, run=self.width)

    def scratch(self) -> AbstractContextManager[list[Any]]:
        """Room for three tiles, or two if none need be loaded."""
        if self.small:
            return nullcontext(self.small_scratch())
        return scratch.arrays(self._rooms, self.dtype)

    def small_scratch(self) -> list[Array]:
        """The same for a small call, which allocates it."""
        size = self.count * self.width
        return [np.empty(size, self.dtype) for _ in range(self._rooms)]

    def load(self, block: Array, room: Array) -> Array:
        """One tile of a full-shape array as (rows, columns) in the accumulation dtype."""
        if self._in_place:
            return block
        columns = math.prod(block.shape[len(self.lead) :])
        return load(block, self.dtype, room, (block.size // max(1, columns), columns))

    def loader(self, array: Array, row: Index, room: Array) -> Callable[[Index], Array]:
        """What gives the tile of a column, again and again; loaded once if there is one column."""

        def load_tile(column: Index) -> Array:
            return self.load(array[row + column], room)

        if len(self.columns) > 1:
            return load_tile
        only = load_tile(self.columns[0])
        return lambda _: only

    def computed_there(self, block: Array) -> bool:
        """Whether one tile of an output can be computed in the output itself."""
        return self._in_place or (block.ndim == 2 and block.dtype == self.dtype)

    def target(self, block: Array, room: Array) -> Array:
        """Where to compute one tile of an output: in the output itself, or in the room."""
        if self.computed_there(block):
            return block
        columns = math.prod(block.shape[len(self.lead) :])
        return room[: block.size].reshape(-1, columns)

    def store(self, values: Array, block: Array, room: Array) -> None:
        """Copy a tile from what ``target`` gave to the output; overwrites the room."""
        if values is not block:
            store(values, block, room)

    def row_values(self, statistic: Array) -> Array:
        """One tile's part of a statistic as a column vector."""
        return statistic.astype(self.dtype, copy=False).reshape(-1, 1)

    def column_values(self, parameter: Array) -> Array:
        """One tile's part of a parameter as a flat vector."""
        values = parameter.astype(self.dtype, copy=False)
        return values if values.ndim == 1 else values.reshape(-1)


@lru_cache(maxsize=4096)
def _rows(
    shape: tuple[int, ...], axis: int, dtype: DType, contiguous: bool, in_place: bool
) -> Rows:
    """Cut once for each signature."""
    return Rows(shape, axis, dtype, contiguous=contiguous, in_place=in_place)

"""How a batch norm cuts its arrays: into blocks of (before, channels, after) the channel axis."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from gradkit._dtypes import dtype_named, float_of
from gradkit._numpy import scratch, tuning
from gradkit._numpy.blocks import Array, DType, Index, blocks, by_halves, load, store
from gradkit._numpy.moments import Moments
from gradkit._numpy.sums import column_sums, row_squares, row_sums
from gradkit._numpy.threads import Result, in_strips


class Channels:
    """Arrays of one shape cut into blocks of (before, channels, after) the channel axis."""

    def __init__(self, arrays: Sequence[Array], axis: int, part: slice):
        cut = [array[(slice(None),) * axis + (part,)] for array in arrays]
        self.count = cut[0].shape[axis]
        self.size = cut[0].size // max(1, self.count)  # elements a channel
        self.dtype = dtype_named(float_of(arrays[0].dtype).accumulation)
        self._streams = cut[0].size * self.dtype.itemsize >= tuning.STREAMED_BYTES
        last = [np.moveaxis(array, axis, -1) for array in cut]
        if all(array.flags.c_contiguous for array in cut):
            before = prod(cut[0].shape[:axis])
            after = prod(cut[0].shape[axis + 1 :])
            self.arrays = [array.reshape(before, self.count, after) for array in cut]
            self.axis = 1
        elif all(array.flags.c_contiguous for array in last):
            self.arrays = [array.reshape(self.size, self.count, 1) for array in last]
            self.axis = 1
        else:
            self.arrays, self.axis = cut, axis
        self.blocks = list(blocks(self.arrays[0].shape, scratch.elements(2, self.dtype)))
        # How many elements of a channel are neighbours. Short runs are spread: what is one
        # number a channel is laid out as one an element, so that runs span the channels. No
        # block cuts through a run then: all channels' runs together fit into one.
        self.after = prod(self.arrays[0].shape[self.axis + 1 :])
        across = self.count * self.after
        self.spread = (
            1 < self.after < tuning.SHORT_RUN
            and across * self.dtype.itemsize <= tuning.SPREAD_BYTES
        )
        self.run = across if self.spread or self.after == 1 else self.after

    def of(self, index: Index) -> slice:
        """The channels that a block holds."""
        return index[self.axis] if len(index) > self.axis else slice(None)

    def load(self, view: Array, room: Array) -> Array:
        """A block's values as (before, channels, after) in the accumulation dtype."""
        before = prod(view.shape[: self.axis])
        channels = view.shape[self.axis]
        return load(view, self.dtype, room, (before, channels, view.size // before // channels))

    def shaped(self, room: Array, tile: Array) -> Array:
        """Scratch in the shape of a tile."""
        return room[: tile.size].reshape(tile.shape)

    def target(self, view: Array, room: Array) -> Array:
        """Where to compute one block of an output: in the output itself, or in the room."""
        direct = not self._streams and view.dtype == self.dtype and view.shape == room.shape
        return view if direct else room

    def store(self, values: Array, view: Array, room: Array) -> None:
        """Copy a block from what ``target`` gave to the output; overwrites the room."""
        if values is not view:
            store(values, view, room)

    def vector(self, values: Array, dtype: DType | None = None) -> Array:
        """One number a channel, to be broadcast over (before, channels, after)."""
        column = values.astype(dtype or self.dtype, copy=False).reshape(-1, 1)
        return np.repeat(column, self.after, axis=1) if self.spread else column

    def sums(self, tile: Array) -> Array:
        """The sum over every channel's elements in one block, in float64."""
        before, channels, after = tile.shape
        if after == 1:
            return column_sums(tile.reshape(before, channels))
        rows = row_sums(tile.reshape(before * channels, after), None)
        totals: Array = by_halves(rows.reshape(before, channels))[0]
        return totals

    def squares(self, tile: Array) -> Array:
        """The same of squares; overwrites the tile."""
        before, channels, after = tile.shape
        if after <= tuning.NARROW:
            return self.sums(np.square(tile, out=tile))
        rows = row_squares(tile.reshape(before * channels, after))
        totals: Array = by_halves(rows.reshape(before, channels))[0]
        return totals

    def for_each_block(self, work: Callable[[Index, Sequence[Array]], None]) -> None:
        """``work`` on the index of every block, with scratch for two of them."""

        def strip(indices: Sequence[Index]) -> None:
            with scratch.arrays(2, self.dtype) as rooms:
                for index in indices:
                    work(index, rooms)

        self._in_strips(strip, 1)

    def total(
        self, sums: Callable[[Index, Sequence[Array]], tuple[Array, ...]], terms: int = 2
    ) -> Array:
        """The sums of every block added up by channel, in float64."""

        def strip(indices: Sequence[Index]) -> Array:
            totals = np.zeros((terms, self.count))
            with scratch.arrays(2, self.dtype) as rooms:
                for index in indices:
                    for total, part in zip(totals, sums(index, rooms), strict=True):
                        total[self.of(index)] += part
            return totals

        total = np.zeros((terms, self.count))
        for part in self._in_strips(strip, self.count):
            total += part
        return total

    def moments(self, x: Array, dtype: DType, factor: float = 1.0) -> Moments:
        """Mean and variance of each channel of ``factor * x``.

        The second pass corrects the first's rounding.
        """
        count = max(1, self.size)

        def loaded(index: Index, rooms: Sequence[Array]) -> Array:
            tile = self.load(x[index], rooms[0])
            if factor == 1:
                return tile
            return np.multiply(tile, factor, out=self.shaped(rooms[0], tile))

        def first(index: Index, rooms: Sequence[Array]) -> tuple[Array, ...]:
            return (self.sums(loaded(index, rooms).astype(dtype, copy=False)),)

        centre = self.vector(self.total(first, 1)[0] / count, dtype)

        def second(index: Index, rooms: Sequence[Array]) -> tuple[Array, ...]:
            tile = loaded(index, rooms)
            room = self.shaped(rooms[1], tile) if dtype == self.dtype else None
            deviation = np.subtract(tile, centre[self.of(index)], out=room, dtype=dtype)
            of_deviation = self.sums(deviation)
            return of_deviation, self.squares(deviation)

        return Moments.about(centre[:, 0], *self.total(second) / count)

    def _in_strips(self, strip: Callable[[Sequence[Index]], Result], width: int) -> list[Result]:
        size = self.arrays[0].size
        return in_strips(strip, self.blocks, size, width=width, run=self.run)

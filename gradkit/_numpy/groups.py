"""How a group norm cuts its arrays: into blocks of whole samples, or of parts of one.

An array is seen as (samples, channels, space) or, if its channels are the fastest axis, as
(samples, space, channels). A column is what one sample has of one channel.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradkit._dtypes import dtype_named, float_of
from gradkit._numpy import scratch, tuning
from gradkit._numpy.blocks import Array, DType, Index, blocks, even_step, load, store
from gradkit._numpy.sums import row_squares, row_sums, stacked_column_sums
from gradkit._numpy.threads import Item, Result, in_strips


class Block(NamedTuple):
    """Where a block is in the arrays, and which samples, groups and channels it has."""

    at: Index
    samples: slice
    groups: slice
    channels: slice

    @property
    def statistics(self) -> Index:
        """Where its statistics are, one of each group of each sample."""
        return self.samples, self.groups


class Groups:
    """A run of groups of channels, in arrays of one shape.

    ``whole``: every block has whole groups; if not, every block is a part of one sample.
    """

    def __init__(self, arrays: Sequence[Array], axis: int, own: slice, part: slice, rooms: int):
        """``own``: which groups; ``part``: their channels; ``rooms``: for how many blocks."""
        arrays = [array[(slice(None),) * axis + (part,)] for array in arrays]
        shape = arrays[0].shape
        self.samples, self.channels, self.groups = shape[0], shape[axis], own.stop - own.start
        self.space = prod(shape[1:axis] + shape[axis + 1 :])
        self.width = self.channels // self.groups  # channels a group
        self.count = self.width * self.space  # elements a group
        self.dtype = dtype_named(float_of(arrays[0].dtype).accumulation)
        self._rooms = rooms
        self._streams = arrays[0].size * self.dtype.itemsize >= tuning.STREAMED_BYTES
        self._arrange(arrays, axis)
        # Channels that are the fastest axis are cut by samples only: groups of them lie apart.
        limit, least = scratch.elements(rooms, self.dtype), 1 if not self.last else self.groups
        self.whole = least * self.count <= limit
        # Parameters are laid out as one number an element where each run would be a short loop.
        self.spread = not self.last and self.whole and self.space < tuning.SHORT_RUN
        self.most = max(1, min(limit // max(1, self.count), tuning.GROUP_COLUMNS // self.width))

    def _arrange(self, arrays: Sequence[Array], axis: int) -> None:
        """See the arrays in one order: in three dimensions if that needs no copy."""
        first = [np.moveaxis(array, axis, 1) for array in arrays]
        last = [np.moveaxis(array, axis, -1) for array in arrays]
        self.last = False
        if all(array.flags.c_contiguous for array in first):
            shape = self.samples, self.channels, self.space
            self.arrays = [array.reshape(shape) for array in first]
        elif all(array.flags.c_contiguous for array in last):
            self.last, shape = True, (self.samples, self.space, self.channels)
            self.arrays = [array.reshape(shape) for array in last]
        else:
            self.last = abs(arrays[0].strides[axis]) == min(map(abs, arrays[0].strides))
            self.arrays = last if self.last else first

    def batches(self) -> list[Block]:
        """Blocks of whole samples, or else of whole groups of one."""
        if self.most >= self.groups:
            step, everything = even_step(self.samples, self.most // self.groups), slice(None)
            cuts = [slice(start, start + step) for start in range(0, self.samples, step)]
            return [Block((cut,), cut, everything, everything) for cut in cuts]
        pieces = -(-self.groups // self.most)
        bounds = [self.groups * k // pieces for k in range(pieces + 1)]
        found = []
        for sample, (start, stop) in product(range(self.samples), pairwise(bounds)):
            cut = slice(sample, sample + 1)
            channels = slice(start * self.width, stop * self.width)
            found.append(Block((cut, channels), cut, slice(start, stop), channels))
        return found

    def parts(self, sample: int) -> list[Block]:
        """Blocks that together have one sample."""
        cut, everything, rank = slice(sample, sample + 1), slice(None), self.arrays[0].ndim
        axis = rank - 2 if self.last else 0  # of the channels in a sample
        limit = scratch.elements(self._rooms, self.dtype)
        return [
            Block((cut, *index), cut, everything, index[axis] if len(index) > axis else everything)
            for index in blocks(self.arrays[0].shape[1:], limit)
        ]

    def in_strips(
        self, work: Callable[[Sequence[Item]], Result], items: Sequence[Item], width: int = 1
    ) -> list[Result]:
        """``work`` over strips of blocks, on threads if that pays."""
        size = self.channels * self.space * (self.samples if self.whole else 1)
        run = self.count if self.spread else self.channels if self.last else self.space
        return in_strips(work, items, size, width=width, run=run)

    def scratch(self) -> AbstractContextManager[list[Any]]:
        """Scratch for as many blocks as were asked for."""
        return scratch.arrays(self._rooms, self.dtype)

    def load(self, view: Array, room: Array) -> Array:
        """A block's values in three dimensions, in the accumulation dtype."""
        channels = view.shape[-1 if self.last else 1]
        rest = view.size // (view.shape[0] * channels)
        shape = (len(view), rest, channels) if self.last else (len(view), channels, rest)
        return load(view, self.dtype, room, shape)

    def target(self, view: Array, room: Array, shape: tuple[int, ...]) -> Array:
        """Where to compute one block of an output: in the output itself, or in the room."""
        gapless = view.flags.c_contiguous and view.flags.aligned
        direct = gapless and view.shape == shape and view.dtype == self.dtype
        if direct and not self._streams:
            return view
        return room[: view.size].reshape(shape)

    def store(self, values: Array, view: Array, room: Array) -> None:
        """Copy a block to the output from what ``target`` gave; overwrites the room."""
        if values is not view:
            store(values, view, room)

    def by_group(self, tile: Array) -> Array:
        """A block in the shape that ``numbers`` are broadcast to."""
        if self.last or not self.whole:
            return tile
        return tile.reshape(len(tile), -1, self.count)

    def numbers(self, values: Array, block: Block, dtype: DType | None = None) -> Array:
        """One number a group of a block's samples, to be broadcast."""
        values = values.astype(dtype or self.dtype, copy=False)
        if self.whole and not self.last:
            return values[:, :, None]
        return self._for_channels(values, block)

    def products(self, values: Array, parameter: Array, block: Block) -> Array:
        """The same, times a ``parameter`` that is not spread: one number a channel."""
        products = self._for_channels(values, block) * self.cut(parameter, block)
        return products.astype(self.dtype, copy=False)

    def _for_channels(self, values: Array, block: Block) -> Array:
        """One number a group, for each channel of a block."""
        columns = np.repeat(values, self.width, axis=1)
        columns = columns if self.whole else columns[:, block.channels]
        return columns[:, None, :] if self.last else columns[:, :, None]

    def by_channel(self, tile: Array) -> Array:
        """A block in the shape that a ``parameter`` is broadcast to."""
        return tile.reshape(len(tile), -1) if self.spread else tile

    def parameter(self, values: Array | None) -> Array | None:
        """One number a channel, laid out to be cut by ``cut``."""
        if values is None:
            return None
        values = values.astype(self.dtype, copy=False)
        if self.spread:
            return np.repeat(values, self.space)
        return values if self.last else values[:, None]

    def cut(self, parameter: Array, block: Block) -> Array:
        """A block's part of a ``parameter``."""
        if not self.spread:
            return parameter[block.channels]
        start, stop, _ = block.channels.indices(self.channels)
        return parameter[start * self.space : stop * self.space]

    def column_sums(self, tile: Array) -> Array:
        """The sum over each column of a block, in float64: (samples, channels)."""
        if self.last:
            return stacked_column_sums(tile)
        count, channels, length = tile.shape
        if length == 1:
            return tile.reshape(count, channels).astype(np.float64)
        return row_sums(tile.reshape(-1, length), None).reshape(count, channels)

    def group_sums(self, tile: Array) -> Array:
        """The sum over each group of a block of whole ones, in float64: (samples, groups)."""
        if self.last:
            return self.over_groups(self.column_sums(tile))
        return row_sums(tile.reshape(-1, self.count), None).reshape(len(tile), -1)

    def group_squares(self, tile: Array) -> Array:
        """The same of squares; overwrites the tile."""
        if self.last:
            return self.group_sums(np.square(tile, out=tile))
        return row_squares(tile.reshape(-1, self.count)).reshape(len(tile), -1)

    def over_groups(self, columns: Array) -> Array:
        """What each group's columns add up to."""
        sums: Array = columns.reshape(len(columns), -1, self.width).sum(axis=-1)
        return sums

"""Batch norm on NumPy arrays: statistics of each channel over all other axes.

With ``xhat = (x - mean) * inv_std`` and n elements a channel::

    dscale = sum of dy * xhat        dbias = sum of dy
    dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradkit._dtypes import accumulation_name, float_name
from gradkit._numpy.blocks import (
    BLOCK,
    Array,
    DType,
    Index,
    Result,
    blocks,
    by_halves,
    in_strips,
    load,
    room_for,
    scratch,
    store,
)
from gradkit._numpy.tiles import column_sums, row_sums

_TINY = 2.0**-100  # a float32 variance below this has lost digits to underflow
_SHORT = 512  # elements: runs that are shorter take longer to set up than to compute
_SPREAD = 7 << 17  # bytes of one number a channel laid out as one an element; four are kept


@np.errstate(all="ignore")
def batch_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    channel_axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
    engine: str | None = None,  # noqa: ARG001
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``.

    ``engine`` is the CUDA backend's to choose; here there is one.
    """
    for part in _channel_parts(x, channel_axis):
        channels = _Channels((dy, x, dx), channel_axis, part)
        _grad_of(channels, *(_cut(a, part) for a in (scale, mean, inv_std, dscale, dbias)))


@np.errstate(all="ignore")
def batch_norm(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    channel_axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
    engine: str | None = None,  # noqa: ARG001
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``.

    ``engine`` is the CUDA backend's to choose; here there is one.
    """
    for part in _channel_parts(x, channel_axis):
        channels = _Channels((x, y), channel_axis, part)
        _forward_of(channels, eps, *(_cut(a, part) for a in (scale, bias, mean, inv_std)))


def _grad_of(
    channels: "_Channels",
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    dy, x, dx = channels.arrays
    of_product, of_dy = _sums_of(channels, mean, inv_std)
    centre, offset = channels.vector(mean), channels.vector(of_dy / channels.size)
    slope = channels.vector(inv_std * (of_product / channels.size))
    outer = channels.vector(inv_std if scale is None else inv_std * scale.astype(np.float64))

    def write(index: Index, rooms: Sequence[Array]) -> None:
        at = channels.of(index)
        tile = channels.load(x[index], rooms[1])
        rest = np.subtract(tile, centre[at], out=channels.shaped(rooms[1], tile))
        rest *= slope[at]
        rest += offset[at]
        np.subtract(channels.load(dy[index], rooms[0]), rest, out=rest)
        out = channels.target(dx[index], rest)
        np.multiply(rest, outer[at], out=out)
        channels.store(out, dx[index], rooms[0])

    channels.for_each_block(write)
    for gradient, total in ((dscale, of_product), (dbias, of_dy)):
        if gradient is not None:
            gradient[...] = total


def _sums_of(channels: "_Channels", mean: Array, inv_std: Array) -> Array:
    """The sums of dy * xhat and of dy over each channel."""
    dy, x, _ = channels.arrays
    centre, factor = channels.vector(mean), channels.vector(inv_std)

    def sums(index: Index, rooms: Sequence[Array]) -> tuple[Array, Array]:
        at = channels.of(index)
        gradient, tile = channels.load(dy[index], rooms[0]), channels.load(x[index], rooms[1])
        product = np.subtract(tile, centre[at], out=channels.shaped(rooms[1], tile))
        product *= factor[at]
        product *= gradient
        return channels.sums(product), channels.sums(gradient)

    return channels.total(sums)


def _forward_of(
    channels: "_Channels",
    eps: float,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
) -> None:
    x, y = channels.arrays
    centre, variance = channels.moments(x, channels.dtype)
    lost = eps < _TINY and bool(np.any(variance < _TINY))
    if lost or not np.all(np.isfinite(variance)):  # squares left float32's range
        centre, variance = channels.moments(x, np.dtype(np.float64))
    deviation = 1 / np.sqrt(variance + eps)
    mean[...], inv_std[...] = centre, deviation
    high = channels.vector(centre)
    low = channels.vector(centre - high[:, 0])
    factor = channels.vector(deviation if scale is None else deviation * scale)
    biases = None if bias is None else channels.vector(bias)

    def write(index: Index, rooms: Sequence[Array]) -> None:
        at = channels.of(index)
        tile = channels.load(x[index], rooms[0])
        out = channels.target(y[index], channels.shaped(rooms[1], tile))
        np.subtract(tile, high[at], out=out)
        out -= low[at]
        out *= factor[at]
        if biases is not None:
            out += biases[at]
        channels.store(out, y[index], rooms[0])

    channels.for_each_block(write)


class _Channels:
    """Arrays of one shape cut into blocks of (before, channels, after) the channel axis."""

    def __init__(self, arrays: Sequence[Array], axis: int, part: slice):
        cut = [array[(slice(None),) * axis + (part,)] for array in arrays]
        self.count = cut[0].shape[axis]
        self.size = cut[0].size // max(1, self.count)  # elements a channel
        self.dtype = np.dtype(accumulation_name(float_name(arrays[0].dtype) or ""))
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
        self.blocks = list(blocks(self.arrays[0].shape, room_for(2, self.dtype)))
        # How many elements of a channel are neighbours. Short runs are spread: what is one
        # number a channel is laid out as one an element, so that runs span the channels. No
        # block cuts through a run then: all channels' runs together fit into one.
        self.after = prod(self.arrays[0].shape[self.axis + 1 :])
        across = self.count * self.after
        self.spread = 1 < self.after < _SHORT and across * self.dtype.itemsize <= _SPREAD
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
        return view if view.dtype == self.dtype and view.shape == room.shape else room

    def store(self, values: Array, view: Array, room: Array) -> None:
        """Bring a block from where ``target`` had it computed to the output; spoils the room."""
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

    def for_each_block(self, work: Callable[[Index, Sequence[Array]], None]) -> None:
        """``work`` on the index of every block, with scratch for two of them."""

        def strip(indices: Sequence[Index]) -> None:
            with scratch(2, self.dtype) as rooms:
                for index in indices:
                    work(index, rooms)

        self._in_strips(strip, 1)

    def total(
        self, sums: Callable[[Index, Sequence[Array]], tuple[Array, ...]], terms: int = 2
    ) -> Array:
        """The sums of every block added up by channel, in float64."""

        def strip(indices: Sequence[Index]) -> Array:
            totals = np.zeros((terms, self.count))
            with scratch(2, self.dtype) as rooms:
                for index in indices:
                    for total, part in zip(totals, sums(index, rooms), strict=True):
                        total[self.of(index)] += part
            return totals

        total = np.zeros((terms, self.count))
        for part in self._in_strips(strip, self.count):
            total += part
        return total

    def moments(self, x: Array, dtype: DType) -> tuple[Array, Array]:
        """Mean and variance of each channel; the second pass corrects the first's rounding."""
        count = max(1, self.size)

        def first(index: Index, rooms: Sequence[Array]) -> tuple[Array, ...]:
            return (self.sums(self.load(x[index], rooms[0]).astype(dtype, copy=False)),)

        centre = self.vector(self.total(first, 1)[0] / count, dtype)

        def second(index: Index, rooms: Sequence[Array]) -> tuple[Array, ...]:
            tile = self.load(x[index], rooms[0])
            room = self.shaped(rooms[1], tile) if dtype == self.dtype else None
            deviation = np.subtract(tile, centre[self.of(index)], out=room, dtype=dtype)
            of_deviation = self.sums(deviation)
            return of_deviation, self.sums(np.square(deviation, out=deviation))

        of_deviation, of_square = self.total(second) / count
        variance = np.maximum(of_square - of_deviation**2, 0)
        return centre[:, 0] + of_deviation, variance

    def _in_strips(self, strip: Callable[[Sequence[Index]], Result], width: int) -> list[Result]:
        size = self.arrays[0].size
        return in_strips(strip, self.blocks, size, width=width, run=self.run)


def _channel_parts(x: Array, axis: int) -> list[slice]:
    """Runs of channels few enough that what is summed for each stays small."""
    return [index[0] for index in blocks((x.shape[axis],), BLOCK // 8)]


def _cut(values: Any, part: slice) -> Any:
    return None if values is None else values[part]

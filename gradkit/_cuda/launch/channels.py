"""Batch norm on a GPU by the project's own kernels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.buffers import contiguous, copy_back, vector_of, writable_like
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.grids import RESIDENT_HEAVY, accumulator, dtype_name, power_of_two
from gradkit._cuda.launch.kernels import Combination, Macros, kernel, norm_macros
from gradkit._dtypes import BATCH_NORM_TYPES, dtype_named

_THREADS = 256
_RESIDENT = RESIDENT_HEAVY // _THREADS  # blocks a multiprocessor


class Forward(NamedTuple):
    """The arguments of ``batch_norm``, for whichever engine runs it."""

    x: Array
    scale: Array | None
    bias: Array | None
    channel_axis: int
    eps: float
    y: Array
    mean: Array
    inv_std: Array


class Gradient(NamedTuple):
    """The arguments of ``batch_norm_grad``, for whichever engine runs it."""

    dy: Array
    x: Array
    scale: Array | None
    mean: Array
    inv_std: Array
    channel_axis: int
    dx: Array
    dscale: Array | None
    dbias: Array | None


def batch_norm_grad(device: Device, call: Gradient) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    shape = _Shape.of(call.x, call.channel_axis)
    if not shape.channels:
        return
    dy, x = shape.arranged(device, call.dy), shape.arranged(device, call.x)
    scale, mean = contiguous(device, call.scale), contiguous(device, call.mean)
    inv_std = contiguous(device, call.inv_std)
    outs = shape.view(call.dx), call.dscale, call.dbias
    dx = writable_like(device, outs[0], shape.vector)
    gradients = [None if out is None else writable_like(device, out) for out in outs[1:]]
    work = _Launches.of(device, shape, "batch_norm_grad", x, mean, scale)
    partials, means = work.partials(), work.scratch(2, accumulator(x))
    work.over_channels("sum_channels", dy, x, mean, inv_std, partials)
    work.finish("finish_channels", partials, *gradients, means)
    work.over_channels("apply_channels", dy, x, scale, mean, inv_std, means, dx)
    for out, made in zip(outs, (dx, *gradients), strict=True):
        if out is not None:
            copy_back(out, made)


def batch_norm(device: Device, call: Forward) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    shape = _Shape.of(call.x, call.channel_axis)
    if not shape.channels:
        return
    x = shape.arranged(device, call.x)
    scale, bias = contiguous(device, call.scale), contiguous(device, call.bias)
    outs = shape.view(call.y), call.mean, call.inv_std
    y = writable_like(device, outs[0], shape.vector)
    statistics = [writable_like(device, out) for out in outs[1:]]
    parameter = bias if scale is None else scale
    work = _Launches.of(device, shape, "batch_norm", x, call.mean, parameter)
    partials, centre, exact = (
        work.partials(),
        work.scratch(1, "float64"),
        work.scratch(2, "float64"),
    )
    work.over_channels("sum_deviations", x, None, partials)
    work.finish("finish_centre", partials, centre)
    work.over_channels("sum_deviations", x, centre, partials)
    eps = (np.float64(call.eps),)
    work.finish("finish_moments", partials, centre, exact, *statistics, last=eps)
    work.over_channels("normalize", x, scale, bias, exact, y)
    for out, made in zip(outs, (y, *statistics), strict=True):
        copy_back(out, made)


@dataclass(frozen=True)
class _Shape:
    """An array as (before, channels, after) in C order, once ``view`` has moved its axes."""

    axis: int
    last: bool  # the channels are the fastest axis in memory
    vector: int  # elements that one access moves
    before: int
    channels: int
    after: int

    @classmethod
    def of(cls, x: Array, axis: int) -> "_Shape":
        """The order that x has already, if it is one of the two, or that it is copied into."""
        before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        gapless = _channels_last(x, axis).flags.c_contiguous
        last = after == 1 or (gapless and not x.flags.c_contiguous)
        if last:
            before, after = before * after, 1
        vector = vector_of(x.itemsize, x.shape[axis] if last else after)
        return cls(axis, last, vector, before, x.shape[axis], after)

    def view(self, array: Array) -> Array:
        """The array with its axes in this order."""
        return _channels_last(array, self.axis) if self.last else array

    def arranged(self, device: Device, array: Array) -> Array:
        """The array in this order: itself if it has it, else a copy."""
        return contiguous(device, self.view(array), self.vector)


@dataclass(frozen=True)
class _Launches:
    """One operation's kernels over the channels of one shape."""

    device: Device
    shape: _Shape
    file: str
    macros: Macros
    grid: tuple[int, int]
    block: tuple[int, int]

    @classmethod
    def of(
        cls,
        device: Device,
        shape: _Shape,
        file: str,
        data: Array,
        statistic: Array,
        parameter: Array | None,
    ) -> "_Launches":
        """The kernels of a file for arrays of these dtypes."""
        like = statistic if parameter is None else parameter
        types = dtype_name(data), dtype_name(statistic), dtype_name(like)
        grid, block = _blocks(device, shape)
        return cls(
            device, shape, file, norm_macros(types, shape.vector, LAST=int(shape.last)), grid, block
        )

    def over_channels(self, name: str, *arrays: Array | None) -> None:
        """Launch a kernel that visits every element, if there are any."""
        shape = self.shape.before, self.shape.channels, self.shape.after
        if math.prod(shape):
            arguments = (*arrays, *map(np.int64, shape))
            kernel(self.device, self.file, name, **self.macros)(self.grid, self.block, arguments)

    def finish(self, name: str, *arrays: Array | None, last: tuple[Any, ...] = ()) -> None:
        """Launch a kernel that adds up the partial sums of each channel."""
        shape = self.shape
        count = shape.before * shape.after
        numbers = self.grid[1] if count else 0, shape.channels, max(1, count)
        kernel(self.device, self.file, name, **self.macros)(
            (-(-shape.channels // 32),), (32, 32), (*arrays, *map(np.int64, numbers), *last)
        )

    def partials(self) -> Array:
        """Memory for two sums of every share of every channel."""
        shape = (2, self.grid[1], self.shape.channels)
        return scratch(self.device, shape, np.float64)

    def scratch(self, planes: int, dtype: str) -> Array:
        """Memory for some numbers a channel."""
        return scratch(self.device, (planes, self.shape.channels), dtype_named(dtype))


def _channels_last(array: Array, axis: int) -> Array:
    """The array with its channels as the last axis."""
    others = [k for k in range(array.ndim) if k != axis]
    return array.transpose(*others, axis)


def _blocks(device: Device, shape: _Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block: channels side by side, shares of their elements below."""
    if shape.last:
        packs, columns = shape.before, -(-shape.channels // shape.vector)
        across = min(32, power_of_two(columns))
        down = _THREADS // across
    else:
        packs, columns = shape.before * shape.after // shape.vector, shape.channels
        down = min(_THREADS, power_of_two(packs))
        across = min(_THREADS // down, power_of_two(columns))
    tiles = -(-columns // across)
    shares = min(-(-_RESIDENT * device.multiprocessors // tiles), -(-packs // down))
    return (tiles, max(1, shares)), (across, down)


def combinations(file: str) -> Iterator[Combination]:
    """A kernel file with all macros that these launchers can ask for."""
    for types in BATCH_NORM_TYPES:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            for last in (False, True):
                yield file, norm_macros(types, vector, LAST=int(last))

"""Batch norm on a GPU by the project's own kernels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.buffers import AllUsable, contiguous, copy_back, vector_of, writable_like
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.grids import column_block, power_of_two
from gradkit._cuda.launch.kernels import (
    Combination,
    Launch,
    LoadedKernel,
    Macros,
    kernel,
    norm_macros,
)
from gradkit._dtypes import (
    BATCH_NORM_TYPES,
    DType,
    accumulation_name,
    dtype_named,
    float_name,
)

_THREADS = 256
_SUMS = {"batch_norm": "sum_deviations", "batch_norm_grad": "sum_channels"}  # the first kernels
_FLOAT64 = np.dtype(np.float64)
_Arrays: TypeAlias = Sequence[Array | None]


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
    if not call.x.shape[call.channel_axis]:
        return
    parameter = call.mean if call.scale is None else call.scale
    work = _launches(device, "batch_norm_grad", call.x, call.channel_axis, call.mean, parameter)
    view = work.shape.view
    inputs = view(call.dy), view(call.x), call.scale, call.mean, call.inv_std
    outs = view(call.dx), call.dscale, call.dbias
    (dy, x, scale, mean, inv_std), written = work.usable(inputs, outs)
    dx, dscale, dbias = written
    partials, means = work.partials(), work.scratch(2, work.accumulator)
    work.over_channels("sum_channels", dy, x, mean, inv_std, partials)
    work.finish("finish_channels", partials, dscale, dbias, means)
    work.over_channels("apply_channels", dy, x, scale, mean, inv_std, means, dx)
    work.deliver(outs, written)


def batch_norm(device: Device, call: Forward) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    if not call.x.shape[call.channel_axis]:
        return
    affine = (a for a in (call.scale, call.bias) if a is not None)
    parameter = next(affine, call.mean)
    work = _launches(device, "batch_norm", call.x, call.channel_axis, call.mean, parameter)
    view = work.shape.view
    outs = view(call.y), call.mean, call.inv_std
    (x, scale, bias), written = work.usable((view(call.x), call.scale, call.bias), outs)
    y, mean, inv_std = written
    partials = work.partials()
    centre, exact = work.scratch(1, _FLOAT64), work.scratch(2, _FLOAT64)
    work.over_channels("sum_deviations", x, None, partials)
    work.finish("finish_centre", partials, centre)
    work.over_channels("sum_deviations", x, centre, partials)
    eps = (np.float64(call.eps),)
    work.finish("finish_moments", partials, centre, exact, mean, inv_std, last=eps)
    work.over_channels("normalize", x, scale, bias, exact, y)
    work.deliver(outs, written)


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
    def of(cls, shape: Shape, strides: Shape, itemsize: int, axis: int) -> "_Shape":
        """The order that an array has already, if it is one of the two, or is copied into."""
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        places = _places(len(shape), axis)
        moved = [shape[k] for k in places], [strides[k] for k in places]
        gapless = _in_c_order(*moved, itemsize)
        last = after == 1 or (gapless and not _in_c_order(shape, strides, itemsize))
        if last:
            before, after = before * after, 1
        vector = vector_of(itemsize, shape[axis] if last else after)
        return cls(axis, last, vector, before, shape[axis], after)

    def view(self, array: Array) -> Array:
        """The array with its axes in this order."""
        return _channels_last(array, self.axis) if self.last else array


def _launches(
    device: Device, file: str, x: Array, axis: int, statistic: Array, parameter: Array
) -> "_Launches":
    """The kernels of a file for arrays like these."""
    dtypes = x.dtype, statistic.dtype, parameter.dtype
    return _planned(device, file, x.shape, x.strides, axis, dtypes)


@lru_cache(maxsize=1024)
def _planned(
    device: Device,
    file: str,
    shape: Shape,
    strides: Shape,
    axis: int,
    dtypes: tuple[DType, DType, DType],
) -> "_Launches":
    """What shapes, strides and dtypes decide, decided once."""
    cut = _Shape.of(shape, strides, dtypes[0].itemsize, axis)
    data, statistic, parameter = (float_name(dtype) or "" for dtype in dtypes)
    macros = norm_macros((data, statistic, parameter), cut.vector, LAST=int(cut.last))
    grid, block = _blocks(kernel(device, file, _SUMS[file], **macros), cut)
    accumulator = dtype_named(accumulation_name(data))
    return _Launches(device, cut, file, macros, grid, block, accumulator)


@dataclass(frozen=True, eq=False)
class _Launches:
    """One operation's kernels over the channels of one shape."""

    device: Device
    shape: _Shape
    file: str
    macros: Macros
    grid: tuple[int, int]
    block: tuple[int, int]
    accumulator: DType

    def usable(self, inputs: _Arrays, outs: _Arrays) -> tuple[_Arrays, _Arrays]:
        """The arrays themselves if kernels can use them; else copies, and what is like the outs."""
        if self._all_usable((*inputs, *outs)):
            return inputs, outs
        device, vector = self.device, self.shape.vector
        width = [vector if array is not None and array.ndim > 1 else 1 for array in inputs]
        read = list(map(contiguous, repeat(device), inputs, width))
        data, *vectors = outs
        written = [writable_like(device, data, vector)]
        written += [None if out is None else writable_like(device, out) for out in vectors]
        return read, written

    @cached_property
    def _all_usable(self) -> AllUsable:
        return AllUsable()

    def deliver(self, outs: _Arrays, written: _Arrays) -> None:
        """Copy what was not written in its place."""
        for out, made in zip(outs, written, strict=True):
            if out is not None:
                copy_back(out, made)

    @cached_property
    def _counts(self) -> tuple[np.int64, ...]:
        return tuple(map(np.int64, (self.shape.before, self.shape.channels, self.shape.after)))

    @cached_property
    def _finish(self) -> tuple[tuple[int], tuple[int, int], tuple[np.int64, ...]]:
        """The grid, the block and the counts of a kernel that adds partial sums up."""
        shape = self.shape
        count = shape.before * shape.after
        counts = self.grid[1] if count else 0, shape.channels, max(1, count)
        block = column_block(self.device.multiprocessors, shape.channels, 1)
        return (-(-shape.channels // block[0]),), block, tuple(map(np.int64, counts))

    @cached_property
    def _launches(self) -> dict[str, Launch]:
        return {}

    def _launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> Launch:
        found = self._launches.get(name)
        if found is None:
            loaded = kernel(self.device, self.file, name, **self.macros)
            found = self._launches[name] = Launch(loaded, grid, block)
        return found

    def over_channels(self, name: str, *arrays: Array | None) -> None:
        """Launch a kernel that visits every element, if there are any."""
        if all(self._counts):
            self._launch(name, self.grid, self.block)(*arrays, *self._counts)

    def finish(self, name: str, *arrays: Array | None, last: tuple[Any, ...] = ()) -> None:
        """Launch a kernel that adds up the partial sums of each channel."""
        grid, block, counts = self._finish
        self._launch(name, grid, block)(*arrays, *counts, *last)

    def partials(self) -> Array:
        """Memory for two sums of every share of every channel."""
        shape = (2, self.grid[1], self.shape.channels)
        return scratch(self.device, shape, np.float64)

    def scratch(self, planes: int, dtype: DType) -> Array:
        """Memory for some numbers a channel."""
        return scratch(self.device, (planes, self.shape.channels), dtype)


def _channels_last(array: Array, axis: int) -> Array:
    """The array with its channels as the last axis."""
    return array.transpose(_places(array.ndim, axis))


def _places(rank: int, axis: int) -> tuple[int, ...]:
    """The axes with the channels' as the last."""
    return (*range(axis), *range(axis + 1, rank), axis)


def _in_c_order(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether an array of these strides, in bytes, has no gaps and its axes in order."""
    if 0 in shape:
        return True
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _blocks(sums: LoadedKernel, shape: _Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block: channels side by side, shares of their elements below.

    As many shares as the device holds at once of the kernel that sums them.
    """
    if shape.last:
        packs, columns = shape.before, -(-shape.channels // shape.vector)
        across = min(32, power_of_two(columns))
        down = _THREADS // across
    else:
        packs, columns = shape.before * shape.after // shape.vector, shape.channels
        down = min(_THREADS, power_of_two(packs))
        across = min(_THREADS // down, power_of_two(columns))
    tiles = -(-columns // across)
    resident = sums.resident(across * down) * sums.device.multiprocessors
    shares = min(-(-resident // tiles), -(-packs // down))
    return (tiles, max(1, shares)), (across, down)


def combinations(file: str) -> Iterator[Combination]:
    """A kernel file with all macros that these launchers can ask for."""
    for types in BATCH_NORM_TYPES:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            for last in (False, True):
                yield file, norm_macros(types, vector, LAST=int(last))

"""Batch norm on a GPU by the project's own kernels."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Array, Running, Shape
from gradkit._cuda.launch.buffers import vector_of
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.grids import column_block, power_of_two
from gradkit._cuda.launch.kernels import (
    Combination,
    LoadedKernel,
    Macros,
    first_of,
    kernel,
    norm_macros,
)
from gradkit._cuda.launch.planned import Planned
from gradkit._cuda.launch.running import combinations_of_running, update_running
from gradkit._dtypes import (
    BATCH_NORM_TYPES,
    DType,
    Types,
    accumulation_name,
    dtype_named,
    float_name,
)

STEPS = "batch_norm_steps"  # the file of the kernels of which every step has its own
_THREADS = 256
_PER_CHANNEL = 128  # the threads of a block that has one for every channel
_FIRST = {  # of each file's kernels: as many shares as the device holds of it at once
    "batch_norm": "sum_deviations",
    "batch_norm_grad": "sum_channels",
    "batch_norm_inference": "infer",
    "batch_norm_inference_grad": "infer_gradient",
}
_FLOAT64 = np.dtype(np.float64)


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
    running: Running | None = None


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
    dtypes = call.mean.dtype, parameter.dtype
    work = launches(device, "batch_norm_grad", call.x, call.channel_axis, *dtypes)
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
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``. ``running`` moves."""
    if not call.x.shape[call.channel_axis]:
        return
    parameter = first_of(call.scale, call.bias, call.mean)
    dtypes = call.mean.dtype, parameter.dtype
    work = launches(device, "batch_norm", call.x, call.channel_axis, *dtypes)
    view = work.shape.view
    outs = view(call.y), call.mean, call.inv_std
    (x, scale, bias), written = work.usable((view(call.x), call.scale, call.bias), outs)
    y, mean, inv_std = written
    partials, centre = work.deviations(x)
    exact = work.scratch(2, _FLOAT64)
    eps, running = (np.float64(call.eps),), call.running
    if running is None:
        work.finish("finish_moments", partials, centre, exact, mean, inv_std, last=eps)
    else:
        known = work.scratch(2, _FLOAT64)
        work.steps.finish("finish_stats", partials, centre, known[0], known[1])
        moved = running.mean, running.var
        count = float(work.shape.before * work.shape.after)
        update_running(device, *moved, known[0], known[1], count, running.momentum, *moved)
        work.steps.each_channel("take_stats", known[0], known[1], exact, mean, inv_std, last=eps)
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
        order = places(len(shape), axis)
        moved = [shape[k] for k in order], [strides[k] for k in order]
        gapless = in_c_order(*moved, itemsize)
        last = after == 1 or (gapless and not in_c_order(shape, strides, itemsize))
        if last:
            before, after = before * after, 1
        vector = vector_of(itemsize, shape[axis] if last else after)
        return cls(axis, last, vector, before, shape[axis], after)

    def view(self, array: Array) -> Array:
        """The array with its axes in this order."""
        return _channels_last(array, self.axis) if self.last else array


def launches(
    device: Device, file: str, x: Array, axis: int, statistic: DType, parameter: DType
) -> "Launches":
    """The kernels of a file for data like this and vectors of these dtypes."""
    return _planned(device, file, x.shape, x.strides, axis, (x.dtype, statistic, parameter))


@lru_cache(maxsize=1024)
def _planned(
    device: Device,
    file: str,
    shape: Shape,
    strides: Shape,
    axis: int,
    dtypes: tuple[DType, DType, DType],
) -> "Launches":
    """What shapes, strides and dtypes decide, decided once."""
    cut = _Shape.of(shape, strides, dtypes[0].itemsize, axis)
    data, statistic, parameter = (float_name(dtype) or "" for dtype in dtypes)
    macros = norm_macros((data, statistic, parameter), cut.vector, LAST=int(cut.last))
    grid, block = _blocks(kernel(device, file, _FIRST[file], **macros), cut)
    accumulator = dtype_named(accumulation_name(data))
    return Launches(device, file, macros, cut, grid, block, accumulator)


@dataclass(frozen=True, eq=False)
class Launches(Planned):
    """One operation's kernels over the channels of one shape."""

    shape: _Shape
    grid: tuple[int, int]
    block: tuple[int, int]
    accumulator: DType

    @property
    def vector(self) -> int:
        """How many elements of the data one access moves."""
        return self.shape.vector

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

    def over_channels(self, name: str, *arrays: Array | None, last: tuple[Any, ...] = ()) -> None:
        """Launch a kernel that visits every element, if there are any."""
        if all(self._counts):
            self.launch(name, self.grid, self.block)(*arrays, *self._counts, *last)

    def finish(
        self, name: str, *arrays: Array | None, last: tuple[Any, ...] = (), counted: bool = True
    ) -> None:
        """Launch a kernel that adds up the partial sums of each channel, and may divide them."""
        grid, block, counts = self._finish
        self.launch(name, grid, block)(*arrays, *(counts if counted else counts[:2]), *last)

    def each_channel(self, name: str, *arguments: Any, last: tuple[Any, ...] = ()) -> None:
        """Launch a kernel that has a thread for every channel."""
        grid = (-(-self.shape.channels // _PER_CHANNEL),)
        channels = self._counts[1]
        self.launch(name, grid, (_PER_CHANNEL,))(*arguments, channels, *last)

    @cached_property
    def steps(self) -> "Launches":
        """The kernels that finish and begin the steps which a batch norm is split into."""
        return replace(self, file=STEPS, macros=steps_macros(self.macros))

    def deviations(self, x: Array) -> tuple[Array, Array]:
        """Partial sums about a centre, and the centre: what every mean and variance is made of."""
        partials, centre = self.partials(), self.scratch(1, _FLOAT64)
        self.over_channels("sum_deviations", x, None, partials)
        self.finish("finish_centre", x, partials, centre, last=self._counts[2:])
        self.over_channels("sum_deviations", x, centre, partials)
        return partials, centre

    def partials(self) -> Array:
        """Memory for two sums of every share of every channel."""
        shape = (2, self.grid[1], self.shape.channels)
        return scratch(self.device, shape, np.float64)

    def scratch(self, planes: int, dtype: DType) -> Array:
        """Memory for some numbers a channel."""
        return scratch(self.device, (planes, self.shape.channels), dtype)


def _channels_last(array: Array, axis: int) -> Array:
    """The array with its channels as the last axis."""
    return array.transpose(places(array.ndim, axis))


def places(rank: int, axis: int) -> tuple[int, ...]:
    """The axes with the channels' as the last."""
    return (*range(axis), *range(axis + 1, rank), axis)


def in_c_order(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether an array of these strides, in bytes, has no gaps and its axes in order."""
    if 0 in shape:
        return True
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _blocks(first: LoadedKernel, shape: _Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block: channels side by side, shares of their elements below.

    As many shares as the device holds at once of the first kernel.
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
    resident = first.resident(across * down) * first.device.multiprocessors
    shares = min(-(-resident // tiles), -(-packs // down))
    return (tiles, max(1, shares)), (across, down)


def steps_macros(of: Macros) -> Macros:
    """The macros of the kernels of steps beside those of these macros."""
    return {"ACC_T": accumulation_name(str(of["DATA_T"])), "STAT_T": of["STAT_T"]}


def combinations(file: str, table: Iterable[Types] = BATCH_NORM_TYPES) -> Iterator[Combination]:
    """A kernel file with all macros that these launchers can ask for."""
    for types in table:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            for last in (False, True):
                yield file, norm_macros(types, vector, LAST=int(last))


def combinations_with_running() -> Iterator[Combination]:
    """A forward pass that may move running statistics."""
    yield from combinations_of_steps("batch_norm")
    yield from combinations_of_running()


def combinations_of_steps(
    file: str, table: Iterable[Types] = BATCH_NORM_TYPES
) -> Iterator[Combination]:
    """The same with the kernels of steps."""
    for _, macros in combinations(file, table):
        yield file, macros
        yield STEPS, steps_macros(macros)

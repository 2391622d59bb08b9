"""Batch norm on a GPU by the project's own kernels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradkit._cuda.device import Array, Device, scratch
from gradkit._cuda.layout import (
    RESIDENT_HEAVY,
    Macros,
    accumulator,
    contiguous,
    dtype_name,
    power_of_two,
    room_for,
    settle,
    vector_of,
)
from gradkit._cuda.loading import kernel
from gradkit._dtypes import BATCH_NORM_TYPES, dtype_named

_THREADS = 256
_RESIDENT = RESIDENT_HEAVY // _THREADS  # blocks a multiprocessor


def batch_norm_grad(
    device: Device,
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    channel_axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    layout = _Layout.of(x, channel_axis)
    if not layout.channels:
        return
    dy, x = (layout.arranged(device, array) for array in (dy, x))
    scale, mean, inv_std = (contiguous(device, array) for array in (scale, mean, inv_std))
    outs = layout.view(dx), dscale, dbias
    target = room_for(device, outs[0], layout.vector)
    rooms = [None if out is None else room_for(device, out) for out in outs[1:]]
    work = _Launches.of(device, layout, "batch_norm_grad", x, mean, scale)
    partials, means = work.partials(), work.room(2, accumulator(x))
    work.over_channels("sum_channels", dy, x, mean, inv_std, partials)
    work.finish("finish_channels", partials, *rooms, means)
    work.over_channels("apply_channels", dy, x, scale, mean, inv_std, means, target)
    for out, room in zip(outs, (target, *rooms), strict=True):
        if out is not None:
            settle(out, room)


def batch_norm(
    device: Device,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    channel_axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    layout = _Layout.of(x, channel_axis)
    if not layout.channels:
        return
    x = layout.arranged(device, x)
    scale, bias = contiguous(device, scale), contiguous(device, bias)
    outs = layout.view(y), mean, inv_std
    rooms = [room_for(device, outs[0], layout.vector), *(room_for(device, out) for out in outs[1:])]
    parameter = bias if scale is None else scale
    work = _Launches.of(device, layout, "batch_norm", x, mean, parameter)
    partials, centre, exact = work.partials(), work.room(1, "float64"), work.room(2, "float64")
    work.over_channels("sum_deviations", x, None, partials)
    work.finish("finish_centre", partials, centre)
    work.over_channels("sum_deviations", x, centre, partials)
    work.finish("finish_moments", partials, centre, exact, *rooms[1:], last=(np.float64(eps),))
    work.over_channels("normalize", x, scale, bias, exact, rooms[0])
    for out, room in zip(outs, rooms, strict=True):
        settle(out, room)


@dataclass(frozen=True)
class _Layout:
    """An array as (before, channels, after) in C order, once ``view`` has moved its axes."""

    axis: int
    last: bool  # the channels are the fastest axis in memory
    vector: int  # elements that one access moves
    before: int
    channels: int
    after: int

    @classmethod
    def of(cls, x: Array, axis: int) -> "_Layout":
        """The layout that x has already, where it is one of the two, or is copied into."""
        before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        gapless = _channels_last(x, axis).flags.c_contiguous
        last = after == 1 or (gapless and not x.flags.c_contiguous)
        if last:
            before, after = before * after, 1
        vector = vector_of(x, x.shape[axis] if last else after)
        return cls(axis, last, vector, before, x.shape[axis], after)

    def view(self, array: Array) -> Array:
        """The array with its axes in the layout's order."""
        return _channels_last(array, self.axis) if self.last else array

    def arranged(self, device: Device, array: Array) -> Array:
        """The array in this layout: itself where it has it, else a copy."""
        return contiguous(device, self.view(array), self.vector)


@dataclass(frozen=True)
class _Launches:
    """One operation's kernels over the channels of one layout."""

    device: Device
    layout: _Layout
    file: str
    macros: Macros
    grid: tuple[int, int]
    block: tuple[int, int]

    @classmethod
    def of(
        cls,
        device: Device,
        layout: _Layout,
        file: str,
        data: Array,
        statistic: Array,
        parameter: Array | None,
    ) -> "_Launches":
        """The kernels of a file for arrays of these dtypes."""
        like = statistic if parameter is None else parameter
        types = dtype_name(data), dtype_name(statistic), dtype_name(like)
        grid, block = _blocks(device, layout)
        return cls(
            device, layout, file, _macros(types, layout.vector, last=layout.last), grid, block
        )

    def over_channels(self, name: str, *arrays: Array | None) -> None:
        """Launch a kernel that visits every element, where there are any."""
        shape = self.layout.before, self.layout.channels, self.layout.after
        if math.prod(shape):
            arguments = (*arrays, *map(np.int64, shape))
            kernel(self.device, self.file, name, **self.macros)(self.grid, self.block, arguments)

    def finish(self, name: str, *arrays: Array | None, last: tuple[Any, ...] = ()) -> None:
        """Launch a kernel that adds up the partial sums of each channel."""
        layout = self.layout
        count = layout.before * layout.after
        numbers = self.grid[1] if count else 0, layout.channels, max(1, count)
        kernel(self.device, self.file, name, **self.macros)(
            (-(-layout.channels // 32),), (32, 32), (*arrays, *map(np.int64, numbers), *last)
        )

    def partials(self) -> Array:
        """Room for two sums of every share of every channel."""
        shape = (2, self.grid[1], self.layout.channels)
        return scratch(self.device, shape, np.float64)

    def room(self, planes: int, dtype: str) -> Array:
        """Room for some numbers a channel."""
        return scratch(self.device, (planes, self.layout.channels), dtype_named(dtype))


def _channels_last(array: Array, axis: int) -> Array:
    """The array with its channels as the last axis."""
    others = [k for k in range(array.ndim) if k != axis]
    return array.transpose(*others, axis)


def _blocks(device: Device, layout: _Layout) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block: channels side by side, shares of their elements below."""
    if layout.last:
        packs, columns = layout.before, -(-layout.channels // layout.vector)
        across = min(32, power_of_two(columns))
        down = _THREADS // across
    else:
        packs, columns = layout.before * layout.after // layout.vector, layout.channels
        down = min(_THREADS, power_of_two(packs))
        across = min(_THREADS // down, power_of_two(columns))
    tiles = -(-columns // across)
    shares = min(-(-_RESIDENT * device.multiprocessors // tiles), -(-packs // down))
    return (tiles, max(1, shares)), (across, down)


def _macros(types: tuple[str, str, str], vector: int, *, last: bool) -> Macros:
    data, statistic, parameter = types
    return {
        "DATA_T": data,
        "STAT_T": statistic,
        "PARAM_T": parameter,
        "VEC": vector,
        "LAST": int(last),
    }


def combinations() -> Iterator[tuple[str, Macros]]:
    """Every kernel file and its macros that these launchers can ask for."""
    for types in BATCH_NORM_TYPES:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            for last in (False, True):
                for file in ("batch_norm", "batch_norm_grad"):
                    yield file, _macros(types, vector, last=last)

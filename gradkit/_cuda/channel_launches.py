"""Launches of norms over channels, which shapes, strides and dtypes decide once a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gradkit._backend import Address, Array, Shape
from gradkit._calls.roles import BatchMean, BatchVar, Data, InvStd, Mean, RunningMean
from gradkit._cuda import channel_kernels as kernels
from gradkit._cuda.channel_kernels import Arrays, Exact, Named, Partials, Parts
from gradkit._cuda.launch.buffers import (
    VECTOR_BYTES,
    Inputs,
    Outs,
    Usable,
    copy_back,
    usable,
    vector_of,
)
from gradkit._cuda.launch.device import Device, workspace
from gradkit._cuda.launch.grids import (
    Places,
    column_block,
    power_of_two,
    row_blocks,
    shares_of,
    sharing_places,
)
from gradkit._cuda.launch.kernels import Launch, LoadedKernel, Macros, kernel, norm_macros
from gradkit._dtypes import DType, Types, accumulation_name, dtype_named, float_name

STATISTICS = "batch_statistics"  # the file of the kernels that have statistics alone
STEPS = "batch_norm_steps"  # the file of the kernels of which every step has its own
_THREADS = 256
_PER_CHANNEL = 128  # the threads of a block that has one for every channel
_ABREAST = 32  # columns of channels-last arrays that a block reads side by side at least
_FIRST, _LAST, _ACROSS = range(3)  # the layouts: kernels' LAST, see ``channels.cuh``
_NARROW = 4  # bytes: where one channel's elements allow no wider access, one goes across two
_HELD = {  # threads that a multiprocessor of an H100 holds of a file's sums: channels first, or not
    "batch_norm": (1024, 512),
    "batch_norm_grad": (768, 512),
    "batch_norm_inference_grad": (512, 512),
    "group_norm": (768, 512),
    "group_norm_grad": (768, 512),
}
_NARROWER, _MOST = 256, 1024  # more threads, of accesses that take fewer registers; at most
_FLOAT64 = np.dtype(np.float64)

Role = TypeVar("Role")
_Arrays: TypeAlias = Sequence[Array | None]


@dataclass(frozen=True)
class Columns:
    """An array as kernels see it, with its axes in ``order``: as columns that are summed over.

    A batch norm has a column for each channel, a group norm one for each sample's channel.
    """

    order: tuple[int, ...]
    layout: int  # where the channels are: slowest, fastest, or several in the packs of a block
    vector: int  # elements that one access moves
    count: int
    channels: int
    elements: int  # of each column
    extent: tuple[int, ...]  # as kernels are told

    @classmethod
    def of_batch(cls, x: Array, axis: int) -> "Columns":
        """(before, channels, after); before and after are one if the channels are last."""
        channels, before = x.shape[axis], math.prod(x.shape[:axis])
        after = math.prod(x.shape[axis + 1 :])
        order, last = _order(x, axis, tuple(range(x.ndim)), after)
        extent = (before * after, channels, 1) if last else (before, channels, after)
        decided = _layout(x.itemsize, last, channels, after)
        return cls(order, *decided, channels, channels, before * after, extent)

    @classmethod
    def of_groups(cls, x: Array, axis: int, groups: int) -> "Columns":
        """(samples, channels, space, channels a group): see ``groups.cuh``."""
        samples, channels = x.shape[0], x.shape[axis]
        space = math.prod(x.shape[1:axis] + x.shape[axis + 1 :])
        first = (0, axis, *range(1, axis), *range(axis + 1, x.ndim))
        order, last = _order(x, axis, first, space)
        extent = (samples, channels, space, channels // groups)
        decided = _layout(x.itemsize, last, channels, space)
        return cls(order, *decided, samples * channels, channels, space, extent)

    @property
    def last(self) -> bool:
        """True if the channels are last."""
        return self.layout == _LAST

    def view(self, array: Role) -> Role:
        """The array with its axes in this order; an absent one is none."""
        view: Any = array
        if view is not None and type(view) is not Address:
            view = view.transpose(self.order)
        return view


def _layout(itemsize: int, last: bool, channels: int, run: int) -> tuple[int, int]:
    """The layout, and how many elements one access moves; ``run``: of a channel, in memory."""
    vector, whole = vector_of(itemsize, channels if last else run), VECTOR_BYTES // itemsize
    narrow = not last and vector * itemsize <= _NARROW
    if narrow and channels % whole == 0 and whole <= run <= _THREADS:
        return _ACROSS, whole
    return (_LAST if last else _FIRST), vector


def _order(x: Array, axis: int, first: tuple[int, ...], run: int) -> tuple[tuple[int, ...], bool]:
    """The order that an array has already, if it is ``first`` or has the channels last.

    Otherwise it is copied into the first; ``run``: how many elements of a channel lie together in
    that. And whether the channels are last.
    """
    last = (*range(axis), *range(axis + 1, x.ndim), axis)
    is_last = run == 1 or (_gapless(x, last) and not _gapless(x, first))
    return (last if is_last else first), is_last


def _gapless(x: Array, order: tuple[int, ...]) -> bool:
    """True if an array has no gaps and its axes in this order."""
    if 0 in x.shape:
        return True
    step = x.itemsize
    for axis in reversed(order):
        if x.shape[axis] > 1 and x.strides[axis] != step:
            return False
        step *= x.shape[axis]
    return True


def batch_launches(device: Device, file: str, x: Array, axis: int, types: Types) -> "BatchLaunches":
    """The kernels of a file for data like this and vectors of these dtypes."""
    return BatchLaunches(*_decided(device, file, Columns.of_batch(x, axis), types))


def group_launches(
    device: Device, file: str, x: Array, axis: int, groups: int, types: Types
) -> "GroupLaunches":
    """The same of a group norm."""
    return GroupLaunches(*_decided(device, file, Columns.of_groups(x, axis, groups), types))


def _decided(device: Device, file: str, columns: Columns, types: Types) -> tuple[Any, ...]:
    macros = norm_macros(types, columns.vector, LAST=columns.layout)
    grid, block = _blocks(_places(device, file, columns, macros), columns)
    accumulator = dtype_named(accumulation_name(types[0]))
    return device, file, macros, columns, grid, block, accumulator


def _places(device: Device, file: str, of: Columns, macros: Macros) -> Places:
    """The places for blocks of a file's kernels; without sums, as many as the device has."""
    if file not in _HELD:
        return kernel(device, file, kernels.infer, **macros).places
    first, others = _HELD[file]
    if of.layout != _FIRST:
        return sharing_places(device, others)
    wide = of.vector * dtype_named(str(macros["DATA_T"])).itemsize == VECTOR_BYTES
    return sharing_places(device, first if wide else min(_MOST, first + _NARROWER))


def _blocks(places: Places, of: Columns) -> tuple[Shape, Shape]:
    """The grid and the block: columns side by side, shares of their elements below."""
    columns, packs, abreast = of.count, of.elements, 1
    if of.layout == _ACROSS:
        return _blocks_across(places, of)
    if of.last:
        columns = -(-columns // of.vector)
        abreast = min(_ABREAST, power_of_two(columns))
    else:
        packs //= of.vector
    down = min(_THREADS // abreast, power_of_two(packs))
    across = min(_THREADS // down, power_of_two(columns))
    tiles = -(-columns // across)
    return (tiles, shares_of(tiles, places(across * down), -(-packs // down))), (across, down)


def _blocks_across(places: Places, of: Columns) -> tuple[Shape, Shape]:
    """The same of blocks that have as many columns as packs have elements, side by side."""
    run = of.extent[2]
    runs, tiles = of.elements // run, of.count // of.vector
    down = max(1, min(_THREADS // run, runs))
    return (tiles, shares_of(tiles, places(run * down), -(-runs // down))), (run, down)


@dataclass(frozen=True, eq=False)
class Launches:
    """The kernels of one file for arrays of one shape, and arrays that they can use."""

    device: Device
    file: str
    macros: Macros
    columns: Columns
    grid: Shape
    block: Shape
    accumulator: DType

    @property
    def statistics(self) -> int:
        """Number of means."""
        raise NotImplementedError

    def usable(self, inputs: Inputs, outs: Outs) -> tuple[Inputs, Outs]:
        """The arrays themselves if kernels can use them; else copies, and what is like the outs."""
        arrays = self.all_usable((*inputs, *outs))
        if arrays is None:
            return self.each(inputs, outs)
        return arrays[: len(inputs)], arrays[len(inputs) :]

    def each(self, inputs: Inputs, outs: Outs) -> tuple[Inputs, Outs]:
        """The same, with every array looked at by itself."""
        return usable(self.device, inputs, outs, self._width)

    def _width(self, array: Array | None) -> int:
        """Elements of an array that one access moves: one a channel of a vector."""
        return self.columns.vector if array is not None and array.ndim > 1 else 1

    @cached_property
    def all_usable(self) -> Usable:
        """A call's arrays as kernels take them."""
        return Usable()

    def deliver(self, outs: _Arrays, written: _Arrays) -> None:
        """Copy what was not written in its place."""
        for out, result in zip(outs, written, strict=True):
            copy_back(out, result)

    @cached_property
    def launched(self) -> dict[str, Launch]:
        """The launches of kernels by name."""
        return {}

    def launch(self, name: str, grid: Shape, block: Shape) -> Launch:
        """The launch of a kernel, which has the same grid and block each time."""
        launch = self.launched.get(name)
        if launch is None:
            launch = self.launched[name] = Launch(self.kernel(name), grid, block)
        return launch

    def kernel(self, name: str) -> LoadedKernel:
        """A kernel of the file."""
        return kernel(self.device, self.file, name, **self.macros)

    @cached_property
    def extent(self) -> tuple[np.int64, ...]:
        """The shape, as kernels are told."""
        return tuple(map(np.int64, self.columns.extent))

    def over_columns(
        self, kernel: Named[*Arrays], *arrays: *Arrays, last: tuple[Any, ...] = ()
    ) -> None:
        """Launch a kernel that visits every element, if there are any."""
        if all(self.extent):
            self.launch(kernel, self.grid, self.block)(*arrays, *self.extent, *last)

    def over_channels(
        self, kernel: Named[*Arrays], *arrays: *Arrays, last: tuple[Any, ...]
    ) -> None:
        """Launch a kernel that adds up the partial sums of each channel."""
        self.launch(kernel, *self._channel_blocks)(*arrays, *last)

    @cached_property
    def _channel_blocks(self) -> tuple[Shape, Shape]:
        channels = self.columns.channels
        rows = self.grid[1] * (self.columns.count // max(1, channels))
        block = column_block(self.device.sharing, channels, 1, rows)
        return (-(-channels // block[0]),), block

    def partials(self) -> Partials:
        """Memory for two sums of every share of every column."""
        return workspace(self.device, (2, self.grid[1], self.columns.count), _FLOAT64)

    def parts(self) -> Parts:
        """Memory for the moments of every share of every column."""
        return workspace(self.device, (self.grid[1], self.columns.count, 4), _FLOAT64)

    def scratch(self, planes: int, dtype: DType = _FLOAT64) -> Any:
        """Memory for some numbers beside each mean."""
        return workspace(self.device, (planes, self.statistics), dtype)


class BatchLaunches(Launches):
    """Launches of a batch norm."""

    @property
    def statistics(self) -> int:
        return self.columns.channels

    @cached_property
    def _counts(self) -> tuple[np.int64, ...]:
        """Shares, channels, and the number to divide sums by."""
        count = self.columns.elements
        counts = self.grid[1] if count else 0, self.columns.channels, max(1, count)
        return tuple(map(np.int64, counts))

    def finish(
        self,
        kernel: Named[*Arrays],
        *arrays: *Arrays,
        last: tuple[Any, ...] = (),
        counted: bool = True,
    ) -> None:
        """Launch a kernel that adds up the partial sums of each channel, and may divide them."""
        counts = self._counts if counted else self._counts[:2]
        self.over_channels(kernel, *arrays, last=counts + last)

    def each_channel(
        self, kernel: Named[*Arrays], *arguments: *Arrays, last: tuple[Any, ...] = ()
    ) -> None:
        """Launch a kernel that has a thread for every channel."""
        grid = (-(-self.columns.channels // _PER_CHANNEL),)
        self.launch(kernel, grid, (_PER_CHANNEL,))(*arguments, self._counts[1], *last)

    @cached_property
    def steps(self) -> "BatchLaunches":
        """The kernels that finish and begin the steps which a batch norm is split into."""
        of = self.macros
        macros = {"ACC_T": accumulation_name(str(of["DATA_T"])), "STAT_T": of["STAT_T"]}
        return replace(self, file=STEPS, macros=macros)

    @cached_property
    def lacking(self) -> "BatchLaunches":
        """The kernels that write no dx, on the same grid, so that sums have the same bits."""
        return replace(self, macros=self.macros | {"LACKING": 1})

    def moments(self, x: Data) -> Parts:
        """The moments of every share of each channel."""
        parts = self.parts()
        self.over_columns(kernels.channel_moments, x, parts)
        return parts

    def finish_moments(
        self,
        parts: Parts,
        batch: tuple[BatchMean | None, BatchVar | None],
        of_norm: tuple[Exact | None, Mean | None, InvStd | None],
        running: Sequence[Any] = (None,) * 4,
        like: RunningMean | None = None,
        eps: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        """Write a batch's statistics, a norm's, and the next of running ones: what is not None.

        ``running``: the mean and the variance, as they are and as they become, of the dtype that
        ``like`` has in the first call.
        """
        name = kernels.finish_moments
        launch = self.launched.get(name)
        if launch is None:
            stat = str(self.macros["STAT_T"])
            run = stat if like is None else float_name(like.dtype) or ""
            finish = kernel(self.device, STATISTICS, name, STAT_T=stat, RUN_T=run)
            launch = self.launched[name] = Launch(finish, *self._channel_blocks)
        numbers = *self._counts[:2], np.float64(eps), np.float64(momentum)
        launch(parts, *batch, *of_norm, *running, *numbers)


class GroupLaunches(Launches):
    """Launches of a group norm."""

    @cached_property
    def statistics(self) -> int:
        samples, channels, _, width = self.columns.extent
        return samples * (channels // width)

    @cached_property
    def shares(self) -> np.int64:
        """Number of partial sums of each column."""
        return np.int64(self.grid[1])

    def over_groups(
        self, kernel: Named[*Arrays], *arrays: *Arrays, last: tuple[Any, ...] = ()
    ) -> None:
        """Launch a kernel that adds up the partial sums of each group."""
        launch = self.launched.get(kernel)
        if launch is None:
            terms = self.grid[1] * self.columns.extent[3]
            loaded, sizes = self.kernel(kernel), (self.statistics, terms, _THREADS)
            blocks = row_blocks(loaded.places, self.device.multiprocessors, *sizes)
            launch = self.launch(kernel, (blocks.count,), blocks.block)
        launch(*arrays, self.shares, *self.extent, *last)

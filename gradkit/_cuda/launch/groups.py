"""Group norm on a GPU: what shapes and dtypes decide about its launches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.buffers import vector_of
from gradkit._cuda.launch.channels import in_c_order, places
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.grids import column_block, power_of_two, row_blocks
from gradkit._cuda.launch.kernels import Combination, LoadedKernel, kernel, norm_macros
from gradkit._cuda.launch.planned import Planned
from gradkit._dtypes import LAYER_NORM_TYPES, DType, Types, accumulation_name, dtype_named

_THREADS = 256
_ABREAST = 32  # columns of channels-last arrays that a block reads side by side at least
_SUMS = {"group_norm": "sum_group_deviations", "group_norm_grad": "sum_group_gradient"}


@dataclass(frozen=True)
class _Layout:
    """An array as kernels see it, once ``view`` has moved its axes: see ``groups.cuh``."""

    axis: int
    last: bool  # the channels are the fastest axis in memory
    vector: int  # elements that one access moves
    samples: int
    channels: int
    space: int
    width: int  # channels a group

    @classmethod
    def of(cls, shape: Shape, strides: Shape, itemsize: int, axis: int, groups: int) -> "_Layout":
        """The order that an array has already, if it is one of the two, or is copied into."""
        space = math.prod(shape[1:axis] + shape[axis + 1 :])
        last = space == 1 or (
            _gapless(shape, strides, itemsize, places(len(shape), axis))
            and not _gapless(shape, strides, itemsize, _channels_first(len(shape), axis))
        )
        channels = shape[axis]
        vector = vector_of(itemsize, channels if last else space)
        return cls(axis, last, vector, shape[0], channels, space, channels // groups)

    def view(self, array: Array) -> Array:
        """The array with its axes in this order."""
        order = (places if self.last else _channels_first)(array.ndim, self.axis)
        return array.transpose(order)


def _channels_first(rank: int, axis: int) -> tuple[int, ...]:
    """The axes with the channels' as the second."""
    return (0, axis, *range(1, axis), *range(axis + 1, rank))


def _gapless(shape: Shape, strides: Shape, itemsize: int, order: tuple[int, ...]) -> bool:
    """Whether an array has no gaps and its axes in this order."""
    return in_c_order([shape[k] for k in order], [strides[k] for k in order], itemsize)


def launches(
    device: Device, file: str, x: Array, axis: int, groups: int, types: Types
) -> "Launches":
    """The kernels of a file for data like this and vectors of these dtypes."""
    layout = _Layout.of(x.shape, x.strides, x.itemsize, axis, groups)
    macros = norm_macros(types, layout.vector, LAST=int(layout.last))
    grid, block = _blocks(kernel(device, file, _SUMS[file], **macros), layout)
    accumulator = dtype_named(accumulation_name(types[0]))
    return Launches(device, file, macros, layout, grid, block, accumulator)


@dataclass(frozen=True, eq=False)
class Launches(Planned):
    """One operation's kernels over the columns of one shape."""

    layout: _Layout
    grid: tuple[int, int]
    block: tuple[int, int]
    accumulator: DType

    @property
    def vector(self) -> int:
        """How many elements of the data one access moves."""
        return self.layout.vector

    @property
    def groups(self) -> int:
        """How many groups all samples have."""
        return self.layout.samples * (self.layout.channels // self.layout.width)

    @cached_property
    def _extent(self) -> tuple[np.int64, ...]:
        of = self.layout
        return tuple(map(np.int64, (of.samples, of.channels, of.space, of.width)))

    @cached_property
    def _shares(self) -> np.int64:
        return np.int64(self.grid[1])

    def over_columns(self, name: str, *arrays: Array | None) -> None:
        """Launch a kernel that visits every element."""
        self.launch(name, self.grid, self.block)(*arrays, *self._extent)

    def over_groups(self, name: str, *arrays: Array | None, last: tuple[Any, ...] = ()) -> None:
        """Launch a kernel that adds up the partial sums of each group."""
        launch = self._launches.get(name)
        if launch is None:
            found = kernel(self.device, self.file, name, **self.macros)
            terms = self.grid[1] * self.layout.width
            blocks = row_blocks(found, self.groups, terms, _THREADS)
            launch = self.launch(name, (blocks.count,), blocks.block)
        launch(*arrays, self._shares, *self._extent, *last)

    def over_parameters(self, name: str, *arrays: Array | None) -> None:
        """Launch a kernel that adds up the partial sums of each channel."""
        channels = self.layout.channels
        block = column_block(self.device.multiprocessors, channels, 1)
        launch = self.launch(name, (-(-channels // block[0]),), block)
        launch(*arrays, self._shares, *self._extent[:2])

    def partials(self) -> Array:
        """Memory for two sums of every share of every column."""
        columns = self.layout.samples * self.layout.channels
        return scratch(self.device, (2, self.grid[1], columns), np.float64)

    def scratch(self, planes: int, dtype: Any) -> Array:
        """Memory for some numbers a group."""
        return scratch(self.device, (planes, self.groups), dtype)


def _blocks(sums: LoadedKernel, layout: _Layout) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block: columns side by side, shares of their elements below.

    As many shares as the device holds at once of the kernel that sums them.
    """
    columns, packs = layout.samples * layout.channels, layout.space
    if layout.last:
        columns = -(-columns // layout.vector)
        down = min(_THREADS // min(_ABREAST, power_of_two(columns)), power_of_two(packs))
    else:
        packs //= layout.vector
        down = min(_THREADS, power_of_two(packs))
    across = min(_THREADS // down, power_of_two(columns))
    tiles = -(-columns // across)
    resident = sums.resident(across * down) * sums.device.multiprocessors
    shares = min(-(-resident // tiles), -(-packs // down))
    return (tiles, max(1, shares)), (across, down)


def combinations(file: str) -> Iterator[Combination]:
    """A kernel file with all macros that these launchers can ask for."""
    for types in LAYER_NORM_TYPES:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            for last in (False, True):
                yield file, norm_macros(types, vector, LAST=int(last))

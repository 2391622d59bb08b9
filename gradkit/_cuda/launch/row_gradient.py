"""The gradient that layer norm, RMS norm and invertible layer norm share, on a GPU.

Rows that fit into a block's registers are read once; longer ones are read twice. Both ways
leave partial sums over rows behind, which a last kernel adds up. For the longest rows that fit,
sums over rows lie in shared memory, if the device has enough of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.buffers import all_usable, contiguous, copy_back, vector_of, writable_like
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.grids import RowBlocks, column_block, row_blocks, rows_of
from gradkit._cuda.launch.kernels import Combination, LoadedKernel, Macros, kernel, norm_macros
from gradkit._dtypes import (
    LAYER_NORM_TYPES,
    DType,
    Types,
    accumulation_name,
    dtype_named,
    float_name,
)

_LONGEST = 512  # threads that work on one row
_WIDE_THREADS = 256
_SLOTS = 1024  # bytes of shared memory that a kernel takes beside
_PARTIAL_SHARE = 0.1  # of the bytes of dy, x and dx that partial sums may cost


@dataclass(frozen=True)
class Norm:
    """How the gradients differ: how xhat is made, and whether the mean counts."""

    from_output: bool
    centred: bool

    @property
    def planes(self) -> int:
        """How many parameter gradients there are."""
        return 2 if self.centred else 1


LAYER = Norm(from_output=False, centred=True)
RMS = Norm(from_output=False, centred=False)
INVERTIBLE = Norm(from_output=True, centred=True)


class Inputs(NamedTuple):
    """What a gradient reads, in the order of the kernels' parameters."""

    dy: Array
    source: Array
    scale: Array | None
    bias: Array | None
    mean: Array | None
    inv_std: Array


class Outputs(NamedTuple):
    """What a gradient writes; ``None`` if not wanted."""

    dx: Array
    dscale: Array | None
    dbias: Array | None


@dataclass(frozen=True)
class RowPlan:
    """One way to hold a row: ``threads`` threads at most, with ``chunks`` packs each.

    ``shared`` is how many bytes of shared memory the sums over rows take, 0 if they lie in
    registers.
    """

    chunks: int
    threads: int
    shared: int = 0


def write_gradient(device: Device, norm: Norm, axis: int, inputs: Inputs, outputs: Outputs) -> None:
    """Write the gradients that are wanted of arrays whose axes from ``axis`` on are normalised.

    ``dx`` may be ``dy``.
    """
    parameter = inputs.inv_std
    if inputs.scale is not None:
        parameter = inputs.scale
    elif inputs.bias is not None:
        parameter = inputs.bias
    wanted = outputs.dscale is not None or outputs.dbias is not None
    source = inputs.source
    plan = _plan(
        device,
        norm,
        source.shape,
        axis,
        (source.dtype, inputs.inv_std.dtype, parameter.dtype),
        wanted,
    )
    plan.run(inputs, outputs)


@lru_cache(maxsize=1024)
def _plan(
    device: Device,
    norm: Norm,
    shape: Shape,
    axis: int,
    dtypes: tuple[DType, DType, DType],
    wanted: bool,
) -> "_Gradient":
    """What shapes and dtypes decide, decided once."""
    data, statistic, parameter = (float_name(dtype) or "" for dtype in dtypes)
    types, itemsize = (data, statistic, parameter), dtypes[0].itemsize
    rows, width = rows_of(shape, axis)
    vector = vector_of(itemsize, width)
    return _Gradient(device, norm, types, itemsize, rows, width, vector, wanted)


@dataclass(frozen=True, eq=False)
class _Gradient:
    """One gradient over ``rows`` rows of ``width``; ``vector`` columns move in one access.

    ``wanted``: sums over rows are, for dscale and dbias.
    """

    device: Device
    norm: Norm
    types: Types
    itemsize: int
    rows: int
    width: int
    vector: int
    wanted: bool

    def run(self, inputs: Inputs, outputs: Outputs) -> None:
        """Launch the kernels on the arrays, or on copies that they can read and write."""
        device, vector = self.device, self.vector
        if all_usable((*inputs[:4], *outputs), vector) and all_usable(inputs[4:]):
            self._launch(inputs, outputs)
            return
        inputs = Inputs(
            contiguous(device, inputs.dy, vector),
            contiguous(device, inputs.source, vector),
            contiguous(device, inputs.scale, vector),
            contiguous(device, inputs.bias, vector),
            contiguous(device, inputs.mean),
            contiguous(device, inputs.inv_std),
        )
        written = Outputs(
            *(None if out is None else writable_like(device, out, vector) for out in outputs)
        )
        self._launch(inputs, written)
        for out, made in zip(outputs, written, strict=True):
            if out is not None:
                copy_back(out, made)

    def _launch(self, inputs: Inputs, outputs: Outputs) -> None:
        partials = None
        if self.rows and self.width:
            if self._row_plan is not None:
                partials = self._in_one_visit(self._row_plan, inputs, outputs.dx)
            else:
                partials = self._in_two_visits(inputs, outputs.dx)
        self._write_parameters(partials, outputs)

    @cached_property
    def _row_plan(self) -> RowPlan | None:
        """How a row is held, if it fits into a block."""
        for plan in _row_plans(self.norm, self.itemsize, self.vector):
            fits = self.width <= plan.threads * plan.chunks * self.vector
            if fits and plan.shared + _SLOTS <= self.device.max_shared_memory:
                return plan
        return None

    @cached_property
    def _macros(self) -> Macros:
        return _macros(self.norm, self.types, self.vector)

    @cached_property
    def _accumulator(self) -> DType:
        return dtype_named(accumulation_name(self.types[0]))

    @cached_property
    def _one_visit(self) -> tuple[LoadedKernel, RowBlocks, int]:
        """The kernel of one visit, its blocks and how many of them."""
        plan = self._row_plan
        assert plan is not None
        held = plan.chunks * self.vector
        packs = _LONGEST if plan.shared else -(-self.width // held)
        macros = self._macros | {"CHUNKS": plan.chunks, "LONG": int(plan.shared > 0)}
        found = kernel(self.device, "layer_norm_grad", "layer_norm_grad", **macros)
        blocks = row_blocks(found, self.rows, packs, _LONGEST, plan.shared)
        count = self._fewer(blocks.count) if self.wanted else blocks.count
        return found, blocks, count

    def _in_one_visit(self, plan: RowPlan, inputs: Inputs, dx: Array) -> Array | None:
        """Write dx; the partial sums of dscale and dbias as (planes, blocks, width)."""
        launch, blocks, count = self._one_visit
        partials = self._partials(count)
        arguments = (*inputs, dx, partials, *self._shape)
        launch((count,), blocks.block, arguments, shared_mem=plan.shared)
        return partials

    @cached_property
    def _shape(self) -> tuple[Any, Any]:
        """Rows and columns; the kernel of one visit counts columns by an int."""
        one_visit = self._row_plan is not None
        return np.int64(self.rows), (np.int32 if one_visit else np.int64)(self.width)

    def _in_two_visits(self, inputs: Inputs, dx: Array) -> Array | None:
        tiles = -(-self.width // (_WIDE_THREADS * self.vector))
        sms = self.device.multiprocessors
        parts = min(tiles, max(1, -(-sms // self.rows)), 32)
        shape = self._shape
        sums = scratch(self.device, (parts, self.rows, 2), np.float64)
        block = (_WIDE_THREADS, 1)
        launch, resident = self._row_sums
        launch((min(self.rows, resident), parts), block, (*inputs, sums, *shape))
        launch, resident = self._apply
        count = min(self.rows, max(1, resident // tiles))
        count = self._fewer(count, at_least=-(-sms // tiles)) if self.wanted else count
        partials = self._partials(count)
        launch((tiles, count), block, (*inputs, sums, dx, partials, *shape, np.int32(parts)))
        return partials

    @cached_property
    def _row_sums(self) -> tuple[LoadedKernel, int]:
        return self._wide("row_sums_of_gradient")

    @cached_property
    def _apply(self) -> tuple[LoadedKernel, int]:
        return self._wide("apply_gradient")

    def _wide(self, name: str) -> tuple[LoadedKernel, int]:
        """A kernel of two visits, and how many of its blocks the device holds at once."""
        found = kernel(self.device, "layer_norm_grad_wide", name, **self._macros)
        return found, found.resident(_WIDE_THREADS) * self.device.multiprocessors

    @cached_property
    def _column_sums(self) -> tuple[LoadedKernel, tuple[int, int], tuple[int, int]]:
        """The last kernel, its grid and its block."""
        macros: Macros = {"ACC_T": str(self._accumulator), "PARAM_T": self.types[2]}
        planes = self.norm.planes
        block = column_block(self.device.multiprocessors, self.width, planes)
        grid = (-(-self.width // block[0]), planes)
        return kernel(self.device, "column_sums", "column_sums", **macros), grid, block

    def _write_parameters(self, partials: Array | None, written: Outputs) -> None:
        if not self.wanted or not self.width:
            return
        count = 0 if partials is None else partials.shape[1]
        numbers = np.int64(count), np.int64(self.width)
        launch, grid, block = self._column_sums
        launch(grid, block, (partials, written.dscale, written.dbias, *numbers))

    def _partials(self, count: int) -> Array | None:
        if not self.wanted:
            return None
        return scratch(self.device, (self.norm.planes, count, self.width), self._accumulator)

    def _fewer(self, blocks: int, at_least: int | None = None) -> int:
        """So many blocks that their partial sums cost little beside the arrays themselves.

        But no fewer than keep every multiprocessor at work, which is worth more.
        """
        each = 2 * self.norm.planes * self._accumulator.itemsize  # bytes a column, both ways
        arrays = 3 * self.rows * self.itemsize
        floor = self.device.multiprocessors if at_least is None else at_least
        return min(blocks, max(floor, int(_PARTIAL_SHARE * arrays / each)))


def combinations(norm: Norm) -> Iterator[Combination]:
    """Every kernel file and its macros that a norm's gradient can ask for."""
    for types in LAYER_NORM_TYPES:
        size = dtype_named(types[0]).itemsize
        for vector in (1, 16 // size):
            macros = _macros(norm, types, vector)
            yield "layer_norm_grad_wide", macros
            for plan in _row_plans(norm, size, vector):
                long_row = int(plan.shared > 0)
                yield "layer_norm_grad", macros | {"CHUNKS": plan.chunks, "LONG": long_row}
    pairs = dict.fromkeys((accumulation_name(t), v) for t, _, v in LAYER_NORM_TYPES)
    for accumulated, parameter in pairs:
        yield "column_sums", {"ACC_T": accumulated, "PARAM_T": parameter}


def _macros(norm: Norm, types: Types, vector: int) -> Macros:
    kind = {"FROM_OUTPUT": int(norm.from_output), "CENTRED": int(norm.centred)}
    return norm_macros(types, vector, **kind)


def _row_plans(norm: Norm, itemsize: int, vector: int) -> list[RowPlan]:
    """The ways to hold a row, from the shortest rows to the longest.

    A thread holds as many columns as registers allow: columns that come one at a time take
    more of them, and so does a division.
    """
    accumulated = max(4, itemsize)
    unit = vector * accumulated // 4
    most = (16 if vector > 1 else 8 if norm.from_output else 12) // unit
    fewest = 1 if vector > 1 else most // 4
    plans = [RowPlan(fewest, 32), RowPlan(most, _LONGEST)]
    full = 24 if itemsize == 8 else 28 if itemsize == 4 and norm.from_output else 32
    for columns in (full,) if vector > 1 else (16, 20):
        chunks = columns // unit
        shared = norm.planes * chunks * vector * _LONGEST * accumulated
        plans.append(RowPlan(chunks, _LONGEST, shared))
    return plans

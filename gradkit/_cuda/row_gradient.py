"""The gradients of layer norm and RMS norm, from their input or output, on a GPU.

Rows that fit into the registers of a block, or of a cluster of blocks if the device has clusters,
are read once; longer ones are read twice. Both ways leave partial sums over rows behind, which a
last kernel adds up. Without clusters the sums over the longest rows that fit lie in shared memory,
if the device has enough of it, and so does scale.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from gradkit._backend import Array
from gradkit._calls.roles import Bias, Data, InvStd, Mean, Scale
from gradkit._calls.rows import (
    InvertibleLayerNormGrad,
    InvertibleRmsNormGrad,
    LayerNormGrad,
    RmsNormGrad,
)
from gradkit._calls.samples import sample_count
from gradkit._cuda.launch.buffers import (
    VECTOR_BYTES,
    all_usable,
    contiguous,
    copy_back,
    writable_like,
)
from gradkit._cuda.launch.device import Device, scratch, workspace
from gradkit._cuda.launch.grids import (
    CLUSTER,
    CLUSTER_THREADS,
    chunks_of,
    row_blocks,
    row_clusters,
    sharing_clusters,
    sharing_places,
)
from gradkit._cuda.launch.kernels import Launch, LoadedKernel, Macros, kernel, norm_macros, types_of
from gradkit._cuda.row_launches import RowLaunches
from gradkit._cuda.row_starts import ADDED, FURTHER, PLAIN, Variant, offset_of
from gradkit._dtypes import Types, dtype_named

_LONGEST = 512  # threads of a block that work on one row
_ODD_COLUMNS = 16 * _LONGEST  # that the registers of a block hold the sums over rows of
_WIDE_THREADS = 256
# Threads that a multiprocessor of an H100 holds, as registers allow: of few columns each, in bytes
# of the accumulator's dtype, more; fewer of those if rows are odd.
_HELD, _HELD_FEW, _HELD_ODD, _FEW = 512, 1024, 768, 32
_SLOTS = 1024  # bytes of shared memory that a kernel takes beside
_CACHED = 4 << 20  # bytes of partial sums that stay in the cache of any GPU: a T4 has so many


class GradientKind(NamedTuple):
    """The difference between gradients: the source of xhat, and whether the mean counts."""

    from_output: bool
    centred: bool

    @property
    def planes(self) -> int:
        """Number of parameter gradients."""
        return 2 if self.centred else 1


LAYER = GradientKind(from_output=False, centred=True)
RMS = GradientKind(from_output=False, centred=False)
LAYER_OUTPUT = GradientKind(from_output=True, centred=True)
RMS_OUTPUT = GradientKind(from_output=True, centred=False)


# A gradient reads, in the order of the kernels' parameters: dy, x or y, scale, bias, mean,
# inv_std.
Inputs: TypeAlias = tuple[Data, Data, Scale | None, Bias | None, Mean | None, InvStd]
# It writes dx, dscale, dbias; ``None`` if not wanted.
Outputs: TypeAlias = tuple[Data | None, Scale | None, Bias | None]


@dataclass(frozen=True)
class RowPlan:
    """One way to hold a row: ``threads`` threads of a block at most, with ``chunks`` packs each.

    ``shared`` is how many bytes of shared memory the sums over rows take, 0 if they lie in
    registers. If they do not, there are exactly so many threads. ``blocks``: how many share a row.
    """

    chunks: int
    threads: int
    shared: int = 0
    blocks: int = 1

    def of(self, packs: int) -> Self:
        """The same with no more threads than a row needs, in steps of 64: each is a kernel."""
        threads = min(self.threads, -(-packs // (64 * self.chunks)) * 64)
        return replace(self, threads=threads, shared=self.shared // self.threads * threads)


def write_gradient(
    device: Device,
    norm: GradientKind,
    call: LayerNormGrad | InvertibleLayerNormGrad | RmsNormGrad | InvertibleRmsNormGrad,
    inputs: Inputs,
    outputs: Outputs,
    ds: Data | None = None,
    scale_offset: float = 0.0,
) -> None:
    """Write the gradients that are wanted; ``dx`` may be ``dy``, or ``ds``, which it includes."""
    launcher: GradientLaunches | None = call.plan.launcher
    if launcher is None:
        dx, dscale, dbias = outputs
        _, source, scale, bias, _, inv_std = inputs
        types = types_of(source, inv_std, scale, bias, dbias)
        launcher = GradientLaunches.of(
            device,
            types,
            source.shape,
            call.axis,
            samples=sample_count(call),
            odd_columns=0 if norm.from_output else _ODD_COLUMNS,
            norm=norm,
            has_dx=dx is not None,
            has_sums=dscale is not None or dbias is not None,
        )
        call.plan.launcher = launcher
    launcher.run(inputs, outputs, None if outputs[0] is None else ds, scale_offset)


@dataclass(frozen=True, eq=False)
class GradientLaunches(RowLaunches):
    """``has_dx`` and ``has_sums``: what is wanted; sums over rows are for dscale and dbias."""

    norm: GradientKind
    has_dx: bool
    has_sums: bool

    def run(self, inputs: Inputs, outputs: Outputs, ds: Data | None, scale_offset: float) -> None:
        """Launch the kernels on the arrays, or on copies of those that they cannot reach."""
        plain = ds is None and not scale_offset and self.samples == 1
        without_gaps = plain or self.whole  # there is a kernel for rows without gaps
        variant = self.plain if plain else FURTHER if ds is None else ADDED
        numbers = () if plain else (offset_of(scale_offset),)
        usable = self.all_usable((*inputs, *outputs, ds)) if without_gaps else None
        if usable is not None:
            *arrays, beside = usable
            further = () if plain else (*numbers, beside)
            self._launch(variant, arrays[:-3], arrays[-3:], *further)
            return
        device, vector = self.device, self.vector
        (dy, source, scale, bias, mean, inv_std), (dx, dscale, dbias) = inputs, outputs
        (dy, source, ds), (dx,) = self.starts.reachable(device, (dy, source, ds), (dx,))
        inputs = (
            dy,
            source,
            contiguous(device, scale, vector),
            contiguous(device, bias, vector),
            contiguous(device, mean),
            contiguous(device, inv_std),
        )
        written = dx, writable_like(device, dscale), writable_like(device, dbias)
        rows = [each for each in (dy, source, dx, ds) if each is not None]
        if without_gaps and all_usable(rows, vector):
            further = () if plain else (*numbers, ds)
        else:
            each, added = (dy, source, dx, ds), ds is not None
            variant, layout = self.starts.strided(
                each, vector, scale_offset, added=added, odd=self.odd
            )
            further = layout, ds
        self._launch(variant, inputs, written, *further)
        for out, result in zip(outputs, written, strict=True):
            copy_back(out, result)

    def _launch(self, variant: Variant, inputs: Inputs, outputs: Outputs, *further: Any) -> None:
        """``further``: the arguments that only kernels of a variant have."""
        dx, dscale, dbias = outputs
        partials = None  # of dscale and dbias, as (planes, blocks, width)
        if self.rows and self.width:
            if self.has_sums:
                partials = workspace(self.device, self._partial_shape, self.accumulator)
            if self._row_plan is None:
                self._in_two_visits(variant, inputs, dx, partials, further)
            else:
                launch = self._one_visit if variant is self.plain else self._one_visit_of(variant)
                launch(*inputs, dx, partials, *self._shape, *further)
        if self.has_sums and self.width and self.samples:
            self._column_sums(partials, dscale, dbias, *self._partial_counts)

    def _in_two_visits(
        self,
        variant: Variant,
        inputs: Inputs,
        dx: Array | None,
        partials: Array | None,
        further: tuple[Any, ...],
    ) -> None:
        """Write dx and the partial sums, with each row's sums first."""
        sum_rows, apply = self._two_visits if variant is PLAIN else self._two_visits_of(variant)
        rows = self.rows * self.samples
        parts = sum_rows.grid[1] if self.has_dx else 0
        sums = scratch(self.device, (parts, rows, 2), np.float64)
        if parts:
            sum_rows(*inputs, sums, *self._shape, *further)
        apply(*inputs, sums, dx, partials, *self._shape, np.int32(parts), *further)

    def _one_visit_of(self, variant: Variant) -> Launch:
        """The kernel of a variant on the grid of the plain one, so that sums have its bits."""
        launch = self._variants.get(variant)
        if launch is None:
            loaded, shared = self._one_visit_kernel(variant)
            launch = self._variants[variant] = self._one_visit.of(loaded, shared)
        return launch

    def _two_visits_of(self, variant: Variant) -> tuple[Launch, Launch]:
        """The same of both kernels."""
        sum_rows, apply = self._two_visits
        return (
            sum_rows.of(self._wide_kernel(sum_rows.kernel.name, variant)),
            apply.of(self._wide_kernel(apply.kernel.name, variant)),
        )

    @cached_property
    def _variants(self) -> dict[Variant, Launch]:
        return {}

    @cached_property
    def _row_plan(self) -> RowPlan | None:
        """The way a row is held, if it fits into a block."""
        clusters = self.device.clusters
        few, most, *longer = row_plans(self.norm, self.itemsize, self.vector, clusters=clusters)
        packs = self.packs
        chunks = chunks_of(packs, few.chunks, most.chunks, _LONGEST)
        if packs <= 32 * few.chunks or chunks == few.chunks:
            return few
        for longest in (most, *longer):
            plan = longest.of(packs) if self.whole and longest.shared else longest
            fits = packs <= plan.blocks * plan.threads * plan.chunks
            if fits and plan.shared + _SLOTS <= self.device.max_shared_memory:
                return plan
        return None

    @cached_property
    def _macros(self) -> Macros:
        return _macros(self.norm, self.types, self.vector)

    @cached_property
    def _shape(self) -> tuple[np.int64, np.int32 | np.int64]:
        """Rows and columns; the kernel of one visit counts columns by an int."""
        one_visit = self._row_plan is not None
        return np.int64(self.rows), (np.int32 if one_visit else np.int64)(self.width)

    @cached_property
    def _one_visit(self) -> Launch:
        """The kernel that keeps a row in registers."""
        plan = self._row_plan
        assert plan is not None
        if plan.blocks > 1:
            return self._by_clusters(plan)
        packs = plan.threads if plan.shared else -(-self.packs // plan.chunks)
        loaded, shared = self._one_visit_kernel(self.plain)
        places = sharing_places(self.device, self._held(plan))
        sizes = self.device.sharing, self.rows, packs, _LONGEST, self.samples
        blocks = row_blocks(places, *sizes)
        count = self._fewer(blocks.count) if self.has_sums else blocks.count
        return Launch(loaded, (count, 1, self.samples), blocks.block, shared)

    def _by_clusters(self, plan: RowPlan) -> Launch:
        """The same of a cluster of blocks."""
        loaded, _ = self._one_visit_kernel(PLAIN)
        packs = -(-self.width // (plan.chunks * self.vector))
        places = sharing_clusters(self.device, _HELD)
        clusters = row_clusters(places, self.rows, packs, self.samples)
        count = self._fewer(clusters.count) if self.has_sums else clusters.count
        return Launch(loaded, (count * CLUSTER, 1, self.samples), clusters.block)

    def _one_visit_kernel(self, variant: Variant) -> tuple[LoadedKernel, int]:
        """The kernel, and the bytes of shared memory that it takes."""
        plan = self._row_plan
        assert plan is not None
        if plan.blocks > 1:
            macros = self._macros | {"CHUNKS": plan.chunks} | variant.macros
            name = "layer_norm_grad_cluster"
            return kernel(self.device, name, name, **macros), 0
        available = self.device.max_shared_memory
        long, shared = _long(plan, self.types, self.vector, variant, available)
        macros = self._macros | {"CHUNKS": plan.chunks, "LONG": long} | variant.macros
        if long:
            macros["THREADS"] = plan.threads
        return kernel(self.device, "layer_norm_grad", "layer_norm_grad", **macros), shared

    @cached_property
    def _two_visits(self) -> tuple[Launch, Launch]:
        """The kernel that sums along rows, in some parts a row, and the one that writes dx."""
        device, block = self.device, (_WIDE_THREADS, 1)
        tiles = -(-self.width // (_WIDE_THREADS * self.vector))
        parts = min(tiles, max(1, -(-device.sharing // (self.rows * self.samples))), 32)
        sums = self._wide_kernel("row_sums_of_gradient", PLAIN)
        grid = min(self.rows, sums.places(_WIDE_THREADS)), parts, self.samples
        places = sharing_places(device, _HELD)(_WIDE_THREADS)
        count = min(self.rows, max(1, places // (tiles * self.samples)))
        count = self._fewer(count) if self.has_sums else count
        apply = self._wide_kernel("apply_gradient", PLAIN)
        return Launch(sums, grid, block), Launch(apply, (tiles, count, self.samples), block)

    def _wide_kernel(self, name: str, variant: Variant) -> LoadedKernel:
        macros = self._macros | variant.macros
        return kernel(self.device, "layer_norm_grad_wide", name, **macros)

    @cached_property
    def _partial_shape(self) -> tuple[int, int, int]:
        """Partial sums are (planes, rows, width); a row for each block of rows of each sample."""
        if not (self.rows and self.width):
            count = 0
        elif self._row_plan is not None:
            count = self._one_visit.grid[0] // self._row_plan.blocks
        else:
            count = self._two_visits[1].grid[1]
        return self.norm.planes, self.samples * count, self.width

    @cached_property
    def _partial_counts(self) -> tuple[np.int64, np.int64]:
        _, rows, width = self._partial_shape
        return np.int64(rows // self.samples), np.int64(width)

    @cached_property
    def _column_sums(self) -> Launch:
        return self.column_sums(self.norm.planes)

    def _held(self, plan: RowPlan) -> int:
        """Threads that a multiprocessor holds of a row's kernel, with room for a few columns."""
        few = plan.chunks * self.vector * self.accumulator.itemsize <= _FEW
        divides = self.norm is LAYER_OUTPUT and self.itemsize == 2  # takes registers of its own
        if not few or divides:
            return _HELD
        return _HELD_ODD if self.odd else _HELD_FEW

    def _fewer(self, blocks: int) -> int:
        """Blocks, limited so that their partial sums are no larger than dy and x, or fit the cache.

        Up to that limit, another block gains more than its partial sums cost.
        """
        sums = self.norm.planes * self.accumulator.itemsize  # bytes a column, of each block
        array = self.rows * self.itemsize  # the same of dy
        return min(blocks, max(2 * array // sums, _CACHED // (sums * self.width * self.samples), 1))


def _macros(norm: GradientKind, types: Types, vector: int) -> Macros:
    kind = {"FROM_OUTPUT": int(norm.from_output), "CENTRED": int(norm.centred)}
    return norm_macros(types, vector, **kind)


def _long(
    plan: RowPlan, types: Types, vector: int, variant: Variant, available: int
) -> tuple[int, int]:
    """LONG, and the bytes of shared memory: for sums over rows (1), and for scale too (2).

    Scale lies there if there is room for it and none in registers, as there is beside packs of
    16-bit elements of rows without gaps. Not if it is twenty single float16, which are widened
    all at once: in registers that spill.
    """
    if not plan.shared:
        return 0, 0
    data, _, parameter = (dtype_named(name).itemsize for name in types)
    both = plan.shared + plan.chunks * vector * plan.threads * parameter
    in_registers = not (variant.strided or variant.added) and data == 2 and vector > 1
    spills = plan.chunks == 20 and types[2] == "float16"
    if in_registers or spills or both + _SLOTS > available:
        return 1, plan.shared
    return 2, both


def row_plans(norm: GradientKind, itemsize: int, vector: int, *, clusters: bool) -> list[RowPlan]:
    """The ways to hold a row, from the shortest rows to the longest.

    A thread holds as many columns as registers allow: columns that come in packs of less than 16
    bytes take more of them, single ones more than that, and so does a division.
    """
    whole = vector * itemsize == VECTOR_BYTES
    accumulated = max(4, itemsize)
    unit = vector * accumulated // 4
    single = 8 if norm.from_output else 10
    most = (16 if whole else 12 if vector > 1 else single) // unit
    fewest = 1 if vector > 1 else most // 3
    plans = [RowPlan(fewest, _LONGEST), RowPlan(most, _LONGEST)]
    if clusters:
        # Addresses of many accesses, and divisions in double precision, leave registers for 8.
        roomy = vector * accumulated >= 16 and not (norm.from_output and itemsize == 8)
        return [*plans, RowPlan((16 if roomy else 8) // unit, CLUSTER_THREADS, 0, CLUSTER)]
    full = 24 if itemsize == 8 else 28 if itemsize == 4 and norm.from_output else 32
    if not whole:
        full = 20 if itemsize == 4 else 24
    for columns in (full,) if vector > 1 else (16, 20):
        chunks = columns // unit
        shared = norm.planes * chunks * vector * _LONGEST * accumulated
        plans.append(RowPlan(chunks, _LONGEST, shared))
    return plans

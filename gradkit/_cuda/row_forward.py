"""The forward passes of layer norm and RMS norm, and the inverse of layer norm, on a GPU."""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from gradkit._calls.roles import Bias, Data, InvStd, Mean, Scale
from gradkit._calls.rows import AddLayerNorm, AddRmsNorm, LayerNorm, LayerNormInverse, RmsNorm
from gradkit._calls.samples import sample_count
from gradkit._cuda.launch.buffers import all_usable, contiguous, copy_back, fill, writable_like
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.grids import CLUSTER, RowBlocks, chunks_of, row_blocks, row_clusters
from gradkit._cuda.launch.kernels import Launch, LoadedKernel, kernel, norm_macros, types_of
from gradkit._cuda.row_launches import RowLaunches
from gradkit._cuda.row_starts import ADDED, FURTHER, PLAIN, Variant, offset_of

_FORWARD_THREADS = 512  # that work on one row at most
_FORWARD_CHUNKS = 4  # accesses in which a thread reads its part of a row, if registers hold a row
_INVERSE_THREADS = 256


class ForwardArrays(NamedTuple):
    """Arrays that a forward pass reads and writes, in the order of the kernel's parameters."""

    x: Data
    scale: Scale | None
    bias: Bias | None
    y: Data
    mean: Mean | None
    inv_std: InvStd


def write_forward(
    device: Device,
    call: LayerNorm | RmsNorm | AddLayerNorm | AddRmsNorm,
    arrays: ForwardArrays,
    residual: Data | None = None,
    s: Data | None = None,
) -> None:
    """Layer norm, or RMS norm if there is no mean.

    With a residual, ``s = x + residual`` is written and takes the place of ``x``; it may be either.
    """
    launcher: _ForwardLaunches | None = call.plan.launcher
    if launcher is None:
        x, scale, bias, _, mean, inv_std = arrays
        if not x.size:  # an empty row counts as mean 0, variance 0
            fill(device, inv_std, 1 / math.sqrt(call.eps) if call.eps else math.inf)
            if mean is not None:
                fill(device, mean, 0)
            return
        types, more = types_of(x, inv_std, scale, bias), {"centred": mean is not None}
        launcher = call.plan.launcher = _ForwardLaunches.of(
            device, types, x.shape, call.axis, samples=sample_count(call), **more
        )
    launcher.normalize(arrays, residual, s, call.eps, call.scale_offset)


def write_inverse(device: Device, call: LayerNormInverse) -> None:
    """``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
    launcher: _ForwardLaunches | None = call.plan.launcher
    if launcher is None:
        if not call.x.size:
            return
        types = types_of(call.y, call.inv_std, call.scale, call.bias)
        launcher = _ForwardLaunches.of(device, types, call.y.shape, call.axis, centred=None)
        call.plan.launcher = launcher
    launcher.invert(call)


@dataclass(frozen=True, eq=False)
class _ForwardLaunches(RowLaunches):
    """``centred``: whether the norm has a mean; ``None``: the inverse."""

    centred: bool | None

    def normalize(
        self,
        arrays: ForwardArrays,
        residual: Data | None,
        s: Data | None,
        eps: float,
        scale_offset: float,
    ) -> None:
        """Launch the forward pass on the arrays, or on copies of those that it cannot reach."""
        numbers = *self.counts, np.float64(eps)
        plain = residual is None and not scale_offset and self.samples == 1
        usable = self.all_usable((*arrays, residual, s)) if plain or self.whole else None
        if usable is not None and plain:
            self._forward(*usable[:-2], *numbers)
            return
        if usable is not None:
            launch = self._variant(FURTHER if residual is None else ADDED)
            launch(*usable[:-2], *numbers, offset_of(scale_offset), *usable[-2:])
            return
        device, vector = self.device, self.vector
        outs = arrays.y, s, arrays.mean, arrays.inv_std
        (x, further), (y, total) = self.starts.reachable(
            device, (arrays.x, residual), (arrays.y, s)
        )
        scale = contiguous(device, arrays.scale, vector)
        bias = contiguous(device, arrays.bias, vector)
        mean, inv_std = writable_like(device, arrays.mean), writable_like(device, arrays.inv_std)
        read = x, scale, bias, y, mean, inv_std, *numbers
        each = x, y, further, total
        rows = [array for array in each if array is not None]
        if plain and all_usable(rows, vector):
            self._forward(*read)
        elif self.whole and all_usable(rows, vector):
            launch = self._variant(FURTHER if residual is None else ADDED)
            launch(*read, offset_of(scale_offset), further, total)
        else:
            added = residual is not None
            variant, layout = self.starts.strided(each, vector, scale_offset, added=added)
            self._variant(variant)(*read, layout, further, total)
        for out, result in zip(outs, (y, total, mean, inv_std), strict=True):
            copy_back(out, result)

    def invert(self, call: LayerNormInverse) -> None:
        """Launch the inverse on the arrays, or on copies of them."""
        vectors, statistics = (call.y, call.scale, call.bias), (call.mean, call.inv_std)
        usable = self.all_usable((*vectors, *statistics, call.x))
        if usable is not None:
            self._inverse(*usable, *self.counts)
            return
        device, vector = self.device, self.vector
        read = (
            *(contiguous(device, array, vector) for array in vectors),
            *(contiguous(device, array) for array in statistics),
        )
        written = writable_like(device, call.x, vector)
        self._inverse(*read, written, *self.counts)
        copy_back(call.x, written)

    @cached_property
    def _forward(self) -> Launch:
        return self._variant(PLAIN)

    @cached_property
    def _variants(self) -> dict[Variant, Launch]:
        return {}

    @cached_property
    def _inverse(self) -> Launch:
        macros = norm_macros(self.types, self.vector)
        loaded = kernel(self.device, "layer_norm_inverse", "layer_norm_inverse", **macros)
        packs = -(-self.width // self.vector)
        blocks = self._blocks(loaded, packs, _INVERSE_THREADS)
        along = -(-self.width // (blocks.threads * self.vector))
        short = max(1, -(-loaded.places(math.prod(blocks.block)) // blocks.count))
        return Launch(loaded, (blocks.count, min(along, short)), blocks.block)

    def _variant(self, variant: Variant) -> Launch:
        launch = self._variants.get(variant)
        if launch is None:
            launch = self._variants[variant] = self._launch(variant)
        return launch

    def _launch(self, variant: Variant) -> Launch:
        packs = -(-self.width // self.vector)
        chunks = chunks_of(packs, 1, _FORWARD_CHUNKS, _FORWARD_THREADS)
        packs = -(-packs // chunks)
        most = _FORWARD_THREADS * (CLUSTER if self.device.clusters else 1)
        chunks = chunks if packs <= most else 0
        macros = norm_macros(
            self.types, self.vector, CENTRED=int(bool(self.centred)), CHUNKS=chunks
        )
        if chunks and packs > _FORWARD_THREADS:
            macros |= {"CLUSTERED": 1}
            loaded = kernel(self.device, "layer_norm", "layer_norm", **macros, **variant.macros)
            places = partial(loaded.clusters, CLUSTER)
            clusters = row_clusters(places, self.rows, packs, self.samples)
            return Launch(loaded, (clusters.count * CLUSTER, 1, self.samples), clusters.block)
        loaded = kernel(self.device, "layer_norm", "layer_norm", **macros, **variant.macros)
        blocks = self._blocks(loaded, packs, _FORWARD_THREADS)
        return Launch(loaded, (blocks.count, 1, self.samples), blocks.block)

    def _blocks(self, loaded: LoadedKernel, packs: int, longest: int) -> RowBlocks:
        """As many blocks of rows as the device holds of a kernel."""
        sizes = self.device.multiprocessors, self.rows, packs, longest, self.samples
        return row_blocks(loaded.places, *sizes)

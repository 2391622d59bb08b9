"""RMS norm with an activated gate, and its gradient, on a GPU.

Rows may lie at strides in all arrays, such as x and gate in one projection. The gradient leaves
partial sums over rows behind, which a last kernel adds up.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradkit._calls.rows import GatedRmsNorm, GatedRmsNormGrad
from gradkit._cuda.launch.buffers import contiguous, copy_back, fill, vector_of, writable_like
from gradkit._cuda.launch.device import Device, workspace
from gradkit._cuda.launch.grids import row_blocks, rows_of
from gradkit._cuda.launch.kernels import Launch, kernel, norm_macros, types_of
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.row_gradient import column_sums
from gradkit._cuda.row_starts import RowStarts
from gradkit._dtypes import DType, Types, accumulation_name, dtype_named

_THREADS = 512  # that work on one row at most
_CHUNKS = 4  # packs of a thread whose sums over rows registers hold
_PACKS = 4  # that a thread reads of a row, if it is long enough for several threads


class GatedNorms(OnDevice):
    """Launches the kernels of gated norms."""

    def gated_rms_norm(self, call: GatedRmsNorm) -> None:
        """Write ``y`` and ``inv_std``; ``y`` may be ``x`` or ``gate``."""
        if call.x.size:
            _launcher(self.device, call).normalize(call)
        else:  # the mean square of no elements counts as 0
            value = 1 / math.sqrt(call.eps) if call.eps else math.inf
            fill(self.device, call.inv_std, value)

    def gated_rms_norm_grad(self, call: GatedRmsNormGrad) -> None:
        """Write ``dx``, ``dgate`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``x``.

        ``dgate`` may be ``dy`` or ``gate``.
        """
        _launcher(self.device, call).differentiate(call)


def _launcher(device: Device, call: GatedRmsNorm | GatedRmsNormGrad) -> "_Launcher":
    launcher: _Launcher | None = call.plan.launcher
    if launcher is None:
        types = types_of(call.x, call.inv_std, call.scale)
        rows, width = rows_of(call.x.shape, call.axis)
        vector = vector_of(call.x.itemsize, width)
        launcher = call.plan.launcher = _Launcher(device, types, call.axis, rows, width, vector)
    return launcher


@dataclass(frozen=True, eq=False)
class _Launcher:
    """``rows`` rows of ``width``; ``vector`` columns are read and written by one access."""

    device: Device
    types: Types
    axis: int
    rows: int
    width: int
    vector: int

    def normalize(self, call: GatedRmsNorm) -> None:
        """Launch the norm on the arrays, or on copies of those that it cannot reach."""
        (x, gate), (y,) = self._starts.reachable(self.device, (call.x, call.gate), (call.y,))
        scale = contiguous(self.device, call.scale, self.vector)
        inv_std = writable_like(self.device, call.inv_std)
        layout = self._starts.layout((x, gate, y), call.scale_offset)
        numbers = *self._counts, np.float64(call.eps), *_gating(call)
        self._forward(x, gate, scale, y, inv_std, *numbers, layout)
        copy_back(call.y, y)
        copy_back(call.inv_std, inv_std)

    def differentiate(self, call: GatedRmsNormGrad) -> None:
        """Launch the gradient likewise, and the sums over rows, if they are wanted."""
        partials = None
        if call.dscale is not None and self._blocks:
            partials = workspace(self.device, (1, self._blocks, self.width), self._accumulator)
        if self.rows and self.width:
            self._write_gradients(call, partials)
        if call.dscale is not None and self.width:
            dscale = writable_like(self.device, call.dscale)
            counts = np.int64(self._blocks), np.int64(self.width)
            self._column_sums(partials, dscale, None, *counts)
            copy_back(call.dscale, dscale)

    def _write_gradients(self, call: GatedRmsNormGrad, partials: Any) -> None:
        device, read, written = self.device, (call.dy, call.x, call.gate), (call.dx, call.dgate)
        inputs, (dx, dgate) = self._starts.reachable(device, read, written)
        scale = contiguous(device, call.scale, self.vector)
        inv_std = contiguous(device, call.inv_std)
        layout = self._starts.layout((*inputs, dx, dgate), call.scale_offset)
        numbers = *self._counts, *_gating(call)
        self._gradient(*inputs, scale, inv_std, dx, dgate, partials, *numbers, layout)
        copy_back(call.dx, dx)
        copy_back(call.dgate, dgate)

    @cached_property
    def _counts(self) -> tuple[np.int64, np.int64]:
        return np.int64(self.rows), np.int64(self.width)

    @cached_property
    def _starts(self) -> RowStarts:
        return RowStarts(self.axis)

    @cached_property
    def _accumulator(self) -> DType:
        return dtype_named(accumulation_name(self.types[0]))

    @cached_property
    def _forward(self) -> Launch:
        return self._launch("gated_rms_norm")

    @cached_property
    def _gradient(self) -> Launch:
        fits = self.width <= _THREADS * _CHUNKS * self.vector
        launch = self._launch("gated_rms_norm_grad", CHUNKS=_CHUNKS if fits else 0)
        # Partial sums cost at most a tenth of the five arrays, unless multiprocessors were idle.
        cheap = self.rows * dtype_named(self.types[0]).itemsize // (4 * self._accumulator.itemsize)
        count = min(launch.grid[0], max(self.device.multiprocessors, cheap))
        return Launch(launch.kernel, (count,), launch.block)

    def _launch(self, name: str, **more: int) -> Launch:
        found = kernel(self.device, name, name, **norm_macros(self.types, self.vector, **more))
        packs = -(-self.width // (_PACKS * self.vector))
        blocks = row_blocks(found, self.rows, packs, _THREADS)
        return Launch(found, (blocks.count,), blocks.block)

    @cached_property
    def _blocks(self) -> int:
        """How many blocks leave partial sums behind."""
        return self._gradient.grid[0] if self.rows and self.width else 0

    @cached_property
    def _column_sums(self) -> Launch:
        return column_sums(self.device, self.types, self.width, planes=1)


def _gating(call: GatedRmsNorm | GatedRmsNormGrad) -> tuple[np.int32, np.int32]:
    """How the gate is used, as the kernels take it."""
    return np.int32(call.activation == "silu"), np.int32(call.norm_before_gate)

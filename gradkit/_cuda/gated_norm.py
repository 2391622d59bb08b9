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
from gradkit._cuda.launch.buffers import contiguous, copy_back, fill, writable_like
from gradkit._cuda.launch.device import Device, workspace
from gradkit._cuda.launch.grids import Places, row_blocks, sharing_places
from gradkit._cuda.launch.kernels import Launch, LoadedKernel, kernel, norm_macros, types_of
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.row_launches import RowLaunches
from gradkit._cuda.row_starts import PLAIN, Variant

_THREADS = 512  # that work on one row at most
# Threads of the gradient that a multiprocessor of an H100 holds, as registers allow.
_HELD, _HELD_LONG, _HELD_NARROW = 512, 768, 1024


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


def _launcher(device: Device, call: GatedRmsNorm | GatedRmsNormGrad) -> "_GatedLaunches":
    launcher: _GatedLaunches | None = call.plan.launcher
    if launcher is None:
        types, before = types_of(call.x, call.inv_std, call.scale), call.norm_before_gate
        of_both = isinstance(call, GatedRmsNorm) or not (call.dx is None or call.dgate is None)
        kind = {"before": before, "lacking": not of_both}
        launcher = _GatedLaunches.of(device, types, call.x.shape, call.axis, **kind)
        call.plan.launcher = launcher
    return launcher


@dataclass(frozen=True, eq=False)
class _GatedLaunches(RowLaunches):
    """Launches that the norm and its gradient share; ``before``: the norm precedes the gate.

    ``lacking``: a gradient of ``x`` or of ``gate`` is not wanted.
    """

    before: bool
    lacking: bool

    def normalize(self, call: GatedRmsNorm) -> None:
        """Launch the norm on the arrays, or on copies of those that it cannot reach."""
        (x, gate), (y,) = self.starts.reachable(self.device, (call.x, call.gate), (call.y,))
        scale = contiguous(self.device, call.scale, self.vector)
        inv_std = writable_like(self.device, call.inv_std)
        variant, layout = self.starts.strided((x, gate, y), self.vector, call.scale_offset)
        numbers = *self.counts, np.float64(call.eps), _silu(call)
        launch = self._reaching(self._forward, variant)
        launch(x, gate, scale, y, inv_std, *numbers, layout)
        copy_back(call.y, y)
        copy_back(call.inv_std, inv_std)

    def differentiate(self, call: GatedRmsNormGrad) -> None:
        """Launch the gradient likewise, and the sums over rows, if they are wanted."""
        partials = None
        if call.dscale is not None and self._blocks:
            partials = workspace(self.device, (1, self._blocks, self.width), self.accumulator)
        if self.rows and self.width:
            self._write_gradients(call, partials)
        if call.dscale is not None and self.width:
            dscale = writable_like(self.device, call.dscale)
            counts = np.int64(self._blocks), np.int64(self.width)
            self._column_sums(partials, dscale, None, *counts)
            copy_back(call.dscale, dscale)

    def _write_gradients(self, call: GatedRmsNormGrad, partials: Any) -> None:
        device, read, written = self.device, (call.dy, call.x, call.gate), (call.dx, call.dgate)
        inputs, (dx, dgate) = self.starts.reachable(device, read, written)
        scale = contiguous(device, call.scale, self.vector)
        inv_std = contiguous(device, call.inv_std)
        each = *inputs, dx, dgate
        variant, layout = self.starts.strided(each, self.vector, call.scale_offset)
        numbers = *self.counts, _silu(call)
        launch = self._reaching(self._gradient, variant)
        launch(*inputs, scale, inv_std, dx, dgate, partials, *numbers, layout)
        copy_back(call.dx, dx)
        copy_back(call.dgate, dgate)

    @cached_property
    def _forward(self) -> Launch:
        return self._launch("gated_rms_norm", None)

    @cached_property
    def _gradient(self) -> Launch:
        launch = self._launch("gated_rms_norm_grad", sharing_places(self.device, self._held))
        # Partial sums cost at most a tenth of the five arrays, unless multiprocessors were idle.
        cheap = self.rows * self.itemsize // (4 * self.accumulator.itemsize)
        count = min(launch.grid[0], max(self.device.sharing, cheap))
        return Launch(launch.kernel, (count,), launch.block)

    def _reaching(self, launch: Launch, variant: Variant) -> Launch:
        """The same launch for arrays whose rows begin between packs, so that sums have its bits."""
        return launch.of(self._kernel(launch.kernel.name, variant)) if variant.piece else launch

    def _packs(self, name: str) -> int:
        """Packs of a row that a thread has, if it is long enough: as many as registers hold."""
        most = 8  # elements of a pack
        if name == "gated_rms_norm_grad":
            most = 4 if self.before else 2
        if self.accumulator.itemsize == 8:
            most = 1
        return 4 if self.vector <= most else 2

    def _in_registers(self, name: str) -> bool:
        """True if a block's registers hold a row."""
        return self.width <= _THREADS * self._packs(name) * self.vector

    def _kernel(self, name: str, variant: Variant) -> LoadedKernel:
        macros = norm_macros(self.types, self.vector)
        chunks = self._packs(name) if self._in_registers(name) else 0
        macros |= {"BEFORE": int(self.before), "CHUNKS": chunks}
        if variant.piece:
            macros["PIECE"] = variant.piece
        if self.lacking:
            macros["LACKING"] = 1
        return kernel(self.device, name, name, **macros)

    def _launch(self, name: str, places: Places | None) -> Launch:
        """The launch on those places, or on all that the device has."""
        device, loaded = self.device, self._kernel(name, PLAIN)
        multiprocessors = device.sharing if places else device.multiprocessors
        packs = -(-self.width // (self._packs(name) * self.vector))
        sizes = multiprocessors, self.rows, packs, _THREADS
        blocks = row_blocks(places or loaded.places, *sizes)
        return Launch(loaded, (blocks.count,), blocks.block)

    @cached_property
    def _held(self) -> int:
        """More threads if accesses are narrow, or if rows of wide elements are read again."""
        if self.vector * self.itemsize < 8:
            return _HELD_NARROW
        again = self.itemsize > 2 and not self._in_registers("gated_rms_norm_grad")
        return _HELD_LONG if again else _HELD

    @cached_property
    def _blocks(self) -> int:
        """Number of blocks that leave partial sums behind."""
        return self._gradient.grid[0] if self.rows and self.width else 0

    @cached_property
    def _column_sums(self) -> Launch:
        return self.column_sums(planes=1)


def _silu(call: GatedRmsNorm | GatedRmsNormGrad) -> np.int32:
    """The activation, as the kernels take it."""
    return np.int32(call.silu)

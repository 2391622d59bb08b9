"""Gradient norms, the clip coefficient and scaling, on lists of arrays on a GPU."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.device import scratch
from gradkit._cuda.launch.kernels import Combination, kernel
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.tensor_lists import KINDS, Table, on_lists, plan_of, run, start
from gradkit._cuda.launch.warmup import asks_for

_ORDERS = {1.0: "Sum", 2.0: "SumOfSquares", math.inf: "Largest"}
_ANY_ORDER = "SumOfPowers"
_PART = 3  # doubles: kernels/norm_orders.cuh
_FINISH = {False: 1024, True: 128}  # threads that join the partial results of a norm
_FLOAT64 = np.dtype(np.float64)
_FLAGS = {False: np.uint32(0), True: np.uint32(1)}  # as kernels take them


def _norms() -> Iterator[Combination]:
    for capacity in KINDS:
        for order in (*_ORDERS.values(), _ANY_ORDER):
            yield "norm", {"CAPACITY": capacity, "ORDER": order}


def _coefficients() -> Iterator[Combination]:
    yield "coefficients", {}


class Clipping(OnDevice):
    """Launches the kernels of norms and scaling."""

    @asks_for(_norms)
    def grad_norm(
        self, grads: Sequence[Array], norm_type: float, out: Array, *, per_tensor: bool = False
    ) -> None:
        """``out = (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
        plan = plan_of(self.device, grads)
        if not plan.chunks:
            out.fill(0)
            return
        p, order = np.float64(norm_type), _ORDERS.get(norm_type, _ANY_ORDER)
        joined = _FLAGS[not per_tensor]
        # A Part for each chunk, or for those of a block if nobody asks which tensor it was.
        counts = [table.count if per_tensor else table.blocks for table in plan.tables]
        parts = scratch(self.device, sum(counts) * _PART, _FLOAT64)
        first = 0
        for table, count in zip(plan.tables, counts, strict=True):
            own = parts if count == sum(counts) else parts[first * _PART :]
            start(self.device, table, "norm", "norm_partials", p, own, joined, ORDER=order)
            if per_tensor:
                self._finish(table, p, order, own, count, out[table.tensors])
            first += count
        if not per_tensor:
            self._finish(plan.tables[0], p, order, parts, first, out)

    @asks_for(_coefficients)
    def norm_shares(self, norm: Array, largest: Array, norm_type: float, out: Array) -> None:
        """``out = (norm / largest)^p``; for infinity, 0 or the NaN that a "max" may drop."""
        self._on_norms("norm_shares", (norm, largest), _order(norm_type), out)

    @asks_for(_coefficients)
    def norm_of_shares(self, total: Array, largest: Array, norm_type: float, out: Array) -> None:
        """``out = largest * total^(1/p)``: the norm over all ranks."""
        self._on_norms("norm_of_shares", (total, largest), _order(norm_type), out)

    @asks_for(_coefficients)
    def clip_coefficient(self, norm: Array, max_norm: float, eps: float, out: Array) -> None:
        """``out = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
        limits = (np.float64(max_norm), np.float64(eps))
        self._on_norms("clip_coefficient", (norm,), limits, out)

    @asks_for(partial(on_lists, "scale"))
    def clip_by_norm(
        self,
        grads: Sequence[Array],
        norm: Array,
        max_norm: float,
        eps: float,
        outs: Sequence[Array],
        *,
        zero_nonfinite: bool,
    ) -> None:
        """``outs = grads * clip_coefficient(norm)``, or zeros if the norm is not finite.

        The coefficient is computed in the launch that scales.
        """
        limits = (np.float64(max_norm), np.float64(eps))
        flags = (_FLAGS[zero_nonfinite], _FLAGS[outs is grads])
        plan = plan_of(self.device, grads, outs)
        run(self.device, plan, "scale", "clip_by_norm", norm, *limits, *flags)

    @asks_for(partial(on_lists, "scale"))
    def scale_grads(
        self, grads: Sequence[Array], coefficient: Array | float, outs: Sequence[Array]
    ) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
        in_place = outs is grads
        known = isinstance(coefficient, float)
        if known and coefficient == 1 and in_place:
            return
        array, number = (None, coefficient) if known else (coefficient, 1.0)
        plan = plan_of(self.device, grads, outs)
        arguments = (array, np.float64(number), _FLAGS[in_place])
        run(self.device, plan, "scale", "scale_grads", *arguments)

    @asks_for(partial(on_lists, "clip_value"))
    def clip_grad_value(
        self, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
    ) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
        plan = plan_of(self.device, grads, outs)
        run(self.device, plan, "clip_value", "clip_grad_value", np.float64(clip_value))

    def _finish(
        self,
        table: Table,
        p: np.float64,
        order: str,
        parts: Array,
        count: int,
        out: Array,
    ) -> None:
        """Join ``count`` parts: all of them into a scalar, or each tensor's into a row of norms."""
        per_tensor = out.ndim > 0
        threads = _FINISH[per_tensor]
        norms = min(out.size, self.device.multiprocessors * (2048 // threads))
        launch = table.launch(self.device, norms, threads, "norm", "norm_finish", ORDER=order)
        stride = np.int64(out.strides[0] if per_tensor else 0)
        launch(table.argument, p, parts, np.uint32(count), _FLAGS[per_tensor], out, stride)

    def _on_norms(
        self, name: str, norms: Sequence[Array], arguments: tuple[Any, ...], out: Array
    ) -> None:
        """Launch one of coefficients.cu's kernels, which take contiguous arrays of one size."""
        if not out.size:
            return
        device = self.device
        sources = [contiguous(device, device.xp.broadcast_to(norm, out.shape)) for norm in norms]
        made = writable_like(device, out)
        blocks = min(-(-out.size // 256), device.multiprocessors * 8)
        launch = kernel(device, "coefficients", name)
        launch((blocks,), (256,), (*sources, np.int64(out.size), *arguments, made))
        copy_back(out, made)


def _order(norm_type: float) -> tuple[Any, ...]:
    return np.float64(norm_type), _FLAGS[math.isinf(norm_type)]

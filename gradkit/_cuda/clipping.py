"""Gradient norms, the clip coefficient and scaling, on lists of arrays on a GPU."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradkit._backend import Array, Number
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.kernels import Combination, kernel
from gradkit._cuda.launch.list_norms import ORDERS, PART, norms, order_of, write_norm, write_parts
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.tensor_lists import (
    FLAGS,
    Step,
    either,
    launch,
    on_lists,
    plan_of,
    plan_steps,
)
from gradkit._cuda.launch.warmup import asks_for

_OF_RANKS = "norm_of_ranks"


def _coefficients() -> Iterator[Combination]:
    yield "coefficients", {}


def _orders() -> Iterator[Combination]:
    for order in ORDERS:
        yield _OF_RANKS, {"ORDER": order}


def _states() -> Iterator[Combination]:
    yield from norms()
    yield from _orders()


class Clipping(OnDevice):
    """Launches the kernels of norms and scaling."""

    @asks_for(norms)
    def grad_norm(
        self,
        grads: Sequence[Array],
        norm_type: float,
        out: Array,
        *,
        per_tensor: bool = False,
        scale: Number = 1.0,
        found_inf: Array | None = None,
    ) -> None:
        """``out = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
        write_norm(self.device, grads, norm_type, out, per_tensor, scale, found_inf)

    @asks_for(norms)
    def norm_parts(
        self,
        grads: Sequence[Array],
        norm_type: float,
        out: Array,
        *,
        per_tensor: bool = False,
        copies: Sequence[int] | None = None,
    ) -> None:
        """``out[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
        write_parts(self.device, grads, norm_type, out, per_tensor, copies)

    @asks_for(_states)
    def rank_state(
        self,
        grads: Sequence[Array],
        norm_type: float,
        digest: float,
        out: Array,
        *,
        scale: Number = 1.0,
        copies: Sequence[int] | None = None,
    ) -> None:
        """``out = (0, digest, |scale|, hi, lo, scale of the sums)``."""
        self.norm_parts(grads, norm_type, out[3:].reshape(1, PART), copies=copies)
        self._of_ranks("rank_state", norm_type, np.float64(digest), *either(scale), out)

    @asks_for(_orders)
    def join_ranks(
        self,
        states: Array,
        digest: float,
        norm_type: float,
        out: Array,
        found_inf: Array | None,
        *,
        scale: Number,
        max_norm: Number,
        fresh: bool,
        faults: Array,
        factors: Array,
    ) -> None:
        """The norm of all ranks' gradients, unless one failed; and what a clip is to use."""
        call = np.uint32(len(states)), np.float64(digest), np.float64(norm_type)
        numbers = (*either(scale), *either(max_norm), FLAGS[fresh])
        outs = out, found_inf, faults, factors
        rows = contiguous(self.device, states)
        self._of_ranks("join_ranks", norm_type, rows, *call, *numbers, *outs)

    def _of_ranks(self, name: str, norm_type: float, *arguments: Any) -> None:
        """Launch one of norm_of_ranks.cu's kernels of one thread."""
        found = kernel(self.device, _OF_RANKS, name, ORDER=order_of(norm_type))
        found((1,), (1,), arguments)

    @asks_for(_coefficients)
    def norm_shares(self, norm: Array, largest: Array, norm_type: float, out: Array) -> None:
        """``out = (norm / largest)^p``; for infinity, 0 or the NaN that a "max" may drop."""
        self._on_norms("norm_shares", (norm, largest), _order(norm_type), out)

    @asks_for(_coefficients)
    def norm_of_shares(self, total: Array, largest: Array, norm_type: float, out: Array) -> None:
        """``out = largest * total^(1/p)``: the norm over all ranks."""
        self._on_norms("norm_of_shares", (total, largest), _order(norm_type), out)

    @asks_for(_coefficients)
    def clip_coefficient(self, norm: Array, max_norm: Number, eps: float, out: Array) -> None:
        """``out = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
        array, number = either(max_norm)
        limits = contiguous(self.device, array), number, np.float64(eps)
        self._on_norms("clip_coefficient", (norm,), limits, out)

    @asks_for(partial(on_lists, "scale"))
    def clip_by_norm(
        self,
        grads: Sequence[Array],
        norm: Array,
        max_norm: Number,
        eps: float,
        outs: Sequence[Array],
        *,
        scale: Number = 1.0,
        zero_nonfinite: bool,
    ) -> None:
        """``outs = grads * (scale * clip_coefficient(norm))``, or zeros if either is not finite.

        The coefficient is computed in the launch that scales.
        """
        factors = norm, max_norm, scale
        launch(self.clip_steps(grads, factors, eps, outs, zero_nonfinite=zero_nonfinite))

    def clip_steps(
        self,
        grads: Sequence[Array],
        factors: Sequence[Number],
        eps: float,
        outs: Sequence[Array],
        *,
        zero_nonfinite: bool,
    ) -> list[Step]:
        """What launches ``clip_by_norm`` by norm, limit and scale, with all its kernels made."""
        norm, max_norm, scale = factors
        numbers = (*either(max_norm), np.float64(eps), *either(scale))
        flags = (FLAGS[zero_nonfinite], FLAGS[outs is grads])
        plan = plan_of(self.device, grads, outs)
        return plan_steps(self.device, plan, "scale", "clip_by_norm", norm, *numbers, *flags)

    @asks_for(partial(on_lists, "scale"))
    def scale_grads(
        self, grads: Sequence[Array], coefficient: Number, outs: Sequence[Array]
    ) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
        launch(self.scale_steps(grads, coefficient, outs))

    def scale_steps(
        self, grads: Sequence[Array], coefficient: Number, outs: Sequence[Array]
    ) -> list[Step]:
        """What launches ``scale_grads``, with all its kernels made."""
        in_place = outs is grads
        array, number = either(coefficient)
        if array is None and number == 1 and in_place:
            return []
        plan = plan_of(self.device, grads, outs)
        arguments = array, number, FLAGS[in_place]
        return plan_steps(self.device, plan, "scale", "scale_grads", *arguments)

    @asks_for(partial(on_lists, "clip_value"))
    def clip_grad_value(
        self, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
    ) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
        launch(self.value_steps(grads, clip_value, outs))

    def value_steps(
        self, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
    ) -> list[Step]:
        """What launches ``clip_grad_value``, with all its kernels made."""
        limit, plan = np.float64(clip_value), plan_of(self.device, grads, outs)
        return plan_steps(self.device, plan, "clip_value", "clip_grad_value", limit)

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
        found = kernel(device, "coefficients", name)
        found((blocks,), (256,), (*sources, np.int64(out.size), *arguments, made))
        copy_back(out, made)


def _order(norm_type: float) -> tuple[Any, ...]:
    return np.float64(norm_type), FLAGS[math.isinf(norm_type)]

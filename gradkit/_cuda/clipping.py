"""Gradient norms, the clip coefficient and scaling, on lists of arrays on a GPU."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradkit._backend import Array, Number
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.kernels import Combination, kernel
from gradkit._cuda.launch.list_norms import norms, write_norm
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.tensor_lists import FLAGS, either, on_lists, plan_of, run
from gradkit._cuda.launch.warmup import asks_for


def _coefficients() -> Iterator[Combination]:
    yield "coefficients", {}


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
        limits = (*either(max_norm), np.float64(eps))
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
        numbers = (*either(max_norm), np.float64(eps), *either(scale))
        flags = (FLAGS[zero_nonfinite], FLAGS[outs is grads])
        plan = plan_of(self.device, grads, outs)
        run(self.device, plan, "scale", "clip_by_norm", norm, *numbers, *flags)

    @asks_for(partial(on_lists, "scale"))
    def scale_grads(
        self, grads: Sequence[Array], coefficient: Number, outs: Sequence[Array]
    ) -> None:
        """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
        in_place = outs is grads
        array, number = either(coefficient)
        if array is None and number == 1 and in_place:
            return
        plan = plan_of(self.device, grads, outs)
        run(self.device, plan, "scale", "scale_grads", array, number, FLAGS[in_place])

    @asks_for(partial(on_lists, "clip_value"))
    def clip_grad_value(
        self, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
    ) -> None:
        """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
        plan = plan_of(self.device, grads, outs)
        run(self.device, plan, "clip_value", "clip_grad_value", np.float64(clip_value))

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
    return np.float64(norm_type), FLAGS[math.isinf(norm_type)]

"""Gradient norms, the clip coefficient and scaling, on lists of arrays on a GPU."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradkit._cuda.device import Array, Device, scratch
from gradkit._cuda.layout import contiguous, room_for, settle
from gradkit._cuda.loading import kernel
from gradkit._cuda.tensor_lists import KINDS, Macros, plan_of, run, start

_ORDERS = {1.0: "Sum", 2.0: "SumOfSquares", math.inf: "Largest"}
_ANY_ORDER = "SumOfPowers"
_PART = 3  # doubles: kernels/norm_orders.cuh
_FINISH = {False: 1024, True: 128}  # threads that join the partial results of a norm


def grad_norm(
    device: Device,
    grads: Sequence[Array],
    norm_type: float,
    out: Array,
    *,
    per_tensor: bool = False,
) -> None:
    """``out = (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
    plan = plan_of(device, grads)
    if not plan.chunks:
        out.fill(0)
        return
    p, order = np.float64(norm_type), _ORDERS.get(norm_type, _ANY_ORDER)
    parts = scratch(device, plan.chunks * _PART, "float64")
    for table in plan.tables:
        own = parts[table.chunks.start * _PART : table.chunks.stop * _PART]
        start(device, table, "norm", "norm_partials", p, own, ORDER=order)
    threads = _FINISH[per_tensor]
    for table in plan.tables if per_tensor else plan.tables[:1]:
        chosen = table.chunks if per_tensor else slice(0, plan.chunks)
        own = parts[chosen.start * _PART : chosen.stop * _PART]
        target = out[table.tensors] if per_tensor else out
        norms = min(target.size, device.multiprocessors * (2048 // threads))
        finish = kernel(device, "norm", "norm_finish", CAPACITY=table.capacity, ORDER=order)
        stride = np.int64(target.strides[0] if per_tensor else 0)
        count = np.uint32(chosen.stop - chosen.start)
        arguments = (table.argument, p, own, count, np.uint32(per_tensor), target, stride)
        finish((norms,), (threads,), arguments)


def norm_shares(device: Device, norm: Array, largest: Array, norm_type: float, out: Array) -> None:
    """``out = (norm / largest)^p``: what this rank adds to a norm over ranks.

    For infinity, where nothing is added, 0 or the NaN that a "max" may have dropped.
    """
    _on_norms(device, "norm_shares", (norm, largest), _order(norm_type), out)


def norm_of_shares(
    device: Device, total: Array, largest: Array, norm_type: float, out: Array
) -> None:
    """``out = largest * total^(1/p)``: the norm over all ranks."""
    _on_norms(device, "norm_of_shares", (total, largest), _order(norm_type), out)


def clip_coefficient(device: Device, norm: Array, max_norm: float, eps: float, out: Array) -> None:
    """``out = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
    limits = (np.float64(max_norm), np.float64(eps))
    _on_norms(device, "clip_coefficient", (norm,), limits, out)


def clip_by_norm(
    device: Device,
    grads: Sequence[Array],
    norm: Array,
    max_norm: float,
    eps: float,
    outs: Sequence[Array],
    *,
    zero_nonfinite: bool,
) -> None:
    """``outs = grads * clip_coefficient(norm)``, or zeros where the norm is not finite.

    The coefficient is computed in the launch that scales.
    """
    limits = (np.float64(max_norm), np.float64(eps))
    flags = (np.uint32(zero_nonfinite), np.uint32(outs is grads))
    plan = plan_of(device, grads, outs)
    run(device, plan, "scale", "clip_by_norm", norm, *limits, *flags)


def scale_grads(
    device: Device, grads: Sequence[Array], coefficient: Array | float, outs: Sequence[Array]
) -> None:
    """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
    in_place = outs is grads
    known = isinstance(coefficient, float)
    if known and coefficient == 1 and in_place:
        return
    array, number = (None, coefficient) if known else (coefficient, 1.0)
    plan = plan_of(device, grads, outs)
    arguments = (array, np.float64(number), np.uint32(in_place))
    run(device, plan, "scale", "scale_grads", *arguments)


def clip_grad_value(
    device: Device, grads: Sequence[Array], clip_value: float, outs: Sequence[Array]
) -> None:
    """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
    plan = plan_of(device, grads, outs)
    run(device, plan, "clip_value", "clip_grad_value", np.float64(clip_value))


def combinations() -> Iterator[tuple[str, Macros]]:
    """Every kernel file and its macros that these launchers can ask for."""
    for capacity in KINDS:
        for order in (*_ORDERS.values(), _ANY_ORDER):
            yield "norm", {"CAPACITY": capacity, "ORDER": order}
        yield "scale", {"CAPACITY": capacity}
        yield "clip_value", {"CAPACITY": capacity}
    yield "coefficients", {}


def _order(norm_type: float) -> tuple[Any, ...]:
    return np.float64(norm_type), np.uint32(math.isinf(norm_type))


def _on_norms(
    device: Device, name: str, norms: Sequence[Array], arguments: tuple[Any, ...], out: Array
) -> None:
    """Launch one of coefficients.cu's kernels, which take gapless arrays of one size."""
    if not out.size:
        return
    sources = [contiguous(device, device.xp.broadcast_to(norm, out.shape)) for norm in norms]
    room = room_for(device, out)
    blocks = min(-(-out.size // 256), device.multiprocessors * 8)
    launch = kernel(device, "coefficients", name)
    launch((blocks,), (256,), (*sources, np.int64(out.size), *arguments, room))
    settle(out, room)

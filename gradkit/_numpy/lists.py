"""Norms and clipping of lists of NumPy arrays."""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from gradkit._calls import lists as records
from gradkit._calls.roles import Numbers
from gradkit._numpy.blocks import Array
from gradkit._numpy.list_norms import (
    coefficient,
    coefficients,
    combined,
    digest_of,
    nonfinite,
    norm_of_states,
    parts_of,
    state_of,
    sum_of_states,
)
from gradkit._numpy.writes import side_by_side, store, whole

__all__ = [
    "clip_by_norm",
    "clip_coefficient",
    "clip_grad_value",
    "grad_norm",
    "head_of",
    "join_ranks",
    "joined_parts",
    "norm_of_ranks",
    "norm_parts",
    "rank_state",
    "scale_grads",
    "zero_grad",
]


@np.errstate(all="ignore")
def grad_norm(call: records.GradNorm) -> None:
    """``norm = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
    by, order = abs(float(call.scale)), call.norm_type
    each = [parts_of(grad, order) for grad in call.grads]
    if not call.per_tensor:
        each = [list(chain.from_iterable(each))]
    norms = [combined(parts, order, by) for parts in each]
    call.norm[...] = np.reshape(norms, call.norm.shape)
    if call.found_inf is not None:
        flags = [nonfinite(parts) for parts in each]
        call.found_inf[...] = np.reshape(flags, call.found_inf.shape)


@np.errstate(all="ignore")
def norm_parts(call: records.NormParts) -> None:
    """``parts[k] = (hi, lo, unit)``: what ``grad_norm`` adds up, before the root."""
    each = [parts_of(grad, call.norm_type) for grad in call.grads]
    if call.copies is not None:
        counted = zip(each, call.copies, strict=True)
        each = [[(unit, total / count) for unit, total in parts] for parts, count in counted]
    if not call.per_tensor:
        each = [list(chain.from_iterable(each))]
    for row, parts in zip(call.parts, each, strict=True):
        row[...] = state_of(parts, call.norm_type)


@np.errstate(all="ignore")
def joined_parts(parts: Array, places: Array, count: int, norm_type: float) -> Array:
    """Rows of ``norm_parts`` joined to ``count`` ones: each belongs to the one at its place."""
    joined = np.zeros((count, parts.shape[1]))
    for k in range(count):
        joined[k] = sum_of_states(parts[places == k].T, norm_type)
    return joined


@np.errstate(all="ignore")
def norm_of_ranks(
    parts: Array, scale: float, norm_type: float, norm: Array, found_inf: Array | None
) -> None:
    """The norms of all ranks' gradients, from the rows ``parts[rank, norm]`` of ``norm_parts``.

    Gradients are to be multiplied by ``scale``.
    """
    norms = [norm_of_states(parts[:, k].T, abs(scale), norm_type) for k in range(norm.size)]
    norm[...] = np.reshape(norms, norm.shape)
    if found_inf is not None:
        found_inf[...] = (~np.isfinite(parts[:, :, 0])).any(axis=0).reshape(found_inf.shape)


def rank_state(call: records.RankState) -> None:
    """``state = (0, digest, numbers, hi, lo, scale of the sums)``."""
    call.state[:3] = head_of(call)
    parts = Numbers(call.state[3:].reshape(1, 3))
    norm_parts(
        records.NormParts(
            grads=call.grads, norm_type=call.norm_type, parts=parts, copies=call.copies
        )
    )


def head_of(call: records.RankState) -> tuple[float, float, float]:
    """The first three numbers of a rank's state."""
    return 0.0, call.digest, digest_of(float(call.scale), float(call.max_norm))


def join_ranks(call: records.JoinRanks) -> None:
    """The norm of all ranks' gradients, unless one failed; and what a clip is to use."""
    states, by, most = call.states, float(call.scale), float(call.max_norm)
    statuses, digests, numbers = states[:, :3].T
    faults_here = np.where(
        digests != call.digest, 2, np.where(numbers != digest_of(by, most), 3, 0)
    )
    faults_here[statuses != 0] = 1
    if faults_here.any():
        call.faults[...] = np.where(call.faults == 0, faults_here, call.faults)
        call.factors[...] = 0, 1, math.inf
        if call.fresh:
            call.norm[...] = math.nan
        return
    norm_of_ranks(states[:, np.newaxis, 3:], by, call.norm_type, call.norm, call.found_inf)
    call.factors[...] = float(call.norm), by, most


@np.errstate(all="ignore")
def clip_coefficient(call: records.ClipCoefficient) -> None:
    """``coefficient = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
    call.coefficient[...] = coefficients(call.norm, np.float64(call.max_norm), call.eps)


def clip_by_norm(call: records.ClipByNorm) -> None:
    """``outs = grads * (scale * coefficient)``, or zeros if the norm is not finite."""
    norm, by = float(call.norm), float(call.scale)  # the host has read the scale
    if call.zero_nonfinite and not math.isfinite(norm):
        _zero(call.outs)
        return
    factor = coefficient(norm, float(call.max_norm), call.eps)
    # If the norm is infinite, finite gradients become 0, though the scale is what made it so.
    _scale(call.grads, factor * by if factor else factor, call.outs)


def scale_grads(call: records.ScaleGrads) -> None:
    """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
    _scale(call.grads, float(call.coefficient), call.outs)


def clip_grad_value(call: records.ClipGradValue) -> None:
    """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
    with whole():
        for grad, out in side_by_side(call.grads, call.outs):
            limit = np.empty((), out.dtype)
            store(np.array(call.clip_value), limit)
            most = float(limit)
            store(np.clip(grad.astype(np.float64), -most, most), out)


def zero_grad(call: records.ZeroGrad) -> None:
    """Write +0 over every element, whatever it was."""
    _zero(call.grads)


def _scale(grads: Sequence[Array], factor: float, outs: Sequence[Array]) -> None:
    with whole():
        for grad, out in side_by_side(grads, outs):
            if factor == 1:
                out[...] = grad
            else:
                store(grad.astype(np.float64) * factor, out)


def _zero(arrays: Sequence[Array]) -> None:
    with whole():
        for array in arrays:
            array.fill(0)

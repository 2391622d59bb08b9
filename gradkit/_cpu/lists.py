"""Norms, clipping and accumulation of lists, compiled. Lists of arrays are lists of NumPy's."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import gradkit._cpu.compiled as compiled
from gradkit._calls import lists as records
from gradkit._calls.roles import Grads, Seed
from gradkit._numpy.at_random import key_of
from gradkit._numpy.block_clipping import unit_factors
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._numpy.list_norms import coefficient
from gradkit._numpy.lists import head_of
from gradkit._numpy.updates import adamw_numbers, count, next_step
from gradkit._numpy.writes import whole

__all__ = [
    "accumulate_grad",
    "accumulate_grad_v2",
    "accumulate_grads",
    "adamw_update",
    "clip_by_norm",
    "clip_grad_value",
    "clip_units",
    "ema_update",
    "grad_norm",
    "grad_stats",
    "keep_if",
    "norm_parts",
    "rank_state",
    "scale_grads",
    "sgd_update",
    "spike_guard_update",
    "unit_norms",
    "zero_grad",
]


def grad_norm(call: records.GradNorm) -> None:
    """``norm = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
    by = abs(float(call.scale))
    results = call.norm, call.found_inf
    compiled.norms(call.grads, call.norm_type, by, call.per_tensor, *results)


def norm_parts(call: records.NormParts) -> None:
    """``parts[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
    each, copies = call.per_tensor, call.copies
    compiled.norm_parts(call.grads, call.norm_type, each, copies, call.parts)


def grad_stats(call: records.ListStats) -> None:
    """A row of ``stats`` for each gradient, or of ``parts`` what it is computed from."""
    if call.parts is not None:
        compiled.stats(call.grads, True, call.parts)
    if call.stats is not None:
        carray = call.stats.flags.carray
        stats = call.stats if carray else np.empty(call.stats.shape)
        compiled.stats(call.grads, False, stats)
        if not carray:
            call.stats[...] = stats


def rank_state(call: records.RankState) -> None:
    """``state = (0, digest, numbers, hi, lo, scale of the sums)``."""
    call.state[:3] = head_of(call)
    copies, parts = call.copies, call.state[3:]
    compiled.norm_parts(call.grads, call.norm_type, False, copies, parts)


def clip_by_norm(call: records.ClipByNorm) -> None:
    """``outs = grads * (scale * coefficient)``, or zeros if the norm is not finite."""
    norm, by = float(call.norm), float(call.scale)  # the host has read the scale
    if call.zero_nonfinite and not math.isfinite(norm):
        compiled.zero(call.outs)
        return
    limited = coefficient(norm, float(call.max_norm), call.eps)
    # If the norm is infinite, finite gradients become 0, though the scale is what made it so.
    factor = limited * by if limited else limited
    if factor != 1 or call.outs is not call.grads:
        compiled.scale(call.grads, call.outs, factor)


def scale_grads(call: records.ScaleGrads) -> None:
    """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
    compiled.scale(call.grads, call.outs, float(call.coefficient))


def clip_grad_value(call: records.ClipGradValue) -> None:
    """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
    compiled.clamp(call.grads, call.outs, call.clip_value)


def zero_grad(call: records.ZeroGrad) -> None:
    """Write +0 over every element, whatever it was."""
    compiled.zero(call.grads)


def unit_norms(call: records.UnitNorms) -> None:
    """``norms = (sum |g|^p)^(1/p)`` for each unit of each gradient, or of the mean of |g|^p."""
    order, mean = call.norm_type, call.mean
    compiled.unit_norms(call.grads, call.axes, order, mean, call.norms)


def clip_units(call: records.ClipUnits) -> None:
    """Scale each unit to ``max_norm`` if its norm is larger."""
    with np.errstate(all="ignore"):
        factors = unit_factors(call)
    compiled.scale_units(call.grads, call.outs, call.axes, factors)


def accumulate_grad(call: records.AccumulateGrad) -> None:
    """``buffer += scale * grad`` (broadcast) if ``do_update``; with a scale, in float64."""
    if call.do_update:
        scale = 1.0 if call.scale is None else call.scale
        compiled.accumulate([call.buffer], [call.grad], scale, False, None, None)


def accumulate_grad_v2(call: records.AccumulateGradV2) -> None:
    """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
    overwrite = bool(call.overwrite)
    compiled.accumulate([call.buffer], [call.grad], 1.0, overwrite, None, None)


def accumulate_grads(call: records.AccumulateGrads) -> None:
    """Each ``buffer += scale * grad``, or ``= scale * grad``; then the norm of the buffers."""
    norms = call.norm, call.grad_norm
    numbers = float(call.scale), bool(call.overwrite)
    if call.do_update and call.compensation is None and call.seed is None:
        compiled.accumulate(call.buffers, call.grads, *numbers, *norms)
        return
    if call.grad_norm is not None:
        compiled.norms(call.grads, 2.0, 1.0, False, call.grad_norm, None)
    if call.do_update and call.compensation is not None:
        compiled.compensate(call.buffers, call.grads, call.compensation, *numbers)
    elif call.do_update:
        with _rounded(call.buffers, call.seed, call.offsets) as (buffers, *counters):
            compiled.accumulate_at_random(buffers, call.grads, *numbers, *counters)
    if call.norm is not None:
        compiled.norms(call.buffers, 2.0, 1.0, False, call.norm, None)


def ema_update(call: records.EmaUpdate) -> None:
    """Each ``average += (1 - decay) * (param - average)``; 1 keeps every bit and 0 copies."""
    decay = float(call.decay)
    if decay == 0:
        compiled.accumulate(call.averages, call.params, 1.0, True, None, None)
    elif decay != 1:
        compiled.average(call.averages, call.params, decay)


def keep_if(call: records.KeepIf) -> None:
    """``old = new``, byte for byte, if the verdict is true."""
    if not call.verdict:
        return
    wide, source = [], []
    with Uninterrupted():
        if isinstance(call.old, compiled.Table) and isinstance(call.new, compiled.Table):
            compiled.accumulate(call.old, call.new, 1.0, True, None, None)
            return
        for old, new in zip(call.old, call.new, strict=True):
            if old.itemsize == 1:  # compiled code has no such dtype
                np.copyto(old, new)
            else:
                wide.append(old)
                source.append(new)
        compiled.accumulate(wide, source, 1.0, True, None, None)


def spike_guard_update(call: records.SpikeGuardUpdate) -> None:
    """Write each state after its norm, and the limit for it; ``next_state`` may be ``state``."""
    states = np.array(call.state, np.float64, order="C")
    norms = np.ascontiguousarray(call.norm, np.float64)
    limits = np.empty(norms.shape)
    rule = call.decay, call.threshold, call.warmup, call.clips
    compiled.spike_guard(states, norms, limits, *rule)
    call.next_state[...], call.max_norm[...] = states, limits.reshape(call.max_norm.shape)


def adamw_update(call: records.AdamwUpdate) -> None:
    """If ``verdict``, parameters after a step of AdamW, and its moments."""
    if not call.verdict:
        return
    number = next_step(call.step)
    numbers = np.array(adamw_numbers(call, number))
    lists = call.grads, call.moments, call.variances
    with _rounded(call.params, call.seed, call.offsets) as (params, *counters):
        compiled.adamw(params, *lists, numbers, *counters)
        count(call.step, number)


def sgd_update(call: records.SgdUpdate) -> None:
    """If ``verdict``, parameters after a step of SGD, and their momenta."""
    if not call.verdict:
        return
    numbers = float(call.lr), float(call.scale), call.momentum, call.weight_decay, call.nesterov
    with _rounded(call.params, call.seed, call.offsets) as (params, *counters):
        compiled.sgd(params, call.grads, call.momenta, *numbers, *counters)


@contextmanager
def _rounded(arrays: Grads, seed: Seed | None, offsets: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """The arrays to write, and the seed of random rounding, if any.

    Compiled loops count elements in the order of memory, which then must be that of an array.
    """
    if seed is None:
        with Uninterrupted():
            yield arrays, 0, None
        return
    contiguous = [a if a.flags.c_contiguous else a.copy(order="C") for a in arrays]
    with whole():
        yield contiguous, key_of(seed), offsets
        for array, written in zip(arrays, contiguous, strict=True):
            if written is not array:
                array[...] = written

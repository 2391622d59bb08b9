"""Batch norm over ranks: statistics and sums of each channel are those of the whole batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gradkit._backend import FLOAT64, Array
from gradkit._calls import channels, checks, engines
from gradkit._calls.backend import Backend
from gradkit._open.dispatch import run, write
from gradkit._ranks.collective import Collective
from gradkit._ranks.groups import Group

_Norm: TypeAlias = channels.BatchNorm | channels.BatchNormGrad
# Fields that may differ between ranks: the layout of a part, and what computes it.
_OWN = {"channel_axis", "engine"}
_Compute: TypeAlias = Callable[[Collective, Any, Backend], None]


def run_over_ranks(call: _Norm, out: Any, group: Group | None, compute: _Compute) -> Any:
    """The results of a call that the ranks of a group make together."""
    if group is None:
        return run(call, out)
    with Collective(group) as collective:
        if collective.alone:
            return run(call, out)
        engines.check_over_ranks(call.engine)
        return run(call, out, partial(compute, collective))


def forward_over_ranks(collective: Collective, call: channels.BatchNorm, backend: Backend) -> None:
    """Write ``y``, ``mean`` and ``inv_std``, and move running statistics."""
    mean, var, count = _stats_of_ranks(collective, call, backend)
    if mean.size:
        checks.enough(count, "x has one element per channel on all ranks together")
    fields = {name: getattr(call, name) for name in ("x", "scale", "bias", "channel_axis", "eps")}
    apply = channels.BatchNormApply(**fields, mean=mean, var=var)
    write(apply, call.y, call.mean, call.inv_std, backend=backend)
    if call.running_mean is not None:
        running = call.running_mean, call.running_var
        update: Any = channels.UpdateRunningStatistics(
            running_mean=running[0],
            running_var=running[1],
            mean=mean,
            var=var,
            count=count,
            momentum=call.momentum,
        )
        write(update, *running, backend=backend)
    engines.ran("native")


def gradient_over_ranks(
    collective: Collective, call: channels.BatchNormGrad, backend: Backend
) -> None:
    """Write ``dx``, ``dscale`` and ``dbias``; nothing before all ranks have met.

    ``sums_here`` becomes ``dscale`` and ``dbias``.
    """
    fields = {name: getattr(call, name) for name in ("dy", "x", "mean", "inv_std", "channel_axis")}
    sums_here = backend.empty((2, call.x.shape[call.channel_axis]), FLOAT64)
    write(channels.BatchNormGradSums(**fields), sums_here[0], sums_here[1], backend=backend)
    rows = _gathered(collective, "batch_norm_grad", call, sums_here, backend)
    if call.dx is not None:
        with np.errstate(all="ignore"):  # infinities of two signs
            totals = rows.sum(axis=0)
        sums = backend.as_float64(totals[:-1].reshape(sums_here.shape))
        apply = channels.BatchNormGradApply(
            **fields, scale=call.scale, sum_dy_xhat=sums[0], sum_dy=sums[1], count=float(totals[-1])
        )
        write(apply, call.dx, backend=backend)
    for gradient, row in zip((call.dscale, call.dbias), sums_here, strict=True):
        if gradient is not None:
            gradient[...] = row
    engines.ran("native")


def _stats_of_ranks(
    collective: Collective, call: channels.BatchNorm, backend: Backend
) -> tuple[Array, Array, float]:
    """Mean and variance of each channel over all ranks, in float64; how many elements each has."""
    stats_here = backend.empty((2, call.x.shape[call.channel_axis]), FLOAT64)
    stats = channels.BatchNormStats(x=call.x, channel_axis=call.channel_axis)
    write(stats, stats_here[0], stats_here[1], backend=backend)
    rows = _gathered(collective, "batch_norm", call, stats_here, backend)
    means, variances = rows[:, :-1].reshape(len(rows), 2, -1).transpose(1, 0, 2)
    together, count = np.empty(stats_here.shape), np.empty(())
    combine: Any = channels.CombineStats(means=means, variances=variances, counts=rows[:, -1])
    write(combine, together[0], together[1], count)
    wide = backend.as_float64(together)
    return wide[0], wide[1], float(count)


def _gathered(
    collective: Collective, name: str, call: _Norm, numbers: Array, backend: Backend
) -> Array:
    """Every rank's two numbers a channel, and how many elements a channel has there."""
    axis = call.channel_axis
    state = np.append(backend.read(numbers), float(channels.elements(call.x, axis)))
    return collective.gather(f"{name}({_call_text(call)}) of {call.x.shape[axis]} channels", state)


def _call_text(call: _Norm) -> str:
    """The arrays and numbers of a call as text: ranks agree on all but their own."""
    numbers = [name for name in (*call.numbers, *call.passing) if name not in _OWN]
    arrays = [name for name in sorted(call.optional) if getattr(call, name) is not None]
    return ", ".join([*arrays, *(f"{name}={getattr(call, name)!r}" for name in numbers)])

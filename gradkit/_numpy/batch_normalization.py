"""Batch norm on NumPy arrays, in float64: statistics of each channel over all other axes.

With ``xhat = (x - mean) * inv_std`` and n elements a channel::

    dscale = sum of dy * xhat        dbias = sum of dy
    dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)

The mean is subtracted before anything is multiplied: ``sum(dy * x)`` cancels if the mean is much
larger than the standard deviation.
"""

from typing import Any, TypeAlias

import numpy as np

from gradkit._backend import Engine
from gradkit._calls import channels as records
from gradkit._numpy.blocks import Array, Index, blocks, by_halves
from gradkit._numpy.channels import Cells, Moments, load
from gradkit._numpy.writes import store

__all__ = [
    "batch_norm",
    "batch_norm_apply",
    "batch_norm_grad",
    "batch_norm_grad_apply",
    "batch_norm_grad_sums",
    "batch_norm_inference",
    "batch_norm_inference_grad",
    "batch_norm_stats",
    "combine_stats",
    "update_running_statistics",
]

_Gradient: TypeAlias = records.BatchNormGrad | records.BatchNormGradApply
_Pair: TypeAlias = tuple[Array, Array]  # a mean and a variance, or those of dy * xhat and of dy

_RANK_NUMBERS = 1 << 17  # means of all ranks that are combined at a time


@np.errstate(all="ignore")
def batch_norm(call: records.BatchNorm) -> Engine:
    """Write ``y``, ``mean`` and ``inv_std``, and move running statistics; ``y`` may be ``x``."""
    x, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        moments = channels.moments(x, channel)
        inv_std = 1 / np.sqrt(moments.variance + call.eps)
        store(moments.mean, call.mean[channel])
        store(inv_std, call.inv_std[channel])
        _normalize(call, channels, channel, moments, inv_std)
        if call.running_mean is not None and call.running_var is not None:
            moved = call.running_mean[channel], call.running_var[channel]
            batch = moments.mean, moments.variance
            _move(moved, batch, channels.size, call.momentum, moved)
    return "native"


@np.errstate(all="ignore")
def batch_norm_grad(call: records.BatchNormGrad) -> Engine:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    _, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        statistics = load(call.mean, channel), load(call.inv_std, channel)
        sums = _gradient_sums(call, channels, channel, *statistics)
        of_product, of_dy = sums
        if call.dx is not None:
            means = of_product / channels.size, of_dy / channels.size
            _differentiate(call, channels, channel, means, call.dx)
        _store_sums(call, channel, sums)
    return "native"


@np.errstate(all="ignore")
def batch_norm_inference(call: records.BatchNormInference) -> Engine:
    """Write ``y``, which may be ``x``."""
    _, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        moments = Moments(load(call.mean, channel), np.zeros(1), load(call.var, channel))
        inv_std = 1 / np.sqrt(moments.variance + call.eps)
        _normalize(call, channels, channel, moments, inv_std)
    return "native"


@np.errstate(all="ignore")
def batch_norm_inference_grad(call: records.BatchNormInferenceGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    dy, channels = _by_channel(call.dy, call)
    for channel in channels.cells:
        inv_std = 1 / np.sqrt(load(call.var, channel) + call.eps)
        if call.dscale is not None or call.dbias is not None:
            mean = load(call.mean, channel)
            _store_sums(call, channel, _gradient_sums(call, channels, channel, mean, inv_std))
        if call.dx is None:
            continue
        dx, _ = _by_channel(call.dx, call)
        factor = channels.column(inv_std * _parameter(call.scale, 1.0, channel))
        for element in channels.elements:
            index = channel + element
            store(load(dy, index) * factor, dx[index])


@np.errstate(all="ignore")
def update_running_statistics(call: records.UpdateRunningStatistics) -> None:
    """Write ``next_mean`` and ``next_var``, which may be the present ones."""
    for part in blocks(call.mean.shape, _RANK_NUMBERS):
        present = call.running_mean[part], call.running_var[part]
        moved = call.next_mean[part], call.next_var[part]
        _move(present, (call.mean[part], call.var[part]), call.count, call.momentum, moved)


@np.errstate(all="ignore")
def batch_norm_stats(call: records.BatchNormStats) -> None:
    """Write each channel's ``mean`` and biased ``var``, in float64."""
    x, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        moments = channels.moments(x, channel)
        call.mean[channel], call.var[channel] = moments.mean, moments.variance


@np.errstate(all="ignore")
def combine_stats(call: records.CombineStats) -> None:
    """Write the statistics of all ranks' channels, from the rows ``means[rank]``."""
    present = call.counts != 0
    total = by_halves(call.counts[present]).sum()
    call.total[...] = total
    if not present.any():
        call.mean[...] = call.var[...] = 0
        return
    weights = (call.counts[present] / total)[:, None]
    for (part,) in blocks(call.mean.shape, max(1, _RANK_NUMBERS // len(weights))):
        rows = call.means[:, part][present], call.variances[:, part][present]
        call.mean[part], call.var[part] = _combined(*rows, weights)


@np.errstate(all="ignore")
def batch_norm_apply(call: records.BatchNormApply) -> None:
    """Write ``y``, ``saved_mean`` and ``inv_std``; ``y`` may be ``x``."""
    _, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        moments = Moments(call.mean[channel], np.zeros(1), call.var[channel])
        inv_std = 1 / np.sqrt(moments.variance + call.eps)
        store(moments.mean, call.saved_mean[channel])
        store(inv_std, call.inv_std[channel])
        _normalize(call, channels, channel, moments, inv_std)


@np.errstate(all="ignore")
def batch_norm_grad_sums(call: records.BatchNormGradSums) -> None:
    """Write the sums of ``dy * xhat`` and of ``dy`` over each channel, in float64."""
    _, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        statistics = load(call.mean, channel), load(call.inv_std, channel)
        sums = _gradient_sums(call, channels, channel, *statistics)
        call.sum_dy_xhat[channel], call.sum_dy[channel] = sums


@np.errstate(all="ignore")
def batch_norm_grad_apply(call: records.BatchNormGradApply) -> None:
    """Write ``dx``, from the sums over ``count`` elements a channel; it may be ``dy``."""
    _, channels = _by_channel(call.x, call)
    for channel in channels.cells:
        means = call.sum_dy_xhat[channel] / call.count, call.sum_dy[channel] / call.count
        _differentiate(call, channels, channel, means, call.dx)


def _by_channel(array: Array, call: Any) -> tuple[Array, Cells]:
    """An array with its channels first, and its blocks."""
    view = np.moveaxis(array, call.channel_axis, 0)
    return view, Cells(view.shape, 1)


def _parameter(numbers: Array | None, absent: float, channel: Index) -> Array:
    """Return the numbers of some channels, in float64."""
    return np.full(1, absent) if numbers is None else load(numbers, channel)


def _normalize(
    call: Any, channels: Cells, channel: Index, moments: Moments, inv_std: Array
) -> None:
    """Write y of some channels."""
    (x, _), (y, _) = _by_channel(call.x, call), _by_channel(call.y, call)
    centre, rest = channels.column(moments.centre), channels.column(moments.rest)
    factor = channels.column(inv_std * _parameter(call.scale, 1.0, channel))
    bias = channels.column(_parameter(call.bias, -0.0, channel))  # -0: which changes no number
    for element in channels.elements:
        index = channel + element
        store((load(x, index) - centre - rest) * factor + bias, y[index])


def _gradient_sums(
    call: Any, channels: Cells, channel: Index, mean: Array, inv_std: Array
) -> _Pair:
    """The sums of dy * xhat and of dy over some channels."""
    (dy, _), (x, _) = _by_channel(call.dy, call), _by_channel(call.x, call)
    centre, factor = channels.column(mean), channels.column(inv_std)

    def product(element: Index) -> Array:
        index = channel + element
        xhat = (load(x, index) - centre) * factor
        return load(dy, index) * xhat

    return channels.sum(product), channels.sum(lambda element: load(dy, channel + element))


def _differentiate(
    call: _Gradient, channels: Cells, channel: Index, means: _Pair, dx: Array
) -> None:
    """Write dx of some channels, from the means of dy * xhat and of dy."""
    of_product, of_dy = map(channels.column, means)
    dy, x, dx = (_by_channel(array, call)[0] for array in (call.dy, call.x, dx))
    centre, inv_std = (channels.column(load(each, channel)) for each in (call.mean, call.inv_std))
    outer = inv_std * channels.column(_parameter(call.scale, 1.0, channel))
    for element in channels.elements:
        index = channel + element
        xhat = (load(x, index) - centre) * inv_std
        rest = xhat * of_product + of_dy
        store((load(dy, index) - rest) * outer, dx[index])


def _store_sums(
    call: records.BatchNormGrad | records.BatchNormInferenceGrad, channel: Index, sums: _Pair
) -> None:
    """Write dscale and dbias of some channels, if they are wanted."""
    for gradient, total in zip((call.dscale, call.dbias), sums, strict=True):
        if gradient is not None:
            store(total, gradient[channel])


def _move(now: _Pair, batch: _Pair, count: Any, momentum: float, to: _Pair) -> None:
    """Write the next running statistics, from a batch's mean and biased variance in float64."""
    (mean, var), n = batch, float(count)
    weight = 0.0 if n <= 1 else momentum
    unbiased = var if weight == 0 else var * (n / (n - 1))
    for old, new, target in zip(now, (mean, unbiased), to, strict=True):
        store(_moved(old, new, weight), target)


def _moved(of: Array, to: Array, weight: float) -> Array:
    """``(1 - weight) * of + weight * to``, of which what has no weight is left out."""
    if weight in (0, 1):
        return (to if weight else of).astype(np.float64)
    return (1 - weight) * of.astype(np.float64) + weight * to


def _combined(means: Array, variances: Array, weights: Array) -> tuple[Array, Array]:
    """A weighted mean about the first rank's, so that equal means give just that mean.

    In halves, so that no difference overflows. Weights are at most 1, so that nothing does which
    the result does not.
    """
    half = by_halves(weights * (0.5 * means - 0.5 * means[0]))[0]
    middle = means[0] + half + half
    apart = means - middle
    return middle, by_halves(weights * variances + weights * apart * apart)[0]

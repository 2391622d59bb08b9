"""Batch norm on NumPy arrays: statistics of each channel over all other axes.

With ``xhat = (x - mean) * inv_std`` and n elements a channel::

    dscale = sum of dy * xhat        dbias = sum of dy
    dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradkit._backend import Engine
from gradkit._calls.channels import (
    BatchNorm,
    BatchNormApply,
    BatchNormGrad,
    BatchNormGradApply,
    BatchNormGradSums,
    BatchNormInference,
    BatchNormInferenceGrad,
    BatchNormStats,
    CombineStats,
    UpdateRunningStatistics,
)
from gradkit._numpy import casts, tuning
from gradkit._numpy.blocks import Array, Index, blocks, by_halves
from gradkit._numpy.channels import Channels
from gradkit._numpy.moments import lost, low_that_counts

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

_FLOAT64 = np.dtype(np.float64)


@np.errstate(all="ignore")
def batch_norm(call: BatchNorm) -> Engine:
    """Write ``y``, ``mean`` and ``inv_std``, and move running statistics; ``y`` may be ``x``."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.x, call.y), call.channel_axis, part)
        centre, variance = _moments(channels, call.eps)
        exact = 1 / np.sqrt(variance + call.eps)
        call.mean[part], call.inv_std[part] = centre, exact
        _normalise(channels, centre, exact, cut(call.scale, part), cut(call.bias, part))
        if call.running_mean is not None and call.running_var is not None:
            moved = call.running_mean[part], call.running_var[part]
            _move(*moved, centre, variance, channels.size, call.momentum, *moved)
    return "native"


@np.errstate(all="ignore")
def batch_norm_grad(call: BatchNormGrad) -> Engine:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.dy, call.x, call.dx), call.channel_axis, part)
        statistics = call.mean[part], call.inv_std[part]
        sums = _gradient_sums(channels, *statistics)
        _write_gradient(channels, cut(call.scale, part), *statistics, *(sums / channels.size))
        for gradient, total in zip((call.dscale, call.dbias), sums, strict=True):
            if gradient is not None:
                gradient[part] = total
    return "native"


@np.errstate(all="ignore")
def batch_norm_inference(call: BatchNormInference) -> Engine:
    """Write ``y``, which may be ``x``."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.x, call.y), call.channel_axis, part)
        known = call.mean[part].astype(np.float64), _inv_std(call.var[part], call.eps)
        _normalise(channels, *known, cut(call.scale, part), cut(call.bias, part))
    return "native"


@np.errstate(all="ignore")
def batch_norm_inference_grad(call: BatchNormInferenceGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.dy, call.x, call.dx), call.channel_axis, part)
        statistics = call.mean[part], _inv_std(call.var[part], call.eps)
        if call.scale is None or call.dscale is None or call.dbias is None:
            _write(channels, statistics[1])
        else:
            sums = _write_and_sum(channels, call.scale[part], *statistics)
            call.dscale[part], call.dbias[part] = sums


@np.errstate(all="ignore")
def update_running_statistics(call: UpdateRunningStatistics) -> None:
    """Write ``next_mean`` and ``next_var``, which may be the present ones."""
    present, batch = (call.running_mean, call.running_var), (call.mean, call.var)
    _move(*present, *batch, call.count, call.momentum, call.next_mean, call.next_var)


@np.errstate(all="ignore")
def batch_norm_stats(call: BatchNormStats) -> None:
    """Write each channel's ``mean`` and biased ``var``, in float64."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.x,), call.channel_axis, part)
        # No eps is known, so that no variance is too small to count.
        call.mean[part], call.var[part] = _moments(channels, 0.0)


@np.errstate(all="ignore")
def combine_stats(call: CombineStats) -> None:
    """Write the statistics of all ranks' channels, from the rows ``means[rank]``."""
    held = call.counts != 0
    total = call.counts[held].sum()
    call.count[...] = total
    if not held.any():
        call.mean[...] = call.var[...] = 0
        return
    weights = (call.counts[held] / total)[:, None]
    for (part,) in blocks(call.mean.shape, max(1, tuning.RANK_NUMBERS // len(weights))):
        rows = call.means[:, part][held], call.variances[:, part][held]
        call.mean[part], call.var[part] = _combined(*rows, weights)


@np.errstate(all="ignore")
def batch_norm_apply(call: BatchNormApply) -> None:
    """Write ``y``, ``saved_mean`` and ``inv_std``; ``y`` may be ``x``."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.x, call.y), call.channel_axis, part)
        mean, exact = call.mean[part], 1 / np.sqrt(call.var[part] + call.eps)
        call.saved_mean[part], call.inv_std[part] = mean, exact
        _normalise(channels, mean, exact, cut(call.scale, part), cut(call.bias, part))


@np.errstate(all="ignore")
def batch_norm_grad_sums(call: BatchNormGradSums) -> None:
    """Write the sums of ``dy * xhat`` and of ``dy`` over each channel, in float64."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.dy, call.x), call.channel_axis, part)
        sums = _gradient_sums(channels, call.mean[part], call.inv_std[part])
        call.sum_dy_xhat[part], call.sum_dy[part] = sums


@np.errstate(all="ignore")
def batch_norm_grad_apply(call: BatchNormGradApply) -> None:
    """Write ``dx``, from the sums over ``count`` elements a channel; it may be ``dy``."""
    for part in _channel_parts(call.x, call.channel_axis):
        channels = Channels((call.dy, call.x, call.dx), call.channel_axis, part)
        statistics = call.mean[part], call.inv_std[part]
        means = call.sum_dy_xhat[part] / call.count, call.sum_dy[part] / call.count
        _write_gradient(channels, cut(call.scale, part), *statistics, *means)


def _moments(channels: Channels, eps: float) -> tuple[Array, Array]:
    """Mean and variance of each channel of (x, ...), the variance to be added to ``eps``."""
    x = channels.arrays[0]
    found = channels.moments(x, channels.dtype)
    if channels.dtype == _FLOAT64:
        finite = np.isfinite(found.variance)
        if finite.all():
            return found.mean, found.variance
        # Sums, differences or squares overflowed float64, or x is not finite.
        small = channels.moments(x, _FLOAT64, factor=tuning.SMALL_ENOUGH)
        mean = np.where(finite, found.mean, small.mean / tuning.SMALL_ENOUGH)
        square = small.variance / tuning.SMALL_ENOUGH / tuning.SMALL_ENOUGH
        return mean, np.where(finite, found.variance, square)
    if (gone := lost(found.variance, eps)).any():
        found = found.replaced(gone, channels.moments(x, _FLOAT64))
    return found.mean, found.variance


def _normalise(
    channels: Channels, centre: Array, exact: Array, scale: Array | None, bias: Array | None
) -> None:
    """Write y, of channels of (x, y), by the mean and the inv_std of each, in float64."""
    x, y = channels.arrays
    rounded = centre.astype(channels.dtype)
    rest = low_that_counts(rounded, centre - rounded, exact)
    high, low = channels.vector(rounded), None if rest is None else channels.vector(rest)
    factor = channels.vector(exact if scale is None else exact * scale)
    biases = None if bias is None else channels.vector(bias)

    def write(index: Index, rooms: Sequence[Array]) -> None:
        at = channels.of(index)
        tile = channels.load(x[index], rooms[0])
        out = channels.target(y[index], channels.shaped(rooms[1], tile))
        np.subtract(tile, high[at], out=out)
        if low is not None:
            out -= low[at]
        out *= factor[at]
        if biases is not None:
            out += biases[at]
        channels.store(out, y[index], rooms[0])

    channels.for_each_block(write)


def _gradient_sums(channels: Channels, mean: Array, inv_std: Array) -> Array:
    """The sums of dy * xhat and of dy over each channel of (dy, x, ...)."""
    dy, x = channels.arrays[:2]
    centre, factor = channels.vector(mean), channels.vector(inv_std)

    def sums(index: Index, rooms: Sequence[Array]) -> tuple[Array, Array]:
        at = channels.of(index)
        gradient, tile = channels.load(dy[index], rooms[0]), channels.load(x[index], rooms[1])
        product = np.subtract(tile, centre[at], out=channels.shaped(rooms[1], tile))
        product *= factor[at]
        product *= gradient
        return channels.sums(product), channels.sums(gradient)

    return channels.total(sums)


def _write_gradient(
    channels: Channels,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    of_product: Array,
    of_dy: Array,
) -> None:
    """Write dx, of channels of (dy, x, dx), from the means of dy * xhat and of dy."""
    dy, x, dx = channels.arrays
    centre, offset = channels.vector(mean), channels.vector(of_dy)
    slope = channels.vector(inv_std * of_product)
    outer = channels.vector(inv_std if scale is None else inv_std * scale.astype(np.float64))

    def write(index: Index, rooms: Sequence[Array]) -> None:
        at = channels.of(index)
        tile = channels.load(x[index], rooms[1])
        rest = np.subtract(tile, centre[at], out=channels.shaped(rooms[1], tile))
        rest *= slope[at]
        rest += offset[at]
        np.subtract(channels.load(dy[index], rooms[0]), rest, out=rest)
        out = channels.target(dx[index], rest)
        np.multiply(rest, outer[at], out=out)
        channels.store(out, dx[index], rooms[0])

    channels.for_each_block(write)


def _write(channels: Channels, inv_std: Array) -> None:
    """Write dx alone; x is not read."""
    dy, _, dx = channels.arrays
    outer = channels.vector(inv_std)

    def write(index: Index, rooms: Sequence[Array]) -> None:
        tile = channels.load(dy[index], rooms[0])
        out = channels.target(dx[index], channels.shaped(rooms[1], tile))
        np.multiply(tile, outer[channels.of(index)], out=out)
        channels.store(out, dx[index], rooms[0])

    channels.for_each_block(write)


def _write_and_sum(channels: Channels, scale: Array, mean: Array, inv_std: Array) -> Array:
    """Write dx, and return the sums of dy * xhat and of dy: one pass over the arrays."""
    dy, x, dx = channels.arrays
    centre, factor = channels.vector(mean), channels.vector(inv_std)
    outer = channels.vector(inv_std * scale.astype(np.float64))

    def sums(index: Index, rooms: Sequence[Array]) -> tuple[Array, Array]:
        at = channels.of(index)
        gradient, tile = channels.load(dy[index], rooms[0]), channels.load(x[index], rooms[1])
        product = np.subtract(tile, centre[at], out=channels.shaped(rooms[1], tile))
        product *= factor[at]
        product *= gradient
        found = channels.sums(product), channels.sums(gradient)
        out = channels.target(dx[index], product)
        np.multiply(gradient, outer[at], out=out)  # dx may be dy, which has been summed
        channels.store(out, dx[index], rooms[0])
        return found

    return channels.total(sums)


def _inv_std(var: Array, eps: float) -> Array:
    exact: Array = 1 / np.sqrt(var.astype(np.float64) + eps)
    return exact


def _move(
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    count: Any,
    momentum: float,
    next_mean: Array,
    next_var: Array,
) -> None:
    """Write the next running statistics, from a batch's mean and biased variance in float64."""
    n = float(count)
    weight = 0.0 if n <= 1 else momentum
    room = np.empty(mean.size)
    casts.narrow(_moved(running_mean, mean, weight), next_mean, room)
    unbiased = var if weight == 0 else var * (n / (n - 1))
    casts.narrow(_moved(running_var, unbiased, weight), next_var, room)


def _moved(of: Array, to: Array, weight: float) -> Array:
    """``(1 - weight) * of + weight * to``, of which what has no weight is left out."""
    if weight in (0, 1):
        return to if weight else of
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


def _channel_parts(x: Array, axis: int) -> list[slice]:
    """Runs of channels few enough that what is summed for each stays small."""
    return [index[0] for index in blocks((x.shape[axis],), tuning.CHANNEL_PART)]


def cut(values: Any, part: slice) -> Any:
    """Those of some channels of one number a channel, if there are any."""
    return None if values is None else values[part]

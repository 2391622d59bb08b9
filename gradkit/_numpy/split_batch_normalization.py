"""Batch norm in steps on NumPy arrays, and the statistics of several ranks' batches together."""

import numpy as np

from gradkit._backend import Number
from gradkit._numpy import tuning
from gradkit._numpy.batch_normalization import (
    channel_parts,
    cut,
    gradient_sums,
    moments,
    normalise,
    write_gradient,
)
from gradkit._numpy.blocks import Array, blocks, by_halves
from gradkit._numpy.channels import Channels

__all__ = [
    "batch_norm_apply",
    "batch_norm_grad_apply",
    "batch_norm_grad_sums",
    "batch_norm_stats",
    "combine_stats",
]


@np.errstate(all="ignore")
def batch_norm_stats(x: Array, channel_axis: int, mean: Array, var: Array) -> None:
    """``mean`` and the biased ``var`` of each channel are written, in float64."""
    for part in channel_parts(x, channel_axis):
        channels = Channels((x,), channel_axis, part)
        # No eps is known, so that no variance is too small to count.
        mean[part], var[part] = moments(channels, 0.0)


@np.errstate(all="ignore")
def combine_stats(
    means: Array, variances: Array, counts: Array, mean: Array, var: Array, count: Array
) -> None:
    """The statistics of all ranks' channels, from the rows ``means[rank]``."""
    held = counts != 0
    total = counts[held].sum()
    count[...] = total
    if not held.any():
        mean[...] = var[...] = 0
        return
    weights = (counts[held] / total)[:, None]
    for (part,) in blocks(mean.shape, max(1, tuning.RANK_NUMBERS // len(weights))):
        rows = means[:, part][held], variances[:, part][held]
        mean[part], var[part] = _combined(*rows, weights)


def _combined(means: Array, variances: Array, weights: Array) -> tuple[Array, Array]:
    """A weighted mean about the first rank's, so that equal means give just that mean.

    In halves, so that no difference overflows. Weights are at most 1, so that nothing does which
    the result does not.
    """
    half = by_halves(weights * (0.5 * means - 0.5 * means[0]))[0]
    middle = means[0] + half + half
    apart = means - middle
    return middle, by_halves(weights * variances + weights * apart * apart)[0]


@np.errstate(all="ignore")
def batch_norm_apply(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    var: Array,
    channel_axis: int,
    eps: float,
    y: Array,
    saved_mean: Array,
    inv_std: Array,
) -> None:
    """``y``, ``saved_mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    for part in channel_parts(x, channel_axis):
        channels = Channels((x, y), channel_axis, part)
        exact = 1 / np.sqrt(var[part] + eps)
        saved_mean[part], inv_std[part] = mean[part], exact
        normalise(channels, mean[part], exact, cut(scale, part), cut(bias, part))


@np.errstate(all="ignore")
def batch_norm_grad_sums(
    dy: Array,
    x: Array,
    mean: Array,
    inv_std: Array,
    channel_axis: int,
    sum_dy_xhat: Array,
    sum_dy: Array,
) -> None:
    """The sums of ``dy * xhat`` and of ``dy`` over each channel are written, in float64."""
    for part in channel_parts(x, channel_axis):
        channels = Channels((dy, x), channel_axis, part)
        sums = gradient_sums(channels, mean[part], inv_std[part])
        sum_dy_xhat[part], sum_dy[part] = sums


@np.errstate(all="ignore")
def batch_norm_grad_apply(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    sum_dy_xhat: Array,
    sum_dy: Array,
    count: Number,
    channel_axis: int,
    dx: Array,
) -> None:
    """``dx`` is written, from the sums over ``count`` elements a channel; it may be ``dy``."""
    for part in channel_parts(x, channel_axis):
        channels = Channels((dy, x, dx), channel_axis, part)
        means = sum_dy_xhat[part] / count, sum_dy[part] / count
        write_gradient(channels, cut(scale, part), mean[part], inv_std[part], *means)

"""Batch norm on NumPy arrays: statistics of each channel over all other axes.

With ``xhat = (x - mean) * inv_std`` and n elements a channel::

    dscale = sum of dy * xhat        dbias = sum of dy
    dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradkit._backend import Engine, Running
from gradkit._numpy import tuning
from gradkit._numpy.blocks import Array, Index, blocks
from gradkit._numpy.channels import Channels
from gradkit._numpy.moments import lost, low_that_counts
from gradkit._numpy.running_statistics import update_running_statistics

__all__ = ["batch_norm", "batch_norm_grad"]

_FLOAT64 = np.dtype(np.float64)


@np.errstate(all="ignore")
def batch_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    channel_axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
    engine: Engine | None = None,  # noqa: ARG001
) -> Engine:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``.

    ``engine`` is a choice on CUDA arrays only.
    """
    for part in channel_parts(x, channel_axis):
        channels = Channels((dy, x, dx), channel_axis, part)
        _grad_of(channels, *(cut(a, part) for a in (scale, mean, inv_std, dscale, dbias)))
    return "native"


@np.errstate(all="ignore")
def batch_norm(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    channel_axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
    engine: Engine | None = None,  # noqa: ARG001
    running: Running | None = None,
) -> Engine:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``. ``running`` moves.

    ``engine`` is a choice on CUDA arrays only.
    """
    for part in channel_parts(x, channel_axis):
        channels = Channels((x, y), channel_axis, part)
        own = (cut(a, part) for a in (scale, bias, mean, inv_std))
        centre, variance = _forward_of(channels, eps, *own)
        if running is not None:
            moved, known = (running.mean[part], running.var[part]), (centre, variance)
            update_running_statistics(*moved, *known, channels.size, running.momentum, *moved)
    return "native"


def _grad_of(
    channels: Channels,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    sums = gradient_sums(channels, mean, inv_std)
    write_gradient(channels, scale, mean, inv_std, *(sums / channels.size))
    for gradient, total in zip((dscale, dbias), sums, strict=True):
        if gradient is not None:
            gradient[...] = total


def write_gradient(
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


def gradient_sums(channels: Channels, mean: Array, inv_std: Array) -> Array:
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


def _forward_of(
    channels: Channels,
    eps: float,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
) -> tuple[Array, Array]:
    centre, variance = moments(channels, eps)
    exact = 1 / np.sqrt(variance + eps)
    mean[...], inv_std[...] = centre, exact
    normalise(channels, centre, exact, scale, bias)
    return centre, variance


def moments(channels: Channels, eps: float) -> tuple[Array, Array]:
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


def normalise(
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


def channel_parts(x: Array, axis: int) -> list[slice]:
    """Runs of channels few enough that what is summed for each stays small."""
    return [index[0] for index in blocks((x.shape[axis],), tuning.CHANNEL_PART)]


def cut(values: Any, part: slice) -> Any:
    """Those of some channels of one number a channel, if there are any."""
    return None if values is None else values[part]

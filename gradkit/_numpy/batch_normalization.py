"""Batch norm on NumPy arrays: statistics of each channel over all other axes.

With ``xhat = (x - mean) * inv_std`` and n elements a channel::

    dscale = sum of dy * xhat        dbias = sum of dy
    dx     = inv_std * scale * (dy - dbias / n - xhat * dscale / n)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradkit._backend import Engine
from gradkit._numpy import tuning
from gradkit._numpy.blocks import Array, Index, blocks
from gradkit._numpy.channels import Channels

__all__ = ["batch_norm", "batch_norm_grad"]


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
    for part in _channel_parts(x, channel_axis):
        channels = Channels((dy, x, dx), channel_axis, part)
        _grad_of(channels, *(_cut(a, part) for a in (scale, mean, inv_std, dscale, dbias)))
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
) -> Engine:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``.

    ``engine`` is a choice on CUDA arrays only.
    """
    for part in _channel_parts(x, channel_axis):
        channels = Channels((x, y), channel_axis, part)
        _forward_of(channels, eps, *(_cut(a, part) for a in (scale, bias, mean, inv_std)))
    return "native"


def _grad_of(
    channels: Channels,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    dy, x, dx = channels.arrays
    of_product, of_dy = _sums_of(channels, mean, inv_std)
    centre, offset = channels.vector(mean), channels.vector(of_dy / channels.size)
    slope = channels.vector(inv_std * (of_product / channels.size))
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
    for gradient, total in ((dscale, of_product), (dbias, of_dy)):
        if gradient is not None:
            gradient[...] = total


def _sums_of(channels: Channels, mean: Array, inv_std: Array) -> Array:
    """The sums of dy * xhat and of dy over each channel."""
    dy, x, _ = channels.arrays
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
) -> None:
    x, y = channels.arrays
    centre, variance = channels.moments(x, channels.dtype)
    lost = eps < tuning.TINY_VARIANCE and bool(np.any(variance < tuning.TINY_VARIANCE))
    if lost or not np.all(np.isfinite(variance)):  # squares overflowed or underflowed float32
        centre, variance = channels.moments(x, np.dtype(np.float64))
    exact = 1 / np.sqrt(variance + eps)
    mean[...], inv_std[...] = centre, exact
    high = channels.vector(centre)
    low = channels.vector(centre - high[:, 0])
    factor = channels.vector(exact if scale is None else exact * scale)
    biases = None if bias is None else channels.vector(bias)

    def write(index: Index, rooms: Sequence[Array]) -> None:
        at = channels.of(index)
        tile = channels.load(x[index], rooms[0])
        out = channels.target(y[index], channels.shaped(rooms[1], tile))
        np.subtract(tile, high[at], out=out)
        out -= low[at]
        out *= factor[at]
        if biases is not None:
            out += biases[at]
        channels.store(out, y[index], rooms[0])

    channels.for_each_block(write)


def _channel_parts(x: Array, axis: int) -> list[slice]:
    """Runs of channels few enough that what is summed for each stays small."""
    return [index[0] for index in blocks((x.shape[axis],), tuning.CHANNEL_PART)]


def _cut(values: Any, part: slice) -> Any:
    return None if values is None else values[part]

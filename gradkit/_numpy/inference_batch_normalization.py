"""Batch norm by known statistics on NumPy arrays: nothing but parameters' gradients is summed."""

from collections.abc import Sequence

import numpy as np

from gradkit._backend import Engine
from gradkit._numpy.batch_normalization import channel_parts, cut, normalise
from gradkit._numpy.blocks import Array, Index
from gradkit._numpy.channels import Channels

__all__ = ["batch_norm_inference", "batch_norm_inference_grad"]


@np.errstate(all="ignore")
def batch_norm_inference(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    var: Array,
    channel_axis: int,
    eps: float,
    y: Array,
    engine: Engine | None = None,  # noqa: ARG001
) -> Engine:
    """``y`` is written; it may be ``x``. ``engine`` is a choice on CUDA arrays only."""
    for part in channel_parts(x, channel_axis):
        channels = Channels((x, y), channel_axis, part)
        centre, exact = mean[part].astype(np.float64), _inv_std(var[part], eps)
        normalise(channels, centre, exact, cut(scale, part), cut(bias, part))
    return "native"


@np.errstate(all="ignore")
def batch_norm_inference_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    var: Array,
    channel_axis: int,
    eps: float,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    for part in channel_parts(x, channel_axis):
        channels = Channels((dy, x, dx), channel_axis, part)
        statistics = mean[part], _inv_std(var[part], eps)
        if dscale is None or dbias is None:
            _write(channels, statistics[1])
        else:
            assert scale is not None
            dscale[part], dbias[part] = _write_and_sum(channels, scale[part], *statistics)


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

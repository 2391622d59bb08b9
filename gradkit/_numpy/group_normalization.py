"""Group norm on NumPy arrays, in float64: statistics of each sample's groups of channels.

With ``xhat = (x - mean) * inv_std``, ``w = dy * scale`` and the means over each group::

    dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat))
    dscale = sum over samples and space of dy * xhat
    dbias  = sum over samples and space of dy

The mean is subtracted before anything is multiplied: ``sum(dy * x)`` cancels if the mean is
much larger than the standard deviation.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from gradkit._calls.channels import GroupNorm, GroupNormGrad
from gradkit._numpy.blocks import Array, Index, blocks
from gradkit._numpy.channels import Cells, load, spread, sums
from gradkit._numpy.writes import store

__all__ = ["group_norm", "group_norm_grad"]

# Axes of an array by groups: (samples, groups, channels of a group, space).
_STATISTICS, _CHANNELS = range(2), range(1, 3)
_MOST_SUMS = 1 << 16  # channels whose sums over samples are held at a time, if they are in groups


@np.errstate(all="ignore")
def group_norm(call: GroupNorm) -> None:
    """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
    x, y = (_by_group(array, call) for array in (call.x, call.y))
    scale = spread(call.scale, 1.0, x.shape, _CHANNELS)
    bias = spread(call.bias, -0.0, x.shape, _CHANNELS)  # -0: which changes no number
    groups = Cells(x.shape, 2)
    for group in groups.cells:
        moments = groups.moments(x, group)
        inv_std = 1 / np.sqrt(moments.variance + call.eps)
        store(moments.mean, call.mean[group])
        store(inv_std, call.inv_std[group])
        centre, rest, factor = map(groups.column, (moments.centre, moments.rest, inv_std))
        for element in groups.elements:
            index = group + element
            xhat = (load(x, index) - centre - rest) * factor
            store(xhat * load(scale, index) + load(bias, index), y[index])


@np.errstate(all="ignore")
def group_norm_grad(call: GroupNormGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    dy, x = (_by_group(array, call) for array in (call.dy, call.x))
    dx = None if call.dx is None else _by_group(call.dx, call)
    scale = spread(call.scale, 1.0, x.shape, _CHANNELS)
    mean, inv_std = (spread(a, 1.0, x.shape, _STATISTICS) for a in (call.mean, call.inv_std))
    for run in _runs(x):
        arrays = [array[:, run] for array in (dy, x, mean, inv_std, scale)]
        totals = _differentiate(arrays, inv_std[:, run], None if dx is None else dx[:, run])
        for gradient, total in zip((call.dscale, call.dbias), totals, strict=True):
            if gradient is not None:
                store(total, gradient.reshape(x.shape[1:3])[run])


def _by_group(array: Array, call: GroupNorm | GroupNormGrad) -> Array:
    """An array as (samples, groups, channels of a group, space)."""
    first = np.moveaxis(array, call.channel_axis, 1)
    samples, channels, *space = first.shape
    groups = call.mean.shape[1]
    return first.reshape(samples, groups, channels // groups, *space)


def _runs(x: Array) -> Iterator[slice]:
    """Runs of groups, few enough that sums for each channel stay small."""
    for (run,) in blocks(x.shape[1:2], max(1, _MOST_SUMS // max(1, x.shape[2]))):
        yield run


def _differentiate(arrays: Sequence[Array], inv_std: Array, dx: Array | None) -> Array:
    """Write dx; the sums of dy * xhat and of dy over samples and space."""
    groups, totals = Cells(inv_std.shape, 2), np.zeros((2, *inv_std.shape[1:3]))
    for group in groups.cells:
        of_product, of_w = map(groups.column, _means(groups, arrays, group))
        for element in groups.elements:
            index = group + element
            dy, xhat, w = _block(arrays, index)
            if dx is not None:
                store((w - (xhat * of_product + of_w)) * load(inv_std, index), dx[index])
            for total, terms in zip(totals, (dy * xhat, dy), strict=True):
                total[index[1:3]] += sums(terms, _CHANNELS)
    return totals


def _means(groups: Cells, arrays: Sequence[Array], group: Index) -> tuple[Array, Array]:
    """The means of w * xhat and of w over some groups."""

    def product(element: Index) -> Array:
        _, xhat, w = _block(arrays, group + element)
        return w * xhat

    of_w = groups.sum(lambda element: _block(arrays, group + element)[2])
    return groups.sum(product) / groups.size, of_w / groups.size


def _block(arrays: Sequence[Array], index: Index) -> tuple[Array, Array, Array]:
    """A block of dy, xhat and w."""
    dy, x, mean, inv_std, scale = (load(array, index) for array in arrays)
    return dy, (x - mean) * inv_std, dy * scale

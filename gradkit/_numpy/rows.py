"""The norms over rows on NumPy arrays, in float64.

With ``xhat = (x - mean) * inv_std`` (RMS norm: ``x * inv_std``; invertible: ``(y - bias) / scale``)
and ``w = dy * scale``, over the normalised axes::

    y      = xhat * scale + bias
    dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds     (RMS norm: without mean(w))
    dscale = sum over rows of dy * xhat
    dbias  = sum over rows of dy

The mean is subtracted before anything is multiplied: ``sum(dy * x)`` cancels if the mean is much
larger than the standard deviation.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gradkit._calls import rows as records
from gradkit._calls.rows import by_sample
from gradkit._numpy.blocks import Array, Index, part
from gradkit._numpy.row_blocks import Rows, column_sums, store

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "invertible_layer_norm_grad",
    "invertible_rms_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
    "rms_norm",
    "rms_norm_grad",
]

Forward: TypeAlias = records.LayerNorm | records.AddLayerNorm | records.RmsNorm | records.AddRmsNorm
Gradient: TypeAlias = (
    records.LayerNormGrad
    | records.InvertibleLayerNormGrad
    | records.RmsNormGrad
    | records.InvertibleRmsNormGrad
)
# The block of some rows and columns.
Block: TypeAlias = Callable[[Index, Index], Array]


@by_sample()
def layer_norm(call: records.LayerNorm) -> None:
    """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
    _normalize(call, call.x, call.bias, call.mean)


@by_sample()
def add_layer_norm(call: records.AddLayerNorm) -> None:
    """Write ``y``, ``s``, ``mean`` and ``inv_std``; ``y`` may be ``x``, ``s`` either summand."""
    _add(call)
    _normalize(call, call.s, call.bias, call.mean)


@by_sample()
def rms_norm(call: records.RmsNorm) -> None:
    """Write ``y`` and ``inv_std``; ``y`` may be ``x``."""
    _normalize(call, call.x, None, None)


@by_sample()
def add_rms_norm(call: records.AddRmsNorm) -> None:
    """Write ``y``, ``s`` and ``inv_std``; ``y`` may be ``x``, ``s`` either summand."""
    _add(call)
    _normalize(call, call.s, None, None)


@np.errstate(all="ignore")
def _add(call: records.AddLayerNorm | records.AddRmsNorm) -> None:
    rows = Rows(call.x.shape, call.axis)
    for row in rows.rows:
        for column in rows.columns:
            s = rows.block(call.x, row, column) + rows.block(call.residual, row, column)
            store(s, call.s[row + column])


@np.errstate(all="ignore")
def _normalize(call: Forward, x: Array, bias: Array | None, mean: Array | None) -> None:
    """Normalise ``x``, which may be ``y``; without ``mean``, as RMS norm does."""
    rows = Rows(x.shape, call.axis)
    if not x.size:  # an empty row counts as mean 0, variance 0
        call.inv_std[...] = 1 / np.sqrt(call.eps) if call.eps else np.inf
        if mean is not None:
            mean[...] = 0
    for row in rows.rows if x.size else ():
        centre, variance = _moments(rows, x, row, centred=mean is not None)
        if mean is not None:
            store(centre[0] + centre[1], part(mean, row))
        store(1 / np.sqrt(variance + call.eps), part(call.inv_std, row))
        inv_std = rows.statistic(call.inv_std, row)
        for column in rows.columns:
            xhat = (rows.block(x, row, column) - centre[0] - centre[1]) * inv_std
            y = xhat * rows.shifted_scale(call, column) + rows.parameter(bias, column, -0.0)
            store(y, call.y[row + column])


def _moments(
    rows: Rows, x: Array, row: Index, *, centred: bool
) -> tuple[tuple[Array, Array], Array]:
    """The mean of each row in two pieces, and the variance; not centred, 0 and the mean square.

    Distances from a row's first element are 0 if all are equal. Those from their mean correct what
    was rounded.
    """
    if not centred:
        zero = np.zeros(1)
        return (zero, zero), rows.mean(lambda column: np.square(rows.block(x, row, column)))
    first = rows.block(x, row, rows.columns[0])[:, :1]
    centre: Array = first + rows.mean(lambda column: rows.block(x, row, column) - first)

    def deviation(column: Index) -> Array:
        return rows.block(x, row, column) - centre

    rest = rows.mean(deviation)
    square = rows.mean(lambda column: np.square(deviation(column)))
    return (centre, rest), np.maximum(square - np.square(rest), 0)


@by_sample()
def layer_norm_grad(call: records.LayerNormGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows(call.x.shape, call.axis)

    def xhat(row: Index, column: Index) -> Array:
        distance = rows.block(call.x, row, column) - rows.statistic(call.mean, row)
        return distance * rows.statistic(call.inv_std, row)

    _differentiate(call, rows, xhat, call.ds, call.dbias)


@by_sample()
def rms_norm_grad(call: records.RmsNormGrad) -> None:
    """Write ``dx`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows(call.x.shape, call.axis)

    def xhat(row: Index, column: Index) -> Array:
        return rows.block(call.x, row, column) * rows.statistic(call.inv_std, row)

    _differentiate(call, rows, xhat, call.ds, None)


def invertible_layer_norm_grad(call: records.InvertibleLayerNormGrad) -> None:
    """As ``layer_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy``."""
    rows = Rows(call.y.shape, call.axis)

    def xhat(row: Index, column: Index) -> Array:
        distance = rows.block(call.y, row, column) - rows.parameter(call.bias, column, 0.0)
        return distance / rows.parameter(call.scale, column, 1.0)

    _differentiate(call, rows, xhat, None, call.dbias)


def invertible_rms_norm_grad(call: records.InvertibleRmsNormGrad) -> None:
    """As ``rms_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows(call.y.shape, call.axis)

    def xhat(row: Index, column: Index) -> Array:
        return rows.block(call.y, row, column) / rows.shifted_scale(call, column)

    _differentiate(call, rows, xhat, call.ds, None)


@np.errstate(all="ignore")
def _differentiate(
    call: Gradient, rows: Rows, xhat: Block, ds: Array | None, dbias: Array | None
) -> None:
    """Write the gradients: of some columns at a time, if not all of a row fit into a block."""
    centred = "dbias" in call.result_names

    def w(row: Index, column: Index) -> Array:
        return rows.block(call.dy, row, column) * rows.shifted_scale(call, column)

    def means_of(row: Index) -> tuple[Array | float, Array]:
        of_w = rows.mean(lambda column: w(row, column)) if centred else 0.0
        return of_w, rows.mean(lambda column: w(row, column) * xhat(row, column))

    several = len(rows.columns) > 1
    means_by_block: list[tuple[Array | float, Array]] = []  # before dx takes the place of dy
    for column in rows.columns:
        of_product = of_dy = np.zeros(1)
        for k, row in enumerate(rows.rows):
            dy, normalized = rows.block(call.dy, row, column), xhat(row, column)
            of_product = of_product + column_sums(dy * normalized)
            of_dy = of_dy + column_sums(dy)
            if call.dx is None:
                continue
            means = means_by_block[k] if k < len(means_by_block) else means_of(row)
            if several and k == len(means_by_block):
                means_by_block.append(means)
            dx = w(row, column) - (normalized * means[1] + means[0])
            dx *= rows.statistic(call.inv_std, row)
            if ds is not None:
                dx += rows.block(ds, row, column)
            store(dx, call.dx[row + column])
        for gradient, total in ((call.dscale, of_product), (dbias, of_dy)):
            if gradient is not None:
                target = part(gradient, column)
                store(np.broadcast_to(total, target.size), target)


@np.errstate(all="ignore")
def layer_norm_inverse(call: records.LayerNormInverse) -> None:
    """Write ``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
    rows = Rows(call.y.shape, call.axis)
    for row in rows.rows:
        for column in rows.columns:
            x = rows.block(call.y, row, column) - rows.parameter(call.bias, column, 0.0)
            x /= rows.parameter(call.scale, column, 1.0)
            x /= rows.statistic(call.inv_std, row)
            store(x + rows.statistic(call.mean, row), call.x[row + column])

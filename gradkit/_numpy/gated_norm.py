"""RMS norm with an activated gate on NumPy arrays, in float64.

With ``a = act(gate)``, ``xhat = source * inv_std`` and ``w = u * scale``, means over a row::

    the norm before the gate:  source = x,      y = xhat * scale * a,  u = dy * a
    the gate before the norm:  source = x * a,  y = xhat * scale,      u = dy

    dsource = inv_std * (w - xhat * mean(w * xhat))
    dscale  = sum over rows of u * xhat

and the product with the gate passes ``dsource`` on, or has passed ``dy`` on before.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from gradkit._calls.rows import GatedRmsNorm, GatedRmsNormGrad
from gradkit._numpy.blocks import Array, Index, part
from gradkit._numpy.row_blocks import Rows, column_sums, store

__all__ = ["gated_rms_norm", "gated_rms_norm_grad"]


@np.errstate(all="ignore")
def gated_rms_norm(call: GatedRmsNorm) -> None:
    """Write ``y`` and ``inv_std``; ``y`` may be ``x`` or ``gate``."""
    rows = Rows(call.x.shape, call.axis)
    if not call.x.size:  # the mean square of no elements counts as 0
        call.inv_std[...] = 1 / np.sqrt(call.eps) if call.eps else np.inf
        return

    def source(row: Index, column: Index) -> Array:
        x = rows.block(call.x, row, column)
        return x if call.norm_before_gate else x * gate(row, column)

    def gate(row: Index, column: Index) -> Array:
        return _activated(call.activation, rows.block(call.gate, row, column))[0]

    for row in rows.rows:
        square = rows.mean(partial(_square, source, row))
        store(1 / np.sqrt(square + call.eps), part(call.inv_std, row))
        inv_std = rows.statistic(call.inv_std, row)
        for column in rows.columns:
            y = source(row, column) * inv_std * rows.shifted_scale(call, column)
            store(y * gate(row, column) if call.norm_before_gate else y, call.y[row + column])


def _square(source: Callable[[Index, Index], Array], row: Index, column: Index) -> Array:
    return np.square(source(row, column))


class _Block:
    """Some rows and columns of a gradient: what its formulas are made of."""

    def __init__(self, call: GatedRmsNormGrad, rows: Rows, row: Index, column: Index):
        self.before = call.norm_before_gate
        self.dy, self.x = rows.block(call.dy, row, column), rows.block(call.x, row, column)
        gate = rows.block(call.gate, row, column)
        self.factor, self.slope = _activated(call.activation, gate)
        self.scale = rows.shifted_scale(call, column)
        self.inv_std = rows.statistic(call.inv_std, row)
        self.xhat = (self.x if self.before else self.x * self.factor) * self.inv_std
        self.u = self.dy * self.factor if self.before else self.dy
        self.w = self.u * self.scale

    def gradients(self, mean: Array) -> tuple[Array, Array]:
        """The gradients of x and of the gate, from the row's mean of ``w * xhat``."""
        dsource = self.inv_std * (self.w - self.xhat * mean)
        if self.before:
            return dsource, self.dy * self.xhat * self.scale * self.slope
        return dsource * self.factor, dsource * self.x * self.slope


@np.errstate(all="ignore")
def gated_rms_norm_grad(call: GatedRmsNormGrad) -> None:
    """Write ``dx``, ``dgate`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``x``.

    ``dgate`` may be ``dy`` or ``gate``.
    """
    rows = Rows(call.x.shape, call.axis)

    def mean_of(row: Index) -> Array:
        def product(column: Index) -> Array:
            block = _Block(call, rows, row, column)
            return block.w * block.xhat

        return rows.mean(product)

    several = len(rows.columns) > 1
    means: list[Array] = []  # before dx and dgate take the place of what they are made of
    for column in rows.columns:
        total = np.zeros(1)
        for k, row in enumerate(rows.rows):
            block = _Block(call, rows, row, column)
            total = total + column_sums(block.u * block.xhat)
            if call.dx is None and call.dgate is None:
                continue
            mean = means[k] if k < len(means) else mean_of(row)
            if several and k == len(means):
                means.append(mean)
            for gradient, out in zip(block.gradients(mean), (call.dx, call.dgate), strict=True):
                if out is not None:
                    store(gradient, out[row + column])
        if call.dscale is not None:
            target = part(call.dscale, column)
            store(np.broadcast_to(total, target.size), target)


def _activated(activation: str, gate: Array) -> tuple[Array, Array]:
    """An activation and its derivative.

    ``exp(-|gate|)`` is a square, whose root is no subnormal number where the product with the gate
    is a normal one.
    """
    root = np.exp(-np.abs(gate) / 2)
    share = 1 / (1 + root * root)
    falling = np.where(gate < 0, root, 1)
    sigmoid, steep = share * falling * falling, share * root
    if activation == "sigmoid":
        return sigmoid, steep * steep
    return gate * share * falling * falling, sigmoid + gate * steep * steep

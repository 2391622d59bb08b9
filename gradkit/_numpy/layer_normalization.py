"""Layer norm and invertible layer norm on NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from gradkit._numpy.blocks import Array, Index
from gradkit._numpy.row_norms import Forward, Gradient, unscale
from gradkit._numpy.tiles import Rows

__all__ = [
    "add_layer_norm",
    "invertible_layer_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
]


@np.errstate(all="ignore")
def layer_norm(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
    *,
    scale_offset: float = 0.0,
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    rows = Rows.of((x, y), axis, mean.dtype)
    Forward(rows, x, scale, bias, eps, y, mean, inv_std, scale_offset=scale_offset).run()


@np.errstate(all="ignore")
def add_layer_norm(
    x: Array,
    residual: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
    eps: float,
    y: Array,
    s: Array,
    mean: Array,
    inv_std: Array,
    *,
    scale_offset: float = 0.0,
) -> None:
    """``y``, ``s``, ``mean`` and ``inv_std`` are written.

    ``y`` may be ``x``, ``s`` either summand.
    """
    rows = Rows.of((x, residual, y, s), axis, mean.dtype)
    Forward(
        *(rows, x, scale, bias, eps, y, mean, inv_std),
        scale_offset=scale_offset,
        residual=residual,
        s=s,
    ).run()


@np.errstate(all="ignore")
def layer_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
    *,
    ds: Array | None = None,
    scale_offset: float = 0.0,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows.of((dy, x, dx, ds), axis, mean.dtype)
    means = rows.per_row(mean)

    def normalize(tile: Array, factor: Array, row: Index, _: Index, out: Array) -> None:
        np.subtract(tile, rows.row_values(means[row]), out)
        np.multiply(out, factor, out)

    Gradient(
        *(rows, dy, x, normalize, scale, inv_std, dx),
        centred=True,
        ds=ds,
        scale_offset=scale_offset,
    ).run(dscale, dbias)


@np.errstate(all="ignore")
def layer_norm_inverse(
    y: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    x: Array,
) -> None:
    """``x = (y - bias) / scale / inv_std + mean`` is written; ``x`` may be ``y``."""
    rows = Rows.of((y, x), axis, mean.dtype)
    scales, biases = rows.per_column(scale), rows.per_column(bias)
    means, inv_stds = rows.per_row(mean), rows.per_row(inv_std)
    source, target = rows.view(y), rows.view(x)

    def strip(tiles: Sequence[tuple[Index, Index]]) -> None:
        with rows.scratch() as (work, room, *_):
            for row, column in tiles:
                tile = rows.load(source[row + column], work)
                out = rows.target(target[row + column], work)
                unscale(rows, tile, scales, biases, column, out)
                out /= rows.row_values(inv_stds[row])
                out += rows.row_values(means[row])
                rows.store(out, target[row + column], room)

    rows.in_strips(strip, rows.tiles())


@np.errstate(all="ignore")
def invertible_layer_norm_grad(
    dy: Array,
    y: Array,
    scale: Array | None,
    bias: Array | None,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """As ``layer_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy``."""
    rows = Rows.of((dy, y, dx), axis, inv_std.dtype)
    scales, biases = rows.per_column(scale), rows.per_column(bias)

    def normalize(tile: Array, _: Array, __: Index, column: Index, out: Array) -> None:
        unscale(rows, tile, scales, biases, column, out)

    Gradient(rows, dy, y, normalize, scale, inv_std, dx, centred=True).run(dscale, dbias)

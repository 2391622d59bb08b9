"""The norms over rows on NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from gradkit._calls.rows import (
    AddLayerNorm,
    AddRmsNorm,
    InvertibleLayerNormGrad,
    LayerNorm,
    LayerNormGrad,
    LayerNormInverse,
    RmsNorm,
    RmsNormGrad,
)
from gradkit._numpy.blocks import Array, Index
from gradkit._numpy.row_norms import Forward, RowGradient, unscale
from gradkit._numpy.tiles import Rows

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "invertible_layer_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
    "rms_norm",
    "rms_norm_grad",
]


@np.errstate(all="ignore")
def layer_norm(call: LayerNorm) -> None:
    """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
    rows = Rows.of((call.x, call.y), call.axis, call.mean.dtype)
    Forward(
        rows,
        call.x,
        call.scale,
        call.bias,
        call.eps,
        call.y,
        call.mean,
        call.inv_std,
        scale_offset=call.scale_offset,
    ).run()


@np.errstate(all="ignore")
def add_layer_norm(call: AddLayerNorm) -> None:
    """Write ``y``, ``s``, ``mean`` and ``inv_std``; ``y`` may be ``x``, ``s`` either summand."""
    rows = Rows.of((call.x, call.residual, call.y, call.s), call.axis, call.mean.dtype)
    Forward(
        rows,
        call.x,
        call.scale,
        call.bias,
        call.eps,
        call.y,
        call.mean,
        call.inv_std,
        scale_offset=call.scale_offset,
        residual=call.residual,
        s=call.s,
    ).run()


@np.errstate(all="ignore")
def layer_norm_grad(call: LayerNormGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows.of((call.dy, call.x, call.dx, call.ds), call.axis, call.mean.dtype)
    means = rows.per_row(call.mean)

    def normalize(tile: Array, factor: Array, row: Index, _: Index, out: Array) -> None:
        np.subtract(tile, rows.row_values(means[row]), out)
        np.multiply(out, factor, out)

    RowGradient(
        rows,
        call.dy,
        call.x,
        normalize,
        call.scale,
        call.inv_std,
        call.dx,
        centred=True,
        ds=call.ds,
        scale_offset=call.scale_offset,
    ).run(call.dscale, call.dbias)


@np.errstate(all="ignore")
def layer_norm_inverse(call: LayerNormInverse) -> None:
    """Write ``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
    rows = Rows.of((call.y, call.x), call.axis, call.mean.dtype)
    scales, biases = rows.per_column(call.scale), rows.per_column(call.bias)
    means, inv_stds = rows.per_row(call.mean), rows.per_row(call.inv_std)
    source, target = rows.view(call.y), rows.view(call.x)

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
def invertible_layer_norm_grad(call: InvertibleLayerNormGrad) -> None:
    """As ``layer_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy``."""
    rows = Rows.of((call.dy, call.y, call.dx), call.axis, call.inv_std.dtype)
    scales, biases = rows.per_column(call.scale), rows.per_column(call.bias)

    def normalize(tile: Array, _: Array, __: Index, column: Index, out: Array) -> None:
        unscale(rows, tile, scales, biases, column, out)

    RowGradient(
        rows, call.dy, call.y, normalize, call.scale, call.inv_std, call.dx, centred=True
    ).run(call.dscale, call.dbias)


@np.errstate(all="ignore")
def rms_norm(call: RmsNorm) -> None:
    """Write ``y`` and ``inv_std``; ``y`` may be ``x``."""
    rows = Rows.of((call.x, call.y), call.axis, call.inv_std.dtype)
    Forward(
        rows,
        call.x,
        call.scale,
        None,
        call.eps,
        call.y,
        None,
        call.inv_std,
        scale_offset=call.scale_offset,
    ).run()


@np.errstate(all="ignore")
def add_rms_norm(call: AddRmsNorm) -> None:
    """Write ``y``, ``s`` and ``inv_std``; ``y`` may be ``x``, ``s`` either summand."""
    rows = Rows.of((call.x, call.residual, call.y, call.s), call.axis, call.inv_std.dtype)
    Forward(
        rows,
        call.x,
        call.scale,
        None,
        call.eps,
        call.y,
        None,
        call.inv_std,
        scale_offset=call.scale_offset,
        residual=call.residual,
        s=call.s,
    ).run()


@np.errstate(all="ignore")
def rms_norm_grad(call: RmsNormGrad) -> None:
    """Write ``dx`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows.of((call.dy, call.x, call.dx, call.ds), call.axis, call.inv_std.dtype)

    def normalize(tile: Array, factor: Array, _: Index, __: Index, out: Array) -> None:
        np.multiply(tile, factor, out=out)

    RowGradient(
        rows,
        call.dy,
        call.x,
        normalize,
        call.scale,
        call.inv_std,
        call.dx,
        centred=False,
        ds=call.ds,
        scale_offset=call.scale_offset,
    ).run(call.dscale, None)

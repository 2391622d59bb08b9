"""RMS norm on NumPy arrays."""

import numpy as np

from gradkit._numpy.blocks import Array, Index
from gradkit._numpy.row_norms import Forward, Gradient
from gradkit._numpy.tiles import Rows

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_grad"]


@np.errstate(all="ignore")
def rms_norm(
    x: Array,
    scale: Array | None,
    axis: int,
    eps: float,
    y: Array,
    inv_std: Array,
    *,
    scale_offset: float = 0.0,
) -> None:
    """``y`` and ``inv_std`` are written; ``y`` may be ``x``."""
    rows = Rows.of((x, y), axis, inv_std.dtype)
    Forward(rows, x, scale, None, eps, y, None, inv_std, scale_offset=scale_offset).run()


@np.errstate(all="ignore")
def add_rms_norm(
    x: Array,
    residual: Array,
    scale: Array | None,
    axis: int,
    eps: float,
    y: Array,
    s: Array,
    inv_std: Array,
    *,
    scale_offset: float = 0.0,
) -> None:
    """``y``, ``s`` and ``inv_std`` are written; ``y`` may be ``x``, ``s`` either summand."""
    rows = Rows.of((x, residual, y, s), axis, inv_std.dtype)
    Forward(
        *(rows, x, scale, None, eps, y, None, inv_std),
        scale_offset=scale_offset,
        residual=residual,
        s=s,
    ).run()


@np.errstate(all="ignore")
def rms_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
    *,
    ds: Array | None = None,
    scale_offset: float = 0.0,
) -> None:
    """``dx`` and ``dscale`` are written (``=``); ``dx`` may be ``dy`` or ``ds``."""
    rows = Rows.of((dy, x, dx, ds), axis, inv_std.dtype)

    def normalize(tile: Array, factor: Array, _: Index, __: Index, out: Array) -> None:
        np.multiply(tile, factor, out=out)

    Gradient(
        *(rows, dy, x, normalize, scale, inv_std, dx),
        centred=False,
        ds=ds,
        scale_offset=scale_offset,
    ).run(dscale, None)

"""RMS norm on NumPy arrays."""

import numpy as np

from gradkit._numpy.blocks import Array, Index
from gradkit._numpy.row_norms import Forward, Gradient
from gradkit._numpy.tiles import Rows

__all__ = ["rms_norm", "rms_norm_grad"]


@np.errstate(all="ignore")
def rms_norm(
    x: Array, scale: Array | None, axis: int, eps: float, y: Array, inv_std: Array
) -> None:
    """``y`` and ``inv_std`` are written; ``y`` may be ``x``."""
    rows = Rows.of((x, y, inv_std), axis, inv_std.dtype)
    Forward(rows, x, scale, None, eps, y, None, inv_std).run()


@np.errstate(all="ignore")
def rms_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
) -> None:
    """``dx`` and ``dscale`` are written (``=``); ``dx`` may be ``dy``."""
    rows = Rows.of((dy, x, dx, dscale), axis, inv_std.dtype)

    def normalize(tile: Array, factor: Array, _: Index, __: Index, out: Array) -> None:
        np.multiply(tile, factor, out=out)

    Gradient(rows, dy, x, normalize, scale, inv_std, dx, centred=False).run(dscale, None)

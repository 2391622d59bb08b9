"""Layer norm, RMS norm and invertible layer norm on a GPU."""

from gradkit._cuda.device import Array, Device
from gradkit._cuda.row_gradient import INVERTIBLE, LAYER, RMS, RowGradient


def layer_norm_grad(
    device: Device,
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    gradient = RowGradient.of(device, LAYER, dy, x, axis, scale=scale, mean=mean, inv_std=inv_std)
    gradient.run(dx, dscale, dbias)


def rms_norm_grad(
    device: Device,
    dy: Array,
    x: Array,
    scale: Array | None,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
) -> None:
    """``dx`` and ``dscale`` are written (``=``); ``dx`` may be ``dy``."""
    RowGradient.of(device, RMS, dy, x, axis, scale=scale, inv_std=inv_std).run(dx, dscale)


def invertible_layer_norm_grad(
    device: Device,
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
    """As ``layer_norm_grad`` with xhat out of the output; ``dx`` may be ``dy``."""
    gradient = RowGradient.of(
        device, INVERTIBLE, dy, y, axis, scale=scale, bias=bias, inv_std=inv_std
    )
    gradient.run(dx, dscale, dbias)

"""Layer norm, RMS norm and invertible layer norm on a GPU."""

import math
from collections.abc import Iterator

import numpy as np

from gradkit._cuda import row_gradient
from gradkit._cuda.device import Array, Device
from gradkit._cuda.layout import (
    RESIDENT_THREADS,
    Macros,
    contiguous,
    dtype_name,
    room_for,
    row_blocks,
    rows_of,
    settle,
    vector_of,
)
from gradkit._cuda.loading import kernel
from gradkit._cuda.row_gradient import INVERTIBLE, LAYER, RMS, RowGradient
from gradkit._dtypes import LAYER_NORM_TYPES, dtype_named

_FORWARD_THREADS = 512  # that work on one row at most
_INVERSE_THREADS = 256


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


def layer_norm(
    device: Device,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    _forward(device, x, scale, bias, axis, eps, y, mean, inv_std)


def rms_norm(
    device: Device,
    x: Array,
    scale: Array | None,
    axis: int,
    eps: float,
    y: Array,
    inv_std: Array,
) -> None:
    """``y`` and ``inv_std`` are written; ``y`` may be ``x``."""
    _forward(device, x, scale, None, axis, eps, y, None, inv_std)


def layer_norm_inverse(
    device: Device,
    y: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    x: Array,
) -> None:
    """``x = (y - bias) / scale / inv_std + mean`` is written; ``x`` may be ``y``."""
    if not x.size:
        return
    rows, width = rows_of(y.shape, axis)
    vector = vector_of(y, width)
    source, factor, offset = (contiguous(device, array, vector) for array in (y, scale, bias))
    room = room_for(device, x, vector)
    blocks = row_blocks(device, rows, -(-width // vector), _INVERSE_THREADS)
    along = -(-width // (blocks.threads * vector))
    resident = RESIDENT_THREADS // _INVERSE_THREADS * device.multiprocessors
    short = max(1, -(-resident // blocks.count))
    macros = _macros(source, mean, factor if factor is not None else offset, vector)
    kernel(device, "layer_norm_inverse", "layer_norm_inverse", **macros)(
        (blocks.count, min(along, short)),
        blocks.block,
        (
            source,
            factor,
            offset,
            contiguous(device, mean),
            contiguous(device, inv_std),
            room,
            np.int64(rows),
            np.int64(width),
        ),
    )
    settle(x, room)


def _forward(
    device: Device,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
    eps: float,
    y: Array,
    mean: Array | None,
    inv_std: Array,
) -> None:
    """Layer norm, or RMS norm where ``mean`` is ``None``."""
    if not x.size:  # an empty row counts as mean 0, variance 0
        inv_std.fill(1 / math.sqrt(eps) if eps else math.inf)
        if mean is not None:
            mean.fill(0)
        return
    rows, width = rows_of(x.shape, axis)
    vector = vector_of(x, width)
    source, factor, offset = (contiguous(device, array, vector) for array in (x, scale, bias))
    outs = [out for out in (y, mean, inv_std) if out is not None]
    rooms = [room_for(device, out, vector) for out in outs]
    blocks = row_blocks(device, rows, -(-width // (4 * vector)), _FORWARD_THREADS)
    macros = _macros(source, inv_std, factor if factor is not None else offset, vector)
    kernel(device, "layer_norm", "layer_norm", **macros | {"CENTRED": int(mean is not None)})(
        (blocks.count,),
        blocks.block,
        (
            source,
            factor,
            offset,
            rooms[0],
            None if mean is None else rooms[1],
            rooms[-1],
            np.int64(rows),
            np.int64(width),
            np.float64(eps),
        ),
    )
    for out, room in zip(outs, rooms, strict=True):
        settle(out, room)


def _macros(data: Array, statistic: Array, parameter: Array | None, vector: int) -> Macros:
    like = statistic if parameter is None else parameter
    return {
        "DATA_T": dtype_name(data),
        "STAT_T": dtype_name(statistic),
        "PARAM_T": dtype_name(like),
        "VEC": vector,
    }


def combinations() -> Iterator[tuple[str, Macros]]:
    """Every kernel file and its macros that these launchers can ask for."""
    yield from row_gradient.combinations()
    for data, statistic, parameter in LAYER_NORM_TYPES:
        for vector in (1, 16 // dtype_named(data).itemsize):
            macros: Macros = {
                "DATA_T": data,
                "STAT_T": statistic,
                "PARAM_T": parameter,
                "VEC": vector,
            }
            yield "layer_norm_inverse", macros
            yield "layer_norm", macros | {"CENTRED": 0}
            yield "layer_norm", macros | {"CENTRED": 1}

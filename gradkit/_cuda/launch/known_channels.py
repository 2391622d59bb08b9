"""Batch norm by known statistics on a GPU, by the project's own kernels."""

from typing import NamedTuple

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.channels import launches
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import first_of


class Inference(NamedTuple):
    """The arguments of ``batch_norm_inference``, for whichever engine runs it."""

    x: Array
    scale: Array | None
    bias: Array | None
    mean: Array
    var: Array
    channel_axis: int
    eps: float
    y: Array


class Gradient(NamedTuple):
    """The arguments of ``batch_norm_inference_grad``."""

    dy: Array
    x: Array
    scale: Array | None
    mean: Array
    var: Array
    channel_axis: int
    eps: float
    dx: Array
    dscale: Array | None
    dbias: Array | None


def batch_norm_inference(device: Device, call: Inference) -> None:
    """``y`` is written; it may be ``x``."""
    if not call.x.shape[call.channel_axis]:
        return
    dtypes = call.mean.dtype, first_of(call.scale, call.bias, call.mean).dtype
    work = launches(device, "batch_norm_inference", call.x, call.channel_axis, *dtypes)
    view = work.shape.view
    inputs, outs = (view(call.x), call.scale, call.bias, call.mean, call.var), (view(call.y),)
    read, written = work.usable(inputs, outs)
    work.over_channels("infer", *read, *written, last=(np.float64(call.eps),))
    work.deliver(outs, written)


def batch_norm_inference_grad(device: Device, call: Gradient) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    if not call.x.shape[call.channel_axis]:
        return
    dtypes = call.mean.dtype, first_of(call.scale, call.mean).dtype
    work = launches(device, "batch_norm_inference_grad", call.x, call.channel_axis, *dtypes)
    view = work.shape.view
    inputs = view(call.dy), view(call.x), call.scale, call.mean, call.var
    outs = view(call.dx), call.dscale, call.dbias
    read, written = work.usable(inputs, outs)
    dx, *parameters = written
    partials = None if call.scale is None else work.partials()
    last = (np.float64(call.eps),)
    work.over_channels("infer_gradient", *read, dx, partials, last=last)
    if partials is not None:
        work.finish("finish_parameters", partials, *parameters, counted=False)
    work.deliver(outs, written)

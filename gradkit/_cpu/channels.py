"""The norms over channels, compiled. Arrays without elements are NumPy's."""

from typing import Any

from gradkit import _numpy
from gradkit._backend import Engine
from gradkit._calls import channels as records
from gradkit._calls.roles import BatchMean, Bias, Mean, RunningMean, Scale, SumDy
from gradkit._cpu.compiled import channel_gradient, channel_norm, combine, move_running
from gradkit._dtypes import float_of
from gradkit._threads import workers

__all__ = [
    "batch_norm",
    "batch_norm_apply",
    "batch_norm_grad",
    "batch_norm_grad_apply",
    "batch_norm_grad_sums",
    "batch_norm_inference",
    "batch_norm_inference_grad",
    "batch_norm_stats",
    "combine_stats",
    "group_norm",
    "group_norm_grad",
    "update_running_statistics",
]


def _types_of(
    call: Any,
    mean: Mean | BatchMean | None,
    parameter: Scale | Bias | None,
    result: Mean | BatchMean | Scale | Bias | SumDy | None = None,
    running: RunningMean | None = None,
) -> int:
    """The numbers of the dtypes of x and of these as one; -1 if NumPy is to compute.

    Decided once for each plan. An absent array has any.
    """
    types: int | None = call.plan.launcher
    if types is None:
        arrays = call.x, mean, parameter, result, running
        codes = [0 if array is None else float_of(array.dtype).code for array in arrays]
        types = sum(code << 2 * k for k, code in enumerate(codes)) if call.x.size else -1
        call.plan.launcher = types
    return types


def _parameter(call: Any) -> Scale | Bias | None:
    """The array whose dtype the parameters of a forward pass have."""
    parameter: Scale | Bias | None = call.bias if call.scale is None else call.scale
    return parameter


def _gradient_types(
    call: records.BatchNormGrad | records.BatchNormInferenceGrad | records.GroupNormGrad,
) -> int:
    """The types of a gradient, whose sums have the dtype of a parameter."""
    result = call.dbias if call.scale is None else call.scale
    return _types_of(call, call.mean, call.scale, result)


def batch_norm(call: records.BatchNorm) -> Engine:
    """Write ``y``, ``mean`` and ``inv_std``, and move running statistics; ``y`` may be ``x``."""
    types = _types_of(call, None, _parameter(call), call.mean, call.running_mean)
    if types < 0:
        return _numpy.batch_norm(call)
    numbers = types, workers(), call.channel_axis, 0, call.eps, call.momentum
    inputs = call.x, call.scale, call.bias, None, None
    saved = call.y, call.mean, call.inv_std, call.var
    channel_norm(*numbers + inputs + saved, call.running_mean, call.running_var)
    return "native"


def batch_norm_inference(call: records.BatchNormInference) -> Engine:
    """Write ``y``, which may be ``x``."""
    if (types := _types_of(call, call.mean, _parameter(call))) < 0:
        return _numpy.batch_norm_inference(call)
    numbers = types, workers(), call.channel_axis, 0, call.eps, 0.0
    inputs = call.x, call.scale, call.bias, call.mean, call.var
    channel_norm(*numbers + inputs, call.y, None, None, None, None, None)
    return "native"


def batch_norm_stats(call: records.BatchNormStats) -> None:
    """Write each channel's ``mean`` and biased ``var``, in float64."""
    if (types := _types_of(call, None, None, call.mean)) < 0:
        _numpy.batch_norm_stats(call)
        return
    numbers = types, workers(), call.channel_axis, 0, 0.0, 0.0
    channel_norm(
        *numbers, call.x, None, None, None, None, None, call.mean, None, call.var, None, None
    )


def update_running_statistics(call: records.UpdateRunningStatistics) -> None:
    """Write ``next_mean`` and ``next_var``, which may be the present ones."""
    if (dtype := call.plan.launcher) is None:
        dtype = call.plan.launcher = float_of(call.running_mean.dtype).code
    numbers = dtype, float(call.count), call.momentum
    inputs = call.running_mean, call.running_var, call.mean, call.var
    move_running(*numbers + inputs, call.next_mean, call.next_var)


def combine_stats(call: records.CombineStats) -> None:
    """Write the statistics of all ranks' channels, from the rows ``means[rank]``."""
    inputs = call.means, call.variances, call.counts
    combine(*inputs, call.mean, call.var, call.total)


def batch_norm_apply(call: records.BatchNormApply) -> None:
    """Write ``y``, ``saved_mean`` and ``inv_std``; ``y`` may be ``x``."""
    if (types := _types_of(call, call.mean, _parameter(call), call.saved_mean)) < 0:
        _numpy.batch_norm_apply(call)
        return
    numbers = types, workers(), call.channel_axis, 0, call.eps, 0.0
    inputs = call.x, call.scale, call.bias, call.mean, call.var
    channel_norm(*numbers + inputs, call.y, call.saved_mean, call.inv_std, None, None, None)


def group_norm(call: records.GroupNorm) -> None:
    """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
    if (types := _types_of(call, None, _parameter(call), call.mean)) < 0:
        _numpy.group_norm(call)
        return
    numbers = types, workers(), call.channel_axis, call.num_groups, call.eps, 0.0
    inputs = call.x, call.scale, call.bias, None, None
    channel_norm(*numbers + inputs, call.y, call.mean, call.inv_std, None, None, None)


def batch_norm_grad(call: records.BatchNormGrad) -> Engine:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    if (types := _gradient_types(call)) < 0:
        return _numpy.batch_norm_grad(call)
    numbers = types, workers(), call.channel_axis, 0, 0.0, 0.0
    inputs = call.dy, call.x, call.scale, call.mean, call.inv_std, None, None, None
    channel_gradient(*numbers + inputs, call.dx, call.dscale, call.dbias)
    return "native"


def batch_norm_inference_grad(call: records.BatchNormInferenceGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    if (types := _gradient_types(call)) < 0:
        _numpy.batch_norm_inference_grad(call)
        return
    numbers = types, workers(), call.channel_axis, 0, call.eps, 0.0
    inputs = call.dy, call.x, call.scale, call.mean, None, call.var, None, None
    channel_gradient(*numbers + inputs, call.dx, call.dscale, call.dbias)


def batch_norm_grad_sums(call: records.BatchNormGradSums) -> None:
    """Write the sums of ``dy * xhat`` and of ``dy`` over each channel, in float64."""
    if (types := _types_of(call, call.mean, None, call.sum_dy)) < 0:
        _numpy.batch_norm_grad_sums(call)
        return
    numbers = types, workers(), call.channel_axis, 0, 0.0, 0.0
    inputs = call.dy, call.x, None, call.mean, call.inv_std, None, None, None
    channel_gradient(*numbers + inputs, None, call.sum_dy_xhat, call.sum_dy)


def batch_norm_grad_apply(call: records.BatchNormGradApply) -> None:
    """Write ``dx``, from the sums over ``count`` elements a channel; it may be ``dy``."""
    if (types := _types_of(call, call.mean, call.scale)) < 0:
        _numpy.batch_norm_grad_apply(call)
        return
    numbers = types, workers(), call.channel_axis, 0, 0.0, float(call.count)
    inputs = call.dy, call.x, call.scale, call.mean, call.inv_std, None
    sums = call.sum_dy_xhat, call.sum_dy
    channel_gradient(*numbers + inputs + sums, call.dx, None, None)


def group_norm_grad(call: records.GroupNormGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    if (types := _gradient_types(call)) < 0:
        _numpy.group_norm_grad(call)
        return
    numbers = types, workers(), call.channel_axis, call.mean.shape[1], 0.0, 0.0
    inputs = call.dy, call.x, call.scale, call.mean, call.inv_std, None, None, None
    channel_gradient(*numbers + inputs, call.dx, call.dscale, call.dbias)

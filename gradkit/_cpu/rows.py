"""The norms over rows, compiled. Rows without elements are NumPy's."""

from typing import Any

from gradkit import _numpy
from gradkit._calls import rows as records
from gradkit._calls.roles import Bias, Data, Mean
from gradkit._calls.rows import by_sample
from gradkit._cpu.compiled import forward, gradient, inverse
from gradkit._dtypes import float_of
from gradkit._threads import workers

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


def types_of(call: Any, data: Any) -> int:
    """The numbers of the data's and the parameters' dtypes as one; -1 if there are no elements.

    Decided once for each plan.
    """
    types: int | None = call.plan.launcher
    if types is None:
        present = (call.scale, getattr(call, "bias", None), getattr(call, "dbias", None), data)
        parameter = next(array for array in present if array is not None)
        both = 4 * float_of(data.dtype).code + float_of(parameter.dtype).code
        types = both if data.size else -1
        call.plan.launcher = types
    return types


def _forward(
    call: records.LayerNorm | records.AddLayerNorm | records.RmsNorm | records.AddRmsNorm,
    types: int,
    residual: Data | None,
    bias: Bias | None,
    s: Data | None,
    mean: Mean | None,
) -> None:
    numbers = types, workers(), call.axis, call.eps, call.scale_offset
    forward(*numbers, call.x, residual, call.scale, bias, call.y, s, mean, call.inv_std)


@by_sample()
def layer_norm(call: records.LayerNorm) -> None:
    """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.layer_norm(call)
    else:
        _forward(call, types, None, call.bias, None, call.mean)


@by_sample()
def add_layer_norm(call: records.AddLayerNorm) -> None:
    """Write ``y``, ``s``, ``mean`` and ``inv_std``; ``y`` may be ``x``, ``s`` either summand."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.add_layer_norm(call)
    else:
        _forward(call, types, call.residual, call.bias, call.s, call.mean)


@by_sample()
def rms_norm(call: records.RmsNorm) -> None:
    """Write ``y`` and ``inv_std``; ``y`` may be ``x``."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.rms_norm(call)
    else:
        _forward(call, types, None, None, None, None)


@by_sample()
def add_rms_norm(call: records.AddRmsNorm) -> None:
    """Write ``y``, ``s`` and ``inv_std``; ``y`` may be ``x``, ``s`` either summand."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.add_rms_norm(call)
    else:
        _forward(call, types, call.residual, None, call.s, None)


@by_sample()
def layer_norm_grad(call: records.LayerNormGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.layer_norm_grad(call)
        return
    numbers = types, workers(), call.axis, False, True, call.scale_offset
    inputs = call.dy, call.x, call.scale, None, call.mean, call.inv_std, call.ds
    gradient(*numbers + inputs, call.dx, call.dscale, call.dbias)


@by_sample()
def rms_norm_grad(call: records.RmsNormGrad) -> None:
    """Write ``dx`` and ``dscale`` (``=``); ``dx`` may be ``dy`` or ``ds``."""
    if (types := types_of(call, call.x)) < 0:
        _numpy.rms_norm_grad(call)
        return
    numbers = types, workers(), call.axis, False, False, call.scale_offset
    inputs = call.dy, call.x, call.scale, None, None, call.inv_std, call.ds
    gradient(*numbers + inputs, call.dx, call.dscale, None)


def invertible_layer_norm_grad(call: records.InvertibleLayerNormGrad) -> None:
    """As ``layer_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy``."""
    if (types := types_of(call, call.y)) < 0:
        _numpy.invertible_layer_norm_grad(call)
        return
    numbers = types, workers(), call.axis, True, True, 0.0
    inputs = call.dy, call.y, call.scale, call.bias, None, call.inv_std, None
    gradient(*numbers + inputs, call.dx, call.dscale, call.dbias)


def invertible_rms_norm_grad(call: records.InvertibleRmsNormGrad) -> None:
    """As ``rms_norm_grad``, with xhat computed from the output; ``dx`` may be ``dy`` or ``ds``."""
    if (types := types_of(call, call.y)) < 0:
        _numpy.invertible_rms_norm_grad(call)
        return
    numbers = types, workers(), call.axis, True, False, call.scale_offset
    inputs = call.dy, call.y, call.scale, None, None, call.inv_std, call.ds
    gradient(*numbers + inputs, call.dx, call.dscale, None)


def layer_norm_inverse(call: records.LayerNormInverse) -> None:
    """Write ``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
    if (types := types_of(call, call.y)) < 0:
        _numpy.layer_norm_inverse(call)
        return
    inputs = call.y, call.scale, call.bias, call.mean, call.inv_std
    inverse(types, workers(), call.axis, *inputs, call.x)

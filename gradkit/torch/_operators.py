"""The norms as operators, ``torch.ops.gradkit``, and as differentiable functions of them.

A norm is named by the records of its forward pass and of its gradient, from which its operators
follow; batch norms say themselves what they run and what results look like.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import gradkit
from gradkit._calls import channels, rows
from gradkit.torch._autograd import Kept, Norm, operator
from gradkit.torch._records import norm_of

# ``(x, scale, bias, axis, eps, scale_offset) -> y``; the backward pass reads x.
LAYER_NORM = norm_of("layer_norm", rows.LayerNorm, rows.LayerNormGrad)

# ``(x, scale, bias, axis, eps, scale_offset) -> y``; the backward pass reads y.
INVERTIBLE_LAYER_NORM = norm_of(
    "invertible_layer_norm", rows.LayerNorm, rows.InvertibleLayerNormGrad
)

# ``(x, residual, scale, bias, axis, eps, scale_offset) -> (y, s)``.
ADD_LAYER_NORM = norm_of("add_layer_norm", rows.AddLayerNorm, rows.LayerNormGrad, x="s")

# ``(x, scale, axis, eps, scale_offset) -> y``.
RMS_NORM = norm_of("rms_norm", rows.RmsNorm, rows.RmsNormGrad)

# ``(x, residual, scale, axis, eps, scale_offset) -> (y, s)``.
ADD_RMS_NORM = norm_of("add_rms_norm", rows.AddRmsNorm, rows.RmsNormGrad, x="s")

# ``(x, scale, bias, num_groups, channel_axis, eps) -> y``.
GROUP_NORM = norm_of("group_norm", channels.GroupNorm, channels.GroupNormGrad)

# What results look like


def _statistic(x: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(shape, dtype=dtype)


def _parameter(parameter: Tensor | None, x: Tensor) -> Tensor:
    """The gradient of a parameter that may be absent, or what replaces it."""
    return x.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)


def _channels(x: Tensor) -> Tensor:
    """New memory without gaps, with x's axes in the order in which they lie there."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    strides, step = [0] * x.ndim, 1
    inwards = sorted(range(x.ndim), key=lambda axis: -x.stride(axis))
    for axis in inwards[::-1]:
        strides[axis] = step
        step *= x.shape[axis]
    return x.new_empty_strided(x.shape, strides)


# Batch norm by the batch's statistics


def _channels_grad_like(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _channels(x), _parameter(scale, x), _parameter(scale, x)


def _keep_channels(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    return (*inputs[:2], *results[1:3]), ()


def _batch_norm_in_place(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return gradkit.batch_norm(
        x,
        scale,
        bias,
        eps=eps,
        running_mean=running_mean,
        running_var=running_var,
        momentum=momentum,
    )


def _batch_norm(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    mean, var = (None if r is None else r.clone() for r in (running_mean, running_var))
    return *_batch_norm_in_place(x, scale, bias, mean, var, momentum, eps), mean, var


def _batch_norm_like(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    statistics = [_statistic(x, x.shape[1:2]) for _ in range(2)]
    moved = _parameter(running_mean, x), _parameter(running_var, x)
    return _channels(x), *statistics, *moved


def _batch_norm_grad(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradkit.batch_norm_grad(dy, x, scale, mean, inv_std)


class _BatchNorm(Norm):
    """Batch norm that writes running statistics in place.

    The operator returns new ones, which are copied outside of it: so compilers see every write.
    """

    def dispatched(self, *args: Any) -> Any:
        """All results; the running statistics are copied."""
        results = super().dispatched(*args)
        with torch.no_grad():
            for running, new in zip(args[3:5], results[3:], strict=True):
                if running is not None:
                    running.copy_(new)
        return results


# ``(x, scale, bias, running_mean, running_var, momentum, eps) -> y``.
BATCH_NORM = _BatchNorm(
    operator(
        "batch_norm(Tensor x, Tensor? scale, Tensor? bias, Tensor? running_mean,"
        " Tensor? running_var, float momentum, float eps)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _batch_norm,
        _batch_norm_like,
    ),
    operator(
        "batch_norm_grad(Tensor dy, Tensor x, Tensor? scale, Tensor mean, Tensor inv_std)"
        " -> (Tensor, Tensor, Tensor)",
        _batch_norm_grad,
        _channels_grad_like,
        last=True,
    ),
    _keep_channels,
    at_once=_batch_norm_in_place,
)


# Batch norm by running statistics


def _batch_norm_inference(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor]:
    return (gradkit.batch_norm_inference(x, scale, bias, mean, var, eps=eps),)


def _batch_norm_inference_like(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    return _channels(x)


def _batch_norm_inference_grad(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradkit.batch_norm_inference_grad(dy, x, scale, mean, var, eps=eps)


def _batch_norm_inference_grad_like(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _channels_grad_like(dy, x, scale, mean, var)


def _keep_statistics(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    x, scale, _, mean, var, eps = inputs
    return (x, scale, mean, var), (eps,)


# ``(x, scale, bias, mean, var, eps) -> y``.
BATCH_NORM_INFERENCE = Norm(
    operator(
        "batch_norm_inference(Tensor x, Tensor? scale, Tensor? bias, Tensor mean, Tensor var,"
        " float eps) -> Tensor",
        _batch_norm_inference,
        _batch_norm_inference_like,
    ),
    operator(
        "batch_norm_inference_grad(Tensor dy, Tensor x, Tensor? scale, Tensor mean, Tensor var,"
        " float eps) -> (Tensor, Tensor, Tensor)",
        _batch_norm_inference_grad,
        _batch_norm_inference_grad_like,
        last=True,
    ),
    _keep_statistics,
)

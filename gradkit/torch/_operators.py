"""The norms as operators, ``torch.ops.gradkit``, and as differentiable functions of them.

Each norm has what runs it, what its results look like, the same of its gradient, and what the
gradient needs of the forward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import gradkit
from gradkit.torch._autograd import Kept, Norm, operator

# What results look like


def _rows(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


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


# Layer norm


def _layer_norm(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    axis: int,
    eps: float,
    scale_offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return gradkit.layer_norm(x, scale, bias, axis=axis, eps=eps, scale_offset=scale_offset)


def _layer_norm_like(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    axis: int,
    eps: float,
    scale_offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lead = x.shape[:axis]
    return _rows(x), _statistic(x, lead), _statistic(x, lead)


def _layer_norm_grad(
    dy: Tensor,
    x: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    axis: int,
    scale_offset: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradkit.layer_norm_grad(
        dy, x, scale, mean, inv_std, axis=axis, scale_offset=scale_offset
    )


def _layer_norm_grad_like(
    dy: Tensor,
    x: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    axis: int,
    scale_offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(x), _parameter(scale, x), _parameter(scale, x)


def _keep_input(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    x, scale, _, axis, _, scale_offset = inputs
    return (x, scale, *results[1:]), (axis, scale_offset)


# ``(x, scale, bias, axis, eps, scale_offset) -> y``; the backward pass reads x.
LAYER_NORM = Norm(
    operator(
        "layer_norm(Tensor x, Tensor? scale, Tensor? bias, int axis, float eps,"
        " float scale_offset) -> (Tensor, Tensor, Tensor)",
        _layer_norm,
        _layer_norm_like,
    ),
    operator(
        "layer_norm_grad(Tensor dy, Tensor x, Tensor? scale, Tensor mean, Tensor inv_std, int axis,"
        " float scale_offset) -> (Tensor, Tensor, Tensor)",
        _layer_norm_grad,
        _layer_norm_grad_like,
    ),
    _keep_input,
)


# Layer norm that keeps its output


def _invertible_layer_norm(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return gradkit.layer_norm(x, scale, bias, axis=axis, eps=eps)


def _invertible_layer_norm_like(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, axis: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _layer_norm_like(x, scale, bias, axis, eps, 0.0)


def _invertible_layer_norm_grad(
    dy: Tensor, y: Tensor, scale: Tensor | None, bias: Tensor | None, inv_std: Tensor, axis: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradkit.invertible_layer_norm_grad(dy, y, scale, bias, inv_std, axis=axis)


def _invertible_layer_norm_grad_like(
    dy: Tensor, y: Tensor, scale: Tensor | None, bias: Tensor | None, inv_std: Tensor, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(y), _parameter(scale, y), _parameter(bias, y)


def _keep_output(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    _, scale, bias, axis, _ = inputs
    y, _, inv_std = results
    return (y, scale, bias, inv_std), (axis,)


# ``(x, scale, bias, axis, eps) -> y``; the backward pass reads y.
INVERTIBLE_LAYER_NORM = Norm(
    operator(
        "invertible_layer_norm(Tensor x, Tensor? scale, Tensor? bias, int axis, float eps)"
        " -> (Tensor, Tensor, Tensor)",
        _invertible_layer_norm,
        _invertible_layer_norm_like,
    ),
    operator(
        "invertible_layer_norm_grad(Tensor dy, Tensor y, Tensor? scale, Tensor? bias,"
        " Tensor inv_std, int axis) -> (Tensor, Tensor, Tensor)",
        _invertible_layer_norm_grad,
        _invertible_layer_norm_grad_like,
    ),
    _keep_output,
)


# Layer norm of a residual sum


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    axis: int,
    eps: float,
    scale_offset: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return gradkit.add_layer_norm(
        x, residual, scale, bias, axis=axis, eps=eps, scale_offset=scale_offset
    )


def _add_layer_norm_like(
    x: Tensor,
    residual: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    axis: int,
    eps: float,
    scale_offset: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lead = x.shape[:axis]
    return _rows(x), _rows(x), _statistic(x, lead), _statistic(x, lead)


def _add_layer_norm_grad(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    axis: int,
    scale_offset: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradkit.layer_norm_grad(
        dy, s, scale, mean, inv_std, axis=axis, ds=ds, scale_offset=scale_offset
    )


def _add_layer_norm_grad_like(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    axis: int,
    scale_offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(s), _parameter(scale, s), _parameter(scale, s)


def _keep_sum(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    _, _, scale, _, axis, _, scale_offset = inputs
    _, s, mean, inv_std = results
    return (s, scale, mean, inv_std), (axis, scale_offset)


# ``(x, residual, scale, bias, axis, eps, scale_offset) -> (y, s)``.
ADD_LAYER_NORM = Norm(
    operator(
        "add_layer_norm(Tensor x, Tensor residual, Tensor? scale, Tensor? bias, int axis,"
        " float eps, float scale_offset) -> (Tensor, Tensor, Tensor, Tensor)",
        _add_layer_norm,
        _add_layer_norm_like,
    ),
    operator(
        "add_layer_norm_grad(Tensor dy, Tensor? ds, Tensor s, Tensor? scale, Tensor mean,"
        " Tensor inv_std, int axis, float scale_offset) -> (Tensor, Tensor, Tensor)",
        _add_layer_norm_grad,
        _add_layer_norm_grad_like,
    ),
    _keep_sum,
    residual=True,
)


# RMS norm


def _rms_norm(
    x: Tensor, scale: Tensor | None, axis: int, eps: float, scale_offset: float
) -> tuple[Tensor, Tensor]:
    return gradkit.rms_norm(x, scale, axis=axis, eps=eps, scale_offset=scale_offset)


def _rms_norm_like(
    x: Tensor, scale: Tensor | None, axis: int, eps: float, scale_offset: float
) -> tuple[Tensor, Tensor]:
    return _rows(x), _statistic(x, x.shape[:axis])


def _rms_norm_grad(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, axis: int, scale_offset: float
) -> tuple[Tensor, Tensor | None]:
    return gradkit.rms_norm_grad(dy, x, scale, inv_std, axis=axis, scale_offset=scale_offset)


def _rms_norm_grad_like(
    dy: Tensor, x: Tensor, scale: Tensor | None, inv_std: Tensor, axis: int, scale_offset: float
) -> tuple[Tensor, Tensor]:
    return _rows(x), _parameter(scale, x)


def _keep_rms(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    x, scale, axis, _, scale_offset = inputs
    return (x, scale, results[1]), (axis, scale_offset)


# ``(x, scale, axis, eps, scale_offset) -> y``.
RMS_NORM = Norm(
    operator(
        "rms_norm(Tensor x, Tensor? scale, int axis, float eps, float scale_offset)"
        " -> (Tensor, Tensor)",
        _rms_norm,
        _rms_norm_like,
    ),
    operator(
        "rms_norm_grad(Tensor dy, Tensor x, Tensor? scale, Tensor inv_std, int axis,"
        " float scale_offset) -> (Tensor, Tensor)",
        _rms_norm_grad,
        _rms_norm_grad_like,
    ),
    _keep_rms,
)


# RMS norm of a residual sum


def _add_rms_norm(
    x: Tensor, residual: Tensor, scale: Tensor | None, axis: int, eps: float, scale_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    return gradkit.add_rms_norm(x, residual, scale, axis=axis, eps=eps, scale_offset=scale_offset)


def _add_rms_norm_like(
    x: Tensor, residual: Tensor, scale: Tensor | None, axis: int, eps: float, scale_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(x), _rows(x), _statistic(x, x.shape[:axis])


def _add_rms_norm_grad(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    scale: Tensor | None,
    inv_std: Tensor,
    axis: int,
    scale_offset: float,
) -> tuple[Tensor, Tensor | None]:
    return gradkit.rms_norm_grad(dy, s, scale, inv_std, axis=axis, ds=ds, scale_offset=scale_offset)


def _add_rms_norm_grad_like(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    scale: Tensor | None,
    inv_std: Tensor,
    axis: int,
    scale_offset: float,
) -> tuple[Tensor, Tensor]:
    return _rows(s), _parameter(scale, s)


def _keep_rms_of_sum(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    _, _, scale, axis, _, scale_offset = inputs
    _, s, inv_std = results
    return (s, scale, inv_std), (axis, scale_offset)


# ``(x, residual, scale, axis, eps, scale_offset) -> (y, s)``.
ADD_RMS_NORM = Norm(
    operator(
        "add_rms_norm(Tensor x, Tensor residual, Tensor? scale, int axis, float eps,"
        " float scale_offset) -> (Tensor, Tensor, Tensor)",
        _add_rms_norm,
        _add_rms_norm_like,
    ),
    operator(
        "add_rms_norm_grad(Tensor dy, Tensor? ds, Tensor s, Tensor? scale, Tensor inv_std,"
        " int axis, float scale_offset) -> (Tensor, Tensor)",
        _add_rms_norm_grad,
        _add_rms_norm_grad_like,
    ),
    _keep_rms_of_sum,
    residual=True,
)


# Group norm


def _group_norm(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return gradkit.group_norm(x, num_groups, scale, bias, eps=eps)


def _group_norm_like(
    x: Tensor, scale: Tensor | None, bias: Tensor | None, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[0], num_groups
    return _channels(x), _statistic(x, shape), _statistic(x, shape)


def _group_norm_grad(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradkit.group_norm_grad(dy, x, scale, mean, inv_std)


def _channels_grad_like(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, inv_std: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _channels(x), _parameter(scale, x), _parameter(scale, x)


def _keep_channels(inputs: Sequence[Any], results: Sequence[Any]) -> Kept:
    return (*inputs[:2], *results[1:3]), ()


# ``(x, scale, bias, num_groups, eps) -> y``.
GROUP_NORM = Norm(
    operator(
        "group_norm(Tensor x, Tensor? scale, Tensor? bias, int num_groups, float eps)"
        " -> (Tensor, Tensor, Tensor)",
        _group_norm,
        _group_norm_like,
    ),
    operator(
        "group_norm_grad(Tensor dy, Tensor x, Tensor? scale, Tensor mean, Tensor inv_std)"
        " -> (Tensor, Tensor, Tensor)",
        _group_norm_grad,
        _channels_grad_like,
    ),
    _keep_channels,
)


# Batch norm by the batch's statistics


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
    ),
    _keep_statistics,
)

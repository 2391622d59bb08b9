"""Norms over channels that JAX differentiates once, as those of :mod:`gradkit.jax.norms`."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradkit
from gradkit._arrays import backend_of
from gradkit._backend import Array, Shape
from gradkit._calls import checks
from gradkit._calls.channels import (
    BatchNormApply,
    BatchNormGrad,
    BatchNormGradApply,
    BatchNormGradSums,
    BatchNormInference,
    BatchNormInferenceGrad,
    BatchNormStats,
    CombineStats,
    GroupNorm,
    GroupNormGrad,
    UpdateRunningStatistics,
)
from gradkit._open.dispatch import write
from gradkit.jax._callbacks import Result, axes_of, call, vary, vary_alike, varying
from gradkit.jax._norms import (
    affine,
    blank,
    from_the_end,
    gradient,
    like,
    of_arguments,
    once,
    three,
)
from gradkit.jax._numbers import doubles, pairs, store

__all__ = ["batch_norm", "batch_norm_inference", "group_norm"]

_FLOAT64 = np.dtype(np.float64)
_GROUP_NORM, _BATCH_NORM = once("group_norm"), once("batch_norm")
_INFERENCE = once("batch_norm_inference")


def group_norm(
    x: Any,
    num_groups: int,
    scale: Any = None,
    bias: Any = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
) -> jax.Array:
    """Group norm: ``y = (x - mean) * inv_std * scale + bias`` with each group's statistics.

    With ``num_groups`` equal to the number of channels it is an instance norm.

    Parameters
    ----------
    x : array of two or more dimensions, samples first
        T: float16, bfloat16, float32 or float64.
    num_groups : int
        Divides the number of channels.
    scale, bias : arrays of shape (C,), optional
        T; also float32 for 16-bit data, and 16-bit for float32 data.
    channel_axis : int
        The channel axis, any but the first: -1 for channels last, which are read where they lie.
    eps : float
        Added to the variance; finite and at least 0.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.group_norm`, while the call is traced.

    References
    ----------
    ``flax.linen.GroupNorm``, whose eps is 1e-6, with channels last.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> x = jnp.array([[1.0, 3.0, 5.0, 5.0]])
    >>> gradkit.jax.group_norm(x, 2, eps=0.25).round(4)
    Array([[-0.8944,  0.8944,  0.    ,  0.    ]], dtype=float32)
    >>> jax.grad(lambda x: gradkit.jax.group_norm(x, 2, eps=0.25)[0, 0])(x).round(4)
    Array([[ 0.0894, -0.0894,  0.    ,  0.    ]], dtype=float32)
    """
    groups, channels = checks.integer(num_groups, "num_groups"), _channel_axis(channel_axis)
    return _group(x, scale, bias, groups, channels, checks.epsilon(eps))


def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    running_mean: Any = None,
    running_var: Any = None,
    momentum: float = 0.1,
    axis_name: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch norm in training mode: ``y = (x - mean) / sqrt(var + eps) * scale + bias``.

    Given running statistics, it returns new ones, with n elements per channel::

        running_mean = (1 - momentum) * running_mean + momentum * mean
        running_var  = (1 - momentum) * running_var  + momentum * var * n / (n - 1)

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64.
    scale, bias : arrays of shape (C,), optional
        T, or float32 for 16-bit data.
    channel_axis : int
        The channel axis; statistics are over all other axes.
    eps : float
        Added to the biased variance; finite and at least 0.
    running_mean, running_var : arrays of shape (C,) and one dtype, optional
        float16, bfloat16, float32 or float64: as :func:`gradkit.batch_norm` moves them, but not
        written.
    momentum : float
        From 0 to 1: the weight of this batch. flax, Keras and ONNX call ``1 - momentum`` momentum.
    axis_name : str or tuple of str, optional
        Axes of a ``shard_map``, or of a ``vmap``: the batch is that of all their devices, by
        ``jax.lax.all_gather`` of two numbers per channel. Statistics are the same on all of them.

    Returns
    -------
    y : array of x's shape and dtype
    mean, var : arrays of shape (C,)
        Without running statistics: float32 (float64 for float64 data), the batch's mean and biased
        variance. With them: the new running statistics, in their dtype. No gradient flows through
        either.

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.batch_norm`, while the call is traced.

    References
    ----------
    ``flax.linen.BatchNorm``, which adds up ``mean(x^2) - mean(x)^2`` by default, and whose running
    variance is biased.

    Examples
    --------
    >>> import jax.numpy as jnp, gradkit.jax
    >>> x = jnp.array([[1.0, 10.0], [3.0, 10.0]])
    >>> y, mean, var = gradkit.jax.batch_norm(x)
    >>> mean, var
    (Array([ 2., 10.], dtype=float32), Array([1., 0.], dtype=float32))
    >>> running = {"running_mean": jnp.zeros(2), "running_var": jnp.ones(2)}
    >>> y, mean, var = gradkit.jax.batch_norm(x, **running, momentum=0.5)
    >>> mean, var
    (Array([1., 5.], dtype=float32), Array([1.5, 0.5], dtype=float32))
    """
    running, weight = _running(running_mean, running_var), checks.weight(momentum)
    rule = _channel_axis(channel_axis), checks.epsilon(eps), weight, axis_name
    y, mean, var = _batch(x, scale, bias, running, *rule)
    return y, jax.lax.stop_gradient(mean), jax.lax.stop_gradient(var)


def _running(mean: Any, var: Any) -> Any:
    """Both running statistics, or none."""
    if (mean is None) != (var is None):
        label = "running_mean" if mean is None else "running_var"
        raise TypeError(f"{label} is None; pass running_mean and running_var, or neither")
    return None if mean is None else (mean, var)


def batch_norm_inference(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    var: Any,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
) -> jax.Array:
    """Batch norm by running statistics: ``y = (x - mean) / sqrt(var + eps) * scale + bias``.

    Parameters
    ----------
    x : array of two or more dimensions
        T: float16, bfloat16, float32 or float64.
    scale, bias : arrays of shape (C,), or None
        T, or float32 for 16-bit data.
    mean, var : arrays of shape (C,)
        Running statistics, as :func:`batch_norm` returns them. They are constants: no gradient
        flows through them.
    channel_axis : int
        The channel axis.
    eps : float
        Added to ``var``; finite and at least 0.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.batch_norm_inference`, while the call is traced.

    References
    ----------
    ``flax.linen.BatchNorm`` with ``use_running_average=True``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> x, mean, var = jnp.array([[1.0], [3.0]]), jnp.array([3.0]), jnp.array([0.1875])
    >>> norm = lambda x: gradkit.jax.batch_norm_inference(x, None, None, mean, var, eps=0.0625)
    >>> norm(x), jax.grad(lambda x: norm(x)[0, 0])(x)
    (Array([[-4.],
           [ 0.]], dtype=float32), Array([[2.],
           [0.]], dtype=float32))
    """
    channels, floor = _channel_axis(channel_axis), checks.epsilon(eps)
    return _inference(x, scale, bias, mean, var, channels, floor)


def _channel_axis(value: Any) -> int:
    return checks.integer(value, "channel_axis")


@partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _group(x: Any, scale: Any, bias: Any, groups: int, channel_axis: int, eps: float) -> Any:
    x, scale, bias = vary_alike(*affine(x, scale, bias))
    planned = gradkit.group_norm(
        np.empty((0, *x.shape[1:]) if x.ndim > 1 else x.shape, x.dtype),
        groups,
        blank(scale),
        blank(bias),
        channel_axis=channel_axis,
    )
    statistic = Result((x.shape[0], groups), planned[1].dtype)
    channels = from_the_end(channel_axis, x, "channel_axis")
    return _group_norm(x, scale, bias, statistic, channels, eps)


@partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=True)
def _batch(
    x: Any,
    scale: Any,
    bias: Any,
    running: Any,
    channel_axis: int,
    eps: float,
    momentum: float,
    axis_name: Any,
) -> Any:
    x = vary(x, frozenset().union(*map(varying, running or ())))
    x, scale, bias = vary_alike(*affine(x, scale, bias))
    channels = checks.axis_index(channel_axis, x.ndim, "channel_axis")
    return _batch_norm(x, scale, bias, running, channels, eps, momentum, axis_name)


@partial(jax.jit, static_argnums=(5, 6), inline=True)
def _inference(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any, channel_axis: int, eps: float
) -> Any:
    given = vary_alike(*affine(x, scale, bias), mean, var)
    channels = from_the_end(channel_axis, x, "channel_axis")
    known: Any = tuple(map(blank, given[1:]))
    gradkit.batch_norm_inference(_no_elements(x, channels), *known, channel_axis=channels)
    return _batch_norm_inference(*given, channels, eps)


def _no_elements(x: Any, channel_axis: int) -> Array:
    """An array with x's channels, and nothing in them."""
    axis = channel_axis % x.ndim
    return np.empty([n if k == axis else 0 for k, n in enumerate(x.shape)], x.dtype)


# Group norm


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _group_norm(
    x: Any, scale: Any, bias: Any, statistic: Result, channel_axis: int, eps: float
) -> Any:
    return _group_norm_forward(x, scale, bias, statistic, channel_axis, eps)[0]


def _group_norm_forward(
    x: Any, scale: Any, bias: Any, statistic: Result, channel_axis: int, eps: float
) -> Any:
    ndim = x.ndim

    def compute(outs: list[Array], ins: list[Any]) -> None:
        x, scale, bias = ins
        x, y = _samples(x, ndim), _samples(outs[0], ndim)
        mean, inv_std = (_samples(out, 2) for out in outs[1:])
        call = GroupNorm(
            x=x,
            num_groups=mean.shape[1],
            scale=scale,
            bias=bias,
            channel_axis=channel_axis,
            eps=eps,
        )
        write(call, y, mean, inv_std)

    results = [like(x), statistic, statistic]
    y, mean, inv_std = call(_GROUP_NORM, compute, results, (x, scale, bias), shared=(1, 2))
    return y, (x, scale, bias, mean, inv_std)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _group_norm_backward(
    statistic: Result,  # noqa: ARG001
    channel_axis: int,
    eps: float,  # noqa: ARG001
    kept: Any,
    dy: Any,
) -> Any:
    x, scale, bias, mean, inv_std = kept
    ndim = x.ndim

    def compute(outs: list[Array], ins: list[Any]) -> None:
        dy, x, scale, mean, inv_std = ins
        dx, dscale, dbias = three(outs)
        dy, x, dx = (_samples(array, ndim) for array in (dy, x, dx))
        mean, inv_std = _samples(mean, 2), _samples(inv_std, 2)
        call = GroupNormGrad(
            dy=dy, x=x, scale=scale, mean=mean, inv_std=inv_std, channel_axis=channel_axis
        )
        write(call, dx, dscale, dbias)

    results = [like(x)] if scale is None else [like(x), like(scale), like(scale)]
    made = gradient("group_norm", compute, results, (dy, x, scale, mean, inv_std), scale)
    return of_arguments(made, scale, bias)


def _samples(array: Array, ndim: int) -> Array:
    """An array of ``ndim`` axes: those of examples in front become further samples."""
    first = array.ndim - ndim + 1
    return array.reshape(math.prod(array.shape[:first]), *array.shape[first:])


_group_norm.defvjp(_group_norm_forward, _group_norm_backward)


# Batch norm


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    running: Any,
    channel_axis: int,
    eps: float,
    momentum: float,
    axis_name: Any,
) -> Any:
    rule = channel_axis, eps, momentum, axis_name
    return _batch_norm_forward(x, scale, bias, running, *rule)[0]


def _batch_norm_forward(
    x: Any,
    scale: Any,
    bias: Any,
    running: Any,
    channel_axis: int,
    eps: float,
    momentum: float,
    axis_name: Any,
) -> Any:
    empty = _no_elements(x, channel_axis)
    _, *planned = gradkit.batch_norm(empty, blank(scale), blank(bias), channel_axis=channel_axis)
    statistic = Result(planned[0].shape, planned[0].dtype, axes_of(axis_name))
    rows = own_row = None
    if axis_name is not None:
        rows = _stats_of_all(x, channel_axis, axis_name)
        own_row = jnp.arange(len(rows)) == jax.lax.axis_index(axis_name)
    size = _size(x, channel_axis)
    moved = _moved(running, planned, size * (1 if rows is None else len(rows)), axis_name)

    def compute(outs: list[Array], ins: list[Any]) -> None:
        (y, mean, inv_std, *told), (x, scale, bias, rows, *known) = outs, ins
        of_all, count = _stats_of(x, rows, channel_axis, mean.shape)
        given = {"scale": scale, "bias": bias, "mean": of_all[0], "var": of_all[1]}
        apply = BatchNormApply(x=x, **given, channel_axis=channel_axis, eps=eps)
        write(apply, y, mean, inv_std)
        if known:
            update = UpdateRunningStatistics(
                running_mean=known[0],
                running_var=known[1],
                mean=of_all[0],
                var=of_all[1],
                count=float(size) if rows is None else count,
                momentum=momentum,
            )
            write(update, *told)
        else:
            store(told[0], of_all[1])

    results = [like(x), statistic, statistic, *(moved or [statistic])]
    operands = (x, scale, bias, rows, *(running or ()))
    y, mean, inv_std, *told = call(_BATCH_NORM, compute, results, operands)
    # Running statistics, or the batch's: the mean is then a result in any case.
    return (y, *(mean, *told)[-2:]), (x, scale, bias, mean, inv_std, own_row, running)


def _stats_of(x: Array, rows: Any, channel_axis: int, shape: Shape) -> tuple[Array, Array]:
    """Mean and variance of x, or of all devices' rows, in float64, and the elements of those."""
    backend = backend_of(x)
    of_all, count = backend.empty((2, *shape), _FLOAT64), backend.empty((), _FLOAT64)
    if rows is None:
        write(BatchNormStats(x=x, channel_axis=channel_axis), of_all[0], of_all[1], None)
    else:
        write(_combined(doubles(rows), len(of_all[0])), of_all[0], of_all[1], count)
    return of_all, count


def _moved(running: Any, planned: Any, count: int, axis_name: Any) -> list[Result]:
    """New running statistics, of which there may be none; raise unless they are valid."""
    if running is None:
        return []
    said = "on all devices together" if axis_name else ""
    checks.enough(count, f"x has one element per channel {said}".strip())
    known: tuple[Any, Any] = (blank(running[0]), blank(running[1]))
    likes = gradkit.update_running_statistics(*known, planned[0], planned[1], 0)
    same = axes_of(axis_name) - frozenset().union(*map(varying, running))
    return [Result(array.shape, array.dtype, same) for array in likes]


def _size(x: Any, channel_axis: int) -> int:
    """How many elements each channel has."""
    return math.prod(n for k, n in enumerate(x.shape) if k != channel_axis)


def _stats_of_all(x: Any, channel_axis: int, axis_name: Any) -> Any:
    """Each device's means, variances and count: a row of each."""
    channels = x.shape[channel_axis]

    def compute(outs: list[Array], ins: list[Any]) -> None:
        (x,), state = ins, doubles(outs[0])
        stats = BatchNormStats(x=x, channel_axis=channel_axis)
        write(stats, state[:channels], state[channels:-1], None)
        state[-1] = x.size // max(channels, 1)

    (state,) = call(_BATCH_NORM, compute, [pairs(2 * channels + 1)], [x])
    return jax.lax.all_gather(state, axis_name)


def _combined(rows: Array, channels: int) -> CombineStats:
    """Mean and variance of all devices' channels, and how many elements each has."""
    means, variances = rows[:, :channels], rows[:, channels:-1]
    return CombineStats(means=means, variances=variances, counts=rows[:, -1])


@partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _batch_norm_backward(
    channel_axis: int,
    eps: float,  # noqa: ARG001
    momentum: float,  # noqa: ARG001
    axis_name: Any,
    kept: Any,
    cotangents: Any,
) -> Any:
    x, scale, bias, mean, inv_std, own_row, running = kept
    constant = None if running is None else (None, None)
    operands = (cotangents[0], x, scale, mean, inv_std)
    if axis_name is not None:
        gradients = _batch_norm_backward_of_all(channel_axis, axis_name, operands, own_row)
        return *of_arguments(gradients, scale, bias), constant

    def compute(outs: list[Array], ins: list[Any]) -> None:
        dy, x, scale, mean, inv_std = ins
        call = BatchNormGrad(
            dy=dy,
            x=x,
            scale=scale,
            mean=mean,
            inv_std=inv_std,
            channel_axis=channel_axis,
            engine=None,
        )
        write(call, *three(outs))

    results = [like(x)] if scale is None else [like(x), like(scale), like(scale)]
    return *of_arguments(call(_BATCH_NORM, compute, results, operands), scale, bias), constant


def _batch_norm_backward_of_all(
    channel_axis: int, axis_name: Any, operands: Any, own_row: Any
) -> list[Any]:
    """Sums over all devices give dx; those of each are its part of dscale and dbias."""
    dy, x, scale, mean, inv_std = operands
    channels = x.shape[channel_axis]

    def sums(outs: list[Array], ins: list[Any]) -> None:
        (dy, x, mean, inv_std), own = ins, doubles(outs[0])
        known = {"dy": dy, "x": x, "mean": mean, "inv_std": inv_std}
        write(BatchNormGradSums(**known, channel_axis=channel_axis), own[0], own[1])
        for out, row in zip(outs[1:], own, strict=False):
            store(out, row)

    parameters = [] if scale is None else [like(scale), like(scale)]
    own, *gradients = call(
        _BATCH_NORM, sums, [pairs(2, channels), *parameters], (dy, x, mean, inv_std)
    )
    # An all_gather: JAX's own knows no axis of a vmap in a backward pass.
    rows = jax.lax.psum(jnp.where(own_row.reshape(-1, 1, 1, 1), own, 0), axis_name)
    count = float(_size(x, channel_axis) * len(own_row))

    def apply(outs: list[Array], ins: list[Any]) -> None:
        dy, x, scale, mean, inv_std, rows = ins
        with np.errstate(all="ignore"):  # infinities of two signs
            totals = doubles(rows).sum(axis=0)
        call = BatchNormGradApply(
            dy=dy,
            x=x,
            scale=scale,
            mean=mean,
            inv_std=inv_std,
            sum_dy_xhat=totals[0],
            sum_dy=totals[1],
            count=count,
            channel_axis=channel_axis,
        )
        write(call, outs[0])

    return [*call(_BATCH_NORM, apply, [like(x)], (*operands, rows)), *gradients]


_batch_norm.defvjp(_batch_norm_forward, _batch_norm_backward)


# Batch norm by running statistics


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _batch_norm_inference(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any, channel_axis: int, eps: float
) -> Any:
    return _inference_forward(x, scale, bias, mean, var, channel_axis, eps)[0]


def _inference_forward(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any, channel_axis: int, eps: float
) -> Any:
    def compute(outs: list[Array], ins: list[Any]) -> None:
        x, scale, bias, mean, var = ins
        call = BatchNormInference(
            x=x,
            scale=scale,
            bias=bias,
            mean=mean,
            var=var,
            channel_axis=channel_axis,
            eps=eps,
            engine=None,
        )
        write(call, outs[0])

    operands = (x, scale, bias, mean, var)
    (y,) = call(_INFERENCE, compute, [like(x)], operands, shared=(1, 2, 3, 4))
    return y, operands


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _inference_backward(channel_axis: int, eps: float, kept: Any, dy: Any) -> Any:
    x, scale, bias, mean, var = kept

    def compute(outs: list[Array], ins: list[Any]) -> None:
        dy, x, scale, mean, var = ins
        call = BatchNormInferenceGrad(
            dy=dy, x=x, scale=scale, mean=mean, var=var, channel_axis=channel_axis, eps=eps
        )
        write(call, *three(outs))

    results = [like(x)] if scale is None else [like(x), like(scale), like(scale)]
    shared = (3, 4) if scale is None else None
    made = call(_INFERENCE, compute, results, (dy, x, scale, mean, var), shared=shared)
    return *of_arguments(made, scale, bias), None, None


_batch_norm_inference.defvjp(_inference_forward, _inference_backward)

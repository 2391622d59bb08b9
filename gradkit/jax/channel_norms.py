"""Norms over channels that JAX differentiates once, as those of :mod:`gradkit.jax.norms`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradkit._arrays import backend_of
from gradkit._calls import channels, checks
from gradkit._open.dispatch import run, write
from gradkit._open.foreign import answers
from gradkit.jax._callbacks import (
    ResultShape,
    axes_of,
    call,
    rows_of_all,
    sharding_of,
    vary,
    vary_alike,
    varying,
)
from gradkit.jax._compiled import CompiledCall, compiled_call
from gradkit.jax._numbers import doubles, pairs, store
from gradkit.jax._records import TracedNorm, results_of, spread_alike

__all__ = ["batch_norm", "batch_norm_inference", "group_norm"]


class _TracedBatchNorm(TracedNorm[...]):
    """Batch norm that returns statistics; its batch may be that of several devices."""

    def __init__(self) -> None:
        super().__init__("batch_norm", channels.BatchNorm, channels.BatchNormGrad)
        self.returned = ["y", "returned_mean", "returned_var"]
        self.residual_names["own_row"] = "own_row"
        self.shared = None

    def alike(self, inputs: dict[str, Any]) -> list[Any]:
        """Running statistics may stay the same on all devices."""
        x, scale, bias, *running = spread_alike(inputs).values()
        return [*vary_alike(vary(x, varying(*running)), scale, bias), *running]

    def forward_pass(self, inputs: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """The results, and which row of all devices' statistics is the own one."""
        x, _, _, *running = inputs.values()
        axis, axis_name = numbers["channel_axis"], numbers.pop("axis_name")
        results, _ = results_of(channels.BatchNorm, inputs, numbers)
        rows = own_row = None
        if axis_name is not None:
            rows = _stats_of_all(self.refusal, axis, axis_name, x)
            own_row = jnp.arange(len(rows)) == jax.lax.axis_index(axis_name)
        everywhere = axes_of(axis_name)
        for name in ("mean", "inv_std"):
            results[name] = results[name]._replace(same_on=everywhere)
        _check_elements(x, axis, rows)
        if running[0] is None:
            results["returned_var"] = results["mean"]
        else:
            same = everywhere - varying(*running)
            results |= {
                name: ResultShape.like(statistic, same)
                for name, statistic in zip(("returned_mean", "returned_var"), running, strict=True)
            }
        operands, kinds = [*inputs.values(), rows], list(results.values())
        run, reuse, compiled = partial(_normalise, numbers), {}, None
        if rows is None:
            compiled = _compiled(numbers, kinds, operands)
            reuse = {k: k for k in range(3, len(results)) if running[0] is not None}
        arrays = call(self.refusal, run, kinds, operands, reuse=reuse, compiled=compiled)
        named = dict(zip(results, arrays, strict=True))
        return {"returned_mean": named["mean"], "own_row": own_row} | named

    def gradient_pass(self, values: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """Sums over all devices give dx; those of each are its part of dscale and dbias."""
        axis, axis_name, own_row = numbers["channel_axis"], numbers["axis_name"], values["own_row"]
        if axis_name is None:
            return super().gradient_pass(values, numbers)
        dy, x, scale, mean, inv_std = operands = self.operands(values).values()
        names = [name for name in ("dscale", "dbias") if name in numbers["wanted"]]
        width, dtype = x.shape[axis], x.dtype if scale is None else scale.dtype
        spread = None if scale is None else sharding_of(scale)
        results = [pairs(3, width)] + [ResultShape((width,), dtype, sharding=spread)] * len(names)
        sums = partial(_sums, axis, names)
        sums_here, *gradients = call(self.refusal, sums, results, (dy, x, scale, mean, inv_std))
        gradients_by_name = dict(zip(names, gradients, strict=True))
        if "dx" not in numbers["wanted"]:
            return gradients_by_name
        # An all_gather: JAX's own knows no axis of a vmap in a backward pass.
        rows = jax.lax.psum(jnp.where(own_row.reshape(-1, 1, 1, 1), sums_here, 0), axis_name)
        apply = partial(_apply_sums, axis, float(channels.elements(x, axis) * len(own_row)))
        (dx,) = call(self.refusal, apply, [ResultShape.like(x)], (*operands, rows))
        return gradients_by_name | {"dx": dx}


_BATCH_NORM = _TracedBatchNorm()
_INFERENCE = TracedNorm(
    "batch_norm_inference", channels.BatchNormInference, channels.BatchNormInferenceGrad
)
_GROUP_NORM = TracedNorm("group_norm", channels.GroupNorm, channels.GroupNormGrad)


@answers
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
    return _GROUP_NORM(
        x=x, num_groups=num_groups, scale=scale, bias=bias, channel_axis=channel_axis, eps=eps
    )


@answers
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
        The weight of this batch in the running statistics, from 0 to 1. flax,
        Keras and ONNX call ``1 - momentum`` momentum.
    axis_name : str or tuple of str, optional
        Axes of a ``shard_map``, or of a ``vmap``: the batch is that of all their devices, by
        ``jax.lax.all_gather`` of two numbers per channel. Statistics are the same on all of them.
        To be differentiated by, a scale that differs between them must not be 0.

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
    call = channels.BatchNorm(
        x=x,
        scale=scale,
        bias=bias,
        channel_axis=channel_axis,
        eps=eps,
        running_mean=running_mean,
        running_var=running_var,
        momentum=checks.weight(momentum),
        engine=None,
    )
    channels.check_momentum(call.momentum, running_mean)
    y, mean, var = _BATCH_NORM.of(call, momentum=call.momentum, axis_name=axis_name)
    return y, jax.lax.stop_gradient(mean), jax.lax.stop_gradient(var)


@answers
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
    return _INFERENCE(
        x=x,
        scale=scale,
        bias=bias,
        mean=mean,
        var=var,
        channel_axis=channel_axis,
        eps=eps,
        engine=None,
    )


# Batch norm in XLA's callbacks


def _normalise(numbers: dict[str, Any], outs: list[Any], ins: list[Any]) -> None:
    """Batch norm by the statistics of all devices' rows; then new running ones, or the variance."""
    (y, mean, inv_std, *returned), (x, scale, bias, *running, rows) = outs, ins
    axis, eps = numbers["channel_axis"], numbers["eps"]
    if rows is None and x.dtype == np.float64:
        _normalise_at_once(numbers, outs, ins)
        return
    count = float(channels.elements(x, axis))
    if rows is None:
        of_all, var = run(channels.BatchNormStats(x=x, channel_axis=axis))
    else:
        every, width = doubles(rows), mean.shape[0]
        means, variances, counts = every[:, :width], every[:, width:-1], every[:, -1]
        combine = channels.CombineStats(means=means, variances=variances, counts=counts)
        of_all, var, _ = run(combine)
        count *= len(rows)
    apply = channels.BatchNormApply(
        x=x, scale=scale, bias=bias, mean=of_all, var=var, channel_axis=axis, eps=eps
    )
    write(apply, y, mean, inv_std)
    if running[0] is None:
        store(returned[0], var)
        return
    update = channels.UpdateRunningStatistics(
        running_mean=running[0],
        running_var=running[1],
        mean=of_all,
        var=var,
        count=count,
        momentum=numbers["momentum"],
    )
    write(update, *returned)


def _compiled(
    numbers: dict[str, Any], results: list[ResultShape], operands: list[Any]
) -> CompiledCall | None:
    """The one call that normalises and moves running statistics, or else keeps the variance."""
    inputs = [None if array is None else (array.shape, array.dtype) for array in operands]
    kinds = [(result.shape, result.dtype) for result in results]
    return compiled_call(partial(_normalise_at_once, numbers, keeps_var=True), kinds, inputs)


def _normalise_at_once(
    numbers: dict[str, Any], outs: list[Any], ins: list[Any], *, keeps_var: bool = False
) -> None:
    """The same in one call, inside of which the mean of float64 data has two numbers."""
    (y, mean, inv_std, *returned), (x, scale, bias, running_mean, *_) = outs, ins
    moved = [None, None] if running_mean is None else returned  # which begin as what is known
    call = channels.BatchNorm(
        x=x,
        scale=scale,
        bias=bias,
        channel_axis=numbers["channel_axis"],
        eps=numbers["eps"],
        running_mean=moved[0],
        running_var=moved[1],
        momentum=numbers["momentum"],
        engine=None,
    )
    if keeps_var and running_mean is None:
        vars(call)["var"] = returned[0]
    write(call, y, mean, inv_std)
    if running_mean is None and not keeps_var:
        stats = channels.BatchNormStats(x=x, channel_axis=numbers["channel_axis"])
        store(returned[0], run(stats)[1])


def _stats_of_all(refusal: str, axis: int, axis_name: Any, x: Any) -> Any:
    """Each device's means, variances and count: a row of each."""
    width = x.shape[axis]

    def compute(outs: list[Any], ins: list[Any]) -> None:
        state = doubles(outs[0])
        stats = channels.BatchNormStats(x=ins[0], channel_axis=axis)
        write(stats, state[:width], state[width:-1])
        state[-1] = channels.elements(ins[0], axis)

    (state,) = call(refusal, compute, [pairs(2 * width + 1)], [x])
    return rows_of_all(state, axis_name)


def _sums(axis: int, names: list[str], outs: list[Any], ins: list[Any]) -> None:
    """A device's sums and scale, and the gradients of the parameters."""
    (dy, x, scale, mean, inv_std), numbers = ins, doubles(outs[0])
    sums = channels.BatchNormGradSums(dy=dy, x=x, mean=mean, inv_std=inv_std, channel_axis=axis)
    write(sums, numbers[0], numbers[1])
    numbers[2] = 1.0 if scale is None else backend_of(scale).as_float64(scale)
    for name, out in zip(names, outs[1:], strict=True):
        store(out, numbers[int(name == "dbias")])


def _apply_sums(axis: int, count: float, outs: list[Any], ins: list[Any]) -> None:
    """The gradient of x, from all devices' sums.

    They are of dy times each device's scale. The own scale, which multiplies them, is divided out.
    """
    dy, x, scale, mean, inv_std, rows = ins
    every = doubles(rows)
    sums, scales = every[:, :2], every[:, 2:]
    with np.errstate(all="ignore"):  # infinities of two signs
        totals = sums.sum(axis=0)
        if scale is not None:
            scale_here = backend_of(scale).as_float64(scale)
            weighted = (sums * scales).sum(axis=0) / scale_here
            totals = np.where((scales == scale_here).all(axis=0), totals, weighted)
    apply = channels.BatchNormGradApply(
        dy=dy,
        x=x,
        scale=scale,
        mean=mean,
        inv_std=inv_std,
        sum_dy_xhat=totals[0],
        sum_dy=totals[1],
        count=count,
        channel_axis=axis,
    )
    write(apply, outs[0])


def _check_elements(x: Any, axis: int, rows: Any) -> None:
    """Raise unless a batch has a variance."""
    count, problem = channels.elements(x, axis), "x has one element per channel"
    if rows is not None:
        count, problem = count * len(rows), f"{problem} on all devices together"
    if x.shape[axis]:
        checks.enough(count, problem)

"""Norms over rows that JAX differentiates: forward passes with their own backward passes.

A norm has a first derivative in reverse mode (``jax.grad``, ``jax.vjp``). Its second one, and
forward mode (``jax.jvp``), are errors. Under ``vmap`` each example is computed by itself, all
examples of a layer norm in one call unless scale and bias have gradients or differ between
examples: a batch that is an axis of ``x`` is faster.
"""

from functools import partial
from typing import Any

import jax

import gradkit
from gradkit._backend import Array
from gradkit._calls import checks
from gradkit._calls.rows import (
    AddLayerNorm,
    AddRmsNorm,
    InvertibleLayerNormGrad,
    LayerNorm,
    LayerNormGrad,
    RmsNorm,
    RmsNormGrad,
)
from gradkit._open.dispatch import write
from gradkit.jax._callbacks import vary_alike
from gradkit.jax._norms import (
    affine,
    blank,
    forward,
    from_the_end,
    gradient,
    like,
    no_rows,
    of_arguments,
    three,
)

__all__ = ["add_layer_norm", "add_rms_norm", "invertible_layer_norm", "layer_norm", "rms_norm"]


def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
) -> jax.Array:
    """Layer norm: ``y = (x - mean) * inv_std * scale + bias`` with each row's statistics.

    Parameters
    ----------
    x : array of shape (*rows, *normalised)
        T: float16, bfloat16, float32 or float64.
    scale, bias : array of shape ``x.shape[axis:]``, optional
        T; also float32 for 16-bit data, and 16-bit for float32 data.
    axis : int
        The first normalised dimension; all dimensions after it are normalised too.
    eps : float
        Added to the variance; finite and at least 0.
    scale_offset : float
        Added to ``scale`` in the accumulation dtype; 1 for a scale that is stored as its distance
        from 1.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.layer_norm`, while the call is traced.

    References
    ----------
    ``flax.linen.LayerNorm``, whose eps is 1e-6, with a variance that is computed safely.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> loss = lambda x: gradkit.jax.layer_norm(x, eps=0.25)[0, 0]
    >>> jax.jit(jax.grad(loss))(jnp.array([[1.0, 3.0]])).round(4)
    Array([[ 0.0894, -0.0894]], dtype=float32)
    """
    offset = checks.scale_offset(scale_offset, scale)
    return _layer(x, scale, bias, checks.integer(axis, "axis"), checks.epsilon(eps), offset)


def add_layer_norm(
    x: Any,
    residual: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Layer norm of a residual sum: ``s = x + residual``, and :func:`layer_norm` of ``s``.

    One pass forward and one backward, which adds the gradient that arrives at ``s`` to that of the
    norm before it is rounded.

    Parameters
    ----------
    x, residual : arrays of one shape (*rows, *normalised) and dtype
        float16, bfloat16, float32 or float64.
    scale, bias, axis, eps, scale_offset
        As :func:`layer_norm`.

    Returns
    -------
    y, s : arrays of x's shape and dtype
        ``s`` is rounded to its dtype before it is normalised.

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    ONNX Runtime's ``SkipLayerNormalization``.

    Examples
    --------
    >>> import jax.numpy as jnp, gradkit.jax
    >>> x, residual = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0]])
    >>> gradkit.jax.add_layer_norm(x, residual, eps=0.0)
    (Array([[-1.,  1.]], dtype=float32), Array([[1., 3.]], dtype=float32))
    """
    given = checks.integer(axis, "axis"), checks.epsilon(eps)
    offset = checks.scale_offset(scale_offset, scale)
    y, s = _add_layer(x, residual, scale, bias, *given, offset)
    return y, s


def invertible_layer_norm(
    x: Any, scale: Any = None, bias: Any = None, *, axis: int = -1, eps: float = 1e-5
) -> jax.Array:
    """:func:`layer_norm` whose gradient is computed from its *output*.

    What is kept for the backward pass is ``y``, which the next layer often keeps anyway, and not
    ``x``. The error of the gradient is about ``u * |y| / |scale|``, where u is the unit roundoff
    of y's dtype.

    Parameters
    ----------
    x, scale, bias, axis, eps
        As :func:`layer_norm`: arrays of its shapes. No element of ``scale`` may be 0 or subnormal
        when the gradient is computed.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.
    jax.errors.JaxRuntimeError
        While the gradient is computed on the CPU: a zero or subnormal in ``scale``. On a GPU
        gradients are not finite there instead.

    References
    ----------
    ONNX Runtime's ``InvertibleLayerNormalizationGrad``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> loss = lambda x: gradkit.jax.invertible_layer_norm(x, eps=0.25)[0, 0]
    >>> jax.jit(jax.grad(loss))(jnp.array([[1.0, 3.0]])).round(4)
    Array([[ 0.0894, -0.0894]], dtype=float32)
    """
    return _invertible(x, scale, bias, checks.integer(axis, "axis"), checks.epsilon(eps))


def rms_norm(
    x: Any,
    scale: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """RMS norm: ``y = x * inv_std * scale`` with ``inv_std = 1 / sqrt(mean(x^2) + eps)``.

    Parameters
    ----------
    x, scale, axis, eps, scale_offset
        As :func:`layer_norm`: arrays of its shapes. ``scale_offset`` is 1 for Gemma's scale.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    ``flax.linen.RMSNorm``.

    Examples
    --------
    >>> import jax.numpy as jnp, gradkit.jax
    >>> gradkit.jax.rms_norm(jnp.array([[2.0, -2.0]]), jnp.array([1.0, 3.0]), eps=0.0)
    Array([[ 1., -3.]], dtype=float32)
    """
    offset = checks.scale_offset(scale_offset, scale)
    return _rms(x, scale, checks.integer(axis, "axis"), checks.epsilon(eps), offset)


def add_rms_norm(
    x: Any,
    residual: Any,
    scale: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """RMS norm of a residual sum: ``s = x + residual``, and :func:`rms_norm` of ``s``.

    Parameters
    ----------
    x, residual, scale, axis, eps, scale_offset
        As :func:`add_layer_norm`: arrays of its shapes.

    Returns
    -------
    y, s : arrays of x's shape and dtype
        ``s`` is rounded to its dtype before it is normalised.

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    ONNX Runtime's ``SkipSimplifiedLayerNormalization``; Liger-Kernel's
    ``LigerFusedAddRMSNormFunction``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> x, residual = jnp.array([[1.0, -2.0]]), jnp.array([[1.0, 0.0]])
    >>> gradkit.jax.add_rms_norm(x, residual, eps=0.0)
    (Array([[ 1., -1.]], dtype=float32), Array([[ 2., -2.]], dtype=float32))
    >>> loss = lambda x: sum(part[0, 0] for part in gradkit.jax.add_rms_norm(x, residual, eps=0.0))
    >>> jax.grad(loss)(x)
    Array([[1.25, 0.25]], dtype=float32)
    """
    given = checks.integer(axis, "axis"), checks.epsilon(eps)
    y, s = _add_rms(x, residual, scale, *given, checks.scale_offset(scale_offset, scale))
    return y, s


@partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _layer(x: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float) -> Any:
    x, scale, bias = vary_alike(*affine(x, scale, bias))
    return _layer_norm(x, scale, bias, from_the_end(axis, x), eps, offset)


@partial(jax.jit, static_argnums=(4, 5, 6), inline=True)
def _add_layer(
    x: Any, residual: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float
) -> Any:
    checks.shape(residual, x.shape, "residual", "the shape of x")
    x, residual, scale, bias = vary_alike(x, residual, *affine(x, scale, bias)[1:])
    return _add_layer_norm(x, residual, scale, bias, from_the_end(axis, x), eps, offset)


@partial(jax.jit, static_argnums=(3, 4), inline=True)
def _invertible(x: Any, scale: Any, bias: Any, axis: int, eps: float) -> Any:
    x, scale, bias = vary_alike(*affine(x, scale, bias))
    return _invertible_layer_norm(x, scale, bias, from_the_end(axis, x), eps)


@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _rms(x: Any, scale: Any, axis: int, eps: float, offset: float) -> Any:
    x, scale = vary_alike(x, scale)
    return _rms_norm(x, scale, from_the_end(axis, x), eps, offset)


@partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _add_rms(x: Any, residual: Any, scale: Any, axis: int, eps: float, offset: float) -> Any:
    checks.shape(residual, x.shape, "residual", "the shape of x")
    x, residual, scale = vary_alike(x, residual, scale)
    return _add_rms_norm(x, residual, scale, from_the_end(axis, x), eps, offset)


# Layer norm


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _layer_norm(x: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float) -> Any:
    return _layer_norm_forward(x, scale, bias, axis, eps, offset)[0]


def _layer_norm_forward(x: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float) -> Any:
    y, mean, inv_std = _layer_forward("layer_norm", x, scale, bias, axis, eps, offset)
    return y, (x, scale, bias, mean, inv_std)


def _layer_forward(
    name: str, x: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float = 0.0
) -> Any:
    def compute(outs: list[Array], ins: list[Any]) -> None:
        (y, mean, inv_std), (x, scale, bias) = outs, ins
        call = LayerNorm(x=x, scale=scale, bias=bias, axis=axis, eps=eps, scale_offset=offset)
        write(call, y, mean, inv_std)

    planned = gradkit.layer_norm(no_rows(x), blank(scale), blank(bias), axis=axis)
    return forward(name, compute, planned, (x, scale, bias))


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _layer_norm_backward(
    axis: int,
    eps: float,  # noqa: ARG001
    offset: float,
    kept: Any,
    dy: Any,
) -> Any:
    return _layer_backward("layer_norm", dy, None, kept, axis, offset)


def _layer_backward(name: str, dy: Any, ds: Any, kept: Any, axis: int, offset: float) -> Any:
    x, scale, bias, mean, inv_std = kept

    def compute(outs: list[Array], ins: list[Any]) -> None:
        (dy, x, scale, mean, inv_std, ds), (dx, dscale, dbias) = ins, three(outs)
        call = LayerNormGrad(
            dy=dy,
            x=x,
            scale=scale,
            mean=mean,
            inv_std=inv_std,
            ds=ds,
            axis=axis,
            scale_offset=offset,
        )
        write(call, dx, dscale, dbias)

    results = [like(x)] if scale is None else [like(x), like(scale), like(scale)]
    made = gradient(name, compute, results, (dy, x, scale, mean, inv_std, ds), scale)
    return of_arguments(made, scale, bias)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _add_layer_norm(
    x: Any, residual: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float
) -> Any:
    return _add_layer_norm_forward(x, residual, scale, bias, axis, eps, offset)[0]


def _add_layer_norm_forward(
    x: Any, residual: Any, scale: Any, bias: Any, axis: int, eps: float, offset: float
) -> Any:
    def compute(outs: list[Array], ins: list[Any]) -> None:
        (y, s, mean, inv_std), (x, residual, scale, bias) = outs, ins
        call = AddLayerNorm(
            x=x,
            residual=residual,
            scale=scale,
            bias=bias,
            axis=axis,
            eps=eps,
            scale_offset=offset,
        )
        write(call, y, s, mean, inv_std)

    planned = gradkit.add_layer_norm(
        no_rows(x), no_rows(residual), blank(scale), blank(bias), axis=axis
    )
    operands = (x, residual, scale, bias)
    y, s, mean, inv_std = forward("add_layer_norm", compute, planned, operands, data=2)
    return (y, s), (s, scale, bias, mean, inv_std)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _add_layer_norm_backward(
    axis: int,
    eps: float,  # noqa: ARG001
    offset: float,
    kept: Any,
    cotangents: Any,
) -> Any:
    dy, ds = cotangents
    dx, dscale, dbias = _layer_backward("add_layer_norm", dy, ds, kept, axis, offset)
    return dx, dx, dscale, dbias


_add_layer_norm.defvjp(_add_layer_norm_forward, _add_layer_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _invertible_layer_norm(x: Any, scale: Any, bias: Any, axis: int, eps: float) -> Any:
    return _invertible_forward(x, scale, bias, axis, eps)[0]


def _invertible_forward(x: Any, scale: Any, bias: Any, axis: int, eps: float) -> Any:
    y, _, inv_std = _layer_forward("invertible_layer_norm", x, scale, bias, axis, eps)
    return y, (y, scale, bias, inv_std)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _invertible_backward(axis: int, eps: float, kept: Any, dy: Any) -> Any:  # noqa: ARG001
    y, scale, bias, inv_std = kept

    def compute(outs: list[Array], ins: list[Any]) -> None:
        dy, y, scale, bias, inv_std = ins
        call = InvertibleLayerNormGrad(
            dy=dy, y=y, scale=scale, bias=bias, inv_std=inv_std, axis=axis
        )
        write(call, *three(outs))

    results = [like(array) for array in (y, scale, bias) if array is not None]
    operands = (dy, y, scale, bias, inv_std)
    made = gradient("invertible_layer_norm", compute, results, operands, scale)
    return of_arguments(made, scale, bias)


_invertible_layer_norm.defvjp(_invertible_forward, _invertible_backward)


# RMS norm


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm(x: Any, scale: Any, axis: int, eps: float, offset: float) -> Any:
    return _rms_norm_forward(x, scale, axis, eps, offset)[0]


def _rms_norm_forward(x: Any, scale: Any, axis: int, eps: float, offset: float) -> Any:
    def compute(outs: list[Array], ins: list[Any]) -> None:
        (y, inv_std), (x, scale) = outs, ins
        call = RmsNorm(x=x, scale=scale, axis=axis, eps=eps, scale_offset=offset)
        write(call, y, inv_std)

    planned = gradkit.rms_norm(no_rows(x), blank(scale), axis=axis)
    y, inv_std = forward("rms_norm", compute, planned, (x, scale))
    return y, (x, scale, inv_std)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _rms_norm_backward(
    axis: int,
    eps: float,  # noqa: ARG001
    offset: float,
    kept: Any,
    dy: Any,
) -> Any:
    return _rms_backward("rms_norm", dy, None, kept, axis, offset)


def _rms_backward(name: str, dy: Any, ds: Any, kept: Any, axis: int, offset: float) -> Any:
    x, scale, inv_std = kept

    def compute(outs: list[Array], ins: list[Any]) -> None:
        (dy, x, scale, inv_std, ds), (dx, dscale, _) = ins, three(outs)
        call = RmsNormGrad(
            dy=dy, x=x, scale=scale, inv_std=inv_std, ds=ds, axis=axis, scale_offset=offset
        )
        write(call, dx, dscale)

    results = [like(array) for array in (x, scale) if array is not None]
    made = gradient(name, compute, results, (dy, x, scale, inv_std, ds), scale)
    return made[0], None if scale is None else made[1]


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _add_rms_norm(x: Any, residual: Any, scale: Any, axis: int, eps: float, offset: float) -> Any:
    return _add_rms_norm_forward(x, residual, scale, axis, eps, offset)[0]


def _add_rms_norm_forward(
    x: Any, residual: Any, scale: Any, axis: int, eps: float, offset: float
) -> Any:
    def compute(outs: list[Array], ins: list[Any]) -> None:
        (y, s, inv_std), (x, residual, scale) = outs, ins
        call = AddRmsNorm(
            x=x, residual=residual, scale=scale, axis=axis, eps=eps, scale_offset=offset
        )
        write(call, y, s, inv_std)

    planned = gradkit.add_rms_norm(no_rows(x), no_rows(residual), blank(scale), axis=axis)
    operands = (x, residual, scale)
    y, s, inv_std = forward("add_rms_norm", compute, planned, operands, data=2)
    return (y, s), (s, scale, inv_std)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _add_rms_norm_backward(
    axis: int,
    eps: float,  # noqa: ARG001
    offset: float,
    kept: Any,
    cotangents: Any,
) -> Any:
    dy, ds = cotangents
    dx, dscale = _rms_backward("add_rms_norm", dy, ds, kept, axis, offset)
    return dx, dx, dscale


_add_rms_norm.defvjp(_add_rms_norm_forward, _add_rms_norm_backward)

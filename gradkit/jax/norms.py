"""Norms over rows that JAX differentiates: forward passes with their own backward passes.

A norm has a first derivative in reverse mode (``jax.grad``, ``jax.vjp``). Its second one, and
forward mode (``jax.jvp``), are errors. Under ``vmap`` each example is computed by itself, all
examples of a layer norm in one call unless scale and bias have gradients or differ between
examples: a batch that is an axis of ``x`` is faster.
"""

from typing import Any

import jax

from gradkit._calls import rows
from gradkit._open.foreign import answers
from gradkit.jax._records import TracedNorm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "invertible_layer_norm",
    "invertible_rms_norm",
    "layer_norm",
    "rms_norm",
]

_LAYER_NORM = TracedNorm("layer_norm", rows.LayerNorm, rows.LayerNormGrad)
_INVERTIBLE = TracedNorm("invertible_layer_norm", rows.LayerNorm, rows.InvertibleLayerNormGrad)
_ADD_LAYER_NORM = TracedNorm("add_layer_norm", rows.AddLayerNorm, rows.LayerNormGrad, x="s")
_RMS_NORM = TracedNorm("rms_norm", rows.RmsNorm, rows.RmsNormGrad)
_INVERTIBLE_RMS = TracedNorm("invertible_rms_norm", rows.RmsNorm, rows.InvertibleRmsNormGrad)
_GATED_RMS_NORM = TracedNorm("gated_rms_norm", rows.GatedRmsNorm, rows.GatedRmsNormGrad)
_ADD_RMS_NORM = TracedNorm("add_rms_norm", rows.AddRmsNorm, rows.RmsNormGrad, x="s")


@answers
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
    scale, bias : array of shape ``x.shape[axis:]``, or one per sample, optional
        T; also float32 for 16-bit data, and 16-bit for float32 data. *Per sample*: both have
        leading dimensions of x, then ones in front of ``x.shape[axis:]``, such as (B, 1, D) for x
        of shape (B, T, D).
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
    return _LAYER_NORM(x=x, scale=scale, bias=bias, axis=axis, eps=eps, scale_offset=scale_offset)


@answers
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
    return _ADD_LAYER_NORM(
        x=x,
        residual=residual,
        scale=scale,
        bias=bias,
        axis=axis,
        eps=eps,
        scale_offset=scale_offset,
    )


@answers
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
        As :func:`layer_norm`, but not per sample. No element of ``scale`` may be 0 or subnormal
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
    return _INVERTIBLE(x=x, scale=scale, bias=bias, axis=axis, eps=eps, scale_offset=0.0)


@answers
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
    return _RMS_NORM(x=x, scale=scale, axis=axis, eps=eps, scale_offset=scale_offset)


@answers
def invertible_rms_norm(
    x: Any,
    scale: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """:func:`rms_norm` whose gradient is computed from its *output*.

    What is kept for the backward pass is ``y``, as in :func:`invertible_layer_norm`.

    Parameters
    ----------
    x, scale, axis, eps, scale_offset
        As :func:`rms_norm`, but not per sample. No element of ``scale + scale_offset`` may be 0 or
        subnormal when the gradient is computed.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError, jax.errors.JaxRuntimeError
        As :func:`invertible_layer_norm`.

    References
    ----------
    NVIDIA's Apex: ``FusedRMSNorm`` with ``memory_efficient=True``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> loss = lambda x: gradkit.jax.invertible_rms_norm(x, eps=0.0)[0, 0]
    >>> jax.jit(jax.grad(loss))(jnp.array([[3.0, 4.0]])).round(4)
    Array([[ 0.181 , -0.1358]], dtype=float32)
    """
    return _INVERTIBLE_RMS(x=x, scale=scale, axis=axis, eps=eps, scale_offset=scale_offset)


@answers
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
    return _ADD_RMS_NORM(
        x=x, residual=residual, scale=scale, axis=axis, eps=eps, scale_offset=scale_offset
    )


@answers
def gated_rms_norm(
    x: Any,
    gate: Any,
    scale: Any = None,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    axis: int = -1,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """RMS norm with an activated gate: ``rms_norm(x) * act(gate)``, or ``rms_norm(x * act(gate))``.

    Parameters
    ----------
    x, gate : arrays of one shape (*rows, *normalised) and dtype
        float16, bfloat16, float32 or float64.
    scale, axis, eps, scale_offset
        As :func:`rms_norm`, but not per sample.
    activation : "silu" (alias "swish") or "sigmoid"
        Of the gate.
    norm_before_gate : bool
        The product with the gate follows the norm; if false, ``x * act(gate)`` is normalised.

    Returns
    -------
    array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.gated_rms_norm`, while the call is traced.

    References
    ----------
    As :func:`gradkit.gated_rms_norm`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, gradkit.jax
    >>> x, gate = jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 1.0]])
    >>> gradkit.jax.gated_rms_norm(x, gate, activation="sigmoid", eps=0.0).round(4)
    Array([[0.4243, 0.8271]], dtype=float32)
    >>> jax.grad(lambda g: gradkit.jax.gated_rms_norm(x, g, eps=0.0)[0, 0])(gate).round(4)
    Array([[0.4243, 0.    ]], dtype=float32)
    """
    return _GATED_RMS_NORM(
        x=x,
        gate=gate,
        scale=scale,
        axis=axis,
        eps=eps,
        scale_offset=scale_offset,
        activation=activation,
        norm_before_gate=norm_before_gate,
    )

"""What norms share: how JAX calls their passes, and how their results are described."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradkit._backend import Array
from gradkit._calls import checks
from gradkit.jax._callbacks import Compute, Result, call

_ONCE = "{} has no second derivative, and none in forward mode: differentiate it once, by jax.grad"


def once(name: str) -> str:
    """What is said if the results of a norm are differentiated again."""
    return _ONCE.format(name)


def gradient(
    name: str, compute: Compute, results: list[Result], operands: Any, scale: Any
) -> list[jax.Array]:
    """The gradients of a norm over rows; sums over the rows of each example are its own."""
    shared = () if scale is None else None
    return call(once(name), compute, results, operands, shared=shared)


def from_the_end(axis: int, x: Any, label: str = "axis") -> int:
    """The axis as a negative number, because ``vmap`` adds axes in front."""
    ndim: int = x.ndim
    return checks.axis_index(axis, ndim, label) - ndim


def affine(x: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
    """A bias alone needs a scale of ones, because gradients come in pairs."""
    if scale is None and bias is not None:
        scale = jnp.ones_like(bias)
    return x, scale, bias


def of_arguments(made: list[Any], scale: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The gradients of x, scale and bias; ``None`` for what is not there."""
    dx, dscale, dbias = three(made)
    return dx, None if scale is None else dscale, None if bias is None else dbias


def three(arrays: list[Any]) -> tuple[Any, Any, Any]:
    """dx, dscale and dbias, of which the last ones may be missing."""
    dx, dscale, dbias = (*arrays, None, None)[:3]
    return dx, dscale, dbias


def like(array: Any) -> Result:
    """A result of an array's shape and dtype."""
    return Result(array.shape, array.dtype)


def blank(parameter: Any) -> Array | None:
    """An array like a parameter that takes no memory."""
    if parameter is None:
        return None
    return np.broadcast_to(np.ones((), parameter.dtype), parameter.shape)

"""Numbers that JAX holds, or takes for something else: it may have no float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import Array
from gradkit._calls import checks
from gradkit.jax._callbacks import ResultShape


def doubles(array: Array) -> Array:
    """Float64 numbers in memory that JAX knows as pairs of uint32."""
    return array.view(np.float64)[..., 0]


def pairs(*shape: int) -> ResultShape:
    """A result of float64 numbers, as JAX knows it."""
    return ResultShape((*shape, 2), np.dtype(np.uint32))


def pair(number: float) -> Array:
    """One float64 number as JAX knows it."""
    return np.array([number], np.float64).view(np.uint32)


def number(value: Any, label: str, check: Callable[[Any, str], float] = checks.real) -> Any:
    """A caller's number: a Python one, checked, in all its bits, an array as it is, or widened."""
    if isinstance(value, jax.Array):
        checks.shape(value, (), label, "one number")
        # A Python int that jit traces, or a count of tokens.
        if jnp.issubdtype(value.dtype, jnp.integer):
            return value.astype(widest())
        checks.floating(value, label)
        return value if value.dtype.itemsize > 2 else value.astype(np.float32)
    return pair(check(value, label))


def factor(scale: Any) -> Any:
    """A caller's ``scale``."""

    def check(value: Any, label: str) -> float:
        return checks.finite(checks.real(value, label), label)

    return number(scale, "scale", check)


def limit_of(value: Any, label: str) -> Any:
    """A caller's limit of a norm."""
    return number(value, label, checks.nonnegative)


def read(number: Array) -> Array:
    """Return the number that ``given`` made, as a 0-d float64 array of a backend."""
    return doubles(number) if number.dtype == np.uint32 else backend_of(number).as_float64(number)


def store(out: Array, value: Array) -> None:
    """Write a result that is rounded to the widest dtype that JAX holds."""
    with np.errstate(over="ignore"):
        out[...] = value


def widest() -> np.dtype[Any]:
    """The widest floating dtype that JAX holds at present."""
    return np.dtype(np.float64 if jax.config.jax_enable_x64 else np.float32)

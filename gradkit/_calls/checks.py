"""Checks of single arguments. Each error names the argument, what it was, what would work."""

import math
import numbers
import sys
from typing import Any

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._dtypes import FLOATS, dtype_named, float_name, float_of


def real(value: Any, label: str) -> float:
    """A Python float from a real number or a 0-d host array."""
    if type(value) is float:
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if is_flag(value) or not (isinstance(value, numbers.Real) or _is_float(value)):
        hint = _hint_at(value)
        raise TypeError(f"{label} must be a real number, not {type(value).__name__}{hint}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{label} is larger than any float; accepted: up to 1.8e308") from None


def _hint_at(value: Any) -> str:
    """Say what to pass in place of an array, a tracer of JAX or another object with memory."""
    if "jax" in sys.modules and isinstance(value, sys.modules["jax"].core.Tracer):
        return (
            ", which is being traced and has no value yet; pass a Python value, a constant of "
            "what is compiled, such as by static_argnames of jax.jit"
        )
    if hasattr(value, "__dlpack_device__") or hasattr(value, "item"):
        return "; pass a Python number, such as its .item()"
    if hasattr(value, "__cuda_array_interface__"):
        return "; pass what cupy.asarray makes of it"
    if hasattr(value, "__dlpack__"):
        return ", which has __dlpack__ without __dlpack_device__; pass an array that has both"
    return ""


def _is_float(value: Any) -> bool:
    """True if a value is a scalar of one of ``FLOATS``; ``numbers.Real`` lacks some of these."""
    return isinstance(value, np.generic) and float_name(value.dtype) is not None


def nonnegative(value: Any, label: str) -> float:
    """A float that is at least 0, infinity included."""
    number = real(value, label)
    if not number >= 0:  # NaN too
        raise ValueError(f"{label} must be at least 0, not {number}")
    return number


def finite(value: float, label: str) -> float:
    """A float that is neither infinite nor NaN."""
    if not math.isfinite(value):
        raise ValueError(f"{label} must be finite, not {value}")
    return value


def factor(value: Any) -> float | None:
    """A finite float, or ``None``."""
    return None if value is None else finite(real(value, "scale"), "scale")


def size(value: Any, label: str) -> float:
    """A finite float that is at least 0."""
    return finite(nonnegative(value, label), label)


def epsilon(value: Any) -> float:
    """A number that keeps a divisor from 0."""
    return size(value, "eps")


def betas(values: Any) -> tuple[float, float]:
    """The decays of both moments of gradients."""
    try:
        first, second = values
    except (TypeError, ValueError):
        raise TypeError(f"betas must be a tuple of two numbers, not {values!r}") from None
    pair = real(first, "betas"), real(second, "betas")
    if not all(0 <= beta < 1 for beta in pair):
        raise ValueError(f"betas must be at least 0 and below 1, not {values!r}")
    return pair


def signed_epsilon(value: Any, mode: Any) -> float:
    """The eps of a clip as backends take it: below 0 if it is added to the norm."""
    number = epsilon(value)
    return -number if choice(mode, "eps_mode", ("max", "add")) == "add" else number


def scale_offset(value: Any, scale: Any) -> float:
    """A finite float that is added to ``scale``; without one it must be 0."""
    number = finite(real(value, "scale_offset"), "scale_offset")
    if number and scale is None:
        raise ValueError(f"scale_offset is {number}, but scale is None; pass a scale")
    return number


def wanted(value: Any, call: Any) -> tuple[str, ...] | None:
    """Names of a call's results; ``None``: all that its arguments have."""
    if value is None:
        return None
    names = type(call).result_names
    if not isinstance(value, tuple):
        example = f"({value!r},)" if value in names else f"({names[0]!r},)"
        raise TypeError(f"wanted must be a tuple of names, such as {example}, not {value!r}")
    unknown = [name for name in value if name not in names]
    if unknown or not value:
        problem = f"has {unknown[0]!r}" if unknown else "is empty"
        raise ValueError(f"wanted {problem}; pass one or more of {', '.join(map(repr, names))}")
    for name in value:
        argument = name.removeprefix("d")
        if argument in call.optional and getattr(call, argument) is None:
            raise ValueError(f"wanted has {name!r}, but {argument} is None; leave one out")
    return value


def weight(momentum: Any) -> float:
    """The weight of one batch in running statistics."""
    return share(real(momentum, "momentum"), "momentum")


def share(number: float, label: str) -> float:
    """A part of a whole."""
    if not 0 <= number <= 1:
        raise ValueError(f"{label} must be from 0 to 1, not {number}")
    return number


def enough(count: float, problem: str) -> None:
    """Raise if a batch has elements, but too few for a variance."""
    if 0 < count <= 1:
        raise ValueError(f"{problem}; a variance needs two or more")


def norm_order(value: Any) -> float:
    """The p of a p-norm: a real number above 0, or infinity (``"inf"`` too)."""
    number = math.inf if isinstance(value, str) and value == "inf" else real(value, "norm_type")
    if not number > 0:
        raise ValueError(f"norm_type must be a real number above 0 or infinity, not {number}")
    return number


def choice(value: Any, label: str, accepted: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{label} must be one of {', '.join(map(repr, accepted))}, not {value!r}")
    return value


def activation(value: Any) -> str:
    """The name of an activation; swish is another one of silu."""
    name = choice(value, "activation", ("silu", "swish", "sigmoid"))
    return "silu" if name == "swish" else name


def is_flag(value: Any) -> bool:
    """True if a value is a plain bool (a NumPy bool scalar too)."""
    return isinstance(value, (bool, np.bool_))


def flag(value: Any, label: str) -> bool:
    """A Python bool, or NumPy's."""
    if not is_flag(value):
        raise TypeError(f"{label} must be a bool, not {type(value).__name__}{_hint_at(value)}")
    return bool(value)


def integer(value: Any, label: str) -> int:
    """A Python int from anything that is one; a bool is none."""
    if is_flag(value):
        raise TypeError(f"{label} must be an integer, not {type(value).__name__}")
    return _index(value, label)


def seed(value: Any, label: str) -> int:
    """An integer of 64 bits, which rounding at random needs."""
    if value is None:
        raise ValueError(f"rounding is 'stochastic', which needs a {label}; pass the step's number")
    return _below(integer(value, label), label, 64)


def step(value: Any, label: str) -> int:
    """The number of a step."""
    number = integer(value, label)
    if number < 1:
        raise ValueError(f"{label} must be at least 1, the first step's number, not {number}")
    return _below(number, label, 63)


def offset(value: Any, label: str) -> int:
    """A position in a list of elements."""
    return _below(integer(value, label), label, 63)


def _below(number: int, label: str, bits: int) -> int:
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{label} must be at least 0 and below 2**{bits}, not {number}")
    return number


def axis_index(axis: Any, ndim: int, label: str = "axis") -> int:
    """An axis as a non-negative index."""
    index = integer(axis, label)
    if not -ndim <= index < ndim:
        raise ValueError(f"{label} is {index}, but the array has {ndim} dimensions")
    return index % ndim


def _index(value: Any, label: str) -> int:
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):
        kind = type(value).__name__
        raise TypeError(f"{label} must be an integer, not {kind}{_hint_at(value)}") from None


def floating(array: Array, label: str) -> str:
    """The name of an array's dtype if it is one of ``FLOATS``."""
    name = float_name(array.dtype)
    if name is None:
        is_numpys = isinstance(array.dtype, np.dtype)  # not one of JAX's own, of random keys
        if is_numpys and float_name(array.dtype.newbyteorder("=")):
            raise TypeError(
                f"{label} has dtype {array.dtype.str!r}, which is not in native byte order; pass "
                f'{label}.astype("{array.dtype.newbyteorder("=")}")'
            )
        problem = f"{label} has dtype {array.dtype}; accepted: {', '.join(FLOATS)}"
        raise TypeError(problem + (_cast(array.dtype, label) if is_numpys else ""))
    return name


def _cast(dtype: np.dtype[Any], label: str) -> str:
    """Say how to cast an array of a dtype that is refused."""
    if dtype.kind == "c":
        part = "np.float32" if dtype.itemsize == 8 else "np.float64"
        return f"; pass {label}.view({part}), its real and imaginary parts as elements"
    return f"; pass {label}.astype(np.float32)" if dtype.kind in "biuf" else ""


def shape(array: Array, expected: Shape, label: str, meaning: str) -> None:
    """Raise unless an array has exactly the expected shape."""
    if array.shape != expected:
        raise ValueError(f"{label} has shape {array.shape}; expected {expected}, {meaning}")


def invertible(scale: Array | None, instead: str, offset: float = 0.0) -> None:
    """On the host, raise if a scale with its offset cannot be divided by.

    ``instead``: the function that reads the norm's input.
    """
    if not isinstance(scale, np.ndarray):
        return
    wide = dtype_named(float_of(scale.dtype).accumulation)
    first, count, start = None, 0, 0
    pieces: Any = np.nditer(  # without a copy of all of a long scale
        scale, ["buffered", "external_loop", "zerosize_ok"], op_dtypes=wide, order="C"
    )
    for piece in pieces:
        bad = np.flatnonzero(np.abs(piece + offset) < np.finfo(wide).smallest_normal)
        if bad.size and first is None:
            first = start + int(bad[0])
        count, start = count + bad.size, start + piece.size
    if count:
        shifted = "scale + scale_offset" if offset else "scale"
        raise ValueError(
            f"{shifted} is zero or subnormal at flat index {first} ({count} in all), so that the "
            f"norm cannot be inverted; use {instead}, which reads x"
        )

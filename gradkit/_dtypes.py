"""The floating dtypes that gradkit accepts, and the combinations that each operation accepts.

A new dtype is one row of ``FLOATS`` here and one row in ``kernels/dtypes.cuh``.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

DType: TypeAlias = np.dtype[Any]
Types: TypeAlias = tuple[str, str, str]


class Float(NamedTuple):
    """One dtype, as the parts of gradkit and other libraries call it."""

    name: str  # in NumPy or ml_dtypes
    cxx: str  # the type in the kernels
    code: int  # its number in the lists of tensors that kernels read
    dlpack: int  # DLDataTypeCode
    cudnn: int  # cudnnDataType_t
    accumulation: str  # the dtype of sums of its elements
    addends: tuple[str, ...]  # the dtypes that convert to it without losing precision


_ALL = ("float16", "bfloat16", "float32", "float64")
_ROWS = (
    Float("float16", "f16", 0, 2, 2, "float32", ("float16",)),
    Float("bfloat16", "bf16", 1, 4, 9, "float32", ("bfloat16",)),
    Float("float32", "f32", 2, 2, 0, "float32", ("float16", "bfloat16", "float32")),
    Float("float64", "f64", 3, 2, 1, "float64", _ALL),
)
FLOATS: dict[str, Float] = {row.name: row for row in _ROWS}

# (T of dy, x, dx; U of mean, inv_std; V of scale, bias, dscale, dbias)
LAYER_NORM_TYPES: tuple[Types, ...] = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("float32", "float32", "float16"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float32", "float32", "bfloat16"),
)
BATCH_NORM_TYPES: tuple[Types, ...] = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float16", "float16"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
)

_NAMES: dict[Any, str | None] = {name: name for name in FLOATS}
_NAMES |= {np.dtype(name): name for name in FLOATS if name != "bfloat16"}


def float_name(dtype: Any) -> str | None:
    """The name of a native-endian dtype in ``FLOATS``, such as ``"float32"``, or ``None``.

    A name there stands for its dtype.
    bfloat16 comes from ml_dtypes and is recognised by its name: gradkit does not import ml_dtypes
    for this.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        is_bfloat16 = str(dtype) == "bfloat16"
        return _NAMES.setdefault(dtype, "bfloat16" if is_bfloat16 else None)


def float_of(dtype: Any) -> Float:
    """The row of a dtype that is in ``FLOATS``."""
    return FLOATS[float_name(dtype) or ""]


@cache
def dtype_named(name: str) -> DType:
    """The dtype that has a name in ``FLOATS``."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def accumulation_name(name: str) -> str:
    """The dtype of sums of elements of dtype ``name``."""
    return FLOATS[name].accumulation


def check_combination(
    types: Types,
    table: tuple[Types, ...],
    data: Sequence[str],
    statistics: Sequence[str],
    parameters: Sequence[str],
) -> None:
    """Raise unless a table has (T, U, V): say which of the named arguments to cast, and to what."""
    if types in table:
        return
    t, u, v = types
    x = next(name for name in data if name != "dy")
    accepted = [row[2] for row in table if row[:2] == (t, u)]
    name, dtype = (parameters[0], v) if accepted else ([*statistics, "out[1]"][0], u)
    accepted = accepted or [*dict.fromkeys(row[1] for row in table if row[0] == t)]
    cast = f"{x}.dtype" if t in accepted else f"np.{accepted[0]}"
    raise TypeError(
        f"{name} has dtype {dtype} and {x} {t}; pass {name}.astype({cast}) "
        f"(accepted: {', '.join(accepted)})"
    )

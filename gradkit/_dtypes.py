"""The floating dtypes that gradkit takes, and which combinations of them each operation takes.

A new dtype is one row of ``FLOATS`` here, and one row in ``kernels/dtypes.cuh``.
"""

from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

DType: TypeAlias = np.dtype[Any]
Types: TypeAlias = tuple[str, str, str]


class Float(NamedTuple):
    """What the parts of gradkit and other libraries call one dtype."""

    name: str  # NumPy's, or that of ml_dtypes
    cxx: str  # the type in the kernels
    code: int  # the number by which lists of tensors tell the kernels
    dlpack: int  # DLDataTypeCode
    cudnn: int  # cudnnDataType_t
    accumulation: str  # the dtype in which sums of its elements are held
    addends: tuple[str, ...]  # what can be added to it without losing digits of the addend


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

_NAMES: dict[Any, str | None] = {np.dtype(name): name for name in FLOATS if name != "bfloat16"}


def float_name(dtype: Any) -> str | None:
    """``"float32"`` for the native-endian dtype, ``None`` for one that is not in ``FLOATS``.

    bfloat16 is that of ml_dtypes and is recognised by its name, so that ml_dtypes is imported
    only by those who use it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        known = str(dtype) == "bfloat16"
        return _NAMES.setdefault(dtype, "bfloat16" if known else None)


def float_of(dtype: Any) -> Float:
    """The row of a dtype that is known to be in ``FLOATS``."""
    return FLOATS[float_name(dtype) or ""]


@cache
def dtype_named(name: str) -> DType:
    """The dtype of a name in ``FLOATS``."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    bfloat16: DType = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def accumulation_name(name: str) -> str:
    """The dtype in which sums of elements of ``name`` are held."""
    return FLOATS[name].accumulation


def check_combination(types: Types, accepted: tuple[Types, ...], roles: str) -> None:
    """Raise the ``TypeError`` that names a combination and lists those that work."""
    if types not in accepted:
        listed = "; ".join(", ".join(row) for row in accepted)
        raise TypeError(f"no kernel for {roles} = ({', '.join(types)}); accepted: {listed}")

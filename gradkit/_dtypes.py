"""The four floating dtypes, and which combinations of them each operation takes."""

from typing import Any, TypeAlias

import numpy as np

DType: TypeAlias = np.dtype[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")

# (T of dy, x, dx; U of mean, inv_std; V of scale, bias, dscale, dbias)
LAYER_NORM_TYPES = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("float32", "float32", "float16"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float32", "float32", "bfloat16"),
)
BATCH_NORM_TYPES = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float16", "float16"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
)
# What may be added into a buffer without losing digits of the addend.
SAFE_ADDENDS = {
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "float32": ("float16", "bfloat16", "float32"),
    "float64": FLOATS,
}

_NAMES: dict[Any, str | None] = {np.dtype(name): name for name in ("float16", "float32", "float64")}


def float_name(dtype: Any) -> str | None:
    """``"float32"`` for the native-endian dtype, ``None`` for one that is not a float of ours.

    bfloat16 is ml_dtypes' and is recognised by its name, so that ml_dtypes is imported only
    by those who use it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        known = str(dtype) == "bfloat16"
        return _NAMES.setdefault(dtype, "bfloat16" if known else None)


def dtype_named(name: str) -> DType:
    """The dtype of a name in ``FLOATS``."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    bfloat16: DType = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def accumulation_name(name: str) -> str:
    """The dtype that sums of elements of ``name`` are held in."""
    return "float64" if name == "float64" else "float32"


def check_combination(
    types: tuple[str, str, str], accepted: tuple[tuple[str, str, str], ...], roles: str
) -> None:
    """Raise the ``TypeError`` that names a combination and lists those that work."""
    if types not in accepted:
        listed = "; ".join(", ".join(row) for row in accepted)
        raise TypeError(f"no kernel for {roles} = ({', '.join(types)}); accepted: {listed}")

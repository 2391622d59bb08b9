"""From a native array to the backend that computes on it."""

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from gradkit import _numpy
from gradkit.errors import BackendUnavailableError

Backend: TypeAlias = Any  # the module gradkit._numpy, or a gradkit._cuda.Backend
Finder: TypeAlias = Callable[[Any], Backend]

_FINDERS: dict[type, Finder] = {}


def backend_of(native: Any) -> Backend:
    """The backend for a native array: one look at its type, and for CuPy's at its device."""
    kind = type(native)
    if kind is np.ndarray:
        return _numpy
    try:
        finder = _FINDERS[kind]
    except KeyError:
        finder = _FINDERS.setdefault(kind, _finder_for(kind))
    return finder(native)


def _finder_for(kind: type) -> Finder:
    cupy = sys.modules.get("cupy")
    if cupy is not None and issubclass(kind, cupy.ndarray):
        from gradkit import _cuda

        return _cuda.backend_of
    raise BackendUnavailableError(
        f"no backend computes on {kind.__module__}.{kind.__qualname__}; pass NumPy arrays, or "
        "CuPy's (pip install 'gradkit[cuda12]' or 'gradkit[cuda13]')"
    )

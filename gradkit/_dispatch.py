"""From the type of a native array to the backend that computes on it."""

from types import ModuleType
from typing import Any

import numpy as np

from gradkit import _numpy
from gradkit.errors import BackendUnavailableError

_BACKENDS: dict[type, ModuleType] = {np.ndarray: _numpy}


def backend_of(native: Any) -> ModuleType:
    """The backend for a native array: one dict look-up."""
    try:
        return _BACKENDS[type(native)]
    except KeyError:
        return _BACKENDS.setdefault(type(native), _load(type(native)))


def _load(kind: type) -> ModuleType:
    raise BackendUnavailableError(
        f"no backend computes on {kind.__module__}.{kind.__qualname__} in this version of "
        "gradkit: its CUDA backend is not there yet. Install a gradkit release that has it "
        "together with CuPy (pip install 'gradkit[cuda12]'), or pass NumPy arrays "
        "(cupy.asnumpy)."
    )

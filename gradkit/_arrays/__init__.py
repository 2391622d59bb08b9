"""The registry: from a type to its array library, and to the backend that computes on it.

To add an array library, add a file here and its line in ``_FRAMEWORKS``. gradkit never imports a
library to recognise its arrays: they exist only after somebody else imported it.
"""

import sys
from typing import Any

from gradkit._arrays.base import NOTHING, Framework
from gradkit._arrays.cupy import CuPy
from gradkit._arrays.dlpack import DLPack
from gradkit._arrays.jax import JAX
from gradkit._arrays.numpy import NumPy
from gradkit._arrays.tensorflow import TensorFlow
from gradkit._arrays.torch import Torch, TorchSubclass
from gradkit._backend import Array
from gradkit._calls.backend import Backend

__all__ = [
    "HOST",
    "NOTHING",
    "Framework",
    "backend_of",
    "framework_for",
    "framework_of",
    "is_array",
    "register",
]

HOST = NumPy()
# A type belongs to the first that owns it.
_FRAMEWORKS: tuple[Framework, ...] = (
    HOST,
    CuPy(),
    Torch(),
    TorchSubclass(),
    JAX(),
    TensorFlow(),
    DLPack(),
)
_BY_TYPE: dict[type, Framework | None] = {}


def framework_of(array: Any) -> Framework | None:
    """The library that an object is an array of, or ``None``."""
    return framework_for(type(array))


def framework_for(kind: type) -> Framework | None:
    """The library that objects of a type are arrays of, or ``None``: one dict look-up per call."""
    try:
        return _BY_TYPE[kind]
    except KeyError:
        found = next((f for f in _FRAMEWORKS if _loaded(f) and f.owns(kind)), None)
        return _BY_TYPE.setdefault(kind, found)


def backend_of(view: Array) -> Backend:
    """The backend that computes on a NumPy or CuPy array."""
    framework = framework_of(view)
    assert framework is not None  # every view is a NumPy or CuPy array
    return framework.backend_of(view)


def is_array(value: Any) -> bool:
    """Whether a value is an array of a library listed here."""
    return framework_for(type(value)) is not None


def register(kind: type, framework: Framework) -> None:
    """Assign a type to a library that is not listed here, such as an emulated device."""
    _BY_TYPE[kind] = framework


def _loaded(framework: Framework) -> bool:
    return not framework.module or sys.modules.get(framework.module) is not None

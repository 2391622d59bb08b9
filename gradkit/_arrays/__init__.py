"""The registry: from a type to its array library, and to the backend that computes on it.

To add an array library, add a file here and its line in ``_FRAMEWORKS``. gradkit never imports a
library to recognise its arrays: they exist only after somebody else imported it.
"""

import sys
from collections.abc import Callable
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
    "is_library_new",
    "register",
]

HOST = NumPy()
_DESCRIBED = ("torch", "Tensor"), ("cupy", "ndarray")  # whose arrays compiled code reads
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


class _Libraries(dict[type, Framework | None]):
    """The library of each type; ``None`` of one whose objects are no arrays."""

    def __missing__(self, kind: type) -> Framework | None:
        """Look for it, the first time that somebody asks for the type."""
        framework = next((f for f in _FRAMEWORKS if _loaded(f) and f.owns(kind)), None)
        return self.setdefault(kind, framework)


_BY_TYPE = _Libraries()
# The library that objects of a type are arrays of, or ``None``, without a Python frame of its own.
framework_for: Callable[[type], Framework | None] = _BY_TYPE.__getitem__


def framework_of(array: Any) -> Framework | None:
    """The library that an object is an array of, or ``None``."""
    return framework_for(type(array))


def backend_of(view: Array) -> Backend:
    """The backend that computes on a NumPy or CuPy array."""
    framework = framework_of(view)
    assert framework is not None  # every view is a NumPy or CuPy array
    return framework.backend_of(view)


def is_library_new() -> bool:
    """True if PyTorch or CuPy was imported since the last call; registers it with compiled code."""
    kinds = (getattr(sys.modules.get(name), attribute, None) for name, attribute in _DESCRIBED)
    new = [kind for kind in kinds if not (kind is None or kind in _BY_TYPE)]
    for kind in new:
        framework_for(kind)
    return bool(new)


def is_array(value: Any) -> bool:
    """True if a value is an array of a library listed here."""
    return framework_for(type(value)) is not None


def register(kind: type, framework: Framework) -> None:
    """Assign a type to a library that is not listed here, such as an emulated device."""
    _BY_TYPE[kind] = framework


def _loaded(framework: Framework) -> bool:
    return not framework.module or sys.modules.get(framework.module) is not None

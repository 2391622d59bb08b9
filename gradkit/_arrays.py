"""What an argument is: the framework of its type, and its name in an error.

Adding an array library takes a file in ``_frameworks`` and a word in the tuple here. Nothing
is imported for it: an array of a library can only exist once its module does.
"""

import sys
from typing import Any

import numpy as np

from gradkit._dispatch import backend_of
from gradkit._frameworks.base import Framework, Native
from gradkit._frameworks.cupy import CuPy
from gradkit._frameworks.dlpack import DLPack
from gradkit._frameworks.jax import JAX
from gradkit._frameworks.numpy import NumPy
from gradkit._frameworks.tensorflow import TensorFlow
from gradkit._frameworks.torch import Torch, TorchSubclass

__all__ = [
    "HOST",
    "Framework",
    "Native",
    "NumPy",
    "beside",
    "framework_of",
    "is_array",
    "is_scalar",
    "refuse_write",
    "same_device",
    "view_of",
]

HOST = NumPy()
# The first that owns a type has it.
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
    """The framework that an object is an array of, or ``None``; one dict look-up a call."""
    kind = type(array)
    try:
        return _BY_TYPE[kind]
    except KeyError:
        found = next((f for f in _FRAMEWORKS if _loaded(f) and f.owns(kind)), None)
        return _BY_TYPE.setdefault(kind, found)


def is_array(value: Any) -> bool:
    """Whether a value is an array of any framework known here."""
    return framework_of(value) is not None


def is_scalar(value: Any) -> bool:
    """Whether a value is a NumPy scalar or 0-d array, which may stand beside any framework's."""
    return isinstance(value, np.generic) or (type(value) is np.ndarray and value.ndim == 0)


def beside(scalar: Any, native: Native) -> Native:
    """A NumPy scalar as a native array where another native array is.

    On a device this queues work: call it where the work is running.
    """
    return backend_of(native).as_scalar(scalar)


def same_device(a: Native, b: Native) -> bool:
    """Whether two native arrays can be worked on together."""
    if type(a) is not type(b):
        return False
    return type(a) is np.ndarray or bool(a.device == b.device)


def refuse_write(framework: Framework, label: str, instead: str) -> None:
    """Raise where a library's users count on their arrays never changing."""
    if framework.immutable:
        raise TypeError(
            f"{label} is a {framework.name} array, whose memory is never written; {instead}"
        )


def view_of(
    framework: Framework, array: Any, label: str, *, write: bool = False, detach: bool = False
) -> Native:
    """An argument as a native array; an error has the argument's name in front."""
    try:
        return framework.view(array, write=write, detach=detach)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label} {error}") from error.__cause__


def _loaded(framework: Framework) -> bool:
    return not framework.module or framework.module in sys.modules

"""What an argument is: its framework, and the way in and out for the caller's own arrays.

A *native* array is what a backend computes on: ``numpy.ndarray`` or ``cupy.ndarray``. Each
framework says how one of its arrays is seen as a native array without a copy, and how a
native result goes back as the caller's own type.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

Native: TypeAlias = Any  # numpy.ndarray, or cupy.ndarray, which cannot be imported here


class Framework:
    """One array library. Subclasses override what differs."""

    name = ""
    module = ""  # the top-level module that must have been imported for an array to exist

    def owns(self, kind: type) -> bool:
        """Whether arrays of this type are this framework's."""
        raise NotImplementedError

    def view(self, array: Any, *, write: bool) -> Native:
        """The array's own memory as a native array.

        A ``TypeError`` or ``ValueError`` says what the array is, without its name: the
        caller knows that (see ``named``).
        """
        raise NotImplementedError

    def wrap(self, native: Native, like: Any) -> Any:
        """A native result as an array of the caller's type, on the device of ``like``."""
        raise NotImplementedError

    def wrote(self, array: Any) -> None:
        """Told after the memory of one of the caller's arrays was written."""


class NumPy(Framework):
    """``numpy.ndarray`` and its harmless subclasses (``memmap``, say)."""

    name = module = "numpy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (np.ndarray, np.generic))

    def view(self, array: Any, *, write: bool) -> Native:
        if type(array) is np.ndarray:
            return array
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("is a masked array; pass its .data or .filled() instead")
        if write and isinstance(array, np.generic):
            raise TypeError("is a NumPy scalar, which cannot be written in place")
        return np.asarray(array)

    def wrap(self, native: Native, like: Any) -> Any:  # noqa: ARG002
        return native


class CuPy(Framework):
    """``cupy.ndarray``."""

    name = module = "cupy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def view(self, array: Any, *, write: bool) -> Native:  # noqa: ARG002
        return array

    def wrap(self, native: Native, like: Any) -> Any:  # noqa: ARG002
        return native


class ArrayAPI(Framework):
    """Any other object in host memory that speaks DLPack and the array-API standard."""

    name = "array API"

    def owns(self, kind: type) -> bool:
        return hasattr(kind, "__dlpack__") and hasattr(kind, "__array_namespace__")

    def view(self, array: Any, *, write: bool) -> Native:  # noqa: ARG002
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError) as error:
            raise TypeError(f"cannot be read through DLPack: {error}") from error

    def wrap(self, native: Native, like: Any) -> Any:
        return like.__array_namespace__().from_dlpack(native)


HOST = NumPy()
_FRAMEWORKS: tuple[Framework, ...] = (HOST, CuPy(), ArrayAPI())
_BY_TYPE: dict[type, Framework | None] = {}


def framework_of(array: Any) -> Framework | None:
    """The framework that an object is an array of, or ``None``; one dict look-up a call."""
    kind = type(array)
    try:
        return _BY_TYPE[kind]
    except KeyError:
        found = next((f for f in _FRAMEWORKS if _loaded(f) and f.owns(kind)), None)
        return _BY_TYPE.setdefault(kind, found)


@contextmanager
def named(label: Callable[[], str]) -> Iterator[None]:
    """Put an argument's name in front of what a framework says of it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label()} {error}") from error.__cause__


def is_array(value: Any) -> bool:
    """Whether a value is an array of any framework known here."""
    return framework_of(value) is not None


def _loaded(framework: Framework) -> bool:
    return not framework.module or framework.module in sys.modules

"""NumPy: a CPU backend computes on its arrays."""

from typing import Any

import numpy as np

from gradkit import _host
from gradkit._arrays.base import Framework
from gradkit._backend import Array
from gradkit._calls.backend import Backend


class NumPy(Framework):
    """``numpy.ndarray``, its subclasses except masked arrays, and NumPy scalars."""

    name = module = "numpy"
    returns_views = True

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (np.ndarray, np.generic))

    def computes_on(self, kind: type) -> bool:
        return kind is np.ndarray

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        if type(array) is np.ndarray:
            return array
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("is a masked array; pass its .data or .filled() instead")
        if write and isinstance(array, np.generic):
            raise TypeError("is a NumPy scalar, which cannot be written in place")
        return np.asarray(array)

    def backend_of(self, view: Array) -> Backend:
        return _host.backend()

    def wrap(self, result: Array, like: Any) -> Any:
        return result

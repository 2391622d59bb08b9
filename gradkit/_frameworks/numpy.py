"""NumPy: its arrays are native ones."""

from typing import Any

import numpy as np

from gradkit._frameworks.base import Framework, Native


class NumPy(Framework):
    """``numpy.ndarray`` and its harmless subclasses (``memmap``, say)."""

    name = module = "numpy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (np.ndarray, np.generic))

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Native:  # noqa: ARG002
        if type(array) is np.ndarray:
            return array
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("is a masked array; pass its .data or .filled() instead")
        if write and isinstance(array, np.generic):
            raise TypeError("is a NumPy scalar, which cannot be written in place")
        return np.asarray(array)

    def wrap(self, native: Native, like: Any) -> Any:  # noqa: ARG002
        return native

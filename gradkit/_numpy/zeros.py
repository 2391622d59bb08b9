"""Zeroing NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from gradkit._numpy import tuning
from gradkit._numpy.blocks import Array
from gradkit._numpy.interrupts import Uninterrupted

__all__ = ["zero_grad"]


def zero_grad(grads: Sequence[Array]) -> None:
    """Write +0 over every element, whatever it was."""
    with Uninterrupted():
        for grad in grads:
            (grad if grad.nbytes < tuning.FILLED_AS_BYTES else _as_bytes(grad)).fill(0)


def _as_bytes(array: Array) -> Array:
    """A contiguous array as its bytes, which NumPy fills at twice the pace; else itself."""
    flags = array.flags
    if not flags.forc:
        return array
    return (array if flags.c_contiguous else array.T).reshape(-1).view(np.uint8)

"""The reference: every operation on NumPy arrays. It is the CPU backend and the tests' oracle.

Functions here take validated native arrays, write into the outputs they are given and return
nothing; ``gradkit._cuda`` has the same names and signatures.
"""

from typing import Any

import numpy as np
from numpy import empty

from gradkit._numpy.accumulation import accumulate_grad, accumulate_grad_v2, zero_grad
from gradkit._numpy.batch_normalization import batch_norm, batch_norm_grad
from gradkit._numpy.blocks import Array
from gradkit._numpy.clipping import (
    clip_by_norm,
    clip_coefficient,
    clip_grad_value,
    grad_norm,
    norm_of_shares,
    norm_shares,
    scale_grads,
)
from gradkit._numpy.normalization import (
    invertible_layer_norm_grad,
    layer_norm,
    layer_norm_grad,
    layer_norm_inverse,
    rms_norm,
    rms_norm_grad,
)


def as_scalar(value: Any) -> Array:
    """A NumPy scalar as a 0-d array."""
    return np.asarray(value)


def as_float64(value: Any) -> Array:
    """A number or an array as a float64 array."""
    return np.asarray(value, np.float64)


__all__ = [
    "accumulate_grad",
    "accumulate_grad_v2",
    "as_float64",
    "as_scalar",
    "batch_norm",
    "batch_norm_grad",
    "clip_by_norm",
    "clip_coefficient",
    "clip_grad_value",
    "empty",
    "grad_norm",
    "invertible_layer_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_inverse",
    "norm_of_shares",
    "norm_shares",
    "rms_norm",
    "rms_norm_grad",
    "scale_grads",
    "zero_grad",
]

"""Norms and clipping unit by unit, on lists of NumPy arrays."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradkit._backend import Shape
from gradkit._calls.lists import ClipUnits, UnitNorms
from gradkit._numpy.blocks import Array, blocks
from gradkit._numpy.list_norms import coefficients, magnitudes, root_of, unit_of
from gradkit._numpy.writes import store, whole

__all__ = ["clip_units", "unit_norms"]


@np.errstate(all="ignore")
def unit_norms(call: UnitNorms) -> None:
    """``norms = (sum |g|^p)^(1/p)`` for each unit of each gradient, or of the mean of |g|^p."""
    pairs = zip(call.grads, call.axes, strict=True)
    norms = [_norms(grad, unit_axes, call.norm_type, mean=call.mean) for grad, unit_axes in pairs]
    np.concatenate([each.reshape(-1) for each in norms] or [call.norms], out=call.norms)


@np.errstate(all="ignore")
def clip_units(call: ClipUnits) -> None:
    """Scale each unit to ``max_norm`` if its norm is larger."""
    factors = unit_factors(call)
    start = 0
    with whole():
        for grad, out, unit_axes in zip(call.grads, call.outs, call.axes, strict=True):
            units = shape_of_units(grad.shape, unit_axes)
            factor = factors[start : start + math.prod(units)].reshape(units)
            start += factor.size
            for index, at in _blocks(grad.shape, unit_axes):
                zero = factor[at] < 0
                store(np.where(zero, 0, grad[index] * factor[at]), out[index])


def unit_factors(call: ClipUnits) -> Array:
    """Factor that each unit is multiplied by; -1 for those that become zeros."""
    limits: Any = np.float64(call.max_norm)
    if call.param_norms is not None:
        limits *= np.maximum(call.param_norms, call.least)
    factors = coefficients(call.norms, limits, call.eps)
    return np.where(~np.isfinite(call.norms) & call.zero_nonfinite, -1.0, factors)


def shape_of_units(shape: Shape, unit_axes: Shape) -> Shape:
    """The shape of an array's units, with a 1 in each axis that they extend along."""
    return tuple(1 if axis in unit_axes else length for axis, length in enumerate(shape))


def _norms(grad: Array, unit_axes: Shape, norm_type: float, *, mean: bool) -> Array:
    units = shape_of_units(grad.shape, unit_axes)
    largest, totals = np.zeros(units), np.zeros(units)
    for index, at in _blocks(grad.shape, unit_axes):
        maxima = magnitudes(grad[index]).max(axis=unit_axes, keepdims=True)
        np.maximum(largest[at], maxima, out=largest[at])  # which keeps NaN
    if math.isinf(norm_type):
        return largest
    unit = unit_of(largest, norm_type)
    for index, at in _blocks(grad.shape, unit_axes):
        powers = (magnitudes(grad[index]) / unit[at]) ** norm_type
        totals[at] += powers.sum(axis=unit_axes, keepdims=True)
    if mean:
        totals /= max(1, math.prod(grad.shape[axis] for axis in unit_axes))
    return np.where(np.isfinite(largest), unit * root_of(totals, norm_type), largest)


def _blocks(shape: Shape, unit_axes: Shape) -> Iterator[tuple[Any, Any]]:
    """Blocks' indices in an array, and those of the units that they are of."""
    for block in blocks(shape):
        at = (slice(None) if axis in unit_axes else part for axis, part in enumerate(block))
        yield (*block, ...), (*at, ...)

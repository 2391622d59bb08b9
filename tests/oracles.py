"""Expected results, by the plainest formulas in the widest arithmetic at hand.

Nothing here is shared with gradkit. The formulas are themselves checked in ``test_oracle.py``
by differentiating the forward passes.
"""

import math
from typing import NamedTuple

import mpmath
import numpy as np

WIDE = np.longdouble


def wide(array):
    """Values in the widest float, or None."""
    return None if array is None else np.asarray(array).astype(WIDE)


# Norms


def norm(grads, order=2.0):
    """The p-norm of all elements of all arrays: exact sums for p = 1, 2, else long doubles."""
    values = np.concatenate([np.zeros(0), *(np.asarray(g, np.float64).reshape(-1) for g in grads)])
    values = np.abs(values)
    largest = values.max(initial=0.0)  # NaN where there is one
    if order == math.inf or largest == 0 or not math.isfinite(largest):
        return mpmath.mpf(largest)
    with mpmath.workprec(200):
        if order == 1:
            return power_sum(values, 1)
        if order == 2:
            return mpmath.sqrt(power_sum(values, 2))
        total = np.sum((values.astype(WIDE) / WIDE(largest)) ** WIDE(order))
        high = float(total)
        total = mpmath.mpf(high) + mpmath.mpf(float(total - high))
        return mpmath.mpf(largest) * total ** (1 / mpmath.mpf(order))


def power_sum(values, order):
    """The sum of finite float64 values to a whole power: of integers, in a unit that all share."""
    fractions, exponents = np.frexp(values)
    lowest = int(exponents.min())
    integers = np.ldexp(fractions, 53).astype(np.int64).tolist()
    shifts = (order * (exponents - lowest)).tolist()
    total = sum(n**order << shift for n, shift in zip(integers, shifts, strict=True))
    return mpmath.ldexp(total, order * (lowest - 53))


def off_by(got, ref):
    """The relative error of a float against an mpmath number, past a subnormal's rounding."""
    got = float(got)
    if mpmath.isnan(ref) or mpmath.isinf(ref) or ref == 0:
        same = got == ref or (math.isnan(got) and mpmath.isnan(ref))
        return 0.0 if same else math.inf
    if not math.isfinite(got):
        return math.inf
    with mpmath.workprec(200):
        return float(max(0, abs(mpmath.mpf(got) - ref) - mpmath.mpf(2.0**-1074)) / ref)


def clipped(grad, norm, max_norm, eps=1e-6):
    """``grad * coefficient`` in float64 (wider for float64), rounded once."""
    factor = coefficient(norm, max_norm, eps)
    if factor == 1:
        return np.array(grad)
    with np.errstate(all="ignore"):
        return (grad.astype(np.float64) * factor).astype(grad.dtype)


def coefficient(norm, max_norm, eps=1e-6, mode="max"):
    """``min(1, max_norm / max(norm, eps))``, or with ``norm + eps``, in Python floats."""
    if math.isnan(norm):
        return math.nan
    if mode == "add":
        norm, eps = norm + eps, 0.0
    if norm <= max_norm:
        return 1.0
    return max_norm / max(norm, eps)


# Norms over the columns of (rows, columns); a batch norm's rows are its channels.


class Forward(NamedTuple):
    """A norm's results, and the sizes of the terms that y and mean were made of."""

    y: np.ndarray
    mean: np.ndarray
    inv_std: np.ndarray
    y_size: np.ndarray
    mean_size: np.ndarray
    mean_in_y: np.ndarray  # what y moves by as the mean moves by itself


class Gradients(NamedTuple):
    """A norm's gradients, and the sums of absolute terms that their errors are measured in."""

    dx: np.ndarray
    dscale: np.ndarray
    dbias: np.ndarray
    dx_size: np.ndarray
    dscale_size: np.ndarray
    dbias_size: np.ndarray


def forward(x, scale=None, bias=None, eps=1e-5, *, centred=True):
    """Norm of each row of x; scale and bias broadcast against it."""
    x, scale, bias = wide(x), wide(1 if scale is None else scale), wide(0 if bias is None else bias)
    with np.errstate(all="ignore"):
        mean = x.mean(axis=1) if centred else np.zeros(len(x), WIDE)
        centre = x - mean[:, None]
        inv_std = 1 / np.sqrt((centre**2).mean(axis=1) + WIDE(eps))
        xhat = centre * inv_std[:, None]
        y = xhat * scale + bias
        # An error of the mean or of inv_std reaches elements whose own xhat is 0.
        typical = np.abs(xhat).mean(axis=1, keepdims=True) if centred else WIDE(0)
        y_size = (np.abs(xhat) + typical) * np.abs(scale) + np.abs(bias)
        mean_in_y = np.abs(mean * inv_std)[:, None] * np.abs(scale)
        return Forward(y, mean, inv_std, y_size, np.abs(centre).mean(axis=1), mean_in_y)


def normalised(x, mean, inv_std):
    """``xhat`` from saved statistics; no mean for an RMS norm."""
    with np.errstate(all="ignore"):
        centre = 0 if mean is None else wide(mean)[:, None]
        return (wide(x) - centre) * wide(inv_std)[:, None]


def unscaled(y, scale, bias):
    """``xhat`` from the output of a norm."""
    with np.errstate(all="ignore"):
        shifted = wide(y) - (0 if bias is None else wide(bias))
        return shifted if scale is None else shifted / wide(scale)


def gradients(dy, xhat, scale, inv_std, *, centred=True, along=0):
    """Those of a norm over rows with this ``xhat``; dscale and dbias are sums along an axis."""
    dy, inv_std = wide(dy), wide(inv_std)[:, None]
    with np.errstate(all="ignore"):
        w = dy if scale is None else dy * wide(scale)
        product, terms = w * xhat, dy * xhat
        dx = w - xhat * product.mean(axis=1, keepdims=True)
        size = np.abs(w) + np.abs(xhat) * np.abs(product).mean(axis=1, keepdims=True)
        if centred:
            dx = dx - w.mean(axis=1, keepdims=True)
            size = size + np.abs(w).mean(axis=1, keepdims=True)
        sums = [a.sum(axis=along) for a in (terms, dy, np.abs(terms), np.abs(dy))]
        return Gradients(dx * inv_std, *sums[:2], size * np.abs(inv_std), *sums[2:])

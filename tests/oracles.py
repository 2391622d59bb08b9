"""What results must be, by the plainest formulas in the widest arithmetic at hand.

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
            return mpmath.fsum(values.tolist())
        if order == 2:
            return mpmath.sqrt(mpmath.fsum(values.tolist(), squared=True))
        total = np.sum((values.astype(WIDE) / WIDE(largest)) ** WIDE(order))
        high = float(total)
        total = mpmath.mpf(high) + mpmath.mpf(float(total - high))
        return mpmath.mpf(largest) * total ** (1 / mpmath.mpf(order))


def off_by(got, ref):
    """The relative error of a float against an mpmath number, past a subnormal's rounding."""
    got = float(got)
    if mpmath.isnan(ref) or mpmath.isinf(ref) or ref == 0:
        same = got == ref or (math.isnan(got) and mpmath.isnan(ref))
        return 0.0 if same else math.inf
    with mpmath.workprec(200):
        return float(max(0, abs(mpmath.mpf(got) - ref) - mpmath.mpf(2.0**-1074)) / ref)


def clipped(grad, norm, max_norm, eps=1e-6):
    """``grad * coefficient`` in float64 (wider for float64), rounded once."""
    factor = coefficient(norm, max_norm, eps)
    if factor == 1:
        return np.array(grad)
    with np.errstate(all="ignore"):
        return (grad.astype(np.float64) * factor).astype(grad.dtype)


def coefficient(norm, max_norm, eps=1e-6):
    """``min(1, max_norm / max(norm, eps))`` in Python floats, NaN for NaN."""
    if math.isnan(norm):
        return math.nan
    if norm <= max_norm:
        return 1.0
    return max_norm / max(norm, eps)


# Layer norms: (rows, columns); a batch norm is the layer norm of its (channels, elements).


class Forward(NamedTuple):
    """A norm's results, and the size of the terms that y was made of."""

    y: np.ndarray
    mean: np.ndarray
    inv_std: np.ndarray
    size: np.ndarray
    deviation: np.ndarray  # mean of |x - mean| of each row


class Gradients(NamedTuple):
    """A norm's gradients, and the sums of absolute terms that their errors are measured in."""

    dx: np.ndarray
    dscale: np.ndarray
    dbias: np.ndarray
    size: np.ndarray
    dscale_terms: np.ndarray
    dbias_terms: np.ndarray


def forward(x, scale=None, bias=None, eps=1e-5, *, centred=True):
    """Statistics of each row of x (M, D); scale and bias broadcast against it."""
    x, scale, bias = wide(x), wide(scale), wide(bias)
    with np.errstate(all="ignore"):
        mean = x.mean(axis=1, keepdims=True) if centred else np.zeros((len(x), 1), WIDE)
        inv_std = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + WIDE(eps))
        y = (x - mean) * inv_std
        y = y if scale is None else y * scale
        size = np.abs(y) + (0 if bias is None else np.abs(bias))
        y = y if bias is None else y + bias
    return Forward(y, mean[:, 0], inv_std[:, 0], size, np.abs(x - mean).mean(axis=1))


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
        of_w = w.mean(axis=1, keepdims=True) if centred else WIDE(0)
        of_product = (w * xhat).mean(axis=1, keepdims=True)
        size_of_w = np.abs(w).mean(axis=1, keepdims=True) if centred else WIDE(0)
        size_of_product = np.abs(w * xhat).mean(axis=1, keepdims=True)
        dx = inv_std * (w - of_w - xhat * of_product)
        size = np.abs(inv_std) * (np.abs(w) + size_of_w + np.abs(xhat) * size_of_product)
        terms = dy * xhat
        return Gradients(
            dx,
            terms.sum(axis=along),
            dy.sum(axis=along),
            size,
            np.abs(terms).sum(axis=along),
            np.abs(dy).sum(axis=along),
        )

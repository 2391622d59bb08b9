"""The norms of lists of NumPy arrays, and what they are multiplied by to be clipped."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from gradkit._numpy.blocks import Array, by_halves
from gradkit._numpy.writes import side_by_side

# A block's sum of |g|^p is kept as (unit, sum) and stands for unit^p * sum: magnitudes are divided
# by the unit, so that no power overflows or underflows.
Part: TypeAlias = tuple[float, float]


def coefficients(norms: Array, limits: Array | np.float64, eps: float) -> Array:
    """As ``coefficient``, for each of many norms, with a limit for each or for all."""
    if eps < 0:
        norms, eps = norms - eps, 0.0
    ratios = np.where(limits < 0, math.nan, limits / np.maximum(norms, eps))
    return np.where(norms <= limits, 1.0, ratios)


def coefficient(norm: float, max_norm: float, eps: float) -> float:
    """``min(1, max_norm / max(norm, eps))``; with an eps below 0, ``norm - eps`` is the norm."""
    if eps < 0:
        norm, eps = norm - eps, 0.0
    # Not min(1, ...): a norm of exactly max_norm must give exactly 1. And the norm first in
    # max(), so that NaN stays NaN.
    if norm <= max_norm:
        return 1.0
    return math.nan if not max_norm >= 0 else max_norm / max(norm, eps)


def magnitudes(block: Array) -> Array:
    """The elements' magnitudes in float64."""
    values: Array = block.astype(np.float64)
    return np.abs(values, out=values)


def unit_of(largest: Any, norm_type: float) -> Any:
    """Divisor for magnitudes up to the largest; 1 if that is 0 or not finite.

    For p = 1 and 2 a power of two, so that nothing is rounded.
    """
    usable = np.isfinite(largest) & (largest > 0)
    if norm_type in (1.0, 2.0):
        largest = np.ldexp(1.0, np.frexp(largest)[1] - 1)
    return np.where(usable, largest, 1.0)


def root_of(total: Any, norm_type: float) -> Any:
    """``total^(1/p)``."""
    return np.sqrt(total) if norm_type == 2 else np.power(total, 1 / norm_type)


def parts_of(grad: Array, norm_type: float) -> list[Part]:
    """Partial results to combine for the norm of a gradient."""
    return [_part(block, norm_type) for (block,) in side_by_side([grad])]


def _part(block: Array, norm_type: float) -> Part:
    values = magnitudes(block)
    largest = float(values.max())
    if largest == 0 or not math.isfinite(largest) or math.isinf(norm_type):
        return largest, 1.0
    unit = float(unit_of(largest, norm_type))
    return unit, sum_of((values / unit) ** norm_type)


def sum_of(values: Array) -> float:
    """A sum whose error is a few roundings, whatever the order of its terms."""
    return math.fsum(by_halves(values.ravel("K"), 64).tolist())


def combined(parts: Sequence[Part], norm_type: float, scale: float = 1.0) -> float:
    """The norm of all parts together, times a number that is at least 0 or NaN."""
    unit, total = _join(parts, norm_type)
    return _product(unit, float(root_of(total, norm_type)), scale)


def _product(unit: float, root: float, scale: float) -> float:
    """``unit * root * scale``, of which two may overflow or underflow where all do not."""
    fractions, exponents = np.frexp([unit, root, scale])
    return float(np.ldexp(fractions.prod(), exponents.sum()))


def _join(parts: Sequence[Part], norm_type: float) -> Part:
    if any(math.isnan(unit) for unit, _ in parts):
        return math.nan, 1.0
    largest = max((unit for unit, _ in parts), default=0.0)
    if largest == 0 or math.isinf(largest) or math.isinf(norm_type):
        return largest, 1.0
    return largest, math.fsum(total * (unit / largest) ** norm_type for unit, total in parts)


def state_of(parts: Sequence[Part], norm_type: float) -> tuple[float, float, float]:
    """The parts of a rank as (hi, lo, unit), which stands for (hi + lo) * unit^p."""
    unit, hi = _join(parts, norm_type)
    if unit == 0 or not math.isfinite(unit) or math.isinf(norm_type):
        return unit, 0.0, float(unit != 0)
    terms = [total * (part_unit / unit) ** norm_type for part_unit, total in parts]
    return hi, math.fsum([*terms, -hi]), unit


def sum_of_states(states: Array, norm_type: float) -> tuple[float, float, float]:
    """The (hi, lo, unit) of several together, of which hi is rounded from all."""
    his, los, units = states
    if math.isinf(norm_type):
        return float(his.max()), 0.0, 1.0  # NumPy's maximum keeps NaN
    largest = float(units.max())
    if largest == 0 or not np.isfinite(his).all():
        return float(his.sum()), 0.0, largest
    shares = np.where(units == largest, 1.0, units / largest)
    terms = np.concatenate([his, los]) * np.tile(shares, 2) ** norm_type
    if not np.isfinite(terms).all():
        return math.nan, 0.0, largest
    hi = math.fsum(terms.tolist())
    return hi, math.fsum([*terms.tolist(), -hi]), largest


def norm_of_states(states: Array, by: float, norm_type: float) -> float:
    """The norm of several ranks' (hi, lo, unit): rounded as if one rank had added up all."""
    hi, _, unit = sum_of_states(states, norm_type)
    if math.isinf(norm_type) or unit == 0 or not math.isfinite(hi):
        return hi * by
    return _product(unit, float(root_of(hi, norm_type)), by)


def digest_of(*numbers: float) -> float:
    """Hash some numbers to a whole number that a float64 can hold.

    -0 counts as 0, and all NaN are alike. As in kernels/norm_of_ranks.cu.
    """
    digest = 0
    for number in numbers:
        canonical = math.nan if math.isnan(number) else number + 0.0
        digest = (
            (digest ^ int(np.float64(canonical).view(np.uint64))) * 0x9E3779B97F4A7C15 % (1 << 64)
        )
        digest ^= digest >> 32
    return float(digest >> 11)


def nonfinite(parts: Sequence[Part]) -> bool:
    """True if an element was NaN or infinite; no part overflows."""
    return not all(math.isfinite(unit) for unit, _ in parts)

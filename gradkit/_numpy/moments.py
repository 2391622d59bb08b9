"""Means and variances as a forward pass needs them, of rows, groups or channels alike."""

from typing import NamedTuple

import numpy as np

from gradkit._numpy import tuning
from gradkit._numpy.blocks import Array


class Moments(NamedTuple):
    """Means in two pieces, and variances.

    Rounded to one number, a mean is off by half a unit of its last place, which may be large
    compared with ``x - mean``.
    """

    high: Array  # in the dtype of the computation
    low: Array  # in float64, as is the variance
    variance: Array

    @classmethod
    def about(cls, centre: Array, of_deviation: Array, of_square: Array) -> "Moments":
        """From the means of deviations from a centre near the mean, and of their squares."""
        return cls(centre, of_deviation, np.maximum(of_square - of_deviation**2, 0))

    @property
    def mean(self) -> Array:
        """The means in float64."""
        mean: Array = self.high + self.low
        return mean

    def replaced(self, lost: Array, exact: "Moments") -> "Moments":
        """These, but where they are lost those that were computed in float64."""
        mean = exact.mean
        high = mean.astype(self.high.dtype)
        pieces = (high, self.high), (mean - high, self.low), (exact.variance, self.variance)
        return Moments(*(np.where(lost, new, old) for new, old in pieces))


def lost(variance: Array, eps: float) -> Array:
    """Where squares overflowed float32, or underflowed it and count beside ``eps``."""
    found: Array = ~np.isfinite(variance)
    if eps < tuning.TINY_VARIANCE:
        found |= variance < tuning.TINY_VARIANCE
    return found


def low_that_counts(high: Array, low: Array, inv_std: Array) -> Array | None:
    """The low pieces in the high ones' dtype, 0 where normalised elements do not feel them.

    ``None`` if no element feels any.
    """
    unfelt = np.abs(low) * inv_std < np.finfo(high.dtype).eps * tuning.UNFELT
    felt: Array = np.where(unfelt, 0, low).astype(high.dtype)
    return felt if felt.any() else None

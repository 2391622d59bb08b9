"""Running statistics of batch norm on NumPy arrays, moved in float64."""

import numpy as np

from gradkit._backend import Number
from gradkit._numpy import casts
from gradkit._numpy.blocks import Array

__all__ = ["update_running_statistics"]


@np.errstate(all="ignore")
def update_running_statistics(
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    count: Number,
    momentum: float,
    next_mean: Array,
    next_var: Array,
) -> None:
    """``next_mean`` and ``next_var`` are written; they may be ``running_mean`` and ``running_var``.

    ``mean`` and the biased ``var`` are float64, of ``count`` elements per channel.
    """
    n = float(count)
    weight = 0.0 if n <= 1 else momentum
    room = np.empty(mean.size)
    casts.narrow(_moved(running_mean, mean, weight), next_mean, room)
    unbiased = var if weight == 0 else var * (n / (n - 1))
    casts.narrow(_moved(running_var, unbiased, weight), next_var, room)


def _moved(of: Array, to: Array, weight: float) -> Array:
    """``(1 - weight) * of + weight * to``, of which what has no weight is left out."""
    if weight in (0, 1):
        return to if weight else of
    return (1 - weight) * of.astype(np.float64) + weight * to

"""Running averages, on NumPy arrays."""

import numpy as np

from gradkit._calls.lists import EmaUpdate
from gradkit._dtypes import accumulation_name
from gradkit._numpy.blocks import Array
from gradkit._numpy.writes import side_by_side, store, whole

__all__ = ["ema_update"]


def ema_update(call: EmaUpdate) -> None:
    """Each ``average += (1 - decay) * (param - average)``; 1 keeps every bit and 0 copies."""
    decay = float(call.decay)
    if decay == 1:
        return
    with whole():
        for average, param in side_by_side(call.averages, call.params):
            wide = accumulation_name(average.dtype.name)
            new = param.astype(wide)
            store(new if decay == 0 else _between(average.astype(wide), new, decay), average)


def _between(old: Array, new: Array, decay: float) -> Array:
    """A point on the way from old to new, from the end that is nearer."""
    step, rest = new - old, 1 - decay
    moved = new - step * decay if decay < 0.5 else old + step * rest
    return np.where(np.isfinite(step), moved, old * decay + new * rest)

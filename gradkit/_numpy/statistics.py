"""Statistics of each array of a list: norm, largest magnitude, mean, zeros and what is not finite.

What is added up of an array is a row as ``STATS_PART`` has it: rows of several ranks are joined.
"""

import math

import numpy as np

from gradkit._calls.lists import STATS, STATS_PART, ListStats
from gradkit._numpy.blocks import Array
from gradkit._numpy.list_norms import norm_of_states, parts_of, state_of, sum_of
from gradkit._numpy.writes import side_by_side

__all__ = ["grad_stats", "stats_of"]

# The elements of an array with larger ones are divided, so that no sum overflows.
_LARGE, _UNIT = 2.0**900, 2.0**100


@np.errstate(all="ignore")
def grad_stats(call: ListStats) -> None:
    """A row of ``stats`` for each gradient, or of ``parts`` what it is computed from."""
    parts = np.array([_part(grad) for grad in call.grads]).reshape(-1, STATS_PART)
    if call.parts is not None:
        call.parts[...] = parts
    if call.stats is not None:
        call.stats[...] = stats_of(parts[np.newaxis])


@np.errstate(all="ignore")
def stats_of(parts: Array) -> Array:
    """The statistics of gradients that lie on several ranks, whose parts are ``parts[rank, k]``."""
    stats = np.zeros((parts.shape[1], STATS))
    largest, counts = parts[:, :, 6].max(axis=0), parts[:, :, 7:].sum(axis=0)
    for k, row in enumerate(stats):
        by_rank = parts[:, k]
        norm = norm_of_states(by_rank[:, :3].T, 1.0, 2.0)
        row[:3] = norm, largest[k], _mean(by_rank[:, 3:6], counts[k, 2])
    stats[:, 3:] = np.rint(counts[:, :2])
    return stats


def _part(grad: Array) -> list[float]:
    """Sums and counts of an array, to be added up."""
    largest, sums, zeros, nonfinite = [0.0], [], 0, 0
    for (block,) in side_by_side([grad]):
        values = block.astype(np.float64)
        largest.append(float(np.abs(values).max()))
        zeros += int(np.count_nonzero(values == 0))
        nonfinite += int(np.count_nonzero(~np.isfinite(values)))
        unit = _UNIT if largest[-1] > _LARGE else 1.0
        sums.append((unit, _sum(values / unit)))
    squares = state_of(parts_of(grad, 2.0), 2.0)
    return [*squares, *_joined(sums), float(np.max(largest)), zeros, nonfinite, grad.size]


def _sum(values: Array) -> float:
    return float(values.sum()) if not np.isfinite(values).all() else sum_of(values)


def _joined(sums: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Sums of blocks, each behind its unit, as (hi, lo, unit)."""
    top = max((unit for unit, _ in sums), default=1.0)
    terms = [total * (unit / top) for unit, total in sums]
    if not np.isfinite(terms).all():
        return float(np.sum(terms)), 0.0, top
    hi = math.fsum(terms)
    return hi, math.fsum([*terms, -hi]), top


def _mean(sums: Array, size: float) -> float:
    """The mean, from each rank's sum as (hi, lo, unit)."""
    his, los, units = sums.T
    if not (size and np.isfinite(his).all()):
        return float(his.sum() / size) if size else 0.0
    top = float(units.max())
    terms = np.concatenate([his, los]) * np.tile(units / top, 2)
    return math.fsum(terms.tolist()) / size * top

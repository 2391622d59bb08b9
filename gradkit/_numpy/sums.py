"""Sums along rows and columns through BLAS, in runs short enough to keep float32's error small.

Each run is added up in its own dtype and carried on in float64.
"""

from functools import lru_cache

import numpy as np

from gradkit._numpy import tuning
from gradkit._numpy.blocks import Array, DType, by_halves


def row_sums(tile: Array, weights: Array | None) -> Array:
    """``tile @ weights`` (of ones if ``None``) in float64."""
    if weights is None:
        weights = _ones(tile.shape[1], tile.dtype)
    whole = tile.shape[1] // tuning.ROW_RUN * tuning.ROW_RUN
    if whole == 0:
        return _run_sums(tile, weights)
    # One call for all runs: threads wait for each other at every call.
    of_runs = np.vecdot(_runs(tile, whole), weights[:whole].reshape(-1, tuning.ROW_RUN))
    total: Array = of_runs.sum(axis=1, dtype=np.float64)
    if whole < tile.shape[1]:
        total += _run_sums(tile[:, whole:], weights[whole:])
    return total


def row_squares(tile: Array) -> Array:
    """The sum of squares of each row of a tile in float64."""
    whole = tile.shape[1] // tuning.ROW_RUN * tuning.ROW_RUN
    runs, rest = _runs(tile, whole), tile[:, whole:]
    total: Array = np.vecdot(runs, runs).sum(axis=1, dtype=np.float64)
    if whole < tile.shape[1]:
        total += np.vecdot(rest, rest)
    return total


def _runs(tile: Array, whole: int) -> Array:
    """The first columns of a tile as (rows, runs, elements of a run), without a copy."""
    return tile[:, :whole].reshape(len(tile), -1, tuning.ROW_RUN)


def column_sums(tile: Array) -> Array:
    """The sum over the rows of a tile in float64."""
    # BLAS adds rows one after the other here, and error grows with their number.
    run = tuning.COLUMN_RUN
    if len(tile) < run:
        return (_ones(len(tile), tile.dtype) @ tile).astype(np.float64, copy=False)
    whole = len(tile) // run * run
    rest = _ones(len(tile) - whole, tile.dtype) @ tile[whole:]
    total: Array = rest.astype(np.float64, copy=False)
    runs = tile[:whole].reshape(-1, run, tile.shape[1])
    total += by_halves((_ones(run, tile.dtype) @ runs).astype(np.float64, copy=False))[0]
    return total


def _run_sums(run: Array, weights: Array) -> Array:
    # A matrix product has one running total or few, a dot product one a vector lane.
    sums: Array = run @ weights if run.shape[1] <= tuning.NARROW else np.vecdot(run, weights)
    return sums.astype(np.float64, copy=False)


@lru_cache(maxsize=16)
def _ones(count: int, dtype: DType) -> Array:
    ones = np.ones(count, dtype)
    ones.flags.writeable = False
    return ones

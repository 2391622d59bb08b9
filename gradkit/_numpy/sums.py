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
    if tile.shape[1] <= tuning.ROW_RUN:
        return _run_sums(tile, weights)
    total = np.zeros(tile.shape[0])
    for start in range(0, tile.shape[1], tuning.ROW_RUN):
        run = slice(start, start + tuning.ROW_RUN)
        total += _run_sums(tile[:, run], weights[run])
    return total


def row_squares(tile: Array) -> Array:
    """The sum of squares of each row of a tile in float64."""
    total = np.zeros(tile.shape[0])
    for start in range(0, tile.shape[1], tuning.ROW_RUN):
        part = tile[:, start : start + tuning.ROW_RUN]
        total += np.vecdot(part, part)
    return total


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


def stacked_column_sums(tiles: Array) -> Array:
    """The sum over the rows of each tile of a stack in float64."""
    if len(tiles) == 1:
        return column_sums(tiles[0])[None]
    run, rows = tuning.COLUMN_RUN, tiles.shape[1]
    whole = rows // run * run
    rest = _ones(rows - whole, tiles.dtype) @ tiles[:, whole:]
    total: Array = rest.astype(np.float64, copy=False)
    if whole:
        runs = tiles[:, :whole].reshape(len(tiles), -1, run, tiles.shape[2])
        sums = (_ones(run, tiles.dtype) @ runs).astype(np.float64, copy=False)
        total += by_halves(np.moveaxis(sums, 1, 0))[0]
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

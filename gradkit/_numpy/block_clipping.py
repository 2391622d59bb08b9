"""Norms and clipping unit by unit, on lists of NumPy arrays."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Shape
from gradkit._calls.lists import ClipUnits, UnitNorms
from gradkit._numpy import scratch, tuning
from gradkit._numpy.blocks import Array, Index, blocks, load, store
from gradkit._numpy.casts import widen
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._numpy.list_norms import coefficients, combined, parts_of_each
from gradkit._numpy.threads import in_strips

__all__ = ["clip_units", "unit_norms"]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_NORM_PIECE, _CLIP_PIECE = scratch.elements(1, _F64), scratch.elements(2, _F32)


class _Sums(NamedTuple):
    """The norms of a gradient's units while they are added up.

    A unit's sum of |g|^p so far is largest^p * totals, as parts of a norm of all gradients are.
    """

    source: Array
    along: Shape
    largest: Array
    totals: Array

    @classmethod
    def of(cls, grad: Array, own: Shape) -> "_Sums":
        (source,), along = _simplified(own, grad)
        kept = _kept(source.shape, along)
        return cls(source, along, np.zeros(kept), np.ones(kept))

    def norms(self, norm_type: float, *, mean: bool) -> Array:
        """What the sums give."""
        powers = self.totals
        if mean and powers.size and not math.isinf(norm_type):
            powers = powers / max(1, self.source.size // powers.size)
        roots = np.sqrt(powers) if norm_type == 2 else np.power(powers, 1 / norm_type)
        return np.asarray(self.largest * roots).reshape(-1)


@np.errstate(all="ignore")
def unit_norms(call: UnitNorms) -> None:
    """``norms = (sum |g|^p)^(1/p)`` for each unit of each gradient, or of the mean of |g|^p."""
    norm_type, mean = call.norm_type, call.mean
    pairs = list(zip(call.grads, call.axes, strict=True))
    whole = [grad for grad, own in pairs if len(own) == grad.ndim]
    parts = zip(parts_of_each(whole, norm_type), whole, strict=True)
    counts = ((part, max(1, grad.size) if mean else 1) for part, grad in parts)
    alone = (np.array([combined(part, norm_type, count=count)]) for part, count in counts)
    cut = [_Sums.of(grad, own) for grad, own in pairs if len(own) < grad.ndim]
    # Each job has units of its own; long runs of neighbouring ones, where units are columns.
    jobs = [
        (sums, index)
        for sums in cut
        for index in blocks(
            sums.totals.shape, max(tuning.SHORT_RUN, sums.totals.size // tuning.STRIPS)
        )
    ]
    elements = sum(sums.source.size for sums in cut)
    in_strips(partial(_fill, norm_type), jobs, elements, pays=tuning.ONE_PASS)
    each = (sums.norms(norm_type, mean=mean) for sums in cut)
    norms = [next(alone if len(own) == grad.ndim else each) for grad, own in pairs]
    np.concatenate(norms or [call.norms], out=call.norms)


@np.errstate(all="ignore")
def clip_units(call: ClipUnits) -> None:
    """Scale each unit to ``max_norm`` if its norm is larger."""
    measured: Array | np.float64 = np.float64(1)
    if call.param_norms is not None:
        measured = np.maximum(call.param_norms, call.least)
    factors = coefficients(call.norms, np.float64(call.max_norm) * measured, call.eps)
    zeros = ~np.isfinite(call.norms) & call.zero_nonfinite
    start, jobs, small = 0, [], []
    for grad, out, own in zip(call.grads, call.outs, call.axes, strict=True):
        if len(own) == grad.ndim and grad.itemsize > 2 and grad.size <= tuning.SMALL_GRADIENT:
            small.append((grad, out, start))
            start += 1
            continue
        (source, target), along = _simplified(own, grad, out)
        kept = _kept(source.shape, along)
        stop = start + math.prod(kept)
        by, zero = (each[start:stop].reshape(kept) for each in (factors, zeros))
        start = stop
        if out is grad and not zero.any() and (by == 1).all():
            continue
        for index in blocks(source.shape, _CLIP_PIECE):
            at = _all_along(along, index)
            jobs.append((source[index], target[index], by[at], zero[at]))
    elements = sum(source.size for source, *_ in jobs)
    with Uninterrupted():
        in_strips(_clip, jobs, elements, pays=tuning.ONE_PASS)
        _clip_small(small, factors, zeros)


def _fill(norm_type: float, jobs: Sequence[tuple[_Sums, Index]]) -> None:
    """Add up units, each wholly within one of the jobs."""
    with scratch.arrays(1, _F64) as (room,):
        for (source, along, largest, totals), index in jobs:
            m, s, units = largest[index], totals[index], source[_all_along(along, index)]
            for piece in blocks(units.shape, _NORM_PIECE):
                at = _all_along(along, piece)
                _include(m[at], s[at], units[piece], along, norm_type, room)


def _include(
    largest: Array, totals: Array, block: Array, along: Shape, norm_type: float, room: Array
) -> None:
    """Add a block's powers to ``totals``, which are relative to ``largest``."""
    values = room[: block.size].reshape(block.shape)
    m, s = None, None
    if norm_type == 2 and block.itemsize < 8 and along == (block.ndim - 1,):
        m, s = _squares_in_runs(block, room)
    if m is None:
        widen(block, values)
        m, s = _plain(values, along, norm_type, narrow=block.itemsize < 8)
    if m is None:
        widen(block, values)
        m, s = _scaled(values, along, norm_type)
    joined = np.maximum(largest, m)
    by = _divisors(joined)
    total = (
        np.where(largest > 0, totals, 0.0) * (largest / by) ** norm_type + s * (m / by) ** norm_type
    )
    totals[...] = np.where(np.isfinite(joined), total, 1.0)
    largest[...] = joined


def _squares_in_runs(block: Array, room: Array) -> tuple[Any, Any]:
    """Rows' sums of squares as ``_plain`` gives them, in float32 over runs of a row."""
    values = load(block, _F32, room.view(_F32), block.shape)
    run = tuning.NORM_RUN_BYTES // values.itemsize
    whole = block.shape[-1] // run * run
    runs, rest = values[..., :whole].reshape(*block.shape[:-1], -1, run), values[..., whole:]
    s = np.vecdot(runs, runs).sum(axis=-1, dtype=_F64) + np.vecdot(rest, rest)
    low, high = tuning.SAFE_SQUARES[_F32]
    safe = bool(((s > low) & (s < high)).all())
    return (np.ones((*s.shape, 1)), s[..., None]) if safe else (None, None)


def _plain(values: Array, along: Shape, norm_type: float, *, narrow: bool) -> tuple[Any, Any]:
    """Sums of powers beside 1, if none overflows or loses digits; overwrites the values."""
    if norm_type == 1:
        s = np.abs(values, out=values).sum(axis=along, keepdims=True)
        safe = narrow or bool((s < tuning.SAFE_SUM).all())
    elif norm_type == 2:
        s = _squares(values, along)
        low, high = tuning.SAFE_SQUARES[_F64]
        safe = narrow or bool(((s > low) & (s < high)).all())
    else:
        return None, None
    return (np.ones(s.shape), s) if safe else (None, None)


def _squares(values: Array, along: Shape) -> Array:
    if along == (values.ndim - 1,):
        return np.asarray(np.vecdot(values, values))[..., None]
    axes = list(range(values.ndim))
    kept = [axis for axis in axes if axis not in along]
    sums = np.einsum(values, axes, values, axes, kept)
    return np.expand_dims(sums, along)


def _scaled(values: Array, along: Shape, norm_type: float) -> tuple[Any, Any]:
    """Largest magnitudes, and sums of powers relative to them; overwrites the values."""
    np.abs(values, out=values)
    m = values.max(axis=along, keepdims=True)
    if math.isinf(norm_type):
        return m, 1.0
    values /= _divisors(m)
    np.power(values, norm_type, out=values)
    return m, values.sum(axis=along, keepdims=True)


def _divisors(largest: Array) -> Array:
    """What magnitudes are divided by: the largest, unless that says nothing."""
    return np.where(np.isfinite(largest) & (largest > 0), largest, 1.0)


def _clip(jobs: Sequence[tuple[Array, Array, Array, Array]]) -> None:
    """Multiply blocks by their units' factors; where ``zero`` is true, elements become +0."""
    with scratch.arrays(2, _F32) as (room, other):
        for source, target, by, zero in jobs:
            wide = source.itemsize == 8 or not _exact_in_float32(by).all()
            factors, dtype = (by, _F64) if wide else (by.astype(_F32), _F32)
            if source.itemsize == 2:
                values = load(source, _F32, room, source.shape)
                np.multiply(values, factors, out=values, dtype=dtype, casting="unsafe")
                store(values, target, other)
            else:
                np.multiply(source, factors, out=target, dtype=dtype, casting="unsafe")
            if zero.any():
                np.copyto(target, 0, where=zero)


def _clip_small(jobs: Sequence[tuple[Array, Array, int]], factors: Array, zeros: Array) -> None:
    """The same for arrays that are units themselves, each with the number of its factor."""
    exact = _exact_in_float32(factors).tolist()
    ones, blank, narrow = (factors == 1).tolist(), zeros.tolist(), factors.astype(_F32)
    for source, target, k in jobs:
        if blank[k]:
            target.fill(0)
        elif target is source and ones[k]:
            continue
        elif exact[k] and source.itemsize < 8:
            np.multiply(source, narrow[k, ...], out=target)
        else:
            np.multiply(source, factors[k, ...], out=target, dtype=_F64, casting="unsafe")


def _exact_in_float32(by: Array) -> Array:
    """Which factors are as exact in float32."""
    low, high = tuning.NORMAL_FACTORS
    exact: Array = (by == 0) | ~np.isfinite(by) | (np.abs(by) >= low) & (np.abs(by) < high)
    return exact


def _kept(shape: Shape, along: Shape) -> Shape:
    """The shape of an array's units, with a 1 in each axis that they extend along."""
    return tuple(1 if axis in along else length for axis, length in enumerate(shape))


def _all_along(along: Shape, index: Index) -> Index:
    """An index, but all of the axes that units extend along."""
    return tuple(slice(None) if axis in along else part for axis, part in enumerate(index))


def _simplified(along: Shape, *arrays: Array) -> tuple[list[Array], Shape]:
    """Arrays of one shape and the axes of their units, in fewer dimensions if they have no gaps."""
    if not all(array.flags.c_contiguous for array in arrays):
        return list(arrays), along
    if arrays[0].ndim == 0:
        return [array.reshape(1) for array in arrays], (0,)
    shape: list[int] = []
    axes: list[int] = []
    kind = None
    for axis, length in enumerate(arrays[0].shape):
        if kind == (axis in along):
            shape[-1] *= length
            continue
        kind = axis in along
        if kind:
            axes.append(len(shape))
        shape.append(length)
    return [array.reshape(shape) for array in arrays], tuple(axes)

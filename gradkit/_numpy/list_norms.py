"""The norms of lists of NumPy arrays, and what they are multiplied by to be clipped."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from gradkit._numpy import scratch, tuning
from gradkit._numpy.blocks import Array, by_halves, load, matched
from gradkit._numpy.threads import in_strips

# A block's sum of |g|^p is kept as (m, s) and stands for m^p * s. Where plain squares are safe
# m is 1; else m is the block's largest magnitude, or for p = 1 and 2 the power of two below it,
# so that no power overflows or underflows.
Part: TypeAlias = tuple[float, float]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
# Elements of a large gradient that are taken at a time.
_PIECE = scratch.elements(1, _F64)

# Elements of small gradients that are taken at once.
_FEW = tuning.SMALL_BYTES // 8
_size_of = attrgetter("size")


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
    return math.nan if max_norm < 0 else max_norm / max(norm, eps)


def parts_of_all(grads: Sequence[Array], norm_type: float) -> Sequence[Part]:
    """What to combine for the norm of all gradients; one part if they are few and small."""
    if max(map(_size_of, grads), default=0) > tuning.SMALL_GRADIENT:
        batches = _batches(grads, norm_type)
    else:
        ends = [*accumulate(map(_size_of, grads), initial=0)]
        if 0 < ends[-1] <= _FEW:
            return (_part_of(norm_type)(grads, np.empty(ends[-1])),)
        batches = list(_cut(grads, ends))
    # Threads gain nothing on batches, whose short copies take turns with the GIL.
    elements = sum(arrays[0].size for arrays in batches if len(arrays) == 1)
    work = partial(_parts_of, norm_type)
    return list(chain.from_iterable(in_strips(work, batches, elements, pays=tuning.ONE_PASS)))


def parts_of_each(grads: Sequence[Array], norm_type: float) -> list[list[Part]]:
    """What to combine for the norm of each gradient."""
    groups: list[list[Part]] = [[] for _ in grads]
    alike = list(_small_ones_alike(grads)) if norm_type == 2 else []
    for numbers in alike:
        for k, part in zip(numbers, _square_parts([grads[k] for k in numbers]), strict=True):
            groups[k].append(part)
    known = set(chain.from_iterable(alike))
    owners, pieces = [], []
    for k, grad in enumerate(grads):
        for piece in () if k in known else matched(grad, limit=_PIECE):
            owners.append(k)
            pieces.append(piece)
    elements = sum(map(_size_of, grads))
    strips = in_strips(partial(_parts_of, norm_type), pieces, elements, pays=tuning.ONE_PASS)
    for k, part in zip(owners, chain.from_iterable(strips), strict=True):
        groups[k].append(part)
    return groups


def _small_ones_alike(grads: Sequence[Array]) -> Iterator[list[int]]:
    """The numbers of small gradients of one size, a batch at a time."""
    by_size: dict[int, list[int]] = {}
    for k, size in enumerate(map(_size_of, grads)):
        if 0 < size <= tuning.SMALL_GRADIENT:
            by_size.setdefault(size, []).append(k)
    for size, numbers in by_size.items():
        step = tuning.BATCH // size
        yield from (numbers[start : start + step] for start in range(0, len(numbers), step))


def _batches(grads: Sequence[Array], norm_type: float) -> list[Sequence[Array]]:
    """Large gradients piece by piece, all others by the batch."""
    in_place = norm_type in (2.0, math.inf)
    large: list[Sequence[Array]] = []
    medium: list[Array] = []
    small: list[Array] = []
    for grad in grads:
        if grad.size > tuning.MEDIUM_GRADIENT:
            direct = in_place and grad.itemsize > 2 and grad.flags.forc and grad.flags.aligned
            large.extend(matched(grad, limit=tuning.IN_PLACE if direct else _PIECE))
        else:
            (small if _goes_wide(grad) else medium).append(grad)
    for some in (medium, small):
        large += _cut(some, [*accumulate(map(_size_of, some), initial=0)])
    return large


def _cut(grads: Sequence[Array], ends: Sequence[int]) -> Iterator[Sequence[Array]]:
    """Batches of neighbours, which end at so many elements; no batch is empty."""
    if 0 < ends[-1] <= _FEW:
        yield grads
        return
    start = taken = 0
    while taken < ends[-1]:
        stop = bisect_right(ends, taken + tuning.BATCH) - 1
        yield grads[start:stop]
        start, taken = stop, ends[stop]


def _goes_wide(grad: Array) -> bool:
    """Whether squares are summed in float64 throughout."""
    return grad.size <= tuning.SMALL_GRADIENT or grad.itemsize == 8


def _parts_of(norm_type: float, items: Sequence[Sequence[Array]]) -> list[Part]:
    part = _part_of(norm_type)
    with scratch.arrays(1, _F64) as (room,):
        return [part(arrays, room) for arrays in items]


def _part_of(norm_type: float) -> Callable[[Sequence[Array], Array], Part]:
    """What makes a part of some arrays, with room for all of their elements."""
    return _PARTS.get(norm_type) or partial(_power_part, norm_type)


def _square_part(arrays: Sequence[Array], room: Array) -> Part:
    values = _gathered(arrays, room if _goes_wide(arrays[0]) else room.view(_F32))
    run = tuning.NORM_RUN_BYTES // values.itemsize
    whole = values.size // run * run
    runs, rest = values[:whole].reshape(-1, run), values[whole:]
    if values.dtype == _F64:
        total = _sum(rest * rest)
        if whole:
            total += _sum(np.vecdot(runs, runs))
    else:
        total = float(np.vecdot(runs, runs).sum(dtype=_F64)) + float(np.dot(rest, rest))
    low, high = tuning.SAFE_SQUARES[values.dtype]
    if low < total < high:
        return 1.0, total
    pieces = matched(*arrays, limit=_PIECE) if len(arrays) == 1 else [arrays]
    return _join([_power_part(2.0, piece, room) for piece in pieces], 2.0)


def _square_parts(arrays: Sequence[Array]) -> Iterator[Part]:
    """``_square_part`` of each of some small arrays of one size."""
    count, run = len(arrays), tuning.NORM_RUN_BYTES // _F64.itemsize
    with scratch.arrays(1, _F64) as (room,):
        values = _gathered(arrays, room).reshape(count, -1)
        whole = values.shape[1] // run * run
        runs, rest = values[:, :whole].reshape(count, -1, run), values[:, whole:]
        of_runs, of_rest = np.vecdot(runs, runs).T, (rest * rest).T
        sums = [by_halves(each, tuning.EXACT_SUM).T.tolist() for each in (of_runs, of_rest)]
        low, high = tuning.SAFE_SQUARES[_F64]
        for array, *terms in zip(arrays, *sums, strict=True):
            total = sum(map(_exact_sum, terms))
            yield (1.0, total) if low < total < high else _square_part([array], room)


def _sum_part(arrays: Sequence[Array], room: Array) -> Part:
    total = _sum(_magnitudes(arrays, room))
    return (1.0, total) if total < tuning.SAFE_SUM else _power_part(1.0, arrays, room)


def _max_part(arrays: Sequence[Array], room: Array) -> Part:
    values = _gathered(arrays, room if _goes_wide(arrays[0]) else room.view(_F32))
    return float(np.maximum(values.max(), -values.min())), 1.0  # np.maximum keeps NaN


def _power_part(norm_type: float, arrays: Sequence[Array], room: Array) -> Part:
    values = _magnitudes(arrays, room)
    largest = float(values.max())
    if largest == 0 or not math.isfinite(largest):
        return largest, 1.0
    # A power of two where sums are exact: ranks' sums are joined without rounding then.
    exact = norm_type in (1.0, 2.0)
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1) if exact else largest
    values /= scale
    np.power(values, norm_type, out=values)
    return scale, _sum(values)


_PARTS = {1.0: _sum_part, 2.0: _square_part, math.inf: _max_part}


def _magnitudes(arrays: Sequence[Array], room: Array) -> Array:
    values = _gathered(arrays, room)
    return np.abs(values, out=room[: values.size])


def _gathered(arrays: Sequence[Array], room: Array) -> Array:
    """All elements as one vector of the room's dtype: the array itself, or copies in the room."""
    if len(arrays) == 1:
        return load(arrays[0], room.dtype, room)
    total = sum(map(_size_of, arrays))
    return np.concatenate(arrays, axis=None, out=room[:total], casting="unsafe")


def _sum(values: Array) -> float:
    """The sum of a vector, which it overwrites."""
    if len(values) > tuning.EXACT_SUM:
        values = by_halves(values, tuning.EXACT_SUM)
    return _exact_sum(values.tolist())


def _exact_sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def combined(parts: Sequence[Part], norm_type: float, scale: float = 1.0, count: int = 1) -> float:
    """The norm of all parts together, times a number that is at least 0 or NaN.

    With a count, that of the mean of so many powers.
    """
    largest, total = _join(parts, norm_type)
    total /= count
    root = math.sqrt(total) if norm_type == 2 else float(np.power(total, 1 / norm_type))
    # The product of the first two overflows only if that of all does: the root is at least 1, or
    # the first is 1.
    return largest * scale * root


def _join(parts: Sequence[Part], norm_type: float) -> Part:
    if len(parts) == 1:
        return parts[0]
    if any(math.isnan(m) for m, _ in parts):
        return math.nan, 1.0
    largest = max((m for m, _ in parts), default=0.0)
    if largest == 0 or math.isinf(largest) or math.isinf(norm_type):
        return largest, 1.0
    return largest, math.fsum(s * (m / largest) ** norm_type for m, s in parts)


def state_of(parts: Sequence[Part], norm_type: float) -> tuple[float, float, float]:
    """The parts of a rank as (hi, lo, scale), which stands for (hi + lo) * scale^p."""
    if nonfinite(parts):
        return combined(parts, norm_type), 0.0, 1.0
    if math.isinf(norm_type):
        return _join(parts, norm_type)[0], 0.0, 1.0
    scale = max((m for m, _ in parts), default=0.0)
    if scale == 0:
        return 0.0, 0.0, 0.0
    terms = [s * (m / scale) ** norm_type for m, s in parts]
    hi = math.fsum(terms)
    return hi, math.fsum([*terms, -hi]), scale


def norm_of_states(states: Array, weights: Array, by: float, norm_type: float) -> float:
    """The norm of several ranks' (hi, lo, scale): rounded as if one rank had added up all."""
    his, los, scales = states
    if math.isinf(norm_type):
        return float((his * weights).max() * by)  # NumPy's maximum keeps NaN
    largest = float(scales.max())
    if largest == 0 or not np.isfinite(his).all():
        return float(his.sum() * by)
    shares = np.where(scales == largest, 1.0, scales / largest) * weights
    terms = np.concatenate([his, los]) * np.tile(shares, 2) ** norm_type
    total = math.fsum(terms.tolist()) if np.isfinite(terms).all() else math.nan
    root = math.sqrt(total) if norm_type == 2 else float(np.power(total, 1 / norm_type))
    # As in `combined`; here the product of the first two may overflow where all do not.
    (first, up), (second, more) = math.frexp(largest), math.frexp(by)
    return float(np.ldexp(first * second * root, up + more))


def nonfinite(parts: Sequence[Part]) -> bool:
    """Whether an element was NaN or infinite; no part overflows."""
    return not all(math.isfinite(m) and math.isfinite(s) for m, s in parts)

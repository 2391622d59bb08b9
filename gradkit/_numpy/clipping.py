"""Gradient norms, the clip coefficient and scaling, on lists of NumPy arrays."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, chain, repeat, starmap
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np

from gradkit._backend import Number
from gradkit._numpy import scratch, tuning
from gradkit._numpy.blocks import Array, DType, by_halves, load, matched, store
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._numpy.threads import in_strips
from gradkit._numpy.zeros import zero_grad

__all__ = [
    "clip_by_norm",
    "clip_coefficient",
    "clip_grad_value",
    "grad_norm",
    "join_ranks",
    "norm_of_ranks",
    "norm_of_shares",
    "norm_parts",
    "norm_shares",
    "rank_state",
    "scale_grads",
]

# A block's sum of |g|^p is kept as (m, s) and stands for m^p * s. Where plain squares are safe
# m is 1; else m is the block's largest magnitude, or for p = 1 and 2 the power of two below it,
# so that no power overflows or underflows.
Part: TypeAlias = tuple[float, float]

# What is called for each array of a dtype, and what it takes between source and target.
Recipe: TypeAlias = Callable[[DType], tuple[Callable[..., object], tuple[Any, ...]]]
Pair: TypeAlias = tuple[Array, ...]  # a source and a target

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
# Elements of a large gradient that are taken at a time.
_PIECE = scratch.elements(1, _F64)

_NO_SCRATCH = nullcontext((np.empty(0), np.empty(0)))
_dtype_of, _size_of = attrgetter("dtype"), attrgetter("size")


@np.errstate(all="ignore")
def grad_norm(
    grads: Sequence[Array],
    norm_type: float,
    out: Array,
    *,
    per_tensor: bool = False,
    scale: Number = 1.0,
    found_inf: Array | None = None,
) -> None:
    """``out = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
    by = abs(float(scale))
    if per_tensor:
        each: Sequence[Sequence[Part]] = parts_of_each(grads, norm_type)
    else:
        each = [_parts_of_all(grads, norm_type)]
    norms = [combined(parts, norm_type, by) for parts in each]
    out[...] = norms if per_tensor else norms[0]
    if found_inf is not None:
        found_inf[...] = np.reshape([_nonfinite(parts) for parts in each], found_inf.shape)


@np.errstate(all="ignore")
def norm_parts(
    grads: Sequence[Array],
    norm_type: float,
    out: Array,
    *,
    per_tensor: bool = False,
    copies: Sequence[int] | None = None,
) -> None:
    """``out[k] = (hi, lo, scale)``: what ``grad_norm`` adds up, before the root."""
    each: Sequence[Sequence[Part]]
    if copies is None and not per_tensor:
        each = [_parts_of_all(grads, norm_type)]
    else:
        each = parts_of_each(grads, norm_type)
        if copies is not None:
            counted = zip(each, copies, strict=True)
            each = [[(m, s / count) for m, s in parts] for parts, count in counted]
        if not per_tensor:
            each = [list(chain.from_iterable(each))]
    for row, parts in zip(out, each, strict=True):
        row[...] = _state(parts, norm_type)


@np.errstate(all="ignore")
def norm_of_ranks(
    parts: Array, scales: Array, norm_type: float, out: Array, found_inf: Array | None
) -> None:
    """The norms of all ranks' gradients, from the rows ``parts[rank, norm]`` of ``norm_parts``.

    ``scales[rank]`` is what the rank's gradients are to be multiplied by, at least 0 or NaN.
    """
    by = float(scales.max())
    weights = np.where(scales == by, 1.0, scales / by)
    norms = [_norm_of_states(parts[:, k].T, weights, by, norm_type) for k in range(out.size)]
    out[...] = np.reshape(norms, out.shape)
    if found_inf is not None:
        found_inf[...] = (~np.isfinite(parts[:, :, 0])).any(axis=0).reshape(found_inf.shape)


def rank_state(
    grads: Sequence[Array],
    norm_type: float,
    digest: float,
    out: Array,
    *,
    scale: Number = 1.0,
    copies: Sequence[int] | None = None,
) -> None:
    """``out = (0, digest, |scale|, hi, lo, scale of the sums)``."""
    out[:3] = 0, digest, abs(float(scale))
    norm_parts(grads, norm_type, out[3:].reshape(1, 3), copies=copies)


def join_ranks(
    states: Array,
    digest: float,
    norm_type: float,
    out: Array,
    found_inf: Array | None,
    *,
    scale: Number,
    max_norm: Number,
    fresh: bool,
    faults: Array,
    factors: Array,
) -> None:
    """The norm of all ranks' gradients, unless one failed; and what a clip is to use."""
    own = np.where(states[:, 0] != 0, 1, np.where(states[:, 1] != digest, 2, 0))
    if own.any():
        faults[...] = np.where(faults == 0, own, faults)
        factors[...] = 0, 1, math.inf
        if fresh:
            out[...] = math.nan
        return
    norm_of_ranks(states[:, np.newaxis, 3:], states[:, 2], norm_type, out, found_inf)
    factors[...] = float(out), float(scale), float(max_norm)


@np.errstate(all="ignore")
def norm_shares(norm: Array, largest: Array, norm_type: float, out: Array) -> None:
    """``out = (norm / largest)^p``: what this rank adds to a norm over ranks.

    For p = infinity there is no sum: 0, or the NaN that a "max" may have dropped.
    """
    share = np.where(norm == largest, 1.0, norm / largest)  # 0/0 and inf/inf are 1
    out[...] = share * 0.0 if math.isinf(norm_type) else share**norm_type


@np.errstate(all="ignore")
def norm_of_shares(total: Array, largest: Array, norm_type: float, out: Array) -> None:
    """``out = largest * total^(1/p)``: the norm over all ranks."""
    out[...] = largest + total if math.isinf(norm_type) else largest * total ** (1 / norm_type)


@np.errstate(all="ignore")
def clip_coefficient(norm: Array, max_norm: Number, eps: float, out: Array) -> None:
    """``out = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
    out[...] = coefficients(norm, np.float64(max_norm), eps)


def coefficients(norms: Array, limits: Array | np.float64, eps: float) -> Array:
    """As ``_coefficient``, for each of many norms, with a limit for each or for all."""
    ratios = np.where(limits < 0, math.nan, limits / np.maximum(norms, eps))
    return np.where(norms <= limits, 1.0, ratios)


def clip_by_norm(
    grads: Sequence[Array],
    norm: Array,
    max_norm: Number,
    eps: float,
    outs: Sequence[Array],
    *,
    scale: Number = 1.0,
    zero_nonfinite: bool,
) -> None:
    """``outs = grads * (scale * clip_coefficient(norm))``, or zeros if the norm is not finite."""
    value, by = float(norm), float(scale)  # of which the second is: it was read by the host
    if zero_nonfinite and not math.isfinite(value):
        zero_grad(outs)
        return
    coefficient = _coefficient(value, float(max_norm), eps)
    # Where the norm is infinite, finite gradients become 0, though the scale is what made it so.
    scale_grads(grads, coefficient * by if coefficient else coefficient, outs)


def _coefficient(norm: float, max_norm: float, eps: float) -> float:
    # Not min(1, ...): a norm of exactly max_norm must give exactly 1. And the norm first in
    # max(), so that NaN stays NaN.
    if norm <= max_norm:
        return 1.0
    return math.nan if max_norm < 0 else max_norm / max(norm, eps)


@np.errstate(all="ignore")
def scale_grads(grads: Sequence[Array], coefficient: Number, outs: Sequence[Array]) -> None:
    """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
    factor = float(coefficient)
    if factor == 1.0:
        for grad, out in zip(grads, outs, strict=True):
            if out is not grad:
                out[...] = grad
        return
    _elementwise(_scaling(factor), grads, outs)


@np.errstate(all="ignore")
def clip_grad_value(grads: Sequence[Array], clip_value: float, outs: Sequence[Array]) -> None:
    """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
    _elementwise(_clamping(clip_value), grads, outs)


def _parts_of_all(grads: Sequence[Array], norm_type: float) -> Sequence[Part]:
    batches = _batches(grads, norm_type)
    if len(batches) == 1 and batches[0] is grads:
        room = np.empty(sum(map(_size_of, grads)))
        return (_part_of(norm_type)(grads, room),)
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
    """Large gradients piece by piece, all others by the batch; few small ones as they are."""
    if max(map(_size_of, grads), default=0) <= tuning.SMALL_GRADIENT:
        return list(_cut(grads))
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
    return [*large, *_cut(medium), *_cut(small)]


def _cut(grads: Sequence[Array]) -> Iterator[Sequence[Array]]:
    """Batches of neighbours; no batch is empty."""
    ends = [0, *accumulate(map(_size_of, grads))]
    if 0 < ends[-1] <= tuning.SMALL_BYTES // 8:
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
        total = _sum(np.vecdot(runs, runs)) + _sum(rest * rest)
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
    return _exact_sum(by_halves(values, tuning.EXACT_SUM).tolist())


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


def _state(parts: Sequence[Part], norm_type: float) -> tuple[float, float, float]:
    """The parts of a rank as (hi, lo, scale), which stands for (hi + lo) * scale^p."""
    if _nonfinite(parts):
        return combined(parts, norm_type), 0.0, 1.0
    if math.isinf(norm_type):
        return _join(parts, norm_type)[0], 0.0, 1.0
    scale = max((m for m, _ in parts), default=0.0)
    if scale == 0:
        return 0.0, 0.0, 0.0
    terms = [s * (m / scale) ** norm_type for m, s in parts]
    hi = math.fsum(terms)
    return hi, math.fsum([*terms, -hi]), scale


def _norm_of_states(states: Array, weights: Array, by: float, norm_type: float) -> float:
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


def _nonfinite(parts: Sequence[Part]) -> bool:
    """Whether an element was NaN or infinite; no part overflows."""
    return not all(math.isfinite(m) and math.isfinite(s) for m, s in parts)


def _scaling(factor: float) -> Recipe:
    """How arrays are multiplied by a number."""
    # float32 rounds the factor and the product: within one unit in the last place, as long
    # as the factor itself is a normal float32.
    low, high = tuning.NORMAL_FACTORS
    normal = factor == 0 or not math.isfinite(factor) or low <= abs(factor) < high
    # 0-d arrays: NumPy takes three times as long to make an operand of a scalar.
    narrow, wide = np.array(factor, _F32), np.array(factor)

    def recipe(dtype: DType) -> tuple[Callable[..., object], tuple[Any, ...]]:
        if dtype == _F64:
            return np.multiply, (wide,)
        if normal:
            return np.multiply, (narrow,)
        return partial(np.multiply, dtype=_F64, casting="unsafe"), (wide,)

    return recipe


def _clamping(limit: float) -> Recipe:
    """How arrays are clamped to both sides of zero."""
    return lambda dtype: (np.clip, (dtype.type(-limit), dtype.type(limit)))


def _elementwise(recipe: Recipe, sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Write to each target what the recipe makes of its source; 16-bit floats in float32."""
    elements = sum(map(_size_of, sources))
    pairs: Iterable[Pair] = zip(sources, targets, strict=True)
    if elements > _PIECE and max(map(_size_of, sources)) > _PIECE:
        pairs = chain.from_iterable(
            matched(*pair, limit=_PIECE) if pair[0].size > _PIECE else [pair] for pair in pairs
        )
    dtypes = dict.fromkeys(map(_dtype_of, sources))
    recipes = {dtype: recipe(_F32 if dtype.itemsize == 2 else dtype) for dtype in dtypes}
    with Uninterrupted():
        in_strips(partial(_elementwise_strip, recipes), list(pairs), elements, pays=tuning.ONE_PASS)


def _elementwise_strip(
    recipes: dict[DType, tuple[Callable[..., object], tuple[Any, ...]]], pairs: Sequence[Pair]
) -> None:
    half = any(dtype.itemsize == 2 for dtype in recipes)
    # Before anything is written: memory may run out.
    with scratch.arrays(2, _F32) if half else _NO_SCRATCH as (wide, room):
        for dtype, (function, operands) in recipes.items():
            one = len(recipes) == 1
            mine = pairs if one else [pair for pair in pairs if pair[0].dtype == dtype]
            if dtype.itemsize == 2:
                for source, target in mine:
                    values = load(source, _F32, wide, source.shape)
                    function(values, *operands, values)
                    store(values, target, room)
            else:
                between = (repeat(operand, len(mine)) for operand in operands)
                first, last = (map(itemgetter(side), mine) for side in (0, 1))
                # A loop of Python's own takes a fifth longer.
                for _ in starmap(function, zip(first, *between, last, strict=True)):
                    pass

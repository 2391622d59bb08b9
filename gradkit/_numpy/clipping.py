"""Gradient norms, the clip coefficient and scaling, on lists of NumPy arrays."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from gradkit._numpy.accumulation import zero_grad
from gradkit._numpy.blocks import (
    ONE_PASS,
    Array,
    in_strips,
    load,
    matched,
    room_for,
    scratch,
    store,
)
from gradkit._numpy.interrupts import Uninterrupted

# A block's sum of |g|^p is kept as (m, s) and stands for m^p * s. Where plain squares are
# safe m is 1; else m is the block's largest magnitude, so that no power leaves float64.
Part: TypeAlias = tuple[float, float]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_RUN = 1024  # bytes that one BLAS call adds up: 256 numbers in float32 before float64 takes over
_FEW = 64  # numbers whose exact sum costs no more than a NumPy call or two
_SMALL = 4096  # up to this many elements float64 throughout costs nothing
_BATCH = 1 << 16  # elements of small gradients that are taken together
_PIECE = room_for(1, _F64)  # elements of a large gradient that are taken at a time
# Between these a block's sum of squares has neither overflowed nor lost digits to underflow.
_SAFE = {_F32: (2.0**-100, 2.0**127), _F64: (1e-200, 1e290)}


@np.errstate(all="ignore")
def grad_norm(
    grads: Sequence[Array], norm_type: float, out: Array, *, per_tensor: bool = False
) -> None:
    """``out = (sum |g|^p)^(1/p)`` over all gradients, or one norm a gradient."""
    elements = sum(grad.size for grad in grads)
    work = partial(_parts_of, norm_type)
    if not per_tensor:
        strips = in_strips(work, _batches(grads), elements, pays=ONE_PASS)
        out[...] = _combine([part for strip in strips for part in strip], norm_type)
        return
    owners, items = [], []
    for k, grad in enumerate(grads):
        for piece in matched(grad, limit=_PIECE):
            owners.append(k)
            items.append(piece)
    groups: list[list[Part]] = [[] for _ in grads]
    parts = (part for strip in in_strips(work, items, elements, pays=ONE_PASS) for part in strip)
    for k, part in zip(owners, parts, strict=True):
        groups[k].append(part)
    out[...] = [_combine(group, norm_type) for group in groups]


@np.errstate(all="ignore")
def norm_shares(norm: Array, largest: Array, norm_type: float, out: Array) -> None:
    """``out = (norm / largest)^p``: what this rank adds to a norm over ranks.

    For infinity, where nothing is added, 0 or the NaN that a "max" may have dropped.
    """
    share = np.where(norm == largest, 1.0, norm / largest)  # 0/0 and inf/inf are 1
    out[...] = share * 0.0 if math.isinf(norm_type) else share**norm_type


@np.errstate(all="ignore")
def norm_of_shares(total: Array, largest: Array, norm_type: float, out: Array) -> None:
    """``out = largest * total^(1/p)``: the norm over all ranks."""
    out[...] = largest + total if math.isinf(norm_type) else largest * total ** (1 / norm_type)


@np.errstate(all="ignore")
def clip_coefficient(norm: Array, max_norm: float, eps: float, out: Array) -> None:
    """``out = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN."""
    # Not np.minimum(1, ...): a norm of exactly max_norm must give exactly 1.
    out[...] = np.where(norm <= max_norm, 1.0, max_norm / np.maximum(norm, eps))


def clip_by_norm(
    grads: Sequence[Array],
    norm: Array,
    max_norm: float,
    eps: float,
    outs: Sequence[Array],
    *,
    zero_nonfinite: bool,
) -> None:
    """``outs = grads * clip_coefficient(norm)``, or zeros where the norm is not finite."""
    if zero_nonfinite and not np.isfinite(norm):
        zero_grad(outs)
        return
    coefficient = np.empty(())
    clip_coefficient(norm, max_norm, eps, coefficient)
    scale_grads(grads, coefficient, outs)


@np.errstate(all="ignore")
def scale_grads(grads: Sequence[Array], coefficient: Array | float, outs: Sequence[Array]) -> None:
    """``outs = grads * coefficient``; a coefficient of 1 keeps every bit."""
    factor = float(coefficient)
    if factor == 1.0:
        for grad, out in zip(grads, outs, strict=True):
            if out is not grad:
                out[...] = grad
        return
    # Backwards: what the norm read last is still in cache.
    _elementwise(_scaler(factor), grads[::-1], outs[::-1])


@np.errstate(all="ignore")
def clip_grad_value(grads: Sequence[Array], clip_value: float, outs: Sequence[Array]) -> None:
    """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""
    _elementwise(partial(_clamp, clip_value), grads, outs)


def _batches(grads: Sequence[Array]) -> list[Sequence[Array]]:
    """Large gradients piece by piece, small ones by the batch."""
    items: list[Sequence[Array]] = []
    batch: list[Array] = []
    held = 0
    for grad in grads:
        size = grad.size
        if size > _SMALL:
            items.extend(matched(grad, limit=_PIECE))
            continue
        if held + size > _BATCH:
            items.append(batch)
            batch, held = [], 0
        batch.append(grad)
        held += size
    if held:
        items.append(batch)
    return items


def _parts_of(norm_type: float, items: Sequence[Sequence[Array]]) -> list[Part]:
    part = {1.0: _sum_part, 2.0: _square_part, math.inf: _max_part}.get(
        norm_type, partial(_power_part, norm_type)
    )
    with scratch(1, _F64) as (room,):
        return [part(arrays, room) for arrays in items]


def _square_part(arrays: Sequence[Array], room: Array) -> Part:
    if arrays[0].size <= _SMALL or arrays[0].itemsize == 8:
        values = _gathered(arrays, room)
    else:
        values = load(arrays[0], _F32, room.view(_F32))
    run = _RUN // values.itemsize
    whole = values.size // run * run
    runs, rest = values[:whole].reshape(-1, run), values[whole:]
    total = float(np.vecdot(runs, runs).sum(dtype=_F64)) + float(np.dot(rest, rest))
    low, high = _SAFE[values.dtype]
    return (1.0, total) if low < total < high else _power_part(2.0, arrays, room)


def _sum_part(arrays: Sequence[Array], room: Array) -> Part:
    total = _sum(_magnitudes(arrays, room))
    return (1.0, total) if total < 1e290 else _power_part(1.0, arrays, room)


def _max_part(arrays: Sequence[Array], room: Array) -> Part:
    if len(arrays) == 1 and arrays[0].itemsize < 8:
        values = load(arrays[0], _F32, room.view(_F32))
    else:
        values = _gathered(arrays, room)
    return float(np.maximum(values.max(), -values.min())), 1.0  # np.maximum keeps NaN


def _power_part(norm_type: float, arrays: Sequence[Array], room: Array) -> Part:
    values = _magnitudes(arrays, room)
    largest = float(values.max())
    if largest == 0 or not math.isfinite(largest):
        return largest, 1.0
    values /= largest
    np.power(values, norm_type, out=values)
    return largest, _sum(values)


def _magnitudes(arrays: Sequence[Array], room: Array) -> Array:
    values = _gathered(arrays, room)
    return np.abs(values, out=room[: values.size])


def _gathered(arrays: Sequence[Array], room: Array) -> Array:
    """All elements as one float64 vector: the array itself, or copies in the room."""
    if len(arrays) == 1:
        return load(arrays[0], _F64, room)
    total = sum(array.size for array in arrays)
    return np.concatenate(arrays, axis=None, out=room[:total], casting="unsafe")


def _sum(values: Array) -> float:
    """The sum of a vector, which it spoils: by halves, in which equal terms lose nothing."""
    while values.size > _FEW:
        half = values.size // 2
        values[:half] += values[-half:]
        values = values[: values.size - half]
    try:
        return math.fsum(values.tolist())
    except OverflowError:
        return math.inf


def _combine(parts: Sequence[Part], norm_type: float) -> float:
    if any(math.isnan(m) for m, _ in parts):
        return math.nan
    largest = max((m for m, _ in parts), default=0.0)
    if largest == 0 or math.isinf(largest) or math.isinf(norm_type):
        return largest
    total = math.fsum(s * (m / largest) ** norm_type for m, s in parts)
    root = np.sqrt(total) if norm_type == 2 else np.power(total, 1 / norm_type)
    return float(largest * root)


def _scaler(factor: float) -> Callable[[Array, Array], None]:
    """What writes ``source * factor``, of float32 or float64, to a target, rounding once."""
    # float32 rounds the factor and the product: within one unit in the last place, as long
    # as the factor itself is a normal float32.
    normal = factor == 0 or not math.isfinite(factor) or 2.0**-126 <= abs(factor) < 2.0**127
    # 0-d arrays: NumPy takes three times as long to make an operand of a scalar.
    narrow, wide = np.array(factor, _F32), np.array(factor)

    def scale(source: Array, target: Array) -> None:
        if source.itemsize == 8:
            np.multiply(source, wide, target)
        elif normal:
            np.multiply(source, narrow, target)
        else:
            np.multiply(source, wide, target, dtype=_F64, casting="unsafe")

    return scale


def _clamp(limit: float, source: Array, target: Array) -> None:
    kind = source.dtype.type
    np.clip(source, kind(-limit), kind(limit), out=target)


def _elementwise(
    work: Callable[[Array, Array], None], sources: Sequence[Array], targets: Sequence[Array]
) -> None:
    items: list[tuple[Array, ...]] = []
    for pair in zip(sources, targets, strict=True):
        if pair[0].size <= _PIECE:
            items.append(pair)
        else:
            items.extend(matched(*pair, limit=_PIECE))

    def strip(pairs: Sequence[tuple[Array, ...]]) -> None:
        with scratch(2, _F32) as (wide, room):
            for source, target in pairs:
                if source.itemsize == 2:
                    values = load(source, _F32, wide, source.shape)
                    work(values, values)
                    store(values, target, room)
                else:
                    work(source, target)

    elements = sum(source.size for source in sources)
    with Uninterrupted():
        in_strips(strip, items, elements, pays=ONE_PASS)

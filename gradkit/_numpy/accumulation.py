"""Adding into gradient buffers, on NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from gradkit._calls.lists import AccumulateGrad, AccumulateGrads, AccumulateGradV2, GradNorm
from gradkit._numpy import casts, scratch, tuning
from gradkit._numpy.blocks import Array, load, matched, store
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._numpy.lists import grad_norm
from gradkit._numpy.threads import in_strips

__all__ = ["accumulate_grad", "accumulate_grad_v2", "accumulate_grads"]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


def accumulate_grad(call: AccumulateGrad) -> None:
    """``buffer += scale * grad`` (broadcast) if ``do_update``; with a scale, in float64."""
    if call.do_update:
        _add(call.buffer, call.grad, call.scale)


def accumulate_grad_v2(call: AccumulateGradV2) -> None:
    """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
    if call.overwrite:
        _overwrite(call.buffer, call.grad)
    else:
        _add(call.buffer, call.grad, None)


def accumulate_grads(call: AccumulateGrads) -> None:
    """Each ``buffer += scale * grad``, or ``= scale * grad``; then the norm of the buffers."""
    factor = float(call.scale)
    by = None if factor == 1 else factor
    pairs = list(zip(call.buffers, call.grads, strict=True)) if call.do_update else []
    with Uninterrupted():
        if call.overwrite and by is None:
            for buffer, grad in pairs:
                _overwrite(buffer, grad)
        else:
            for kinds in dict.fromkeys((b.dtype, g.dtype) for b, g in pairs):
                own = [(b, g) for b, g in pairs if (b.dtype, g.dtype) == kinds]
                _add_all(own, by, fresh=bool(call.overwrite))
    if call.norm is not None:
        grad_norm(GradNorm(grads=call.buffers, norm_type=2.0, norm=call.norm))


def _overwrite(buffer: Array, grad: Array) -> None:
    """``buffer = grad``, broadcast."""
    if casts.rounds_twice(grad.dtype, buffer.dtype):
        with Uninterrupted(), np.errstate(all="ignore"):
            _add_all([(buffer, np.broadcast_to(grad, buffer.shape))], None, fresh=True)
    elif buffer is not grad:
        with np.errstate(all="ignore"):
            np.copyto(buffer, grad, casting="unsafe")


@np.errstate(all="ignore")
def _add(buffer: Array, grad: Array, scale: float | None) -> None:
    """``buffer += scale * grad``, broadcast."""
    same = scale is None and buffer.dtype == grad.dtype and buffer.itemsize > 2
    if same and buffer.size <= tuning.SMALL_GRADIENT:
        np.add(buffer, grad, out=buffer)  # one call: Ctrl-C comes before it or after it
        return
    if grad.shape != buffer.shape:
        grad = np.broadcast_to(grad, buffer.shape)
    with Uninterrupted():
        _add_all([(buffer, grad)], scale)


@np.errstate(all="ignore")
def _add_all(
    pairs: Sequence[tuple[Array, Array]], scale: float | None, *, fresh: bool = False
) -> None:
    """``buffer += scale * grad`` for pairs of the same dtypes; with ``fresh`` the product alone."""
    buffer, grad = pairs[0]
    # Rounded once: every sum of two 16-bit floats rounds through float32 as if at once, a
    # float32 one adds directly, and whatever is scaled or narrowed goes through float64.
    direct = scale is None and max(buffer.itemsize, grad.itemsize) < 8
    wide = _F32 if direct and grad.itemsize <= buffer.itemsize else _F64
    in_place = scale is None and buffer.dtype == grad.dtype == wide
    by_cast = casts.rounds_twice(wide, buffer.dtype)  # not by NumPy, within the sum
    factor = None if scale is None else np.array(scale)

    def strip(pieces: Sequence[tuple[Array, ...]]) -> None:
        with scratch.arrays(2, wide) as (room, other):
            for total, addend in pieces:
                term, result = addend, total
                if factor is not None:
                    term = room[: addend.size].reshape(addend.shape)
                    np.multiply(addend, factor, out=term, dtype=wide, casting="unsafe")
                elif casts.pays(addend):
                    term = load(addend, wide, room, addend.shape)
                if fresh:
                    store(term, total, other)
                    continue
                if by_cast or casts.pays(total):
                    result = load(total, wide, other, total.shape)
                np.add(result, term, out=result, dtype=wide, casting="unsafe")
                if result is not total:
                    store(result, total, room)

    limit, elements = scratch.elements(2, wide), sum(total.size for total, _ in pairs)
    if in_place:  # nothing goes through scratch
        limit = max(limit, -(-elements // tuning.STRIPS))
    pieces: list[tuple[Array, ...]] = []
    for pair in pairs:
        pieces += [pair] if 0 < pair[0].size <= limit else matched(*pair, limit=limit)
    in_strips(strip, pieces, elements, pays=tuning.ONE_PASS)

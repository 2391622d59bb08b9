"""Adding into gradient buffers and zeroing them, on NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from gradkit._numpy import casts, scratch, tuning
from gradkit._numpy.blocks import Array, load, matched, store
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._numpy.threads import in_strips

__all__ = ["accumulate_grad", "accumulate_grad_v2", "zero_grad"]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


def accumulate_grad(
    buffer: Array, grad: Array, do_update: Array | bool, scale: float | None
) -> None:
    """``buffer += scale * grad`` (broadcast) if ``do_update``, with one rounding."""
    if do_update:
        _add(buffer, grad, scale)


def accumulate_grad_v2(buffer: Array, grad: Array, overwrite: Array | bool) -> None:
    """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
    if not overwrite:
        _add(buffer, grad, None)
    elif buffer is not grad:
        with np.errstate(all="ignore"):
            np.copyto(buffer, grad, casting="unsafe")


def zero_grad(grads: Sequence[Array]) -> None:
    """Write +0 over every element, whatever it was."""
    with Uninterrupted():
        for grad in grads:
            (grad if grad.nbytes < tuning.FILLED_AS_BYTES else _as_bytes(grad)).fill(0)


def _as_bytes(array: Array) -> Array:
    """A contiguous array as its bytes, which NumPy fills at twice the pace; else itself."""
    flags = array.flags
    if not flags.forc:
        return array
    return (array if flags.c_contiguous else array.T).reshape(-1).view(np.uint8)


@np.errstate(all="ignore")
def _add(buffer: Array, grad: Array, scale: float | None) -> None:
    # Rounded once: every sum of two 16-bit floats rounds through float32 as if at once, a
    # float32 one adds directly, and whatever is scaled or narrowed goes through float64.
    direct = scale is None and max(buffer.itemsize, grad.itemsize) < 8
    wide = _F32 if direct and grad.itemsize <= buffer.itemsize else _F64
    in_place = scale is None and buffer.dtype == grad.dtype == wide
    if in_place and buffer.size <= tuning.SMALL_GRADIENT:
        np.add(buffer, grad, out=buffer)  # one call: Ctrl-C comes before it or after it
        return
    factor = None if scale is None else np.array(scale)

    def strip(pairs: Sequence[tuple[Array, ...]]) -> None:
        with scratch.arrays(2, wide) as (room, other):
            for total, addend in pairs:
                term, result = addend, total
                if factor is not None:
                    term = room[: addend.size].reshape(addend.shape)
                    np.multiply(addend, factor, out=term, dtype=wide, casting="unsafe")
                elif casts.pays(addend):
                    term = load(addend, wide, room, addend.shape)
                if casts.pays(total):
                    result = load(total, wide, other, total.shape)
                np.add(result, term, out=result, dtype=wide, casting="unsafe")
                if result is not total:
                    store(result, total, room)

    limit = scratch.elements(2, wide)
    if in_place:  # nothing goes through scratch
        limit = max(limit, -(-buffer.size // tuning.STRIPS))
    if grad.shape != buffer.shape:
        grad = np.broadcast_to(grad, buffer.shape)
    items = list(matched(buffer, grad, limit=limit))
    with Uninterrupted():
        in_strips(strip, items, buffer.size, pays=tuning.ONE_PASS)

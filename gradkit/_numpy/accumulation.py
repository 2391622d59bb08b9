"""Adding into gradient buffers, on NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from gradkit._calls import lists as records
from gradkit._numpy.at_random import key_of, random_bits, rounded_at_random
from gradkit._numpy.blocks import BLOCK, Array, blocks, part
from gradkit._numpy.lists import grad_norm, zero_grad
from gradkit._numpy.writes import side_by_side, store, whole

__all__ = ["accumulate_grad", "accumulate_grad_v2", "accumulate_grads"]


def accumulate_grad(call: records.AccumulateGrad) -> None:
    """``buffer += scale * grad`` (broadcast) if ``do_update``."""
    if call.do_update and call.scale != 0:
        scale = 1.0 if call.scale is None else call.scale
        grad = np.broadcast_to(call.grad, call.buffer.shape)
        _accumulate([call.buffer], [grad], scale, overwrite=False)


def accumulate_grad_v2(call: records.AccumulateGradV2) -> None:
    """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
    grad = np.broadcast_to(call.grad, call.buffer.shape)
    _accumulate([call.buffer], [grad], 1.0, overwrite=bool(call.overwrite))


def accumulate_grads(call: records.AccumulateGrads) -> None:
    """Each ``buffer += scale * grad``, or ``= scale * grad``; then the norm of the buffers."""
    if call.grad_norm is not None:
        grad_norm(records.GradNorm(grads=call.grads, norm_type=2.0, norm=call.grad_norm))
    if call.do_update and float(call.scale) == 0:
        if call.overwrite:
            zero_grad(records.ZeroGrad(grads=[*call.buffers, *(call.compensation or ())]))
    elif call.do_update and call.compensation is not None:
        _compensate(call, call.compensation, float(call.scale), overwrite=bool(call.overwrite))
    elif call.do_update and call.seed is not None:
        _accumulate_at_random(call, key_of(call.seed))
    elif call.do_update:
        numbers = float(call.scale), bool(call.overwrite)
        _accumulate(call.buffers, call.grads, numbers[0], overwrite=numbers[1])
    if call.norm is not None:
        grad_norm(records.GradNorm(grads=call.buffers, norm_type=2.0, norm=call.norm))


def _accumulate(
    buffers: Sequence[Array], grads: Sequence[Array], scale: float, *, overwrite: bool
) -> None:
    """Add in float64, and round to the buffer's dtype once."""
    with whole():
        for buffer, grad in side_by_side(buffers, grads):
            term = grad.astype(np.float64) * scale
            store(term if overwrite else buffer + term, buffer)


def _compensate(
    call: records.AccumulateGrads, compensation: Sequence[Array], scale: float, *, overwrite: bool
) -> None:
    """Knuth's two-sum, in which the sum is rounded to the buffer's dtype."""
    pairs = zip(call.grads, call.buffers, strict=True)
    grads = [np.broadcast_to(grad, buffer.shape) for grad, buffer in pairs]
    with whole():
        for buffer, grad, remainder in side_by_side(call.buffers, grads, compensation):
            nothing = np.full(buffer.shape, -0.0)
            before = nothing if overwrite else buffer.astype(np.float64)
            change = (nothing if overwrite else remainder) + grad.astype(np.float64) * scale
            store(before + change, buffer)
            after = buffer.astype(np.float64)
            moved = after - before
            rest = (before - (after - moved)) + (change - moved)
            store(np.where(np.isfinite(after), rest, 0), remainder)


def _accumulate_at_random(call: records.AccumulateGrads, key: int) -> None:
    """As ``_accumulate``, but rounded by random bits; blocks are runs of counters."""
    scale, overwrite = float(call.scale), bool(call.overwrite)
    with whole():
        for buffer, grad, counter in zip(call.buffers, call.grads, call.offsets, strict=True):
            for index in blocks(buffer.shape, BLOCK // 4):
                block, term = part(buffer, index), part(grad, index).astype(np.float64) * scale
                bits = random_bits(key, counter, block.size).reshape(block.shape)
                rounded = rounded_at_random(term if overwrite else block + term, bits, block.dtype)
                block.view(np.uint16)[...] = rounded
                counter += block.size

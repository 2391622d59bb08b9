"""What the batch of all ranks of a group says of each channel."""

from typing import Any

import numpy as np

from gradkit._arrays import backend_of
from gradkit._backend import Array
from gradkit._open.call import Call
from gradkit._open.meeting import Meeting
from gradkit._open.norms import Channels, Forward, Gradient

_FLOAT64 = np.dtype(np.float64)


def stats_of_ranks(
    call: Call[Forward], axis: int, eps: float, meeting: Meeting
) -> tuple[Array, Array, float]:
    """Mean and variance of each channel over all ranks, in float64; how many elements each has."""
    x, backend = call.arrays.x, call.backend
    own = backend.empty((2, x.shape[axis]), _FLOAT64)
    backend.batch_norm_stats(x, axis, own[0], own[1])
    rows = _gathered(f"batch_norm(eps={eps})", call, axis, own, meeting)
    means, variances = rows[:, :-1].reshape(len(rows), 2, -1).transpose(1, 0, 2)
    together, count = np.empty(own.shape), np.empty(())
    on_host = backend_of(together)
    on_host.combine_stats(means, variances, rows[:, -1], together[0], together[1], count)
    stats = backend.as_float64(together)
    return stats[0], stats[1], float(count)


def sums_of_ranks(
    call: Call[Gradient], axis: int, own: Array, meeting: Meeting
) -> tuple[Array, float]:
    """Sums of each channel over all ranks, of which ``own`` are this one's; elements of each."""
    rows = _gathered("batch_norm_grad", call, axis, own, meeting)
    with np.errstate(all="ignore"):  # infinities of two signs
        totals = rows.sum(axis=0)
    return call.backend.as_float64(totals[:-1].reshape(own.shape)), float(totals[-1])


def _gathered(name: str, call: Call[Any], axis: int, own: Array, meeting: Meeting) -> Array:
    """Every rank's two numbers a channel, and how many elements a channel has there."""
    channels = Channels(call.arrays.x, axis)
    state = np.append(call.backend.read(own), float(channels.size))
    return meeting.gather(f"{name} of {channels.shape[0]} channels", state)

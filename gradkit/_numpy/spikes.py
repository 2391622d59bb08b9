"""One step of a spike guard, in Python's floats, which are the kernel's doubles."""

import math

from gradkit._calls.lists import SpikeGuardUpdate

__all__ = ["spike_guard_update"]


def spike_guard_update(call: SpikeGuardUpdate) -> None:
    """Write the state after a norm, and the limit for it; ``next_state`` may be ``state``."""
    decay, following = call.decay, call.next_state
    count, mean, std = call.state.tolist()
    value = float(call.norm)
    starting = count < call.warmup
    judges = not starting and std > 0
    limit = _limit(call, value, mean, std) if judges else math.inf
    call.max_norm[...] = limit
    if not 0 <= value < math.inf:  # NaN too
        following[...] = call.state
        return
    deviation = min(value, limit) - mean
    # The first norms have equal weights; `rest` makes the paper's variance of the later ones.
    weight = 1 / (count + 1) if starting else 1 - decay
    keep, rest = (1 - weight, 1.0) if starting else (decay, decay)
    spread = _spread(std, deviation, keep, weight * rest)
    following[...] = count + 1, mean + weight * deviation, spread


def _limit(call: SpikeGuardUpdate, norm: float, mean: float, std: float) -> float:
    margin = call.threshold * std
    limit = mean + margin
    if call.clips and limit < norm < math.inf:
        limit = mean + margin * (margin / (norm - mean))
    return limit


def _spread(std: float, deviation: float, keep: float, weight: float) -> float:
    """``sqrt(keep * (std**2 + weight * deviation**2))``, whose squares stay near 1."""
    largest = max(std, abs(deviation))
    if largest == 0:
        return 0.0
    std, deviation = std / largest, deviation / largest
    return largest * math.sqrt(keep * (std * std + weight * deviation * deviation))

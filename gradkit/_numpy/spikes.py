"""Steps of spike guards, in Python's floats, which are the kernel's doubles."""

import math

import numpy as np

from gradkit._calls.lists import SpikeGuardUpdate

__all__ = ["spike_guard_update"]


def spike_guard_update(call: SpikeGuardUpdate) -> None:
    """Write each state after its norm, and the limit for it; ``next_state`` may be ``state``."""
    states, norms = call.state.reshape(-1, 3).tolist(), call.norm.reshape(-1).tolist()
    steps = [_step(call, *pair) for pair in zip(states, norms, strict=True)]
    call.next_state[...] = np.reshape([state for state, _ in steps], call.state.shape)
    call.max_norm[...] = np.reshape([limit for _, limit in steps], call.norm.shape)


def _step(call: SpikeGuardUpdate, state: list[float], value: float) -> tuple[list[float], float]:
    """The state after one norm, and the limit for it."""
    count, mean, std = state
    starting = count < call.warmup
    judges = not starting and std > 0
    limit = _limit(call, value, mean, std) if judges else math.inf
    if not 0 <= value < math.inf:  # NaN too
        return state, limit
    deviation = min(value, limit) - mean
    # The first norms have equal weights; `rest` makes the paper's variance of the later ones.
    weight = 1 / (count + 1) if starting else 1 - call.decay
    keep, rest = (1 - weight, 1.0) if starting else (call.decay, call.decay)
    spread = _spread(std, deviation, keep, weight * rest)
    return [count + 1, mean + weight * deviation, spread], limit


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

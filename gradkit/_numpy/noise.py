"""The gradient noise scale, in Python's floats, which are the kernel's doubles."""

import math

import numpy as np

from gradkit._calls.lists import NoiseScale

__all__ = ["noise_scale"]


@np.errstate(all="ignore")
def noise_scale(call: NoiseScale) -> None:
    """Write the ratio of the means of noise and signal, and these; ``next_state`` may be ``state``.

    McCandlish et al., appendix A.1: ``E|g|^2`` of a batch of b samples is ``|G|^2 + tr(cov) / b``.
    """
    total = squares = 0.0
    pairs = zip(call.small_norms.tolist(), call.small_sizes.tolist(), strict=True)
    for norm, size in pairs:
        total, squares = total + size, squares + size * (norm * norm)
    small, big = total / call.small_norms.size, call.big_size
    mean, square = squares / total, float(call.big_norm) * float(call.big_norm)
    signal = np.float64(big * square - small * mean) / (big - small)
    noise = (mean - square) / np.float64(1 / small - 1 / big)
    before = np.zeros(3) if call.state is None else call.state
    count, noises, signals = before.tolist()
    if math.isfinite(signal) and math.isfinite(noise):
        weight = max(1 / (count + 1), 1 - call.decay)
        noises += weight * (float(noise) - noises)
        signals += weight * (float(signal) - signals)
        call.next_state[...] = count + 1, noises, signals
    else:
        call.next_state[...] = before
    call.scale[...] = np.float64(noises) / np.float64(signals)

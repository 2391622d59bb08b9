"""One step of a spike guard on a GPU."""

from collections.abc import Iterator

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.kernels import Combination, kernel
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for


def _combinations() -> Iterator[Combination]:
    yield "spike_guard", {}


class Spikes(OnDevice):
    """Launches the kernel of the spike guard."""

    @asks_for(_combinations)
    def spike_guard_update(
        self,
        state: Array,
        norm: Array,
        decay: float,
        threshold: float,
        warmup: int,
        following: Array,
        max_norm: Array,
    ) -> None:
        """Write the state after a norm, and the limit for it; ``following`` may be ``state``."""
        device, outs = self.device, (following, max_norm)
        sources = (contiguous(device, array) for array in (state, norm))
        made = [writable_like(device, out) for out in outs]
        rule = map(np.float64, (decay, threshold, warmup))
        launch = kernel(device, "spike_guard", "spike_guard_update")
        launch((1,), (1,), (*sources, *rule, *made))
        for out, written in zip(outs, made, strict=True):
            copy_back(out, written)

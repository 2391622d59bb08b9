"""Base of the groups whose numbers travel in device memory."""

from typing import Any

import numpy as np

from gradkit._arrays import backend_of, cuda, framework_of
from gradkit._backend import FLOAT64, Array
from gradkit.errors import RankError

# Meanings of the numbers in `faults`.
_FAULTS = {
    1.0: "failed; its own error says why",
    2.0: "made another call",
    3.0: "passed another scale or max_norm",
}


class DeviceRanks:
    """Ranks with a GPU each, whose numbers travel on the caller's current stream."""

    on_device = True

    def __init__(self, rank: int, size: int, device: int):
        self.rank, self.size = rank, size
        self._backend = backend_on(device)
        with self._backend.device.active():
            self.faults = self._zeros(size)

    def allgather(self, state: Any, /) -> Any:
        """Every rank's numbers, a row each, once the current stream has reached this point."""
        backend = self._backend
        with backend.device.active():
            row = backend.as_float64(state) if type(state) is np.ndarray else state
            rows = backend.empty((self.size, row.size), FLOAT64)
            self._gather(row, rows)
        return rows

    def check(self) -> None:
        """Wait for the device; raise an error that names ranks at fault since the last check."""
        backend = self._backend
        with backend.device.active():
            framework: Any = framework_of(self.faults)
            noted = framework.view(self.faults, write=True)
            backend.device.synchronize()  # calls may have been queued on any stream
            faults = backend.read(noted)
            if faults.any():
                noted.fill(0)
                backend.device.synchronize()  # the next call may be on another stream
        raise_if_any(faults)

    def _zeros(self, size: int) -> Any:
        """Make the array ``faults``."""
        zeros = self._backend.empty((size,), FLOAT64)
        zeros.fill(0)
        return zeros

    def _gather(self, state: Array, rows: Array) -> None:
        """Queue what fills the rows, on the current stream."""
        raise NotImplementedError


def backend_on(device: int) -> Any:
    """The CUDA backend of the device of this number."""
    with cuda.cupy().cuda.Device(device):
        return backend_of(cuda.cupy().empty(0))


def raise_if_any(faults: np.ndarray[Any, Any]) -> None:
    """Raise an error that names the ranks at fault, if there are some."""
    at_fault = {int(rank): _FAULTS[float(faults[rank])] for rank in np.flatnonzero(faults)}
    if at_fault:
        raise RankError("a collective call failed; nothing was written on any rank", at_fault)

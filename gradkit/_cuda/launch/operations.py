"""The base class of all CUDA operations."""

from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.device import Device


class OnDevice:
    """Operations on one device, which must be current while they run."""

    def __init__(self, device: Device):
        self.device = device

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        """An array's values on the host, once the current stream has written them."""
        if self.device.capturing():  # CUDA would give up the capture
            raise RuntimeError(
                "this call would synchronise with the device, which is not allowed during graph "
                "capture"
            )
        values: np.ndarray[Any, Any] = self.device.xp.asnumpy(array)
        return values

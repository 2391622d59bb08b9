"""The base class of all CUDA operations."""

from gradkit._cuda.launch.device import Device


class OnDevice:
    """Operations on one device, which must be current while they run."""

    def __init__(self, device: Device):
        self.device = device

"""The base of every file of operations: they run on one device."""

from gradkit._cuda.launch.device import Device


class OnDevice:
    """Operations on one device, which is the current one while they run."""

    def __init__(self, device: Device):
        self.device = device

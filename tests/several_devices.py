"""Emulated devices that one process works on, each with a stream of its own.

Kernels run at once, so that an order that is missing would not show. The devices therefore keep
count of what each stream has waited for, and refuse what on a GPU might come too early.
"""

import threading
from contextlib import contextmanager

import numpy as np

from tests.device_ranks import RankBackend, RankDevice

HOST = "host"


class Devices:
    """Several devices of which at most one is current in a thread."""

    def __init__(self, count):
        self._own = threading.local()
        self.all = [OrderedDevice(number, self) for number in range(count)]
        self.backends = [RankBackend(device) for device in self.all]

    @property
    def current(self):
        return getattr(self._own, "device", None)

    @current.setter
    def current(self, device):
        self._own.device = device

    def put(self, number, host):
        """A copy of a host array on a device, or for HOST in host memory."""
        if number == HOST:
            return np.array(host)
        return self.backends[number].put(np.asarray(host))

    def over(self, numbers, hosts):
        """Arrays on the devices of these numbers."""
        return [self.put(k, host) for k, host in zip(numbers, hosts, strict=True)]

    def settled(self):
        """Return whether none is current any more, and nobody's memory is still to be copied."""
        return self.current is None and not any(device.unread() for device in self.all)


class OrderedDevice(RankDevice):
    """A device that works only while it is current, on its own arrays and in order."""

    def __init__(self, number, devices):
        super().__init__(number)
        self._devices = devices
        self.done = {number: 0}  # how much of each device's work comes before what is queued next
        self.readers = []  # (device, amount of its work) that read this one's memory
        self.uploads = self.fetched = self.launches = 0
        self.is_captured = False

    @property
    def stream(self):
        self._check_current()
        return self.address

    @contextmanager
    def active(self):
        before, self._devices.current = self._devices.current, self
        try:
            yield
        finally:
            self._devices.current = before

    def capturing(self):
        self._check_current()
        return self.is_captured

    def empty(self, shape, dtype):
        self._check_current()
        return super().empty(shape, dtype)

    def upload(self, host):
        self._check_current()
        self.uploads += 1
        return super().upload(host)

    def pointers(self, arrays, *, write):
        self._check_own(arrays)
        return super().pointers(arrays, write=write)

    def compile(self, source, options=()):
        return OrderedModule(self, super().compile(source, options))

    def record(self):
        self._check_current()
        return dict(self.done)

    def wait(self, event):
        self._check_current()
        for number, amount in event.items():
            self.done[number] = max(self.done.get(number, 0), amount)

    def fetch(self, source, origin, target):
        self.work([target])
        theirs = self._devices.all[origin]
        assert theirs is not self
        assert theirs.holds(source)
        assert source.flags.c_contiguous
        assert target.flags.c_contiguous
        assert (source.shape, source.dtype) == (target.shape, target.dtype)
        assert self.done.get(origin, 0) == theirs.done[origin], "the source may not be written yet"
        theirs.readers.append((self.number, self.done[self.number]))
        self.fetched += source.nbytes
        super().fetch(source, origin, target)

    def work(self, arrays):
        """Something is queued that touches these arrays."""
        self._check_current()
        self._check_own(arrays)
        assert not self.unread(), "memory is used again that another device may still read"
        self.done[self.number] += 1

    def unread(self):
        """Readers that may still read this device's memory when the work queued next runs."""
        return [(who, when) for who, when in self.readers if self.done.get(who, 0) < when]

    def holds(self, array):
        low, high = np.lib.array_utils.byte_bounds(array)
        return not array.size or self.memory.holds(low, high - low)

    def _check_current(self):
        assert self._devices.current is self, "work is queued while another device is current"

    def _check_own(self, arrays):
        assert all(map(self.holds, arrays)), "an array of another device"


class OrderedModule:
    """A module whose kernels check on which device they are launched, and on what."""

    def __init__(self, device, module):
        self._device, self._module = device, module

    def get_function(self, name):
        launch, device = self._module.get_function(name), self._device

        def checked(grid, block, args, shared_mem=0):
            device.work([a for a in args if isinstance(a, np.ndarray) and a.dtype.kind != "V"])
            device.launches += 1
            launch(grid, block, args, shared_mem)

        return checked

"""Ranks with a GPU each compute on the device of their own, whichever is current."""

from contextlib import contextmanager

import numpy as np

from gradkit._ranks import device
from tests.device_ranks import RankBackend, RankDevice


class Watched(RankDevice):
    """A device that knows whether it is current."""

    current = False

    @contextmanager
    def active(self):
        self.current = True
        yield
        self.current = False


class Ranks(device.DeviceRanks):
    """One rank, which notes whether its device is current where it allocates and exchanges."""

    def _zeros(self, size):
        self.seen = [self._backend.device.current]
        return np.zeros(size)

    def _gather(self, *_):
        self.seen.append(self._backend.device.current)


def test_a_rank_allocates_and_exchanges_on_its_own_device(monkeypatch):
    backend = RankBackend(Watched(1))
    monkeypatch.setattr(device, "backend_on", lambda _: backend)
    ranks = Ranks(0, 1, 1)
    ranks.allgather(np.ones(2))
    assert ranks.seen == [True, True]
    assert not backend.device.current

"""Tests marked ``alone`` measure time: while one runs, no other worker of pytest-xdist runs any.

A test that is not marked shares a lock with the others; one that is marked has it to itself.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest

try:
    import fcntl
except ModuleNotFoundError:  # on Windows: there, use one process
    fcntl = None


class Turns:
    """A plugin of each worker. It locks two files, which are the same for all of them."""

    def __init__(self, gate, room):
        self._gate, self._room = (Path(path).open() for path in (gate, room))  # noqa: SIM115

    def pytest_unconfigure(self):
        """Close the files."""
        self._gate.close()
        self._room.close()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Tests that are alone come first: then nobody waits for a long test to end."""
        items.sort(key=lambda item: not _alone(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Run a test in its turn."""
        with self._turn(fcntl.LOCK_EX if _alone(item) else fcntl.LOCK_SH):
            return (yield)

    @contextmanager
    def _turn(self, kind):
        fcntl.flock(self._gate, fcntl.LOCK_EX)  # who waits for the room lets nobody else go first
        fcntl.flock(self._room, kind)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)


def _alone(item):
    return item.get_closest_marker("alone") is not None

"""Ranks that are threads of one process: one thread a device, or a test without processes."""

import threading
from typing import Any

import numpy as np

from gradkit.errors import RankError


class _Board:
    """Memory in which the threads of a group exchange numbers."""

    def __init__(self, size: int, timeout: float):
        self.states: list[Any] = [None] * size
        self._meetings = [0] * size  # that each rank has come to
        self._barrier = threading.Barrier(size, timeout=min(timeout, threading.TIMEOUT_MAX))

    def meet(self, rank: int) -> None:
        """Wait for all ranks; if one does not come, an error on all of them names it."""
        self._meetings[rank] += 1
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            turn = self._meetings[rank]
            absent = [k for k, meetings in enumerate(self._meetings) if meetings < turn]
            absences = dict.fromkeys(absent, "did not come")
            names = " and ".join(f"rank {k}" for k in absent)
            raise RankError(f"timed out waiting for {names or 'another rank'}", absences) from None


class ThreadGroup:
    """One rank of a group of threads."""

    def __init__(self, rank: int, board: _Board):
        self.rank, self.size = rank, len(board.states)
        self._board, self.wire = board, self

    def allgather(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """Every rank's numbers, a row each."""
        board = self._board
        board.states[self.rank] = state
        board.meet(self.rank)
        rows = np.stack(board.states)
        board.meet(self.rank)  # from here on a rank may write its next numbers
        return rows

    def allreduce(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """The sum of every rank's numbers."""
        with np.errstate(invalid="ignore"):  # of infinity and NaN
            total: np.ndarray[Any, Any] = self.allgather(state).sum(axis=0)
        return total


def groups(size: int, timeout: float) -> list[ThreadGroup]:
    """The ranks of a new group."""
    board = _Board(size, timeout)
    return [ThreadGroup(rank, board) for rank in range(size)]

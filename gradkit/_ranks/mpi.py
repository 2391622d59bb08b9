"""Ranks of an MPI communicator, by mpi4py."""

from typing import Any

import numpy as np

_CALLED = ("Allgather", "Get_rank", "Get_size", "Is_inter")


class MpiGroup:
    """The ranks of an ``mpi4py.MPI.Intracomm``; its numbers travel in host memory."""

    def __init__(self, comm: Any):
        self._comm = self.wire = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def allgather(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """Every rank's numbers, a row each."""
        rows = np.empty((self.size, state.size))
        self._comm.Allgather(state, rows)
        return rows

    def allreduce(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """The sum of every rank's numbers."""
        total = np.empty_like(state)
        self._comm.Allreduce(state, total)  # MPI.SUM is its default
        return total


def ranks_of(comm: Any) -> MpiGroup:
    """The group of a communicator whose ranks gather their own numbers."""
    if not all(hasattr(comm, name) for name in _CALLED):
        kind = type(comm).__qualname__
        raise TypeError(f"comm is a {kind}; pass a communicator of mpi4py, such as MPI.COMM_WORLD")
    if not comm:
        raise ValueError("comm is the null communicator; this process is not in it")
    if comm.Is_inter():
        raise ValueError(
            "comm is an intercommunicator, on which each group gathers the other group's numbers; "
            "pass comm.Merge()"
        )
    return MpiGroup(comm)

"""Ranks of an NCCL communicator, by CuPy or by nccl4py."""

from typing import Any

from gradkit._backend import Array
from gradkit._ranks.device import DeviceRanks

_NCCL_FLOAT64 = 8  # in nccl.h


class CupyxRanks(DeviceRanks):
    """The ranks of a ``cupyx.distributed.NCCLBackend``."""

    def __init__(self, backend: Any):
        # All that it makes public of its communicator is its rank.
        if not _is_a(backend, "cupyx", "NCCLBackend"):
            raise TypeError(f"backend is a {type(backend).__qualname__}, not an NCCLBackend of "
                            "cupyx.distributed")  # fmt: skip
        communicator = backend._comm
        super().__init__(backend.rank, communicator.size(), communicator.device_id())
        self._distributed = backend

    def _gather(self, state: Array, rows: Array) -> None:
        self._distributed.all_gather(state, rows, state.size)


class CupyRanks(DeviceRanks):
    """The ranks of a ``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, communicator: Any):
        super().__init__(communicator.rank_id(), communicator.size(), communicator.device_id())
        self._communicator = communicator

    def _gather(self, state: Array, rows: Array) -> None:
        source, target = map(self._backend.address, (state, rows))
        stream = self._backend.device.cuda_stream()
        self._communicator.allGather(source, target, state.size, _NCCL_FLOAT64, stream)


class Nccl4pyRanks(DeviceRanks):
    """The ranks of an ``nccl.core.Communicator``."""

    def __init__(self, communicator: Any):
        super().__init__(communicator.rank, communicator.nranks, communicator.device.device_id)
        self._communicator = communicator

    def _gather(self, state: Array, rows: Array) -> None:
        # Without a stream it would take the default one.
        stream = self._backend.device.cuda_stream()
        self._communicator.allgather(state, rows, stream=stream)


def ranks_of(communicator: Any) -> DeviceRanks:
    """The group that takes a communicator of this type."""
    if _is_a(communicator, "cupy_backends", "NcclCommunicator"):
        return CupyRanks(communicator)
    if _is_a(communicator, "nccl", "Communicator"):
        return Nccl4pyRanks(communicator)
    raise TypeError(
        f"communicator is a {type(communicator).__qualname__}; pass a "
        "cupy.cuda.nccl.NcclCommunicator or an nccl.core.Communicator"
    )


def _is_a(value: Any, package: str, name: str) -> bool:
    """True if a value is of a class of that name, from a package that need not be there."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__)
    return (package, name) in kinds

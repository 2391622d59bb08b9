"""Ranks of a ``torch.distributed`` process group."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from gradkit._ranks.device import DeviceRanks
from gradkit._ranks.ownership import Axes, chunk_of, whole_of


def ranks_of(process_group: Any, device: Any) -> "TorchGroup | TorchDeviceRanks":
    """The group on the host if the process group has a backend for it, else on its GPUs."""
    torch = sys.modules["torch"]
    if device is None:
        _rank_in(process_group)
        config = torch.distributed.get_backend_config(process_group)  # "cpu:gloo,cuda:nccl"
        backends = dict(pair.split(":") for pair in config.split(","))
        if "cpu" in backends and backends.get("cuda") == "nccl":
            return TorchBothRanks(process_group)
        device = "cpu" if "cpu" in backends else "cuda"
    where = torch.device(device)
    if where.type == "cpu":
        return TorchGroup(process_group)
    if where.type != "cuda":
        raise ValueError(f"device must be the CPU or a CUDA device, not {where}")
    return TorchDeviceRanks(process_group, where)


def _rank_in(process_group: Any) -> int:
    rank: int = sys.modules["torch"].distributed.get_rank(process_group)
    if rank < 0:
        raise ValueError("this process is not in process_group")
    return rank


class TorchGroup:
    """The ranks of a process group; its numbers travel in host memory, by gloo for example."""

    def __init__(self, process_group: Any):
        distributed = sys.modules["torch"].distributed
        self._group = process_group
        self.wire = distributed.group.WORLD if process_group is None else process_group
        self.rank = _rank_in(process_group)
        self.size = sys.modules["torch"].distributed.get_world_size(process_group)

    def allgather(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """Every rank's numbers, a row each."""
        torch = sys.modules["torch"]
        rows = np.empty((self.size, state.size))
        targets = list(torch.from_numpy(rows))
        torch.distributed.all_gather(targets, torch.from_numpy(state), group=self._group)
        return rows

    def allreduce(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """The sum of every rank's numbers."""
        torch = sys.modules["torch"]
        total = state.copy()
        torch.distributed.all_reduce(torch.from_numpy(total), group=self._group)
        return total


class TorchDeviceRanks(DeviceRanks):
    """The ranks of a process group with NCCL; its numbers are tensors on a GPU."""

    def __init__(self, process_group: Any, device: Any):
        on_host = TorchGroup(process_group)
        number = (
            sys.modules["torch"].cuda.current_device() if device.index is None else device.index
        )
        self._device = f"cuda:{number}"
        self._group = process_group
        super().__init__(on_host.rank, on_host.size, number)

    def allgather(self, state: Any, /) -> Any:
        """Every rank's numbers, a row each, once the current stream has reached this point."""
        torch = sys.modules["torch"]
        with self._stream_of(state):
            if type(state) is np.ndarray:
                numbers = torch.from_numpy(state).to(self._device)
            else:
                numbers = torch.from_dlpack(state)
            count = self.size * numbers.numel()
            rows = torch.empty(count, dtype=torch.float64, device=self._device)
            torch.distributed.all_gather_into_tensor(rows, numbers, group=self._group)
        return rows.view(self.size, -1)

    def allreduce(self, state: Any, /) -> Any:
        """The sum of every rank's numbers, which are in host memory, on the GPU."""
        torch = sys.modules["torch"]
        total = torch.from_numpy(state).to(self._device)
        torch.distributed.all_reduce(total, group=self._group)
        return total

    def _stream_of(self, state: Any) -> AbstractContextManager[Any]:
        """A context in which PyTorch queues work on the stream that an array was made on."""
        cuda = sys.modules["torch"].cuda
        if type(state) is np.ndarray:
            return nullcontext()
        stream = self._backend.device.cuda_stream()
        if cuda.current_stream(self._device).cuda_stream == stream:
            return nullcontext()
        return cuda.stream(cuda.ExternalStream(stream, self._device))

    def _zeros(self, size: int) -> Any:
        torch = sys.modules["torch"]
        return torch.zeros(size, dtype=torch.float64, device=self._device)


class TorchBothRanks(TorchGroup):
    """The ranks of a process group with a backend for the host, and NCCL.

    Hosts agree on a call in host memory. If the gradients of all lie on GPUs, the sums of their
    norm then travel between these.
    """

    def __init__(self, process_group: Any):
        super().__init__(process_group)
        self._between: dict[int, TorchDeviceRanks] = {}

    def between_devices(self, number: int) -> TorchDeviceRanks:
        """The same ranks, of which this one is on the GPU of this number."""
        ranks = self._between.get(number)
        if ranks is None:
            device = sys.modules["torch"].device(f"cuda:{number}")
            ranks = self._between[number] = TorchDeviceRanks(self._group, device)
        return ranks

    def check(self) -> None:
        """Wait for the GPUs; raise an error if a rank failed on its own once all had agreed."""
        for ranks in self._between.values():
            ranks.check()


def shard_of(grad: Any, label: str) -> tuple[Any, int]:
    """The rank's own part of a DTensor, and on how many ranks of its mesh that lies.

    ``label``: its name in errors.
    """
    replicas = 1
    for length, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        if placement.is_partial():
            whole = ["Replicate()" if p.is_partial() else repr(p) for p in grad.placements]
            raise ValueError(
                f"{label} is a DTensor of partial sums, whose ranks' parts are yet to be added up; "
                f"take grad.redistribute(placements=[{', '.join(whole)}]) in its place"
            )
        if placement.is_replicate():
            replicas *= length
    return local_of(grad), replicas


def local_of(grad: Any) -> Any:
    """The rank's own part of a DTensor, or of its partial sums."""
    local = grad.to_local()
    wait = getattr(local, "wait", None)  # of a collective that has not ended
    return wait() if wait else local


def added_up(grads: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add up gradients that are partial sums: new DTensors, which are copies.

    All of one dtype that a dimension of a mesh adds up take one all-reduce.
    """
    torch = sys.modules["torch"]
    totals = {key: local_of(grad) for key, grad in grads.items() if _partial_along(grad)}
    together: dict[Any, list[Any]] = {}
    for key in totals:
        for dim in _partial_along(grads[key]):
            mesh = grads[key].device_mesh
            together.setdefault((mesh, dim, grads[key].dtype), []).append(key)
    for (mesh, dim, _), keys in together.items():
        total = torch.cat([totals[key].reshape(-1) for key in keys])
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
        each = total.split([totals[key].numel() for key in keys])
        for key, part in zip(keys, each, strict=True):
            count = mesh.size(dim) if grads[key].placements[dim].reduce_op == "avg" else 1
            totals[key] = (part / count if count > 1 else part).view(totals[key].shape)
    return {key: _replicated(grads[key], total) for key, total in totals.items()}


def _partial_along(grad: Any) -> list[int]:
    """The dimensions of its mesh that a gradient is yet to be added up along."""
    placements = getattr(grad, "placements", ())
    partial = {dim: p for dim, p in enumerate(placements) if p.is_partial()}
    are_plain = all(type(p).__name__ == "Partial" for p in partial.values())
    if not (are_plain and all(p.reduce_op in ("sum", "avg") for p in partial.values())):
        return []  # which `shard_of` refuses
    return [*partial]


def _replicated(grad: Any, total: Any) -> Any:
    """The DTensor whose partial sums have this total."""
    dtensor = sys.modules["torch.distributed.tensor"]
    placements = [dtensor.Replicate() if p.is_partial() else p for p in grad.placements]
    shape, stride = grad.shape, grad.stride()
    return dtensor.DTensor.from_local(
        total, grad.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def indices_in(tensor: Any, local: Any) -> tuple[list[Axes | None], tuple[int, ...]]:
    """The indices that the rank's own part of a DTensor has, and all ranks of its mesh.

    ``None``: the rank is not in the mesh.
    """
    axes, members = _indices(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
    if axes is None:
        return [None], members
    lengths = [sum(stop - start for start, stop in runs) for runs in axes]
    if lengths != list(local.shape):
        raise ValueError(
            f"is a DTensor whose local shape is {tuple(local.shape)}; its placements say {lengths}"
        )
    return [axes], members


@lru_cache(maxsize=4096)
def _indices(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]
) -> tuple[Axes | None, tuple[int, ...]]:
    axes = list(whole_of(shape))
    members = tuple(mesh.mesh.flatten().tolist())
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, members
    for pieces, index, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ValueError(f"is a DTensor with the placement {placement!r}, which is unknown")
        splits = getattr(placement, "split_factor", 1)
        axes[placement.dim] = chunk_of(axes[placement.dim], pieces, index, splits)
    return tuple(axes), members

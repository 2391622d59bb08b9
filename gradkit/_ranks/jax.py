"""The processes of a JAX program that ran on several hosts, or several times on one."""

import sys
from importlib import import_module
from typing import Any

import numpy as np

from gradkit._ranks.ownership import Axes


class JaxGroup:
    """The processes that ``jax.distributed.initialize`` has joined."""

    def __init__(self) -> None:
        jax = sys.modules["jax"]
        self.wire = jax
        self.rank, self.size = jax.process_index(), jax.process_count()

    def allgather(self, state: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
        """Every process's numbers, a row each: as bits, because JAX would make them float32."""
        utils = import_module("jax.experimental.multihost_utils")
        bits = utils.process_allgather(state.view(np.uint32))
        return np.ascontiguousarray(bits).reshape(self.size, -1).view(np.float64)


def shards_of(array: Any) -> list[tuple[Any, int]]:
    """The process' own parts of an array, each with the number of processes that hold it."""
    holders: dict[str, set[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        holders.setdefault(str(index), set()).add(device.process_index)
    return [(data, len(holders[index])) for index, data in _own_shards(array).items()]


def indices_of(array: Any) -> tuple[list[Any], list[Axes]]:
    """The process' own parts of an array, and the indices of each along each axis."""
    shards = {str(shard.index): shard.index for shard in array.addressable_shards}
    indices: list[Axes] = [
        tuple(((start, stop),) for start, stop, _ in map(slice.indices, index, array.shape))
        for index in shards.values()
    ]
    return [*_own_shards(array).values()], indices


def _own_shards(array: Any) -> dict[str, Any]:
    return {str(shard.index): shard.data for shard in array.addressable_shards}

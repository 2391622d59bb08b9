"""The processes of a JAX program that ran on several hosts, or several times on one."""

import sys
from importlib import import_module
from typing import Any

import numpy as np


class JaxGroup:
    """The processes that ``jax.distributed.initialize`` has joined."""

    def __init__(self) -> None:
        jax = sys.modules["jax"]
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
    own = {str(shard.index): shard.data for shard in array.addressable_shards}
    return [(data, len(holders[index])) for index, data in own.items()]

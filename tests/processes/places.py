"""Groups of ranks and arrays of each library."""

import os
import sys
from importlib import import_module

import numpy as np

from gradkit import distributed

MIXED = 3  # with so many ranks of MPI, some hold another framework's arrays
FRAMEWORKS = {1: "torch", 2: "jax"}


class Place:
    """One rank among all, with the group of all ranks and that of every second one.

    ``add_up(array)`` adds up a NumPy array over all ranks, in place.
    """

    adapter = ""  # the file under test, and its class
    kind = ""

    def __init__(self, rank, size, directory):
        self.rank, self.size, self.directory = rank, size, directory
        self.half_members = list(range(rank % 2, size, 2))
        self.start()
        self.group, *halves = [self.made(*of) for of in self.communicators()]
        self.half = halves[0] if halves else None

    def array(self, values):
        """Gradients as this library's users hold them."""
        return np.array(values, np.float64)

    def close(self):
        """Leave, together with all others."""


class Mpi(Place):
    """Ranks of mpiexec. The halves count backwards."""

    adapter, kind = "gradkit/_ranks/mpi.py", "MpiGroup"
    made = staticmethod(distributed.from_mpi)

    def start(self):
        from mpi4py import MPI

        self.names = {"MPI": MPI, "comm": MPI.COMM_WORLD}
        self.half_comm = MPI.COMM_WORLD.Split(self.rank % 2, -self.rank)
        self.half_members.reverse()
        if self.size == MIXED and self.rank in FRAMEWORKS:
            import_module(FRAMEWORKS[self.rank])  # now, because others would wait for it later

    def communicators(self):
        return [(self.names["comm"],), (self.half_comm,)]

    def add_up(self, array):
        self.names["comm"].Allreduce(self.names["MPI"].IN_PLACE, array)


class Torch(Place):
    """Ranks of a gloo process group."""

    adapter, kind = "gradkit/_ranks/torch.py", "TorchGroup"
    made = staticmethod(distributed.from_torch)

    def start(self):
        import torch
        import torch.distributed as dist

        # DTensors need both, and take seconds; a check that lets others wait counts as stuck.
        import_module("torch._dynamo")
        import_module("torch.distributed.tensor")
        torch.set_num_threads(1)
        store = (self.directory / "store").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
        halves = [dist.new_group(list(range(k, self.size, 2))) for k in range(min(2, self.size))]
        self.half_group, self.other_half = halves[self.rank % 2], halves[self.rank % 2 - 1]
        self.names = {"torch": torch, "dist": dist}

    def communicators(self):
        return [(None,), (self.half_group,)]

    def array(self, values):
        return self.names["torch"].tensor(values, dtype=self.names["torch"].float64)

    def add_up(self, array):
        self.names["dist"].all_reduce(self.names["torch"].from_numpy(array))

    def close(self):
        os._exit(0)  # gloo's threads now and then abort a process whose Python takes itself down


class Jax(Place):
    """Processes of a JAX program, without float64."""

    adapter, kind = "gradkit/_ranks/jax.py", "JaxGroup"
    made = staticmethod(distributed.from_jax)

    def start(self):
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        coordinator = f"localhost:{os.environ['GRADKIT_PORT']}"
        jax.distributed.initialize(coordinator, self.size, self.rank)

    def communicators(self):
        return [()]

    def add_up(self, array):
        array[...] = self.group.allgather(array.reshape(-1)).sum(axis=0).reshape(array.shape)

    def close(self):
        sys.modules["jax"].distributed.shutdown()


PLACES = {"mpi": Mpi, "torch": Torch, "jax": Jax}

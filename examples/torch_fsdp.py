"""Clip the sharded gradients of PyTorch's FSDP by their norm over all ranks.

    torchrun --nproc-per-node 4 examples/torch_fsdp.py

``fully_shard`` leaves each rank a part of every gradient, a DTensor. ``shards_of`` gives these
parts, without a copy, and ``group=`` makes the norm that of all of them. The same network is then
trained in one process; the norms must agree within ``BOUND``.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradkit

BOUND = 1e-9  # of a norm, in float64: ranks add up gradients in another order
MAX_NORM = 0.5


def network() -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(1, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1)
    ).double()


def train(model: torch.nn.Module, rows: slice, group: gradkit.distributed.Group | None,
          steps: int) -> list[float]:  # fmt: skip
    """Fit a sine; the norm of the gradients of each step, before clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x = torch.linspace(-3, 3, 256, dtype=torch.float64)[rows, None]
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), torch.sin(x)).backward()
        own = gradkit.distributed.shards_of if group else gradkit.named_grads_of
        grads = own(model.named_parameters())

        # Before: norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norm = gradkit.clip_grad_norm(grads, MAX_NORM, group=group)

        optimizer.step()
        norms.append(float(norm))
    return norms


def main(steps: int = 60) -> int:
    """Train sharded and alone; return 1 if the norms differ."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)))
    group = gradkit.distributed.from_torch()
    norms = train(sharded, slice(rank, None, size), group, steps)
    alone = train(network(), slice(None), None, steps)
    off = max(abs(a - b) / b for a, b in zip(norms, alone, strict=True))
    if rank == 0:
        clipped = sum(norm > MAX_NORM for norm in norms)
        print(f"{size} ranks: {steps} steps, clipped in {clipped}; norms {norms[0]:.3f} -> "
              f"{norms[-1]:.3f}, off one process' by {off:.1e} (bound {BOUND:.0e})")  # fmt: skip
    dist.destroy_process_group()
    return int(not off <= BOUND)


if __name__ == "__main__":
    sys.exit(main())

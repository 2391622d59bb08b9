"""Train the digits' network of ``train_digits.py`` on several ranks of MPI.

    mpiexec -n 4 python examples/mpi_training.py [--epochs 60]

- Data parallelism: each rank takes its rows of every micro-batch, and batch norm normalises those
  of all ranks together: ``group=``.
- Sharded training (ZeRO): a rank keeps the summed gradient, the momentum and the update of its own
  part of the parameters only. The norm that decides the clipping is that of all parts: ``group=``.

Rank 0 then trains alone in the same way as the demo. Both runs do the same arithmetic but for the
order of additions, and their parameters must agree within ``BOUND``.
"""

import argparse
import math
import sys

import numpy as np
from mpi4py import MPI
from train_digits import (
    BATCH,
    MAX_NORM,
    MICRO_BATCH,
    MOMENTUM,
    Array,
    Arrays,
    Digits,
    Network,
    Trainer,
    accuracy,
    batches,
)

import gradkit

SEED = 0
LEARNING_RATE = 0.2  # small, so that roundings do not grow from step to step
BOUND = 1e-12  # of the largest parameter; 60 epochs on 3 and 4 ranks came to 1.1e-15


class ShardedTrainer:
    """SGD with momentum, where each rank owns a part of all parameters."""

    def __init__(self, network: Network, comm: MPI.Comm):
        self.network, self.comm = network, comm
        self.group = network.group = gradkit.distributed.from_mpi(comm)
        self.flat, network.params = flattened(network.params)
        self.flat_grads, self.grads = flattened(network.params)
        cuts = np.linspace(0, self.flat.size, comm.size + 1).astype(int)
        self.counts = np.diff(cuts)
        self.mine = self.flat[cuts[comm.rank] : cuts[comm.rank + 1]]
        self.grad, self.velocity = np.zeros_like(self.mine), np.zeros_like(self.mine)

    def step(self, x: Array, targets: Array, learning_rate: float) -> tuple[float, float]:
        """One update from one batch, of which this rank reads its part: loss and norm."""
        loss = 0.0
        self.flat_grads[...] = 0
        for start in range(0, len(x), MICRO_BATCH):
            part = slice(start + self.comm.rank, start + MICRO_BATCH, self.comm.size)
            share, grads = self.network.loss_and_grads(x[part], targets[part], len(x))
            loss += float(share)
            for name, grad in grads.items():
                gradkit.accumulate_grad(self.grads[name], grad)
        self.comm.Reduce_scatter(self.flat_grads, self.grad, self.counts)

        norm = gradkit.clip_grad_norm(self.grad, max_norm=MAX_NORM, group=self.group)

        gradkit.sgd_update(self.mine, self.grad, self.velocity, lr=learning_rate, momentum=MOMENTUM)
        self.comm.Allgatherv(MPI.IN_PLACE, (self.flat, self.counts))
        return self.comm.allreduce(loss), float(norm)


def flattened(arrays: Arrays) -> tuple[Array, Arrays]:
    """All arrays in one vector, and views of it with the arrays' names and shapes."""
    flat = np.concatenate([array.reshape(-1) for array in arrays.values()])
    ends = np.cumsum([array.size for array in arrays.values()])
    pieces = np.split(flat, ends[:-1])
    shapes = [array.shape for array in arrays.values()]
    views = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return flat, dict(zip(arrays, views, strict=True))


def run(trainer: Trainer | ShardedTrainer, digits: Digits, epochs: int) -> list[float]:
    """Train; the norm of each step. All ranks draw the same batches."""
    rng, norms = np.random.default_rng(SEED), []
    per_epoch = len(digits.train_x) // BATCH
    for epoch in range(epochs):
        for number, (x, targets) in enumerate(batches(np, digits, rng)):
            progress = (epoch + number / per_epoch) / epochs
            rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))
            norms.append(float(trainer.step(x, targets, rate)[1]))
    return norms


def network_of(digits: Digits) -> Network:
    """The same network in float64 on every rank."""
    return Network.initialised(np, digits.train_x.shape[1], SEED, "float64")


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest difference of a parameter, relative to the largest parameter."""
    largest = max(float(abs(value).max()) for value in theirs.values())
    return max(float(abs(ours[name] - theirs[name]).max()) for name in theirs) / largest


def main() -> int:
    """Train on all ranks, then on one; return 1 if they differ or have not learned."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits over MPI.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--min-accuracy", type=float, default=0.95)
    args, comm = parser.parse_args(), MPI.COMM_WORLD

    digits = Digits.load(np, SEED)
    sharded = network_of(digits)
    norms = run(ShardedTrainer(sharded, comm), digits, args.epochs)

    failed = False
    if comm.rank == 0:
        alone = network_of(digits)
        run(Trainer(alone), digits, args.epochs)
        off, reached = difference(sharded.params, alone.params), accuracy(sharded, digits)
        clipped = sum(norm > MAX_NORM for norm in norms)
        print(f"{comm.size} ranks: {len(norms)} steps, clipped in {clipped}")
        print(f"test accuracy {reached:.2%}; with one process {accuracy(alone, digits):.2%}")
        print(f"parameters differ from one process' by {off:.1e} (bound {BOUND:.0e})")
        failed = not off <= BOUND or reached < args.min_accuracy
    return int(comm.bcast(failed))


if __name__ == "__main__":
    sys.exit(main())

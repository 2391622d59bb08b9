"""Each rank's own gradient norm beside that of all ranks, from mpi_training.py's network.

mpiexec -n 4 python ranks.py prints one JSON list of lists: [own norm on each rank, norm of all]
for each step, as rank 0 knows it.
"""

import json

import numpy as np
from mpi4py import MPI
from mpi_training import SEED, Digits, ShardedTrainer, batches, network_of

import gradkit

comm, rng = MPI.COMM_WORLD, np.random.default_rng(SEED)
digits = Digits.load(np, SEED)
trainer = ShardedTrainer(network_of(digits), comm)
norms = []
for _ in range(4):
    for x, targets in batches(np, digits, rng):
        _, norm = trainer.step(x, targets, learning_rate=0.1)
        own = comm.gather(float(gradkit.grad_norm(trainer.grad)))  # after clipping
        if own:
            norms.append([*own, norm])
if norms:
    print(json.dumps(norms))

r"""
One norm over four MPI ranks
============================

Four ranks train one model. Each rank processes its rows of every batch, and keeps the gradient and
the update of a quarter of the parameters (ZeRO). All ranks clip by the norm of all quarters:
``gradkit.clip_grad_norm(own, max_norm, group=group)``. The ranks exchange six numbers each.
``examples/mpi_training.py`` does the same for a network with batch norm.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

RANKS = """
import json

import numpy as np
from mpi4py import MPI

import gradkit

comm = MPI.COMM_WORLD
group = gradkit.distributed.from_mpi(comm)
rng = np.random.default_rng(0)  # the same on all ranks
x = rng.normal(size=(2048, 64)) * np.linspace(0.2, 2, 64)
y = x @ rng.normal(size=(64, 8)) + rng.normal(size=(2048, 8))


def gradient(weights, rows):
    return 2 * x[rows].T @ (x[rows] @ weights - y[rows]) / 128


weights = np.zeros((64, 8))
alone = weights.copy()  # the same by each rank for itself
cuts = np.linspace(0, weights.size, comm.size + 1).astype(int)
own = weights.reshape(-1)[cuts[comm.rank] : cuts[comm.rank + 1]]
grad, history = np.empty_like(own), []
for step in range(40):
    batch = rng.integers(len(x), size=128)
    share = gradient(weights, batch[comm.rank :: comm.size])
    comm.Reduce_scatter(share, grad, np.diff(cuts))
    norm = gradkit.clip_grad_norm(grad, max_norm=30.0, group=group)
    own -= 0.02 * grad
    comm.Allgatherv(MPI.IN_PLACE, (weights, np.diff(cuts)))

    whole = gradient(alone, batch)
    gradkit.clip_grad_norm(whole, max_norm=30.0)
    alone -= 0.02 * whole
    history.append(comm.gather(float(gradkit.grad_norm(grad))) or [])
    history[-1].append(float(norm))
if comm.rank == 0:
    off = float(abs(weights - alone).max())
    print(json.dumps({"norms": history, "off": off}))
"""


def mpiexec(ranks, script):
    """Run a script on ranks of this machine; what it prints."""
    command = [Path(sys.executable).parent / "mpiexec", "-n", str(ranks), sys.executable, "-c"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # the ranks are as many as the cores, or more
    done = subprocess.run([*command, script], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


# %%
# A rank's own norm after clipping says little about the norm over all ranks, which never exceeds
# the limit.

found = json.loads(mpiexec(4, RANKS))
norms = np.array(found["norms"])
own, before = norms[:, :-1], norms[:, -1]

figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
axes.semilogy(own, color="C2", linewidth=0.9, label=["each rank's own part, clipped", "", "", ""])
axes.semilogy(before, color="C1", linewidth=2, label="all parts, before clipping")
after = np.sqrt((own**2).sum(axis=1))
axes.semilogy(after, color="C0", linewidth=2, label="all parts, clipped")
axes.set_xlabel("training step")
axes.set_ylabel("L2 norm of gradients")
axes.legend(frameon=False)
axes.set_title("Gradient norms on four ranks of MPI")
assert after.max() < 30 * (1 + 1e-12)

# %%
# One process with the same batches reaches the same parameters, up to the order of additions.

print(f"parameters differ by at most {found['off']:.1e}")
assert found["off"] < 1e-12

r"""
One norm over four MPI ranks
============================

``examples/mpi_training.py`` trains the digits' network on several ranks. Each keeps the gradient,
the momentum and the update of its own part of the parameters (ZeRO), and all clip by the norm of
all parts: ``gradkit.clip_grad_norm(own, 0.5, group=gradkit.distributed.from_mpi(comm))``. Six
numbers a rank travel.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import train_digits
from digits_plot import BLUE, GREY, ORANGE, dress, log_scale


def mpiexec(ranks, script, *arguments):
    """Run a script on ranks of this machine; what it prints."""
    command = [Path(sys.executable).parent / "mpiexec", "-n", str(ranks), sys.executable, script]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # the ranks are as many as the cores, or more
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


# %%
# What a rank knows, and what all know
# ------------------------------------
#
# Four ranks, each with a quarter of the parameters. A rank's own norm after clipping says little
# about that of all; together they never exceed the limit. :download:`ranks.py <ranks.py>` is the
# script.

norms = np.array(json.loads(mpiexec(4, "ranks.py")))
own, before = norms[:, :-1], norms[:, -1]

figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
axes.plot(own, color=GREY, linewidth=0.9, label=["each rank's own part, clipped", "", "", ""])
axes.plot(before, color=ORANGE, linewidth=2, label="all parts, before clipping")
after = np.sqrt((own**2).sum(axis=1))
axes.plot(after, color=BLUE, linewidth=2, label="all parts, clipped")
axes.set_xlabel("training step")
axes.set_ylabel("L2 norm of gradients")
log_scale(axes, [*before, *own.ravel()])
axes.legend(frameon=False)
dress(axes, "Gradient norms on four ranks of MPI")
assert after.max() < 0.5 * (1 + 1e-12)

# %%
# The same numbers as one process
# -------------------------------
#
# The example ends by training alone in the same way, and compares every parameter.

examples = Path(train_digits.__file__).parent
print(mpiexec(4, examples / "mpi_training.py", "--epochs", "3", "--min-accuracy", "0.8"))

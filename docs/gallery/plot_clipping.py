r"""
Digits with and without clipping
================================

The network of ``examples/train_digits.py`` reads handwritten digits: three hidden layers, each with
another norm, and every gradient by gradkit. Its gradients are clipped by
:func:`gradkit.clip_grad_norm` to a norm of 0.5, or not at all. All runs start from the same weights
and see the same batches.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import train_digits
from digits_plot import BLUE, GREY, ORANGE, dress
from train_digits import MAX_NORM, Digits, Network, train

EPOCHS = 5
RATES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
digits = Digits.load(np, seed=0)


def run(rate, max_norm):
    """Train at a learning rate."""
    train_digits.LEARNING_RATE = rate
    network = Network.initialised(np, pixels=64, seed=0)
    with np.errstate(over="ignore", invalid="ignore"):  # without clipping, some runs diverge
        return train(network, digits, EPOCHS, seed=0, max_norm=max_norm)


with_clipping = {rate: run(rate, MAX_NORM) for rate in RATES}
without = {rate: run(rate, math.inf) for rate in RATES}

# %%
# A learning rate that is too high
# --------------------------------
#
# At low rates both learn alike. Clipping is for the other ones: it makes a step's length at most
# ``rate * max_norm``, so a few steep batches cannot throw the weights away.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for runs, colour, name in ((without, ORANGE, "without clipping"), (with_clipping, BLUE, "clipped")):
    reached = [100 * runs[rate].accuracy[-1] for rate in RATES]
    axes.semilogx(RATES, reached, "o-", color=colour, label=name)
axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
axes.minorticks_off()
axes.set_xlabel("learning rate at the start")
axes.set_ylabel("test digits read correctly, %")
axes.legend(frameon=False, loc="lower left")
dress(axes, f"Test accuracy after {EPOCHS} epochs")

# %%
# One of these rates, step by step
# --------------------------------

rate = 3.2
figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
for runs, colour, name in ((without, ORANGE, "without clipping"), (with_clipping, BLUE, "clipped")):
    upper.plot(runs[rate].loss, color=colour, label=name)
    lower.plot(runs[rate].norm_before, color=colour, label=name)
lower.axhline(MAX_NORM, color=GREY, linestyle="--", label=f"max_norm = {MAX_NORM:g}")
upper.set_ylabel("cross-entropy (nats per digit)")
lower.set_ylabel("L2 norm of all gradients")
lower.set_xlabel("training step")
for axes in (upper, lower):
    axes.set_yscale("log")
    axes.legend(frameon=False, loc="upper right")
dress(upper, f"Training loss at a learning rate of {rate:g}")
dress(lower, "Norm of all gradients, before clipping")

# %%
# The rest is ``python examples/train_digits.py``, or ``make demo``, which shows 40 epochs at a rate
# where clipping changes little.

assert with_clipping[rate].accuracy[-1] > 0.9 > without[rate].accuracy[-1]

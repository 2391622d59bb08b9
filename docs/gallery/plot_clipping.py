r"""
Digits with and without clipping
================================

A network on plain arrays classifies handwritten digits. It has one hidden layer with a layer norm,
whose gradient gradkit computes. Gradients are clipped to a norm of 0.5 by
:func:`gradkit.clip_grad_norm`, or not at all. All runs start from the same weights and use the same
batches.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import gradkit

BATCH, EPOCHS, MOMENTUM, MAX_NORM = 128, 5, 0.9, 0.5
RATES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
data, labels = (pixels[order] / 8 - 1).astype(np.float32), labels[order]  # 0..16 to -1..1
SPLIT = len(data) * 4 // 5


def initialised(rng):
    """Random weights."""
    return {
        "w1": rng.normal(0, math.sqrt(2 / 64), (64, 64)).astype(np.float32),
        "scale": np.ones(64, np.float32),
        "bias": np.zeros(64, np.float32),
        "w2": rng.normal(0, math.sqrt(2 / 64), (64, 10)).astype(np.float32),
    }


def forward(p, x):
    """The logits, and what the backward pass needs."""
    h = x @ p["w1"]
    n, mean, inv_std = gradkit.layer_norm(h, p["scale"], p["bias"])
    a = np.maximum(n, 0)
    return a @ p["w2"], (h, mean, inv_std, a)


def loss_and_grads(p, x, labels):
    """The mean cross-entropy of a batch and its gradients."""
    logits, (h, mean, inv_std, a) = forward(p, x)
    log_p = logits - logits.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    targets = np.eye(10, dtype=np.float32)[labels]
    d_logits = (np.exp(log_p) - targets) / len(x)
    d_n = (d_logits @ p["w2"].T) * (a > 0)
    d_h, d_scale, d_bias = gradkit.layer_norm_grad(d_n, h, p["scale"], mean, inv_std)
    grads = {"w1": x.T @ d_h, "scale": d_scale, "bias": d_bias, "w2": a.T @ d_logits}
    return -(targets * log_p).sum() / len(x), grads


def train(rate, max_norm):
    """Train by SGD with momentum: the loss and the norm of each step, and the test accuracy."""
    rng = np.random.default_rng(0)
    params = initialised(rng)
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    steps, losses, norms = EPOCHS * SPLIT // BATCH, [], []
    for step in range(steps):
        rows = rng.integers(SPLIT, size=BATCH)
        noise = rng.standard_normal((BATCH, 64), dtype=np.float32)
        loss, grads = loss_and_grads(params, data[rows] + 0.4 * noise, labels[rows])
        norms.append(gradkit.clip_grad_norm(grads, max_norm))
        losses.append(loss)
        for name, value in params.items():
            velocity[name] = MOMENTUM * velocity[name] + grads[name]
            value -= rate * 0.5 * (1 + math.cos(math.pi * step / steps)) * velocity[name]
    read = forward(params, data[SPLIT:])[0].argmax(axis=1)
    return losses, norms, (read == labels[SPLIT:]).mean()


with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # some runs diverge
    without = {rate: train(rate, math.inf) for rate in RATES}
    clipped = {rate: train(rate, MAX_NORM) for rate in RATES}

# %%
# A learning rate that is too high
# --------------------------------
#
# At low rates, both runs learn equally well. Clipping helps at high rates: the length of a step is
# at most ``rate * max_norm``, so a few steep batches cannot ruin the weights.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for runs, colour, name in ((without, "C1", "without clipping"), (clipped, "C0", "clipped")):
    reached = [100 * runs[rate][2] for rate in RATES]
    axes.semilogx(RATES, reached, "o-", color=colour, label=name)
axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
axes.minorticks_off()
axes.set_xlabel("learning rate at the start")
axes.set_ylabel("test digits read correctly, %")
axes.legend(frameon=False, loc="lower left")
axes.set_title(f"Test accuracy after {EPOCHS} epochs")

# %%
# One of these rates, step by step
# --------------------------------

rate = 3.2
figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
for runs, colour, name in ((without, "C1", "without clipping"), (clipped, "C0", "clipped")):
    losses, norms, _ = runs[rate]
    upper.semilogy(losses, color=colour, label=name)
    lower.semilogy(norms, color=colour, label=name)
lower.axhline(MAX_NORM, color="C2", linestyle="--", label=f"max_norm = {MAX_NORM:g}")
upper.set_ylabel("cross-entropy (nats per digit)")
lower.set_ylabel("L2 norm of all gradients")
lower.set_xlabel("training step")
upper.legend(frameon=False, loc="upper right")
lower.legend(frameon=False, loc="upper right")
upper.set_title(f"Training loss at a learning rate of {rate:g}")
lower.set_title("Norm of all gradients, before clipping")

# %%
# ``python examples/train_digits.py``, or ``make demo``, trains a larger network, with three norms
# and micro-batches.

assert clipped[rate][2] > 0.9 > without[rate][2]

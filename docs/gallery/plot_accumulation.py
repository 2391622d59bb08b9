r"""
Accumulation against the full batch
===================================

A batch that does not fit in memory is split into micro-batches, whose gradients are added. The sum
is the gradient of the full batch only if every *token* has the same weight, and it is only as
accurate as the buffer's dtype.
"""

import matplotlib.pyplot as plt
import numpy as np

import gradkit

rng = np.random.default_rng(0)


def gradient(x, y, weights):
    """Of half the squared error, summed over the rows (tokens) of x."""
    return x.T @ (x @ weights - y)


def relative(found, wanted):
    """The error of a gradient."""
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


# %%
# Micro-batches of unequal size
# -----------------------------
#
# 4,096 tokens are split into eight micro-batches. A mean of the micro-batches' means gives more
# weight to the tokens of small micro-batches. A sum that is divided once, by the number of all
# tokens, does not. ``scale=1 / tokens`` does this without another pass over memory, since
# :func:`gradkit.clip_grad_norm` multiplies anyway.

x = rng.normal(size=(4096, 32))
y = x @ rng.normal(size=(32, 1)) + rng.normal(size=(4096, 1)) * (1 + 3 * rng.random((4096, 1)))
weights = np.zeros((32, 1))
full = gradient(x, y, weights) / len(x)

spreads, of_means, of_sums = np.linspace(0, 0.98, 15), [], []
for spread in spreads:
    shares = 1 + spread * np.linspace(-1, 1, 8)
    cuts = np.rint(np.cumsum(shares / shares.sum()) * len(x)).astype(int)[:-1]
    means, sums, tokens = np.zeros_like(weights), np.zeros_like(weights), 0
    for xs, ys in zip(np.split(x, cuts), np.split(y, cuts), strict=True):
        grad = gradient(xs, ys, weights)
        gradkit.accumulate_grad(means, grad, scale=1 / len(xs) / 8)
        gradkit.accumulate_grad(sums, grad)
        tokens += len(xs)
    gradkit.clip_grad_norm(sums, max_norm=np.inf, scale=1 / tokens)
    of_means.append(relative(means, full))
    of_sums.append(relative(sums, full))

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.semilogy(100 * spreads, of_means, color="C1", linewidth=2, label="mean of means")
axes.semilogy(100 * spreads, of_sums, color="C0", linewidth=2, label="sum / tokens, by scale=")
axes.set_xlabel("micro-batches are up to this much smaller and larger than the mean, %")
axes.set_ylabel("error against the full batch's gradient")
axes.legend(frameon=False, loc="center right")
axes.set_title("Eight micro-batches against one batch")
assert max(of_sums) < 1e-14

# %%
# Buffers of 16 bits
# ------------------
#
# A float16 or bfloat16 sum soon becomes too large for small gradients to change it.
# :func:`gradkit.accumulate_grad` adds 16-bit gradients to a float32 buffer without a separate
# conversion. In this example the float32 sums are exact, and are drawn at 1e-9.

grads = rng.uniform(0.5, 1.5, size=(1024, 256)).astype(np.float16)
buffers = {dtype: np.zeros(256, dtype) for dtype in (np.float16, np.float32)}
errors = {dtype: [] for dtype in buffers}
for count, grad in enumerate(grads, 1):
    exact = grads[:count].sum(axis=0, dtype=np.float64)
    for dtype, buffer in buffers.items():
        gradkit.accumulate_grad(buffer, grad)
        errors[dtype].append(max(relative(buffer.astype(np.float64), exact), 1e-9))

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.loglog(errors[np.float16], color="C1", linewidth=2, label="float16 buffer")
axes.loglog(errors[np.float32], color="C0", linewidth=2, label="float32 buffer")
axes.axhline(2**-11, color="C2", linestyle="--", label="one rounding to float16")
axes.set_xlabel("micro-batches")
axes.set_ylabel("error of the sum")
axes.legend(frameon=False, loc="center left")
axes.set_title("Sums of float16 gradients")

r"""
Which batch size pays
=====================

The gradient noise scale of McCandlish et al., "An Empirical Model of Large-Batch Training" (2018),
says about how many samples a batch may have before more of them pay less: the variance of one
sample's gradient, summed over its elements, divided by the squared norm of the true gradient.

Norms that a step computes anyway are enough. The squared norm of a mean over :math:`b` samples is
:math:`|G|^2 + \mathrm{tr}(\Sigma) / b` on average, so that two sizes of batches give both terms:
those of the micro-batches, which ``grad_norm_out=`` of :func:`gradkit.accumulate_grads` writes, and
that of their mean.
"""

import matplotlib.pyplot as plt
import numpy as np

import gradkit

rng = np.random.default_rng(0)
signal, deviation = np.full(100, 0.5), 1.0
exact = signal.size * deviation**2 / (signal @ signal)

# %%
# Two unbiased estimates
# ----------------------
#
# Single steps scatter widely, so each estimate is averaged over steps *before* they are divided. A
# step whose norms are not finite is left out.


def noise_and_signal(small, sizes, big):
    """Estimates from the norms of micro-batches of these sizes, and the norm of their mean."""
    total, size = sizes.sum(), sizes.mean()
    square = (sizes * small**2).sum() / total  # the mean of the micro-batches' squares
    return (square - big**2) / (1 / size - 1 / total), (total * big**2 - size * square) / (
        total - size
    )


def train(steps, decay):
    """The noise scale after each step, of four micro-batches of unequal sizes."""
    sizes = np.array([4, 8, 4, 16])
    small, big = np.zeros(len(sizes)), np.zeros(())
    buffer, means, found = [np.zeros(100)], np.zeros(2), []
    for step in range(steps):
        for i, size in enumerate(sizes):
            grad = [signal + deviation * rng.normal(size=100) / np.sqrt(size)]
            options = {"norm_out": big, "grad_norm_out": small[i, ...]}
            gradkit.accumulate_grads(
                buffer, grad, scale=size / sizes.sum(), overwrite=i == 0, **options
            )
        now = np.array(noise_and_signal(small, sizes, big))
        if np.isfinite(now).all():
            means += max(1 / (step + 1), 1 - decay) * (now - means)
        found.append(means[0] / means[1])
    return found


# %%
# The means converge
# ------------------
#
# ``big`` is the norm of the buffer after each micro-batch, and that of the whole batch after the
# last one. On a GPU the norms are arrays on the device: copy them to the host once a step, or
# compute with them where they are.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for decay, color in ((0.9, "C1"), (0.99, "C0")):
    axes.plot(train(300, decay), color=color, label=f"decay {decay}")
axes.axhline(exact, color="C2", linestyle="--", label="exact")
axes.set_xlabel("steps")
axes.set_ylabel("noise scale, samples")
axes.legend(frameon=False)
axes.set_title("The noise scale, from norms of micro-batches")
assert abs(np.mean(train(2000, 0.999)[1000:]) - exact) < 0.3

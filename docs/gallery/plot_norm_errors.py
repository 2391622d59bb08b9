r"""
Norms: the error of naive sums
==============================

The norm of all gradients is a sum of squares, and squaring doubles the exponent. In float32,
squares overflow above 1.8e19 and underflow below 2.6e-23; in float16, above 255 and below 1.7e-4.
A running float32 sum of many numbers also loses those parts of each number that are below the
sum's precision.

:func:`gradkit.grad_norm` returns float64 for every dtype, and scales blocks whose squares would
overflow or underflow. This page compares it with two common one-line formulas.
"""

import math

import matplotlib.pyplot as plt
import numpy as np

import gradkit

rng = np.random.default_rng(0)


def exact(grad):
    """The norm by Python's exact sum, of squares that neither overflow nor vanish."""
    largest = float(np.abs(grad).max())
    scaled = grad.astype(np.float64) / largest
    return largest * math.sqrt(math.fsum(scaled * scaled))


def error(norm, grad):
    """Relative; no digits right is 1. The least that the plot shows is 1e-17."""
    off = abs(float(norm) / exact(grad) - 1)
    return max(off, 1e-17) if off < 1 else 1.0


# %%
# Over magnitudes
# ---------------
#
# 10,000 float32 numbers of each magnitude that float32 has.

magnitudes = 10.0 ** np.arange(-36, 37)
NAIVE = {
    "np.sqrt((g * g).sum())": lambda g: np.sqrt((g * g).sum()),
    "np.linalg.norm(g)": np.linalg.norm,
}
unit = rng.normal(size=10_000)
errors = {name: [] for name in (*NAIVE, "gradkit.grad_norm(g)")}
with np.errstate(over="ignore", under="ignore"):
    for magnitude in magnitudes:
        grad = (unit * magnitude).astype(np.float32)
        for name, norm in NAIVE.items():
            errors[name].append(error(norm(grad), grad))
        errors["gradkit.grad_norm(g)"].append(error(gradkit.grad_norm(grad), grad))

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
STYLES = (("-", "C1"), ("--", "C2"), ("-", "C0"))
for (name, values), (line, colour) in zip(errors.items(), STYLES, strict=True):
    axes.loglog(magnitudes, values, line, color=colour, label=name, linewidth=2)
axes.set_xlabel("standard deviation of the gradient's elements")
axes.set_ylabel("relative error of the norm")
axes.legend(frameon=False, loc="upper center")
axes.set_title("Norm of 10,000 float32 numbers")

# %%
# Over lengths
# ------------
#
# Numbers near 1 are added one after the other, as by a simple loop or a GPU's atomic additions; in
# pairs, as by ``np.sum``; and by gradkit, in float64.

lengths = 4 ** np.arange(2, 13)
sequential, pairwise, ours = [], [], []
for length in lengths:
    grad = rng.uniform(0.5, 1.5, length).astype(np.float32)
    sequential.append(error(np.sqrt(np.cumsum(grad * grad)[-1]), grad))
    pairwise.append(error(np.sqrt((grad * grad).sum()), grad))
    ours.append(error(gradkit.grad_norm(grad), grad))

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.loglog(lengths, sequential, color="C1", linewidth=2, label="float32, one after the other")
axes.loglog(lengths, pairwise, color="C2", linewidth=2, label="float32, in pairs: np.sum")
axes.loglog(lengths, ours, color="C0", linewidth=2, label="gradkit.grad_norm")
axes.axhline(2**-48, color="black", linewidth=1, linestyle="--", label="gradkit's bound, 2^-48")
axes.set_xlabel("elements")
axes.set_ylabel("relative error of the norm")
axes.legend(frameon=False, loc="upper left")
axes.set_title("Norm of float32 numbers between 0.5 and 1.5")

# %%
# A wrong norm matters: if it is infinite, ``max_norm / norm`` is zero, and the step is lost; if it
# underflows to zero, nothing is clipped.

grad = np.full(4, 1e20, np.float32)
with np.errstate(over="ignore"):
    naive = grad * np.minimum(1, 1 / np.sqrt((grad * grad).sum()))
gradkit.clip_grad_norm(grad, max_norm=1.0)
print("naive: ", naive)
print("gradkit:", grad)
assert not naive.any()
assert (grad == 0.5).all()

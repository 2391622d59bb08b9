r"""
Clipping JAX's gradients
========================

JAX's arrays are immutable: :func:`gradkit.clip_by_global_norm` returns new gradients in the same
pytree, as ``optax.clip_by_global_norm`` does, and the norm. It runs between the jitted halves of a
step; inside of one, :func:`gradkit.jax.clip_by_global_norm` does the same.
``examples/jax_training_step.py`` has the network, the loss and the update.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
from digits_plot import BLUE, GREY, ORANGE, dress, log_scale
from jax_training_step import main

# %%
# A wave is fitted with three limits; the smallest one slows the fit down.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for max_norm, colour in ((0.03, ORANGE), (0.1, GREY), (0.3, BLUE)):
    losses = main(steps=150, max_norm=max_norm)
    axes.plot(losses, color=colour, linewidth=2, label=f"max_norm = {max_norm:g}")
log_scale(axes, losses)
axes.set_ylim(top=0.7)
axes.set_xlabel("step")
axes.set_ylabel("mean squared error")
axes.legend(frameon=False)
dress(axes, "A small network, clipped between the jitted halves of each step")

# %%
# A JAX array comes back as one, on its device.

import gradkit  # noqa: E402

clipped, norm = gradkit.clip_by_global_norm({"w": jnp.full(4, 2.0)}, max_norm=1.0)
print(type(norm).__module__, clipped, float(norm))
assert float(norm) == 4.0

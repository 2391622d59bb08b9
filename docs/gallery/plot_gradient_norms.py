r"""
Gradient norms by layer
=======================

One number says that a step was too large, not where. :func:`gradkit.per_tensor_norms` gives the
norm of every gradient in the structure of the gradients, and :func:`gradkit.grad_norm` with
``per_tensor=True`` one array, with the names from :func:`gradkit.names_of`: one copy from a GPU for
all of them.
"""

import matplotlib.pyplot as plt
import numpy as np
from digits_plot import dress
from train_digits import Digits, Network, Trainer, batches

import gradkit

digits = Digits.load(np, seed=0)
trainer = Trainer(Network.initialised(np, pixels=64, seed=0))
rng = np.random.default_rng(0)
history = []
for _ in range(8):
    for x, targets in batches(np, digits, rng):
        trainer.step(x, targets, learning_rate=0.1)
        history.append(gradkit.grad_norm(trainer.grads, per_tensor=True))
names, norms = gradkit.names_of(trainer.grads), np.array(history).T

# %%
# After clipping, all of them together have a norm of at most 0.5.

figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
picture = axes.pcolormesh(np.log10(norms), cmap="viridis")
axes.set_yticks(np.arange(len(names)) + 0.5, names)
axes.invert_yaxis()
axes.set_xlabel("training step")
figure.colorbar(picture, label="log10 of the L2 norm")
dress(axes, "Gradient norms by parameter")
axes.grid(visible=False)
assert np.sqrt((norms**2).sum(axis=0)).max() < 0.5 + 1e-6

# %%
# The same for one step, by name.

for name, norm in gradkit.per_tensor_norms(trainer.grads).items():
    print(f"{name:18} {float(norm):.4f}")

r"""
Gradient norms by layer
=======================

The global norm shows that a step was too large, but not which layer caused it.
:func:`gradkit.per_tensor_norms` returns the norm of every gradient in the structure of the
gradients. With ``flat=True`` it returns one array, which takes one copy from a GPU;
:func:`gradkit.names_of` returns the names.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import gradkit

LAYERS = ("layer1", "layer2", "layer3")
rng = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
data = (pixels / 8 - 1).astype(np.float32)  # 0..16 to -1..1


def weights(outputs):
    """Of a layer with 64 inputs."""
    return rng.normal(0, (2 / 64) ** 0.5, (64, outputs)).astype(np.float32)


params = {
    **{f"{name}.weights": weights(64) for name in LAYERS},
    **{f"{name}.scale": np.ones(64, np.float32) for name in LAYERS},
    "logits.weights": weights(10),
}


def gradients(p, x, labels):
    """Of the mean cross-entropy of a network with an RMS norm in each hidden layer."""
    grads, kept = dict.fromkeys(p), []
    for name in LAYERS:
        h = x @ p[f"{name}.weights"]
        n, inv_std = gradkit.rms_norm(h, p[f"{name}.scale"])
        kept.append((name, x, h, n, inv_std))
        x = np.maximum(n, 0)
    exps = np.exp(x @ p["logits.weights"])
    d = (exps / exps.sum(axis=1, keepdims=True) - np.eye(10, dtype=np.float32)[labels]) / len(x)
    grads["logits.weights"] = x.T @ d
    d = d @ p["logits.weights"].T
    for name, x, h, n, inv_std in reversed(kept):
        scale = f"{name}.scale"
        d, grads[scale] = gradkit.rms_norm_grad(d * (n > 0), h, p[scale], inv_std)
        grads[f"{name}.weights"] = x.T @ d
        d = d @ p[f"{name}.weights"].T
    return grads


# %%
# After clipping, all of them together have a norm of at most 0.5.

history = []
for _ in range(100):
    rows = rng.integers(len(data), size=128)
    grads = gradients(params, data[rows], labels[rows])
    gradkit.clip_grad_norm(grads, max_norm=0.5)
    history.append(gradkit.per_tensor_norms(grads, flat=True))
    for name, value in params.items():
        value -= 0.5 * grads[name]
names, norms = gradkit.names_of(grads), np.array(history).T

figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
picture = axes.pcolormesh(np.log10(norms), cmap="viridis")
axes.set_yticks(np.arange(len(names)) + 0.5, names)
axes.invert_yaxis()
axes.set_xlabel("training step")
figure.colorbar(picture, label="log10 of the L2 norm")
axes.set_title("Gradient norms by parameter")
axes.grid(visible=False)
assert np.sqrt((norms**2).sum(axis=0)).max() < 0.5 + 1e-6

# %%
# The same for one step, by name.

for name, norm in gradkit.per_tensor_norms(grads).items():
    print(f"{name:18} {float(norm):.4f}")

r"""
Clipping JAX's gradients
========================

JAX's arrays are immutable: :func:`gradkit.clip_by_global_norm` returns new gradients in the same
pytree, like ``optax.clip_by_global_norm``, and the norm. Call it between the jitted halves of a
step. Inside a jitted function, use :func:`gradkit.jax.clip_by_global_norm`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import gradkit


@jax.jit
@jax.value_and_grad
def loss_and_grads(params, x, y):
    """The mean squared error of a network with one hidden layer, and its gradients."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


@jax.jit
def update(params, grads):
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def fit(max_norm, steps=150):
    """Fit a wave, and return the losses."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(first, (1, 32)),
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(second, (32, 1)) / 6,
    }
    x = jnp.linspace(-3, 3, 256)[:, None]
    losses = []
    for _ in range(steps):
        loss, grads = loss_and_grads(params, x, jnp.sin(x))
        grads, _ = gradkit.clip_by_global_norm(grads, max_norm)
        params = update(params, grads)
        losses.append(float(loss))
    return losses


# %%
# Three limits; the smallest one slows the fit down.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for max_norm in (0.3, 0.03, 0.1):
    axes.semilogy(fit(max_norm), linewidth=2, label=f"max_norm = {max_norm:g}")
axes.set_xlabel("step")
axes.set_ylabel("mean squared error")
axes.legend(frameon=False)
axes.set_title("A small network, clipped between the jitted halves of each step")

# %%
# The result is a JAX array on the same device.

clipped, norm = gradkit.clip_by_global_norm({"w": jnp.full(4, 2.0)}, max_norm=1.0)
print(type(norm).__module__, clipped, float(norm))
assert float(norm) == 4.0

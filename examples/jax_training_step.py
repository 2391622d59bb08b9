"""A JAX training step that clips with gradkit.

JAX's arrays are immutable, so ``clip_by_global_norm`` clips the gradients: it returns new ones in
the same pytree. It runs between the two jitted halves of the step, because inside ``jax.jit``
arrays have no values yet.
"""

from typing import Any

import jax
import jax.numpy as jnp

import gradkit

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a network with one hidden layer."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


loss_and_grads = jax.jit(jax.value_and_grad(loss))


@jax.jit
def update(params: Params, grads: Params, learning_rate: float) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)


def main(steps: int = 60, max_norm: float = 1.0) -> list[float]:
    """Fit a small network to a sine and return the losses."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(first, (1, 32)),
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(second, (32, 1)) / 6,
    }
    x = jnp.linspace(-3, 3, 256)[:, None]
    y = jnp.sin(x)

    losses = []
    for _ in range(steps):
        value, grads = loss_and_grads(params, x, y)
        grads, norm = gradkit.clip_by_global_norm(grads, max_norm)
        params = update(params, grads, 0.1)
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; last gradient norm {float(norm):.3f}")
    return losses


if __name__ == "__main__":
    main()

"""All training steps as one program for XLA: norms, their gradients and clipping inside of ``jit``.

``gradkit.jax`` has the norms that JAX differentiates. Batch norm returns its running statistics,
which travel through the ``scan`` beside the parameters; the network is then evaluated by them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import gradkit.jax

WIDTH, RATE = 32, 0.03
Tree = dict[str, jax.Array]


def network(params: Tree, normalise: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """A layer with batch norm and a residual block with RMS norm; what batch norm adds."""
    y, *statistics = normalise(x @ params["w1"], params["scale"], params["bias"])
    hidden = jnp.tanh(y)
    normal, hidden = gradkit.jax.add_rms_norm(
        jnp.tanh(hidden @ params["w2"]), hidden, params["rms"]
    )
    return (normal + hidden) @ params["w3"], statistics


def loss(params: Tree, running: Tree, x: jax.Array, y: jax.Array) -> Any:
    """The mean squared error of a batch, and the running statistics after it."""
    guess, (mean, var) = network(params, partial(gradkit.jax.batch_norm, **running), x)
    return jnp.mean((guess - y) ** 2), {"running_mean": mean, "running_var": var}


def evaluate(params: Tree, running: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error by running statistics."""

    def normalise(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array]:
        mean, var = running["running_mean"], running["running_var"]
        return (gradkit.jax.batch_norm_inference(x, scale, bias, mean, var),)

    return jnp.mean((network(params, normalise, x)[0] - y) ** 2)


def step(x: jax.Array, y: jax.Array, carry: Any, key: jax.Array) -> Any:
    """One step on a random half of the data."""
    params, running = carry
    batch = jax.random.permutation(key, len(x))[: len(x) // 2]
    slopes = jax.value_and_grad(loss, has_aux=True)
    (value, running), grads = slopes(params, running, x[batch], y[batch])
    grads, norm = gradkit.jax.clip_by_global_norm(grads, max_norm=1.0)
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return (params, running), (value, norm)


def main(steps: int = 60) -> list[float]:
    """Fit a small network to a sine and return the losses."""
    first, second, third, batches = jax.random.split(jax.random.key(0), 4)
    params = {
        "w1": jax.random.normal(first, (1, WIDTH)),
        "w2": jax.random.normal(second, (WIDTH, WIDTH)) / WIDTH**0.5,
        "w3": jax.random.normal(third, (WIDTH, 1)) / 6,
        "scale": jnp.ones(WIDTH),
        "bias": jnp.linspace(-2, 2, WIDTH),
        "rms": jnp.ones(WIDTH),
    }
    running = {"running_mean": jnp.zeros(WIDTH), "running_var": jnp.ones(WIDTH)}
    x = jnp.linspace(-3, 3, 256)[:, None]
    y = jnp.sin(x)

    train = jax.jit(lambda carry, keys: jax.lax.scan(partial(step, x, y), carry, keys))
    carry, (losses, norms) = train((params, running), jax.random.split(batches, steps))
    held = jax.jit(evaluate)(*carry, x, y)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; last gradient norm {norms[-1]:.3f}")
    print(f"by running statistics {held:.3f}")
    return [float(value) for value in losses]


if __name__ == "__main__":
    main()

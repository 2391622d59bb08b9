"""RMS norm inside of ``tf.function`` and ``tf.GradientTape``; gradkit clips the gradients.

``tf.custom_gradient`` gives the norm its own backward pass, and ``tf.numpy_function`` reaches
gradkit when the graph runs. Tensors of a graph forget their shapes on the way, which
``tf.ensure_shape`` gives back.
"""

from typing import Any

import tensorflow as tf

import gradkit


@tf.custom_gradient
def rms_norm(x: Any, scale: Any) -> Any:
    """RMS norm over the last dimension."""
    wide = tf.float64 if x.dtype == tf.float64 else tf.float32
    y, inv_std = tf.numpy_function(gradkit.rms_norm, [x, scale], [x.dtype, wide])

    def gradient(dy: Any) -> Any:
        dx, dscale = tf.numpy_function(
            gradkit.rms_norm_grad, [dy, x, scale, inv_std], [x.dtype, scale.dtype]
        )
        return tf.ensure_shape(dx, x.shape), tf.ensure_shape(dscale, scale.shape)

    return tf.ensure_shape(y, x.shape), gradient


def clip_by_global_norm(grads: list[Any], max_norm: float) -> tuple[list[Any], Any]:
    """``tf.clip_by_global_norm`` by gradkit, also inside of ``tf.function``."""

    def clip(*arrays: Any) -> Any:
        clipped, norm = gradkit.clip_by_global_norm(arrays, max_norm)
        return *clipped, norm

    *clipped, norm = tf.numpy_function(clip, grads, [*(g.dtype for g in grads), tf.float64])
    return [tf.ensure_shape(c, g.shape) for c, g in zip(clipped, grads, strict=True)], norm


def main(steps: int = 60, max_norm: float = 1.0) -> list[float]:
    """Fit a small network to a sine and return the losses."""
    start = tf.random.Generator.from_seed(0)
    weights = [
        tf.Variable(start.normal((1, 32))),
        tf.Variable(start.normal((32,))),
        tf.Variable(tf.ones(32)),
        tf.Variable(start.normal((32, 1)) / 6),
    ]
    x = tf.reshape(tf.linspace(-3.0, 3.0, 256), (-1, 1))
    y = tf.sin(x)

    @tf.function
    def step() -> Any:
        w1, b1, scale, w2 = weights
        with tf.GradientTape() as tape:
            hidden = tf.tanh(rms_norm(x @ w1 + b1, scale))
            loss = tf.reduce_mean((hidden @ w2 - y) ** 2)
        grads, norm = clip_by_global_norm(tape.gradient(loss, weights), max_norm)
        for weight, grad in zip(weights, grads, strict=True):
            weight.assign_sub(0.1 * grad)
        return loss, norm

    losses = []
    for _ in range(steps):
        loss, norm = step()
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; last gradient norm {float(norm):.3f}")
    return losses


if __name__ == "__main__":
    main()

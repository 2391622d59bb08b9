"""A thinc model with gradkit's layer norm as a layer; gradkit clips its gradients.

thinc's layers return a callback for the backward pass, and its parameters are NumPy or CuPy
arrays, so gradkit's functions can be called directly.
"""

from typing import Any

import numpy as np
from thinc.api import Adam, Linear, Model, Relu, chain, fix_random_seed

import gradkit


def GradkitLayerNorm(width: int) -> Model:  # noqa: N802 (the style of thinc's layers)
    """Layer norm over the last dimension."""
    return Model(
        "gradkit_layer_norm",
        _forward,
        init=_init,
        dims={"nO": width, "nI": width},
        params={"scale": None, "bias": None},
    )


def _init(model: Model, X: Any = None, Y: Any = None) -> None:  # noqa: ARG001, N803
    model.set_param("scale", model.ops.alloc1f(model.get_dim("nO")) + 1)
    model.set_param("bias", model.ops.alloc1f(model.get_dim("nO")))


def _forward(model: Model, x: Any, is_train: bool) -> Any:  # noqa: ARG001
    scale = model.get_param("scale")
    y, mean, inv_std = gradkit.layer_norm(x, scale, model.get_param("bias"))

    def backprop(dy: Any) -> Any:
        dx, dscale, dbias = gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)
        model.inc_grad("scale", dscale)
        model.inc_grad("bias", dbias)
        return dx

    return y, backprop


def gradients(model: Model) -> dict[str, Any]:
    """All gradients of a model and of its layers."""
    return {
        f"{node.name}.{node.id}.{name}": node.get_grad(name)
        for node in model.walk()
        for name in node.param_names
        if node.has_grad(name)
    }


def main(steps: int = 60, max_norm: float = 1.0) -> list[float]:
    """Fit a small network to a sine and return the losses."""
    fix_random_seed(0)
    x = np.linspace(-3, 3, 256, dtype=np.float32)[:, None]
    x, y = np.concatenate([x, np.sin(2 * x)], axis=1), np.sin(x)
    model = chain(Linear(32), GradkitLayerNorm(32), Relu(32), Linear(1))
    model.initialize(X=x, Y=y)
    optimizer = Adam(0.02, grad_clip=0.0)  # clipping is gradkit's here

    losses = []
    for _ in range(steps):
        guess, backprop = model.begin_update(x)
        backprop(2 / len(x) * (guess - y))
        norm = gradkit.clip_grad_norm(gradients(model), max_norm)
        model.finish_update(optimizer)
        losses.append(float(((guess - y) ** 2).mean()))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; last gradient norm {float(norm):.3f}")
    return losses


if __name__ == "__main__":
    main()

"""A training loop with only CuPy and gradkit: no framework, no autograd.

The network is a layer norm between two matrix products, with its backward pass written out.
Gradients are accumulated over micro-batches and clipped, all on the device. Without a GPU the
same code runs on NumPy.
"""

from typing import Any

import numpy

import gradkit


def array_module() -> Any:
    """CuPy if there is a device, otherwise NumPy."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, no device
        return numpy
    return cupy


def gradients(xp: Any, params: dict[str, Any], x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
    """The mean squared error and its gradient for each parameter."""
    hidden = x @ params["w1"]
    normed, mean, inv_std = gradkit.layer_norm(hidden, params["scale"], params["bias"])
    active = xp.tanh(normed)
    error = active @ params["w2"] - y

    d_out = 2 / len(x) * error
    d_normed = (d_out @ params["w2"].T) * (1 - active**2)
    d_hidden, d_scale, d_bias = gradkit.layer_norm_grad(
        d_normed, hidden, params["scale"], mean, inv_std, out=(d_normed, None, None)
    )
    grads = {"w1": x.T @ d_hidden, "scale": d_scale, "bias": d_bias, "w2": active.T @ d_out}
    return (error**2).mean(), grads


def main(steps: int = 60, max_norm: float = 1.0, micro_batches: int = 4) -> list[float]:
    """Fit a small network to a sine and return the losses."""
    xp = array_module()
    rng = numpy.random.default_rng(0)
    x = xp.linspace(-3, 3, 256, dtype=xp.float32)[:, None]
    x, y = xp.concatenate([x, xp.sin(2 * x), xp.ones_like(x)], axis=1), xp.sin(x)
    params = {
        "w1": xp.asarray(rng.standard_normal((3, 32), numpy.float32)),
        "scale": xp.ones(32, xp.float32),
        "bias": xp.zeros(32, xp.float32),
        "w2": xp.asarray(rng.standard_normal((32, 1), numpy.float32)) / 6,
    }
    buffers = {name: xp.empty_like(value) for name, value in params.items()}

    losses = []
    for _ in range(steps):
        total = 0.0
        for i in range(micro_batches):
            value, grads = gradients(xp, params, x[i::micro_batches], y[i::micro_batches])
            total += value / micro_batches
            for name, grad in grads.items():  # the first overwrites: no zeroing
                gradkit.accumulate_grad_v2(buffers[name], grad, overwrite=i == 0)
        gradkit.scale_grads(buffers, 1 / micro_batches)
        norm = gradkit.clip_grad_norm(buffers, max_norm)  # stays on the device
        gradkit.sgd_update(params, buffers, lr=0.1)
        losses.append(total)
    history = [float(value) for value in losses]
    print(f"{xp.__name__}: loss {history[0]:.3f} -> {history[-1]:.3f}; last norm {float(norm):.3f}")
    return history


if __name__ == "__main__":
    main()

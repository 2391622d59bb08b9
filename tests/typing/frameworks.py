"""Steps in PyTorch and JAX, with the libraries' own types: `make test-interop` checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import gradkit

if TYPE_CHECKING:
    import jax
    import torch


def torch_step(model: torch.nn.Module, x: torch.Tensor, max_norm: torch.Tensor) -> torch.Tensor:
    grads = assert_type(gradkit.grads_of(model.parameters()), list[torch.Tensor])
    assert_type(gradkit.named_grads_of(model.named_parameters()), dict[str, torch.Tensor])
    assert_type(gradkit.clip_by_global_norm(grads, 1.0), tuple[list[torch.Tensor], torch.Tensor])
    y, mean, inv_std = gradkit.layer_norm(x)
    dx, none, _ = gradkit.layer_norm_grad(y, x, None, mean, inv_std)
    assert_type(dx, torch.Tensor)
    assert_type(none, None)
    return gradkit.clip_grad_norm(grads, max_norm, nonfinite="zero")


def jax_step(grads: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    clipped, norm = gradkit.clip_by_global_norm(grads, 1.0)
    assert_type(clipped, dict[str, jax.Array])
    assert_type(gradkit.rms_norm(x), tuple[jax.Array, jax.Array])
    return norm

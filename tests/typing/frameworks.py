"""Steps in PyTorch and JAX, with the libraries' own types: `make test-interop` checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import gradkit

if TYPE_CHECKING:
    import jax
    import optax
    import torch

    import gradkit.jax
    import gradkit.torch
    from gradkit.jax import transforms


def torch_step(model: torch.nn.Module, x: torch.Tensor, max_norm: torch.Tensor) -> torch.Tensor:
    grads = assert_type(gradkit.grads_of(model.parameters()), list[torch.Tensor])
    assert_type(gradkit.named_grads_of(model.named_parameters()), dict[str, torch.Tensor])
    assert_type(gradkit.clip_by_global_norm(grads, 1.0)[0], list[torch.Tensor])
    assert_type(gradkit.grad_norm([p.grad for p in model.parameters()]), torch.Tensor)
    y, mean, inv_std = gradkit.layer_norm(x)
    dx, none, _ = gradkit.layer_norm_grad(y, x, None, mean, inv_std)
    assert_type(dx, torch.Tensor)
    assert_type(none, None)
    return gradkit.clip_grad_norm(grads, max_norm, nonfinite="zero")


def jax_step(grads: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    clipped, norm = gradkit.clip_by_global_norm(grads, 1.0)
    assert_type(clipped, dict[str, jax.Array])
    assert_type(gradkit.rms_norm(x), tuple[jax.Array, jax.Array])
    found: jax.Array = norm
    return found


def torch_autograd(model: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    assert_type(gradkit.torch.replace_norms(model), torch.nn.Sequential)
    assert_type(gradkit.torch.restore_norms(model), torch.nn.Sequential)
    y = assert_type(gradkit.torch.layer_norm(x, (3,)), torch.Tensor)
    assert_type(gradkit.torch.rms_norm(x, (3,), scale_offset=1.0), torch.Tensor)
    assert_type(gradkit.torch.group_norm(x, 1), torch.Tensor)
    assert_type(gradkit.torch.instance_norm(x), torch.Tensor)
    assert_type(gradkit.torch.batch_norm(x, None, None, training=True), torch.Tensor)
    assert_type(gradkit.torch.invertible_layer_norm(x, (3,), y, None), torch.Tensor)
    assert_type(gradkit.torch.invertible_rms_norm(x, (3,), y), torch.Tensor)
    assert_type(gradkit.torch.gated_rms_norm(x, y, (3,), activation="sigmoid"), torch.Tensor)
    assert_type(gradkit.torch.add_rms_norm(x, y, (3,)), tuple[torch.Tensor, torch.Tensor])
    assert_type(gradkit.torch.add_layer_norm(x, y, (3,)), tuple[torch.Tensor, torch.Tensor])
    gradkit.torch.LayerNorm(3, epsilon=1e-6)  # type: ignore[call-arg]
    gradkit.torch.GatedRMSNorm(3, gate="silu")  # type: ignore[call-arg]
    accumulator = gradkit.torch.GradAccumulator(model)
    assert_type(accumulator.finish(max_norm=1.0, scale=0.5), torch.Tensor)
    norm = assert_type(gradkit.torch.get_total_norm([x]), torch.Tensor)
    limit = assert_type(gradkit.SpikeGuard().update(norm), torch.Tensor)
    gradkit.torch.clip_grads_with_norm_(model.parameters(), limit, norm)
    assert_type(gradkit.torch.clip_grad_norm_(model.parameters(), limit), torch.Tensor)
    assert_type(gradkit.torch.grad_stats(model)["weight"].max, torch.Tensor)
    return gradkit.torch.clip_grad_norm_(model.parameters(), 1.0)


def jax_jit(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y = assert_type(gradkit.jax.layer_norm(x), jax.Array)
    assert_type(gradkit.jax.rms_norm(x, scale_offset=1.0), jax.Array)
    assert_type(gradkit.jax.group_norm(x, 1), jax.Array)
    assert_type(gradkit.jax.invertible_rms_norm(x, y), jax.Array)
    assert_type(gradkit.jax.gated_rms_norm(x, y), jax.Array)
    assert_type(gradkit.jax.add_rms_norm(x, y), tuple[jax.Array, jax.Array])
    assert_type(gradkit.jax.add_layer_norm(x, y), tuple[jax.Array, jax.Array])
    assert_type(gradkit.jax.batch_norm(x), tuple[jax.Array, jax.Array, jax.Array])
    clipped, norm = gradkit.jax.clip_by_global_norm(params, 1.0)
    assert_type(clipped, dict[str, jax.Array])
    assert_type(gradkit.jax.clip_by_block_norm(params, 1.0)[0], dict[str, jax.Array])
    adapted = gradkit.jax.clip_by_adaptive_norm(clipped, params)
    assert_type(adapted, tuple[dict[str, jax.Array], dict[str, jax.Array]])
    assert_type(gradkit.jax.accumulate_grads(params, clipped), dict[str, jax.Array])
    both = gradkit.jax.accumulate_grads(params, clipped, compensation=params)
    assert_type(both, tuple[dict[str, jax.Array], dict[str, jax.Array]])
    assert_type(transforms.clip_by_global_norm(1.0), optax.GradientTransformation)
    assert_type(transforms.clip_spikes(), optax.GradientTransformation)
    return norm

"""Clipping unit by unit beside optax's and timm's rules."""

import numpy as np
import pytest

import gradkit
from tests.interop.conftest import framework

SHAPES = {"dense": (6, 5), "conv": (3, 3, 4, 7), "bias": (5,), "zero": (4, 4)}


def host_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    tree = {
        name: (scale * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    tree["zero"][...] *= seed % 2
    return tree


@pytest.mark.parametrize("threshold", [0.3, 0.9, 5.0])
def test_block_rms_as_optax_has_it(threshold):
    jax, optax = framework("jax"), framework("optax")
    grads = jax.tree.map(jax.numpy.asarray, host_tree(1))
    theirs, _ = optax.clip_by_block_rms(threshold).update(grads, optax.EmptyState())
    ours, norms = gradkit.clip_by_block_norm(grads, threshold, rms=True)
    for name, g in grads.items():
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)
        np.testing.assert_allclose(norms[name], np.sqrt(np.mean(np.square(g))), rtol=1e-6)


@pytest.mark.parametrize("clipping", [0.001, 0.1, 1.0])
def test_adaptive_as_optax_has_it(clipping):
    """JAX's weights: a neuron's inputs are all axes but the last."""
    jax, optax = framework("jax"), framework("optax")
    grads, params = (jax.tree.map(jax.numpy.asarray, host_tree(seed)) for seed in (1, 2))
    transform = optax.adaptive_grad_clip(clipping)
    theirs, _ = transform.update(grads, transform.init(params), params)

    def inputs(name, grad):  # noqa: ARG001
        return range(grad.ndim - 1)

    ours, _ = gradkit.clip_by_adaptive_norm(grads, params, clipping, axis=inputs)
    for name in grads:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, err_msg=name)


def unitwise(x):
    """The norm that timm takes of a parameter of PyTorch's or of its gradient."""
    dims = tuple(range(1, x.ndim)) if x.ndim > 1 else (0,)
    return x.norm(p=2, dim=dims, keepdim=x.ndim > 1)


@pytest.mark.parametrize("clipping", [0.001, 0.1, 1.0])
def test_adaptive_as_timm_has_it(torch, clipping):
    """PyTorch's weights: a neuron's inputs are all axes but the first; parameters require grad."""
    params = [torch.nn.Parameter(torch.from_numpy(p)) for p in host_tree(2).values()]
    for param, grad in zip(params, host_tree(1).values(), strict=True):
        param.grad = torch.from_numpy(grad)
    theirs = []
    for param in params:
        limit = unitwise(param.detach()).clamp(min=1e-3) * clipping
        norm = unitwise(param.grad)
        clipped = param.grad * (limit / norm.clamp(min=1e-6))
        theirs.append(torch.where(norm < limit, param.grad, clipped))
    versions = [param.grad._version for param in params]
    grads = gradkit.grads_of(params)
    gradkit.clip_grad_adaptive(
        grads,
        params,
        clipping,
        axis=lambda name, grad: range(1, grad.ndim),  # noqa: ARG005
    )
    for param, expected, version in zip(params, theirs, versions, strict=True):
        torch.testing.assert_close(param.grad, expected, rtol=2e-6, atol=0)
        assert param.grad._version > version
    assert all(param.requires_grad for param in params)


def test_parameters_of_another_framework(torch):
    grads = [torch.ones(3)]
    with pytest.raises(TypeError, match=r"params\[0\] is a numpy array and grads\[0\] a torch"):
        gradkit.clip_grad_adaptive(grads, [np.ones(3, np.float32)])

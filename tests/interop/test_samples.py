"""Scale and bias per sample beside the modulation of diffusion transformers, by autograd."""

import numpy as np
import pytest

from tests import strategies as draw_

from .libraries import framework

SHAPE = (3, 5, 16)
NORMS = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])


def values(name, shape, seed):
    return np.asarray(draw_.values(shape, name, seed))


def arrays(name="float64", lead=(3, 1)):
    x, dy = (values(name, SHAPE, seed) for seed in (0, 1))
    return x, *(values(name, (*lead, 16), seed) for seed in (2, 3)), dy


@NORMS
@pytest.mark.parametrize("lead", [(3, 1), (3, 5), (1, 1)], ids=str)
def test_modulation_in_pytorch(name, lead):
    """DiT's ``modulate(norm(x), shift, scale)``; without a shift for RMS norm."""
    torch = framework("torch")
    import gradkit.torch

    x, scale, shift, dy = map(torch.from_numpy, arrays(lead=lead))
    given = [x, scale, shift][: 3 if name == "layer_norm" else 2]

    def theirs(x, scale, shift=0):
        norm = getattr(torch.nn.functional, name)
        return norm(x, (16,), eps=1e-6) * (1 + scale) + shift

    def ours(x, *parameters):
        norm = getattr(gradkit.torch, name)
        return norm(x, (16,), *parameters, eps=1e-6, scale_offset=1.0)

    leaves = [t.clone().requires_grad_() for t in given]
    found, expected = ours(*leaves), theirs(*leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slopes = (torch.autograd.grad(y, leaves, dy) for y in (found, expected))
    for got, ref in zip(*slopes, strict=True):
        assert got.shape == ref.shape
        torch.testing.assert_close(got, ref, rtol=1e-11, atol=1e-12)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(*leaves), leaves, dy)
    for got, ref in zip(again, torch.autograd.grad(ours(*leaves), leaves, dy), strict=True):
        assert torch.equal(got, ref)


@NORMS
def test_modulation_in_jax(name):
    jax = framework("jax")
    import gradkit.jax

    given = list(map(jax.numpy.asarray, arrays("float32")))
    *given, dy = given if name == "layer_norm" else (*given[:2], given[3])

    def theirs(x, scale, shift=0):
        distance = x - (x.mean(-1, keepdims=True) if name == "layer_norm" else 0)
        inv_std = jax.lax.rsqrt((distance**2).mean(-1, keepdims=True) + 1e-6)
        return distance * inv_std * (1 + scale) + shift

    def ours(x, *parameters):
        return getattr(gradkit.jax, name)(x, *parameters, eps=1e-6, scale_offset=1.0)

    found, back = jax.vjp(jax.jit(ours), *given)
    expected, ref = jax.vjp(theirs, *given)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    for got, slope in zip(back(dy), ref(dy), strict=True):
        assert got.shape == slope.shape
        np.testing.assert_allclose(got, slope, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0)], ids=str)
def test_a_vmap_of_jax_has_the_bits_of_single_calls(axes):
    """Return whether examples share the scales of their samples or not."""
    jax = framework("jax")
    import gradkit.jax

    numbers = np.random.default_rng(5)
    x = numbers.normal(size=(2, *SHAPE)).astype(np.float32)
    lead = () if axes[1] is None else (2,)
    scale, shift = numbers.normal(size=(2, *lead, 3, 1, 16)).astype(np.float32)
    found = jax.vmap(gradkit.jax.layer_norm, axes)(x, scale, shift)
    for k in range(2):
        own = (scale, shift) if axes[1] is None else (scale[k], shift[k])
        ref = gradkit.layer_norm(x[k], *own)[0]
        np.testing.assert_array_equal(found[k], ref)

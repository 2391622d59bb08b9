"""Scale and bias per sample beside the modulation of diffusion transformers, by autograd."""

import numpy as np
import pytest

import gradkit
from tests import strategies as draw_

from .libraries import framework

SHAPE = (3, 5, 16)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_modulation_in_jax(name):
    """DiT's ``modulate(norm(x), shift, scale)``; without a shift for RMS norm."""
    jax = framework("jax")
    import gradkit.jax

    shapes = (SHAPE, (3, 1, 16), (3, 1, 16), SHAPE)
    given = [jax.numpy.asarray(draw_.values(n, "float32", k)) for k, n in enumerate(shapes)]
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


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_bias_per_sample_needs_no_scale(library):
    ours = framework(f"gradkit.{library}")
    array = framework("torch").asarray if library == "torch" else framework("jax.numpy").asarray
    x, shift = (draw_.values(shape, "float32", k) for k, shape in enumerate([(2, 3, 4), (2, 1, 4)]))
    given = (array(x), None) if library == "jax" else (array(x), (4,), None)
    found = np.asarray(ours.layer_norm(*given, array(shift)))
    np.testing.assert_allclose(found, gradkit.layer_norm(x)[0] + shift, rtol=1e-6, atol=1e-6)


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

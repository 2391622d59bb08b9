"""The gradient noise scale: unbiased estimates, their means, and the norms they come from."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests.tolerances import assert_same_bits

norms = st.floats(1e-3, 1e3)


def estimates(small, sizes, big, size):
    """Noise and signal by appendix A.1 of McCandlish et al., in exact numbers."""
    total = sum(map(Fraction, sizes))
    mean = sum(Fraction(n) ** 2 * Fraction(b) for n, b in zip(small, sizes, strict=True)) / total
    b, size, square = total / len(sizes), Fraction(size), Fraction(big) ** 2
    return (mean - square) / (1 / b - 1 / size), (size * square - b * mean) / (size - b)


@given(
    pairs=st.lists(st.tuples(norms, st.integers(1, 50)), min_size=1, max_size=8),
    big=norms,
    more=st.integers(1, 100),
    seen=st.integers(0, 400),
    decay=st.sampled_from((0.5, 0.99)),
)
def test_a_step_is_the_formula(backend, pairs, big, more, seen, decay):
    small, sizes = zip(*pairs, strict=True)
    size = math.ceil(sum(sizes) / len(sizes)) + more
    before = [float(seen), 3.0, 0.5] if seen else None
    state = None if before is None else backend.asarray(np.array(before))
    arrays = backend.asarray(np.array(small)), backend.asarray(np.array(big))
    scale, after = gradkit.noise_scale(
        arrays[0], list(sizes), arrays[1], size, state=state, decay=decay
    )
    noise, signal = estimates(small, sizes, big, size)
    weight = max(Fraction(1, seen + 1), 1 - Fraction(decay))
    kept = [Fraction(x) for x in (before or [0, 0, 0])]
    expected = [kept[k] + weight * (x - kept[k]) for k, x in ((1, noise), (2, signal))]
    found = backend.asnumpy(after)
    assert found[0] == seen + 1
    terms = sum(float(n) ** 2 for n in (*small, big)) * size * size
    for got, exact in zip(found[1:], expected, strict=True):
        assert abs(Fraction(float(got)) - exact) <= 1e-14 * (terms + 4)
    with np.errstate(all="ignore"):
        assert_same_bits(backend.asnumpy(scale), np.array(found[1] / found[2]))


def test_backends_have_the_same_bits(backend):
    rng, state, known = np.random.default_rng(1), None, None
    for step in range(6):
        small, big = rng.lognormal(0, 1, 5), np.array(rng.lognormal(0, 1))
        if step == 3:
            small[2] = np.nan
        arrays = backend.asarray(small), backend.asarray(big)
        scale, state = gradkit.noise_scale(arrays[0], 3.0, arrays[1], 15, state=state, decay=0.7)
        ref, known = gradkit.noise_scale(small, 3.0, big, 15, state=known, decay=0.7)
        assert_same_bits(backend.asnumpy(scale), ref)
        assert_same_bits(backend.asnumpy(state), known)
    assert known[0] == 5  # NaN does not count


def test_it_finds_the_noise_scale_of_gradients_that_are_known():
    """Micro-batches of unequal sizes, whose norms come from accumulation."""
    rng, true = np.random.default_rng(0), np.full(50, 1.0)
    deviation, sizes = 3.0, [2, 6, 4]
    total, state = sum(sizes), None
    buffer, small = np.zeros(50), np.zeros(len(sizes))
    for _ in range(1000):
        for k, size in enumerate(sizes):
            mean = true + deviation / math.sqrt(size) * rng.normal(size=50)
            gradkit.accumulate_grads(
                buffer, mean, scale=size / total, overwrite=k == 0, grad_norm_out=small[k, ...]
            )
        big = gradkit.grad_norm(buffer)
        scale, state = gradkit.noise_scale(small, sizes, big, total, state=state, decay=0.9999)
    exact = 50 * deviation**2 / (true @ true)
    assert float(scale) == pytest.approx(exact, rel=0.05)


def test_the_norm_of_what_arrives(backend):
    """With the bits of grad_norm, whatever becomes of the buffers; a gradient may be one."""
    rng = np.random.default_rng(2)
    hosts = [rng.normal(size=9).astype(np.float32), rng.normal(size=(2, 40))]
    norm, result = (backend.asarray(np.array(7.0)) for _ in range(2))
    for options in ({}, {"do_update": False}, {"overwrite": True, "scale": 0.5}):
        buffers = [backend.asarray(h) for h in hosts]
        expected = backend.asnumpy(gradkit.grad_norm(buffers))
        gradkit.accumulate_grads(buffers, buffers, norm_out=result, grad_norm_out=norm, **options)
        assert_same_bits(backend.asnumpy(norm), expected)
        assert_same_bits(backend.asnumpy(result), backend.asnumpy(gradkit.grad_norm(buffers)))
    grads = [backend.asarray(h) for h in hosts]
    with pytest.raises(ValueError, match="grad_norm_out shares memory with norm_out"):
        gradkit.accumulate_grads(buffers, grads, norm_out=norm, grad_norm_out=norm)

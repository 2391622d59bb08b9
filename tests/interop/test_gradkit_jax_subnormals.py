"""Subnormal numbers, which XLA flushes to zero, count in ``gradkit.jax`` as they do outside."""

import platform
import textwrap
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.buffer_callback import buffer_callback

import gradkit
import gradkit.jax
from gradkit._numpy import floating_point
from tests.tolerances import assert_all_same_bits, assert_same_bits

TINY = np.arange(24, dtype=np.float32).reshape(4, 6) * np.float32(1e-40)


def test_norms_and_sums_of_subnormal_gradients(way):  # noqa: ARG001
    norm = jax.jit(gradkit.jax.grad_norm)(TINY)
    assert_same_bits(norm, np.float32(gradkit.grad_norm(TINY)))
    assert float(norm) > 0
    clipped, _ = jax.jit(partial(gradkit.jax.clip_by_global_norm, max_norm=1e-39, eps=0.0))(TINY)
    assert_same_bits(clipped, gradkit.clip_by_global_norm(TINY, 1e-39, eps=0.0)[0])
    assert np.count_nonzero(np.asarray(clipped))
    buffers = jax.jit(gradkit.jax.accumulate_grads)(TINY, TINY)
    assert_same_bits(buffers, TINY + TINY)


def test_xla_flushes_after_a_call_as_before(way):  # noqa: ARG001
    """In what follows on the same thread."""

    def product(x, factor):
        return (x * factor)[0]

    def after_a_norm(x, factor):
        y = gradkit.jax.rms_norm(x)
        return product(x + 0 * y[:, :1], factor)

    one = np.float32(1)
    before, after = jax.jit(product)(TINY, one), jax.jit(after_a_norm)(TINY, one)
    assert_same_bits(after, before)


def test_norms_of_subnormal_rows(way):  # noqa: ARG001
    scale = np.linspace(1, 2, 6, dtype=np.float32)
    y, backward = jax.vjp(lambda *a: gradkit.jax.rms_norm(*a, eps=0.0), TINY, scale)
    ref, inv_std = gradkit.rms_norm(TINY, scale, eps=0.0)
    dx, dscale = gradkit.rms_norm_grad(TINY, TINY, scale, inv_std)
    assert_all_same_bits((y, *backward(TINY)), (ref, dx, dscale))


def flushes():
    """Return whether the processor takes subnormal numbers for zero."""
    return bool(np.float32(1e-40) * np.array(1, np.float32) == 0)


@pytest.mark.parametrize("fails", [False, True])
def test_xla_finds_its_own_settings_again(fails):
    seen = []

    def run():
        seen.append(flushes())
        if fails:
            raise ValueError("as planned")

    def callback(context, out, x):  # noqa: ARG001
        seen.append(flushes())
        try:
            floating_point.within(floating_point.DEFAULT, run)
        except ValueError:
            assert fails
        seen.append(flushes())

    kind = jax.ShapeDtypeStruct((3,), np.float32)
    call = buffer_callback(callback, kind, input_output_aliases={0: 0})
    jax.block_until_ready(jax.jit(call)(np.ones(3, np.float32)))
    assert seen == [True, False, True]
    assert not flushes()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="where the flags are, is known there")
@pytest.mark.parametrize("which", ["compiled", "numpy"])
def test_importing_where_they_are_flushed_changes_nothing(run_alone, which):
    """As where a library was loaded that was compiled with -ffast-math; it rounds upwards, too."""
    program = """
    import ctypes, jax, numpy as np
    tiny, x = np.full(1000, 1e-40, np.float32), np.linspace(1, 2, 24, dtype='f').reshape(4, 6)
    environment = (ctypes.c_uint32 * 32)()
    ctypes.pythonapi.fegetenv(environment)
    environment[7] |= 0x8040 | 0x4000  # flushes to zero, and rounds upwards
    ctypes.pythonapi.fesetenv(environment)
    import gradkit, gradkit.jax
    def found():
        rows = jax.jit(gradkit.jax.rms_norm)(x)
        return [*map(np.asarray, (jax.jit(gradkit.jax.grad_norm)(tiny), rows))]
    flushed, flushes = found(), np.float32(1e-40) * np.float32(1) == 0
    environment[7] &= ~(0x8040 | 0x6000)
    ctypes.pythonapi.fesetenv(environment)
    right, alike = abs(flushed[0] / 3.162e-39 - 1) < 1e-3, map(np.array_equal, flushed, found())
    print(flushes, right, all(alike))
    """
    assert run_alone(program, GRADKIT_CPU=which) == "True True True\n"


def test_threads_that_begin_inside_of_jax_keep_them(run_alone):
    """Helpers inherit the settings of the thread that starts them, and are there for all calls."""
    program = """
    import jax, jax.numpy as jnp, numpy as np, gradkit, gradkit.jax

    gradkit.set_num_threads(2)
    grads = np.full(1 << 22, 1e-41, np.float32)
    jax.block_until_ready(jax.jit(gradkit.jax.grad_norm)(jnp.ones(grads.shape)))
    wanted = float(grads[0]) * grads.size**0.5
    print(abs(float(gradkit.grad_norm(grads)) / wanted - 1) < 1e-6)
    """
    assert run_alone(textwrap.dedent(program)) == "True\n"

"""``gradkit.jax`` on a GPU, beside the CPU: XLA calls gradkit there on its stream.

``make test-gpu``. Bits are a device's own; what rounding leaves to devices is small.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradkit.jax

from .test_gradkit_jax_lists import gradients
from .test_gradkit_jax_norms import CASES, passes

pytestmark = pytest.mark.gpu
BOUNDS = {
    "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
    "float16": {"rtol": 3e-3, "atol": 3e-3},
    "float32": {"rtol": 2e-5, "atol": 2e-5},
    "float64": {"rtol": 1e-12, "atol": 1e-12},
}


@pytest.fixture(scope="module", autouse=True)
def gpu():
    pytest.importorskip("cupy")
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")


def on(device, function, *given):
    with jax.default_device(device):
        return function(*jax.tree.map(jnp.asarray, given))


def assert_as_on_the_cpu(gpu, function, *given, **bounds):
    expected = on(jax.devices("cpu")[0], function, *given)
    got = on(gpu, function, *given)
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert one.devices() == {gpu}
        assert one.dtype == other.dtype
        wide = [np.asarray(each).astype(np.float64) for each in (one, other)]
        np.testing.assert_allclose(*wide, **bounds or BOUNDS[str(other.dtype)])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(gpu, name, dtype):
    case = CASES[name]
    with jax.enable_x64(dtype == "float64"):
        given = case.arguments(dtype, dtype if dtype == "float64" else "float32")
        assert_as_on_the_cpu(gpu, jax.jit(passes(case.ours)), *given, **BOUNDS[dtype])


@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "group_norm", "batch_norm"])
def test_each_example_of_a_vmap(gpu, name):
    case = CASES[name]
    first, *others = case.arguments("float32", "float32")
    many = np.stack([first, first[::-1] * 3, first + 1])
    norm = jax.vmap(passes(case.ours), (0, *[None] * len(others)))
    assert_as_on_the_cpu(gpu, jax.jit(norm), many, *others)


LISTS = {
    "grad_norm": gradkit.jax.grad_norm,
    "1-norm": partial(gradkit.jax.grad_norm, norm_type=1.0, scale=0.25),
    "clip_by_global_norm": lambda g: gradkit.jax.clip_by_global_norm(g, 0.5),
    "clip_by_block_norm": lambda g: gradkit.jax.clip_by_block_norm(g, 0.5, axis=0),
    "blocks": lambda g: gradkit.jax.clip_by_block_norm(g, 0.5, blocks=lambda name, _: name[0]),
    "clip_by_adaptive_norm": lambda g: gradkit.jax.clip_by_adaptive_norm(g, g, 0.5, axis=1),
    "accumulate_grads": lambda g: gradkit.jax.accumulate_grads(g, g, scale=1 / 3),
    "grad_stats": gradkit.jax.grad_stats,
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(gpu, name):
    grads = gradients("float32", "bfloat16", "float16")
    assert_as_on_the_cpu(gpu, jax.jit(LISTS[name]), grads)


def test_steps_in_a_loop_that_donates_its_buffers(gpu):
    """Hundreds of calls in one program, whose arrays XLA uses again."""

    @partial(jax.jit, donate_argnums=0)
    def train(params, x, y):
        def loss(params):
            hidden = gradkit.jax.rms_norm(jnp.tanh(x @ params["w"]), params["scale"])
            return jnp.mean((hidden.sum(-1) - y) ** 2)

        def step(params, _):
            value, grads = jax.value_and_grad(loss)(params)
            grads, norm = gradkit.jax.clip_by_global_norm(grads, 0.5)
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), (value, norm)

        return jax.lax.scan(step, params, None, length=100)

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 8)).astype("f4"), "scale": np.ones(8, "f4")}
    x, y = rng.normal(size=(16, 3)).astype("f4"), rng.normal(size=16).astype("f4")
    with jax.default_matmul_precision("highest"):
        assert_as_on_the_cpu(gpu, train, params, x, y, rtol=1e-2, atol=1e-3)


def test_work_between_xlas_own(gpu):
    """On XLA's stream: behind what makes its input, before what reads its result."""

    @jax.jit
    def chain(x):
        for _ in range(20):
            x = gradkit.jax.layer_norm(x @ x.T / 512 + 1)
        return x.sum(), x

    x = np.random.default_rng(0).normal(size=(512, 512)).astype("f4")
    with jax.default_matmul_precision("highest"):
        first = jax.tree.map(np.asarray, on(gpu, chain, x))
        again = jax.tree.map(np.asarray, on(gpu, chain, x))
    np.testing.assert_array_equal(first[1], again[1])
    assert np.isfinite(first[1]).all()
    np.testing.assert_allclose(first[1].mean(1), 0, atol=1e-5)
    np.testing.assert_allclose((first[1] ** 2).mean(1), 1, rtol=1e-3)

"""``gradkit.jax``'s norms inside of JAX's transformations, beside direct calls on NumPy arrays."""

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradkit
import gradkit.jax
from gradkit import _host
from gradkit._arrays.base import NOTHING
from gradkit.jax import _callbacks
from tests import bad_input
from tests.backends import Backend
from tests.bad_input.arguments import Cell, Factory
from tests.interop.test_gradkit_jax_norms import values
from tests.operations import OPERATIONS
from tests.tolerances import assert_same_bits


def arguments(shape):
    """The data of a layer norm, scale and bias."""
    return [values(shape), *(values(shape[-1:], seed=seed) for seed in (1, 2))]


# Values


def test_statistics_of_the_batch_without_a_gradient():
    x = values((8, 3, 2))
    _, mean, var = jax.jit(gradkit.jax.batch_norm)(x)
    np.testing.assert_allclose(mean, x.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(var, x.var((0, 2)), rtol=1e-6)
    constant = gradkit.jax.batch_norm(jnp.full((4, 2), 3.0), eps=3e-4)[2]
    np.testing.assert_array_equal(constant, [0, 0])  # 1 / inv_std**2 - eps is not
    slope = jax.grad(lambda x: sum(part.sum() for part in gradkit.jax.batch_norm(x)[1:]))(x)
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3)])
def test_arrays_without_elements(shape):
    x, scale, bias = arguments(shape)
    gradients = jax.jit(jax.grad(lambda *a: gradkit.jax.layer_norm(*a).sum(), (0, 1, 2)))
    for got, like in zip(gradients(x, scale, bias), (x, scale, bias), strict=True):
        np.testing.assert_array_equal(got, np.zeros_like(like))


# Transformations


def test_vmap_moves_axes_in_front():
    x, scale, bias = arguments((4, 5))
    many = np.stack([x, x * 2, x * 3], axis=-1)
    made = jax.vmap(gradkit.jax.layer_norm, (-1, None, None))(many, scale, bias)
    for k in range(3):
        assert_same_bits(made[k], gradkit.layer_norm(many[..., k], scale, bias)[0])


def test_results_are_written_where_xla_wants_them(monkeypatch, in_python):  # noqa: ARG001
    seen = []
    norm = _host.backend().rms_norm

    def noting(call):
        seen.append((call.x, call.y))
        norm(call)

    monkeypatch.setattr(_host.backend(), "rms_norm", noting)
    x = jnp.asarray(values((64, 8)))
    y = jax.block_until_ready(jax.jit(gradkit.jax.rms_norm)(x))
    read, written = (a.__array_interface__["data"][0] for a in seen[-1])
    assert (read, written) == (x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer())
    jax.clear_caches()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_inputs_stay_as_they_are_and_may_be_donated():
    x, scale, bias = map(jnp.asarray, arguments((8, 16)))
    before = np.array(x)

    def step(x, scale, bias):
        return x - jax.grad(lambda x: (gradkit.jax.layer_norm(x, scale, bias) ** 3).sum())(x)

    kept = jax.jit(step)(x, scale, bias)
    assert_same_bits(x, before)
    donated = jax.jit(step, donate_argnums=0)(x, scale, bias)
    assert x.is_deleted()
    assert_same_bits(donated, kept)


def test_on_a_gpu_work_goes_to_xlas_stream(monkeypatch):
    """With stand-ins for XLA's buffers and for CuPy: this has not run on a GPU."""
    seen = []
    pool = SimpleNamespace(malloc=len)
    cupy = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(_callbacks.cuda, "cupy", lambda: cupy)
    monkeypatch.setattr(_callbacks.cuda, "on_stream", lambda *a: seen.append(a) or NOTHING)
    view = lambda buffer, write: seen.append((buffer, write)) or buffer  # noqa: E731
    monkeypatch.setattr(_callbacks._DLPACK, "view", view)
    callbacks = []
    given = lambda callback, *_, **__: lambda *_: callbacks.append(callback)  # noqa: E731
    monkeypatch.setattr(_callbacks, "buffer_callback", given)
    run = lambda outs, ins: seen.append((outs, ins))  # noqa: E731
    _callbacks._through_buffers(run, [], [], {})
    x, y = (SimpleNamespace(__dlpack_device__=lambda: (2, 1)) for _ in range(2))
    callbacks[0](SimpleNamespace(stream=7), [y], x)
    assert seen == [(1, 7, len), (y, False), (x, False), ([y], [x])]


# Errors


# What is said of memory, of containers and of what gradkit.jax has otherwise.
OTHERWISE = (
    *("\\[", "read-only", "overlaps", "memory", "counterpart", "replica", "no group"),
    *("nonfinite", "byte order", "a NumPy scalar", "not ndarray", "a bool array, not", "per unit"),
    *(
        "is a NoneType; exp",
        "first step",
        "or an int",
        "and below 2",
    ),
)
REFUSED = [
    cell.call
    for row in bad_input.ROWS.values()
    for cell in row
    if isinstance(cell, Cell) and cell.raises
    if not any(words in cell.call.message for words in OTHERWISE)
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [name for name in gradkit.jax.__all__ if name in OPERATIONS])
def test_errors_are_those_of_direct_calls(name):
    """Of arrays, and while a function of them is traced."""
    function, tried = getattr(gradkit.jax, name), 0
    for _, arguments, error, said in (call for call in REFUSED if call.function == name):
        given = arguments(Factory(Backend()))
        if given.keys() <= inspect.signature(function).parameters.keys():
            arrays = {n: jnp.asarray(a) for n, a in given.items() if isinstance(a, np.ndarray)}
            with pytest.raises(error, match=said):
                function(**given | arrays)
            with pytest.raises(error, match=said):
                jax.eval_shape(lambda own, given=given: function(**given | own), arrays)
            tried += 1
    assert tried or name == "grad_stats"


def test_an_axis_that_there_is_not():
    with pytest.raises(NameError, match="i"):
        gradkit.jax.batch_norm(jnp.ones((3, 5)), axis_name="i")


@pytest.mark.parametrize("name", ["invertible_layer_norm", "invertible_rms_norm"])
def test_what_cannot_be_inverted_is_an_error_at_run_time(name):
    def loss(x, scale):
        return getattr(gradkit.jax, name)(x, scale).sum()

    x, scale = jnp.ones((2, 3)), jnp.array([1.0, 0.0, 1.0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="scale is zero or subnormal at flat"):
        jax.block_until_ready(jax.grad(loss)(x, scale))


# The whole


@pytest.mark.parametrize(
    "name", ["", ".accumulation", ".channel_norms", ".clipping", ".norms", ".transforms"]
)
def test_doctests(name):
    tried = doctest.testmod(importlib.import_module(f"gradkit.jax{name}"))
    assert tried.failed == 0
    assert tried.attempted > 0 or name == ""


def test_everything_public_is_documented():
    from gradkit.jax import transforms

    for module in (gradkit.jax, transforms):
        for name in module.__all__:
            text = getattr(module, name).__doc__
            if not name.endswith("State"):
                wanted = ("Parameters", "Returns", "Examples")
                assert all(re.search(rf"^ +{w}\n +-+$", text, re.MULTILINE) for w in wanted), name


def test_transforms_say_that_they_need_optax(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "gradkit.jax.transforms", raising=False)
    with pytest.raises(ImportError, match=r"^gradkit\.jax\.transforms needs optax: pip install"):
        importlib.import_module("gradkit.jax.transforms")


def test_the_code_of_the_page_runs():
    page = Path(gradkit.__file__).parents[1] / "docs" / "jax.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names = {}
    exec(blocks[0], names)
    assert float(names["norm"]) > 0
    exec(blocks[1], names)
    np.testing.assert_allclose(names["mean"], np.arange(24.0).reshape(8, 3).mean(0))
    assert float(names["norm"]) == pytest.approx(8**0.5)
    assert float(gradkit.grad_norm(np.asarray(names["grads"]))) == pytest.approx(1)
    exec(blocks[2], names)
    assert float(names["norms"]["experts"]) == pytest.approx(24**0.5)
    np.testing.assert_array_equal(names["grads"]["dense"], np.ones(3))
    exec(blocks[3], names)
    mean = np.asarray(names["x"] @ names["params"]["w"]).mean(0)
    np.testing.assert_allclose(names["stats"]["running_mean"], 0.1 * mean, rtol=1e-6)
    assert names["evaluated"].shape == (16, 8)
    exec(blocks[4], names)
    wanted = np.tile(names["params"]["scale"], (5, 1))
    np.testing.assert_allclose(names["normal"], wanted, rtol=1e-5)
    before = names["params"]
    exec(blocks[5], names)
    assert int(names["state"].step) == 0
    assert float(names["state"].inner[0].norm) > 0
    assert float(jnp.abs(names["params"]["w"] - before["w"]).max()) > 0

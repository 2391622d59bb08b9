"""``gradkit.jax``'s clipping and accumulation, and its transformations beside optax's own."""

from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradkit
import gradkit.jax
from gradkit.jax import accumulation, clipping, transforms
from tests.interop.libraries import checking_leaks
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits

INF = float("inf")


def gradients(*dtypes, seed=0):
    """A pytree with an array of each dtype, one of them 0-d, and a None."""
    rng = np.random.default_rng(seed)
    made = [rng.normal(0, 3, (k + 2, 5)).astype(DTYPES[d]) for k, d in enumerate(dtypes)]
    return {"list": made, "none": None, "tuple": (np.float32(rng.normal()) * np.ones((), "f4"),)}


def assert_same_tree(got, ref):
    assert jax.tree.structure(got) == jax.tree.structure(ref)
    assert_all_same_bits(*map(jax.tree.leaves, (got, ref)))


# Clipping


@pytest.mark.guarantee("Inside JAX's transformations")
@pytest.mark.parametrize(
    ("dtypes", "order", "options"),
    [
        (("float32", "float32"), 2.0, {}),
        (("float16", "bfloat16", "float32"), 2.0, {"scale": 1 / 3}),
        (("bfloat16",), 1.0, {"scale": -0.1}),
        (("float32", "float16"), INF, {"eps": 0.0}),
        (("float64", "float32"), 3.0, {"scale": 1e200}),
    ],
)
def test_bits_of_direct_calls(dtypes, order, options, way):  # noqa: ARG001
    grads = gradients(*dtypes)
    with jax.enable_x64("float64" in dtypes):
        for limit in (0.1, 1e300):
            ref, norm = gradkit.clip_by_global_norm(grads, limit, order, **options)
            clip = lambda g, o=options, m=limit: gradkit.jax.clip_by_global_norm(g, m, order, **o)  # noqa: E731
            for got, found in (clip(grads), jax.jit(clip)(grads)):
                assert_same_tree(got, ref)
                assert found == norm.astype(found.dtype)
            alone = gradkit.jax.grad_norm(grads, order, scale=options.get("scale", 1.0))
            assert alone == found
            assert found.dtype == (np.float64 if "float64" in dtypes else np.float32)


def test_numbers_may_be_traced():
    grads = gradients("float32")
    clip = jax.jit(lambda g, m, s: gradkit.jax.clip_by_global_norm(g, m, scale=s))
    for limit, scale in ((0.5, 0.25), (INF, 2.0), (0.0, 1.0)):
        got, norm = clip(grads, limit, scale)
        ref, wanted = gradkit.clip_by_global_norm(grads, limit, scale=scale)
        assert_same_tree(got, ref)
        assert norm == wanted.astype(np.float32)
    for limit, scale in ((-1.0, 1.0), (float("nan"), 1.0), (1.0, float("nan"))):
        got, _ = clip(grads, limit, scale)
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(got))
    zeros, _ = jax.jit(
        lambda g, s: gradkit.jax.clip_by_global_norm(g, 1.0, scale=s, nonfinite="zero")
    )(grads, INF)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(zeros))


@pytest.mark.parametrize("axis", [None, "rows"])
def test_an_infinite_scale_makes_finite_gradients_0(axis):
    """As an infinite norm does, whatever made it so."""
    clip = lambda g, s: gradkit.jax.clip_by_global_norm(g, 1.0, scale=s, axis_name=axis)  # noqa: E731
    grads = jnp.array([[3.0, 0.0], [1.0, -2.0]])
    clipped, norm = jax.vmap(clip, (0, None), axis_name="rows")(grads, jnp.array(jnp.inf))
    assert jnp.isinf(norm).all()
    assert not clipped.any()


def test_copies_are_those_of_the_gradients_that_count():
    clip = lambda g: gradkit.jax.clip_by_global_norm(  # noqa: E731
        g, INF, axis_name="rows", replicas=[1, 2], count=[False, True]
    )
    grads = [jnp.array([[7.0], [9.0]]), jnp.array([[3.0, 4.0]] * 2)]
    _, norm = jax.vmap(clip, axis_name="rows")(grads)
    assert norm.tolist() == [5, 5]


def test_another_number_compiles_nothing():
    grads = gradients("float32")
    gradkit.jax.clip_by_global_norm(grads, 1.0)
    before = clipping._clip._cache_size()
    for limit in (2.0, 3.0):
        gradkit.jax.clip_by_global_norm(grads, limit, scale=1 / limit)
    assert clipping._clip._cache_size() == before


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_what_is_not_finite(value):
    grads = {"w": np.array([1.0, value], np.float32), "b": np.ones(2, np.float32)}
    for policy in ("propagate", "zero"):
        got, norm = gradkit.jax.clip_by_global_norm(grads, 1.0, nonfinite=policy)
        ref, _ = gradkit.clip_by_global_norm(grads, 1.0, nonfinite=policy)
        assert_same_tree(got, ref)
        assert not np.isfinite(norm)


def test_a_norm_beyond_float32_still_clips():
    grads = np.full(4, 3e38, np.float32)
    got, norm = jax.jit(lambda g: gradkit.jax.clip_by_global_norm(g, 1.0))(grads)
    assert norm == INF
    np.testing.assert_allclose(got, 0.5, rtol=1e-6)


def test_no_gradients():
    for grads in ({}, {"w": None}):
        assert gradkit.jax.clip_by_global_norm(grads, 1.0) == (grads, 0)
        assert gradkit.jax.grad_norm(grads) == 0
        assert gradkit.jax.accumulate_grads(grads, grads) == grads


def test_gradients_are_clipped_where_they_lie():
    grads = [jnp.ones((64, 64)), jnp.ones(7)]
    places = [g.unsafe_buffer_pointer() for g in grads]
    clip = lambda g: gradkit.jax.clip_by_global_norm(g, 1.0)[0]  # noqa: E731
    kept = jax.jit(clip)(grads)
    assert [g.unsafe_buffer_pointer() for g in grads] == places
    assert all((g == 1).all() for g in grads)
    donated = jax.jit(clip, donate_argnums=0)(grads)
    assert [g.unsafe_buffer_pointer() for g in donated] == places
    assert_same_tree(donated, kept)


@pytest.mark.guarantee("Inside JAX's transformations")
def test_every_example_of_a_vmap_has_its_own_norm(way):  # noqa: ARG001
    grads = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones((3,), np.float32)}
    limits = np.array([1.0, 2.0, 3.0], np.float32)
    cases = [
        (({"w": 0, "b": 0}, None), (grads, 1.0)),
        (({"w": 0, "b": None}, 0), ({"w": grads["w"], "b": np.ones(2, np.float32)}, limits)),
        ((None, 0), ({"w": grads["w"][1]}, limits)),
    ]
    for axes, given in cases:
        got, norms = jax.jit(jax.vmap(gradkit.jax.clip_by_global_norm, axes))(*given)
        for k in range(3):
            own = {
                name: g[k] if axes[0] and axes[0][name] == 0 else g for name, g in given[0].items()
            }
            ref, norm = gradkit.clip_by_global_norm(own, limits[k] if axes[1] == 0 else 1.0)
            assert_same_tree(jax.tree.map(lambda a, k=k: a[k], got), ref)
            assert norms[k] == norm.astype(np.float32)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda c, g: c(g, 1.0, scale=jnp.ones((), bool)), TypeError, "scale has dtype"),
        (lambda c, g: c(g, 1.0, nonfinite="raise"), ValueError, 'pass "zero"'),
        (lambda c, g: c(g, 1.0, replicas=2), ValueError, "pass axis_name too"),
        (lambda c, g: c(g, 1.0, replicas=0, axis_name="i"), ValueError, "at least 1, not 0"),
        (lambda c, _: c({"a": [jnp.ones(2, int)]}, 1.0), TypeError, r"grads\['a'\]\[0\] has dtype"),
        (lambda c, _: c({"a": "text"}, 1.0), TypeError, "text|str"),
        (lambda c, g: c(g, jax.random.key(0)), TypeError, "max_norm has dtype key<"),
        (lambda c, _: c([jax.random.key(0)], 1.0), TypeError, r"grads\[0\] has dtype key<"),
        (lambda c, g: c(g, 1.0, clip=[True]), ValueError, "clip must be like grads, or end above"),
    ],
)
def test_errors_name_the_argument(call, error, said):
    with pytest.raises(error, match=said):
        call(gradkit.jax.clip_by_global_norm, {"w": jnp.ones(3)})


def test_clipping_is_not_differentiable():
    def norm(g):
        return gradkit.jax.clip_by_global_norm(g, 1.0)[1]

    for f in (norm, gradkit.jax.grad_norm, lambda g: gradkit.jax.accumulate_grads(g, g).sum()):
        with pytest.raises(TypeError, match=r"gradkit.jax.\w+ is not differentiable; "):
            jax.grad(f)(jnp.ones(3))


# Accumulation


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_sums_of_direct_calls(scale, overwrite, way):  # noqa: ARG001
    buffers = {"a": np.ones((3, 4), np.float32), "b": [np.full(5, np.nan, np.float32)]}
    grads = {"a": gradients("bfloat16")["list"][0][:1, :4].repeat(3, 0),
             "b": [np.linspace(0, 1, 5, dtype=np.float32)]}  # fmt: skip
    ref = gradkit.accumulate_grads(
        jax.tree.map(np.copy, buffers), grads, scale=scale, overwrite=overwrite
    )
    add = gradkit.jax.accumulate_grads
    assert_same_tree(add(buffers, grads, scale=scale, overwrite=overwrite), ref)
    traced = jax.jit(lambda b, g, f, u: add(b, g, scale=scale, overwrite=f, do_update=u))
    assert_same_tree(traced(buffers, grads, overwrite, True), ref)
    assert_same_tree(traced(buffers, grads, overwrite, False), buffers)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_sums_that_keep_what_rounding_drops(name, way):  # noqa: ARG001
    """With the bits of direct calls, also carried through a scan; 1 is lost in 256 otherwise."""
    start = {"a": jnp.full((3, 4), 256, name), "b": [jnp.full(5, 1, name)]}
    grads = {"a": jnp.full((3, 4), 1, name), "b": [jnp.linspace(0, 1, 5, dtype=name)]}
    host, kept = ([np.array(leaf) for leaf in jax.tree.leaves(start)] for _ in range(2))
    gradkit.zero_grad(kept)
    arriving = [np.array(leaf) for leaf in jax.tree.leaves(grads)]
    for _ in range(7):
        gradkit.accumulate_grads(host, arriving, scale=0.3, compensation=kept)

    def add(buffers, kept):
        return gradkit.jax.accumulate_grads(buffers, grads, scale=0.3, compensation=kept)

    nothing = jax.tree.map(jnp.zeros_like, start)
    total, _ = jax.jit(jax.lax.scan, static_argnums=0)(
        lambda carried, _: (add(*carried), None), (start, nothing), jnp.arange(7)
    )
    assert_same_tree(jax.tree.leaves(total), [*host, *kept])
    with pytest.raises(ValueError, match=r"compensation\['b.0'\] has no counterpart|counterpart"):
        add(start, {"a": nothing["a"]})
    with pytest.raises(TypeError, match=r"compensation\['a'\] has dtype float16 and buffers"):
        add(start, jax.tree.map(lambda x: x.astype("float16"), nothing))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_compensated_sums_that_overwrite_or_change_nothing(overwrite, update, way):  # noqa: ARG001
    """Each argument, decided while a function is traced or when it runs."""
    buffers, kept = [np.full(5, np.nan if overwrite else 1, "f4")], [np.full(5, 0.25, "f4")]
    grads = [np.linspace(1, 1.0001, 5, dtype="f4")]
    numbers = {"scale": 1 / 3, "overwrite": overwrite}
    expected = [array.copy() for array in (*buffers, *kept)]
    if update:
        given = expected[:1], grads
        gradkit.accumulate_grads(*given, compensation=expected[1:], **numbers)
        assert np.isfinite(expected).all()
    add = partial(gradkit.jax.accumulate_grads, buffers, grads, compensation=kept)
    traced = jax.jit(lambda f, u: add(scale=1 / 3, overwrite=f, do_update=u))
    for found in (traced(overwrite, update), add(**numbers, do_update=update)):
        assert_same_tree(jax.tree.leaves(found), expected)


def test_sums_rounded_at_random(way):  # noqa: ARG001
    """With the bits of direct calls; the seed may be the number of a step that is carried on."""
    start = {"a": jnp.full((3, 40), 256, "bfloat16"), "b": [jnp.ones(50, "float16")]}
    grads = {
        "a": jnp.full((3, 40), 0.7, "bfloat16"),
        "b": [jnp.linspace(0, 1e-3, 50, dtype="float16")],
    }
    host, arriving = (list(map(np.array, jax.tree.leaves(tree))) for tree in (start, grads))
    for step in range(5):
        gradkit.accumulate_grads(host, arriving, scale=0.3, rounding="stochastic", seed=step)
    add = partial(gradkit.jax.accumulate_grads, scale=0.3, rounding="stochastic")
    total, _ = jax.jit(jax.lax.scan, static_argnums=0)(
        lambda carried, step: (add(carried, grads, seed=step), None), start, jnp.arange(5)
    )
    assert_same_tree(jax.tree.leaves(total), host)
    one = gradkit.accumulate_grads(
        list(map(np.array, jax.tree.leaves(start))),
        arriving,
        scale=0.3,
        rounding="stochastic",
        seed=7 + 2**40,
    )
    assert_same_tree(jax.tree.leaves(add(start, grads, seed=7 + 2**40)), one)
    with jax.enable_x64(True):
        assert_same_tree(jax.tree.leaves(add(start, grads, seed=jnp.array(7 + 2**40))), one)
    with pytest.raises(TypeError, match="seed has dtype float32; accepted: integers"):
        add(start, grads, seed=jnp.ones(()))
    with pytest.raises(ValueError, match="seed must be at least 0 and below"):
        add(start, grads, seed=-1)
    with pytest.raises(TypeError, match=r"buffers\['a'\] has dtype float32; rounding="):
        add(jax.tree.map(lambda x: x.astype("float32"), start), grads)


def test_buffers_are_written_in_place_if_nobody_else_needs_them():
    buffer, grad = jnp.zeros((32, 32)), jnp.ones((32, 32), jnp.bfloat16)
    place = buffer.unsafe_buffer_pointer()
    jax.jit(gradkit.jax.accumulate_grads)(buffer, grad)
    np.testing.assert_array_equal(buffer, 0)
    once = jax.jit(gradkit.jax.accumulate_grads, donate_argnums=0)(buffer, grad)
    assert once.unsafe_buffer_pointer() == place
    total, _ = jax.lax.scan(
        lambda b, g: (gradkit.jax.accumulate_grads(b, g), None), once, jnp.stack([grad] * 4)
    )
    np.testing.assert_array_equal(total, 5)
    np.testing.assert_array_equal(once, 1)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda add, b: add({"w": b}, {"v": b}), ValueError, r"has no counterpart"),
        (
            lambda add, b: add({"w": [b]}, {"w": [jnp.ones(4)]}),
            ValueError,
            r"grads\['w.0'\] has sh",
        ),
        (lambda add, b: add(b.astype("f2"), b), TypeError, "would lose precision"),
        (lambda add, b: add(b, b, do_update=jnp.ones(2, bool)), TypeError, "do_update must be"),
        (lambda add, b: add(b, b, compensation=b[:2]), ValueError, "compensation has shape"),
        (lambda add, b: add(b, b, rounding="stochastic"), TypeError, "dtype float32; rounding="),
    ],
)
def test_errors_of_accumulation_name_the_argument(call, error, said):
    with pytest.raises(error, match=said):
        call(gradkit.jax.accumulate_grads, jnp.zeros(3))


# optax


def trained(optimizer, grads, params, **extra):
    """The parameters after each of some gradients."""
    state, seen = optimizer.init(params), []

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
        seen.append(params)
    return seen, state


def steps(count, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), count)
    return [{"w": jax.random.normal(k, (4, 3), dtype) * 2, "b": jnp.ones(3, dtype)} for k in keys]


def assert_close_trees(got, ref, rtol=1e-5):
    for one, other in zip(*map(jax.tree.leaves, (got, ref)), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=rtol, atol=1e-6
        )


def test_a_chain_clips_as_optax_does():
    grads = steps(8)
    params = jax.tree.map(jnp.zeros_like, grads[0])
    ours, state = trained(
        optax.chain(transforms.clip_by_global_norm(3.0), optax.adam(0.1)), grads, params
    )
    theirs, _ = trained(optax.chain(optax.clip_by_global_norm(3.0), optax.adam(0.1)), grads, params)
    assert_close_trees(ours, theirs)
    np.testing.assert_allclose(state[0].norm, optax.tree.norm(grads[-1]), rtol=1e-6)


def test_a_limit_may_be_a_hyperparameter():
    grads = steps(3)
    params = jax.tree.map(jnp.zeros_like, grads[0])

    def optimizer(clip, *static):
        limit = optax.linear_schedule(1.0, 3.0, 3)
        clip = optax.inject_hyperparams(clip, static_args=static)(max_norm=limit)
        return optax.chain(clip, optax.sgd(0.1))

    static = ("norm_type", "eps", "replicas")
    ours, _ = trained(optimizer(transforms.clip_by_global_norm, *static), grads, params)
    theirs, _ = trained(optimizer(optax.clip_by_global_norm), grads, params)
    assert_close_trees(ours, theirs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_accumulation_takes_the_steps_of_multisteps(dtype):
    grads = steps(7, dtype)
    params = jax.tree.map(jnp.zeros_like, grads[0])

    def inner(clip):
        return optax.chain(clip(2.0), optax.adam(0.1))

    ours, state = trained(
        transforms.accumulate(inner(transforms.clip_by_global_norm), 3), grads, params
    )
    theirs, _ = trained(optax.MultiSteps(inner(optax.clip_by_global_norm), 3), grads, params)
    assert state.step == 1
    if dtype == jnp.float32:
        assert_close_trees(ours, theirs)
    else:  # whose sums are bfloat16, and ours are not
        assert {b.dtype for b in jax.tree.leaves(state.buffers)} == {jnp.dtype("float32")}
        assert_close_trees(ours, theirs, rtol=0.1)
    assert_close_trees(ours[1], params)


def test_micro_batches_count_by_their_weight():
    """The mean over all tokens, where each loss is the mean over its own."""
    optimizer = transforms.accumulate(optax.sgd(1.0), 2)
    params = jnp.zeros(())
    for tokens in ((1, 3), (5, 2), (0, 0)):
        state = optimizer.init(params)
        for count, grad in zip(tokens, (4.0, 8.0), strict=True):
            updates, state = optimizer.update(jnp.asarray(grad), state, params, weight=count)
        np.testing.assert_allclose(updates, -np.dot(tokens, (4, 8)) / max(sum(tokens), 1))
        assert state.step == 0


def test_the_inner_optimizer_gets_what_else_is_passed():
    def update(updates, state, params=None, *, factor, by):  # noqa: ARG001
        return jax.tree.map(lambda u: by(u, factor), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer = transforms.accumulate(inner, 2)
    state = optimizer.init(jnp.zeros(2))
    for wanted in (0, 6):
        rest = {"factor": jnp.asarray(2.0), "by": jnp.multiply}
        updates, state = optimizer.update(jnp.full(2, 3.0), state, **rest)
        np.testing.assert_array_equal(updates, wanted)


def test_nan_of_an_earlier_step_is_forgotten():
    optimizer = transforms.accumulate(optax.sgd(1.0), 1)
    state = optimizer.init(jnp.zeros(2))
    _, state = optimizer.update(jnp.full(2, jnp.nan), state)
    updates, _ = optimizer.update(jnp.ones(2), state)
    np.testing.assert_array_equal(updates, -1)


@pytest.mark.parametrize("wide", [True, False])
def test_spikes_are_clipped_as_by_a_spike_guard(wide):
    norms = [1.0, 1.1, 0.9, 1.2, 30.0, float("nan"), 1.0, 2.0, 1.0]
    guard, how = gradkit.SpikeGuard(warmup=3), {"eps": 3.0, "nonfinite": "zero"}
    with jax.enable_x64(wide):
        clip = transforms.clip_spikes(warmup=3, **how)
        state, update = clip.init(None), jax.jit(clip.update)
        for norm in norms:
            grads = {"w": np.array([0.6 * norm, 0.8 * norm])}
            got, state = update(jax.tree.map(jnp.asarray, grads), state)
            total = gradkit.grad_norm(grads)
            limit = guard.update(total)
            ref, _ = gradkit.clip_by_global_norm(grads, limit, **how)
            if wide:
                assert_same_bits(got["w"], ref["w"])
                assert_same_bits(state.max_norm, limit)
            np.testing.assert_allclose(got["w"], ref["w"], rtol=1e-5)
            np.testing.assert_allclose(state.norm, total, rtol=1e-6)
        known = guard.state_dict()
        np.testing.assert_allclose(state.statistics, list(known.values())[:3], rtol=1e-5)
        assert state.statistics.dtype == (np.float64 if wide else np.float32)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: transforms.clip_spikes(decay=1.0), ValueError, "decay must be greater than 0"),
        (lambda: transforms.accumulate(optax.sgd(1.0), 0), ValueError, "every must be at least 1"),
        (lambda: transforms.accumulate(optax.sgd(1.0), 1.5), TypeError, "every must be an int"),
    ],
)
def test_errors_of_transformations(call, error, said):
    with pytest.raises(error, match=said):
        call()


OPTIONS = {"norm_type": 1.0, "scale": 0.5, "eps": 50.0, "nonfinite": "zero", "replicas": 2}
NAMES = ["clip_by_global_norm", "clip_by_block_norm", "clip_by_adaptive_norm", "clip_spikes"]


@pytest.mark.parametrize("name", [*NAMES, "skip_steps"])
def test_every_option_of_a_transformation_changes_what_it_does(name):
    """As it changes what the function does; over an axis of two, if it is of ranks."""
    transformation, function = getattr(transforms, name), getattr(gradkit.jax, name, None)
    grads = {"a": jnp.array([[3.0, 4.0], [6.0, 8.0]]), "b": jnp.array([[5.0, 1.0], [5.0, 1.0]])}
    of_steps = {"clip_spikes": {"warmup": 1}, "skip_steps": {"optimizer": optax.sgd(1.0)}}
    limit = () if name in of_steps else (0.5,)
    with_params = name == "clip_by_adaptive_norm"

    def stepped(grads, **options):
        clip = transformation(*limit, **of_steps.get(name, {}), **options)
        state = clip.init(grads)
        for size in (0.1, 0.2, 1.0):
            updates, state = clip.update(jax.tree.map(lambda g, s=size: g * s, grads), state, grads)
        return updates, state

    def direct(grads, **options):
        return function(grads, *((grads,) if with_params else ()), *limit, **options)

    for option in OPTIONS.keys() & signature(transformation).parameters.keys():
        given, other = grads, {}
        if option == "nonfinite":
            given = jax.tree.map(lambda g: g.at[0, 0].set(jnp.nan), grads)
        if option == "replicas":
            other = {"axis_name": "i"} | ({"blocks": "all"} if "block" in name else {})
        options = {option: OPTIONS[option]} | other
        over = partial(jax.vmap, axis_name="i")
        found, plain = (
            over(partial(stepped, **options))(given),
            over(partial(stepped, **other))(given),
        )
        pairs = zip(*map(jax.tree.leaves, (found, plain)), strict=True)
        assert not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs), option
        if function is not None:
            assert_same_tree(found[0], over(partial(direct, **options))(given)[0])


def test_nothing_is_left_of_a_norm_that_is_not_finite():
    """Of gradients that are not clipped either; and of finite ones, if the scale is infinite."""
    clip = partial(gradkit.jax.clip_by_global_norm, max_norm=1.0)
    bad = {"a": jnp.ones(2), "b": jnp.array([INF, 1])}
    some = jax.jit(partial(clip, nonfinite="zero", clip={"a": True, "b": False}))
    assert_same_tree(some(bad)[0], {"a": np.zeros(2, "f4"), "b": np.zeros(2, "f4")})
    clipped, norm = jax.jit(lambda scale: clip(jnp.ones(2), scale=scale))(jnp.array(INF))
    assert norm == INF
    assert_same_tree(clipped, np.zeros(2, "f4"))


def test_a_limit_that_is_an_integer_beyond_float32():
    with jax.enable_x64(True):
        clipped, _ = gradkit.jax.clip_by_global_norm(jnp.array(2.0**40), jnp.array(2**25 + 1))
    assert float(clipped) == 2**25 + 1


def test_an_eps_that_is_added_and_gradients_that_are_wider():
    grads = {"w": jnp.array([2.0])}
    clipped, _ = gradkit.jax.clip_by_global_norm(grads, 0.5, eps=0.5, eps_mode="add")
    np.testing.assert_allclose(clipped["w"], 0.4, rtol=1e-6)
    chain = transforms.clip_by_global_norm(0.5, eps=0.5, eps_mode="add")
    np.testing.assert_allclose(chain.update(grads, chain.init(grads))[0]["w"], 0.4, rtol=1e-6)
    buffers = {"w": jnp.ones(1, jnp.bfloat16)}
    with pytest.raises(TypeError, match="would lose precision"):
        gradkit.jax.accumulate_grads(buffers, grads)
    added = jax.jit(gradkit.jax.accumulate_grads, static_argnames="casting")
    summed = added(buffers, grads, casting="same_kind")["w"]
    assert (summed.dtype, float(summed[0])) == (jnp.bfloat16, 3.0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_some_are_clipped_and_some_count(scale, nonfinite):
    """As outside of ``jit``, to the bit."""
    grads = steps(1)[0] | {"more": [jnp.full(3, 2.0), jnp.array([jnp.nan])]}
    hosts = jax.tree.map(np.asarray, grads)
    masks = {"clip": {"w": True, "b": False, "more": True}}
    masks["count"] = {"w": True, "b": True, "more": [True, False]}
    options = masks | {"scale": scale, "nonfinite": nonfinite}
    got, norm = jax.jit(lambda g: gradkit.jax.clip_by_global_norm(g, 0.7, **options))(grads)
    ref, known = gradkit.clip_by_global_norm(hosts, 0.7, **options)
    assert_all_same_bits(*map(jax.tree.leaves, (got, ref)))
    np.testing.assert_allclose(norm, known, rtol=1e-7)
    with pytest.raises(TypeError, match="clip must be a bool, not int"):
        gradkit.jax.clip_by_global_norm(grads, 0.7, clip=1)


TRACED = {
    "grad_norm": gradkit.jax.grad_norm,
    "grad_stats": lambda g: gradkit.jax.grad_stats(g).table,
    "clip_by_global_norm": lambda g: gradkit.jax.clip_by_global_norm(g, 1.0),
    "clip_by_block_norm": lambda g: gradkit.jax.clip_by_block_norm(g, 1.0, axis=0),
    "clip_by_block_norm, blocks": lambda g: gradkit.jax.clip_by_block_norm(g, 1.0, blocks="all"),
    "clip_by_adaptive_norm": lambda g: gradkit.jax.clip_by_adaptive_norm(g, g),
    "accumulate_grads": lambda g: gradkit.jax.accumulate_grads(g, g, scale=0.5),
    "accumulate_grads, compensated": lambda g: gradkit.jax.accumulate_grads(g, g, compensation=g),
    "accumulate_grads, stochastic": lambda g: gradkit.jax.accumulate_grads(
        *[jax.tree.map(lambda a: a.astype("bfloat16"), g)] * 2, rounding="stochastic", seed=3
    ),
}
OPTIMIZERS = {
    "clip_by_global_norm": lambda: transforms.clip_by_global_norm(1.0),
    "clip_by_block_norm": lambda: transforms.clip_by_block_norm(1.0),
    "clip_by_adaptive_norm": transforms.clip_by_adaptive_norm,
    "clip_spikes": lambda: transforms.clip_spikes(warmup=1),
    "accumulate": lambda: transforms.accumulate(optax.adam(0.1), 2),
    "skip_steps": lambda: transforms.skip_steps(
        optax.adam(0.1), guard=gradkit.SpikeGuard(on_spike="skip")
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_nothing_of_a_trace_outlives_it(name, way):  # noqa: ARG001
    (grads,) = steps(1)
    function = TRACED[name]
    with checking_leaks():
        found = jax.jit(function)(grads)
        one = jax.tree.map(lambda a: a[None], grads)
        many = jax.jit(jax.vmap(function))(one)
        _, scanned = jax.lax.scan(lambda c, g: (c, function(g)), None, one)
    for own in (many, scanned):
        assert_close_trees(jax.tree.map(lambda a: a[0], own), found)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_nothing_of_a_step_outlives_it(name, jit, way):  # noqa: ARG001
    grads = steps(3)
    optimizer = OPTIMIZERS[name]()
    update = jax.jit(optimizer.update) if jit else optimizer.update
    with checking_leaks():
        state = optimizer.init(grads[0])
        for grad in grads:
            updates, state = update(grad, state, grads[0])
    assert jax.tree.structure(updates) == jax.tree.structure(grads[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_outside_of_jit_a_step_is_compiled_once(name, compilations):
    """One that waits or is skipped, and one that updates."""
    optimizer, params = OPTIMIZERS[name](), jnp.zeros(3)
    state = optimizer.init(params)
    for step in range(6):
        if step == 2:
            assert compilations  # they are counted
            compilations.clear()
        _, state = optimizer.update(jnp.full(3, jnp.nan if step % 2 else 1.0), state, params)
    assert compilations == []


def test_every_function_of_a_pytree_is_traced():
    modules = "accumulation", "block_clipping", "clipping", "statistics"
    every = [name for module in modules for name in getattr(gradkit.jax, module).__all__]
    assert {*TRACED} >= {*every}
    assert {*OPTIMIZERS} == {n for n in transforms.__all__ if not n.endswith("State")}


# Skipped steps


def bytes_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def after(optimizer, params, grads, *, jit=True):
    """Parameters, and what the optimizer has kept, after a step by each of the gradients."""
    update = jax.jit(optimizer.update) if jit else optimizer.update
    state = optimizer.init(params)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.guarantee("A step is skipped")
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("odd", [jnp.nan, jnp.inf, 1e4])
def test_a_run_with_skipped_steps_is_one_that_never_saw_them(odd, jit):
    optimizer = transforms.skip_steps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), limit=100.0
    )
    good = steps(6)
    bad = jax.tree.map(lambda g: g * odd, good[0])
    params = {"w": jnp.ones((4, 3)), "b": jnp.array([-0.0, 0.0, 1.0])}
    run = partial(after, optimizer, params, jit=jit)
    assert bytes_of(run([bad])[0]) == bytes_of(params)
    found, state = run([bad, *good[:3], bad, bad, *good[3:], bad])
    expected, known = run(good)
    assert bytes_of((found, state.inner)) == bytes_of((expected, known.inner))
    assert (int(state.skipped), bool(state.taken), bool(known.taken)) == (4, False, True)
    assert int(known.skipped) == 0


INNER = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "adam, moments of a dtype": lambda: optax.adam(0.1, mu_dtype="float32"),
    "lion": lambda: optax.lion(0.1),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "a chain": lambda: optax.chain(optax.zero_nans(), optax.adamw(0.1)),
}


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        *((name, ("bfloat16", "float32")) for name in INNER),
        *((name, ("float32", "bfloat16")) for name in ("adam", "adam, moments of a dtype")),
    ],
)
def test_gradients_of_another_dtype_than_parameters(name, dtypes):
    """Bits of the optimizer alone, whose state has the wider dtype from the first step on."""
    params = {"w": jnp.ones((4, 3), dtypes[0]), "b": jnp.full(3, 2, dtypes[0])}
    grads = steps(3, dtypes[1])
    inner = INNER[name]
    expected, known = after(inner(), params, grads)
    bad = jax.tree.map(lambda g: g * jnp.nan, grads[0])
    odd = [bad, grads[0], bad, *grads[1:], bad]
    skipping = after(transforms.skip_steps(inner()), params, odd)
    twice = [g for g in grads for _ in range(2)]
    summing = after(transforms.accumulate(inner(), 2), params, twice)
    for found, state in (skipping, summing):
        assert_same_tree((found, state.inner), (expected, known))
    kept, state = after(transforms.skip_steps(inner()), params, [bad])
    assert_same_tree(kept, params)
    start = inner().init(params)
    for found, wanted in zip(*map(jax.tree.leaves, (state.inner, start)), strict=True):
        np.testing.assert_array_equal(found.astype(wanted.dtype), wanted)


def test_after_many_bad_steps_the_next_is_skipped_too():
    """``optax.apply_if_finite`` gives up here and lets NaN through."""
    params, bad = jnp.ones(2), jnp.full(2, jnp.nan)
    ours, theirs = transforms.skip_steps(optax.adam(0.1)), optax.apply_if_finite(optax.adam(0.1), 3)
    for optimizer, nan in ((ours, False), (theirs, True)):
        state, own = optimizer.init(params), params
        for _ in range(5):
            updates, state = optimizer.update(bad, state, own)
            own = optax.apply_updates(own, updates)
        assert bool(jnp.isnan(own).any()) is nan


def test_spikes_are_skipped_as_by_a_spike_guard():
    guard = gradkit.SpikeGuard(warmup=3, on_spike="skip")
    optimizer = transforms.skip_steps(optax.sgd(1.0), guard=guard, limit=40.0)
    state, update = optimizer.init(jnp.zeros(1)), jax.jit(optimizer.update)
    for norm in (1.0, 1.1, 50.0, 0.9, 1.2, 30.0, float("nan"), 1.0, 35.0):
        limit = min(float(guard.update(norm)), 40.0)
        updates, state = update(jnp.array([norm]), state)
        assert bool(state.taken) == (norm <= limit)
        np.testing.assert_allclose(state.limit, limit, rtol=1e-6)
        np.testing.assert_array_equal(updates, np.float32(-norm if norm <= limit else 0))
    known = list(guard.state_dict().values())[:3]
    np.testing.assert_allclose(state.statistics, known, rtol=1e-5)


def test_what_else_is_passed_reaches_the_optimizer_that_is_not_skipped():
    def update(updates, state, params=None, *, factor):  # noqa: ARG001
        return jax.tree.map(lambda u: u * factor, updates), state

    optimizer = transforms.skip_steps(optax.GradientTransformationExtraArgs(lambda _: (), update))
    state = optimizer.init(jnp.zeros(2))
    for given, wanted in ((3.0, 6.0), (jnp.nan, 0.0)):
        updates, state = optimizer.update(jnp.full(2, given), state, factor=jnp.asarray(2.0))
        np.testing.assert_array_equal(updates, wanted)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"guard": gradkit.SpikeGuard()}, ValueError, 'guard clips; pass SpikeGuard.on_spike="sk'),
        ({"guard": 1}, TypeError, "guard must be a gradkit.SpikeGuard, not int"),
        ({"limit": -1.0}, ValueError, "limit must be at least 0, not -1.0"),
    ],
)
def test_errors_of_skipped_steps(given, error, said):
    with pytest.raises(error, match=said):
        transforms.skip_steps(optax.sgd(1.0), **given)


class Pair(NamedTuple):
    w: Any
    b: Any


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_find_their_buffers_by_key(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(accumulation, "named_call", lambda *_, **__: None)
        jax.clear_caches()
    buffers = Pair(jnp.zeros(4), jnp.zeros(2))
    grads = {"w": jnp.ones(4), "b": jnp.full(2, 5.0)}  # JAX sorts a dict's keys: b, w
    found = gradkit.jax.accumulate_grads(buffers, grads)
    np.testing.assert_array_equal(found.w, np.ones(4))
    np.testing.assert_array_equal(found.b, np.full(2, 5.0))
    kept = {"w": jnp.full(4, 0.5), "b": jnp.full(2, 0.25)}
    _, rest = gradkit.jax.accumulate_grads(buffers, grads, compensation=kept)
    assert (rest["w"].shape, rest["b"].shape) == ((4,), (2,))


def test_keys_with_dots_hide_no_wrong_shape():
    buffers = {"a": {"b": jnp.zeros(4)}, "a.b": jnp.zeros(2)}
    grads = {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}
    with pytest.raises(ValueError, match="shape"):
        gradkit.jax.accumulate_grads(buffers, grads)
    with pytest.raises(ValueError, match="structure"):
        gradkit.jax.accumulate_grads(buffers, {"a.b": jnp.ones(2)})


def test_numpys_float64_without_jit():
    grads = [np.arange(3.0)]
    with jax.disable_jit():
        (clipped,), _ = gradkit.jax.clip_by_global_norm(grads, 1.0)
        (summed,) = gradkit.jax.accumulate_grads(grads, grads)
    assert clipped.dtype == summed.dtype == jnp.zeros(()).dtype


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", ["nearest", "stochastic", "compensated"])
def test_what_has_no_weight_is_left_out(way, overwrite, jitted):
    """By XLA's own call of compiled code too; a scale may be a number or an array."""
    dtype = jnp.bfloat16 if way == "stochastic" else jnp.float32
    held = [jnp.array([1.5, -0.0, jnp.nan], dtype), jnp.array([2.0], dtype)]
    kept = jax.tree.map(jnp.ones_like, held)
    grads = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), held)

    def add(buffers, rests, scale):
        options = {"scale": scale, "overwrite": overwrite}
        if way == "compensated":
            return gradkit.jax.accumulate_grads(buffers, grads, compensation=rests, **options)
        return gradkit.jax.accumulate_grads(buffers, grads, rounding=way, **options), rests

    for scale in (0.0, jnp.float32(-0.0)):
        made = (jax.jit(add) if jitted else add)(held, kept, scale)
        sums, rests = made
        wanted = jax.tree.map(jnp.zeros_like, held) if overwrite else held
        cleared = overwrite and way == "compensated"
        left = jax.tree.map(jnp.zeros_like, kept) if cleared else kept
        for found, expected in zip([*sums, *rests], [*wanted, *left], strict=True):
            assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_micro_batch_is_left_out(empty):
    """Its gradients are the mean over no tokens; a step of nothing else has none."""
    optimizer = transforms.accumulate(optax.sgd(-1.0), every=3)
    params = jnp.zeros(1)
    state = optimizer.init(params)
    batches = [(3, 2.0), (1, 6.0)]
    batches.insert(empty, (0, np.nan))
    for weights, mean in (([0, 0, 0], 0.0), ([tokens for tokens, _ in batches], 3.0)):
        for weight, (tokens, grad) in zip(weights, batches, strict=True):
            value = grad if weight or not tokens else np.nan
            updates, state = optimizer.update(jnp.array([value]), state, params, weight=weight)
        assert float(updates[0]) == mean


def test_a_limit_of_nan_without_eps_is_no_division_by_zero():
    def clip(grad, limit):
        return gradkit.jax.clip_by_global_norm(grad, limit, eps=0.0, axis_name="i")[0]

    over = jax.vmap(clip, in_axes=(0, None), axis_name="i")
    assert np.isnan(over(jnp.zeros((2, 3)), jnp.float32(jnp.nan))).all()

"""``gradkit.jax``'s clips by units, blocks and parameters, beside direct calls, NumPy and optax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
import gradkit.jax
from gradkit.jax import block_clipping, transforms
from tests.interop.test_gradkit_jax_devices import OWN, SAME
from tests.interop.test_gradkit_jax_lists import Pair, assert_same_tree, gradients, trained
from tests.strategies import orders, seeds, values
from tests.tolerances import DTYPES, assert_same_bits

BY_BLOCK, ADAPTIVE = gradkit.jax.clip_by_block_norm, gradkit.jax.clip_by_adaptive_norm
FIRST = lambda name, grad: name.partition(".")[0]  # noqa: ARG005, E731
INPUTS = lambda name, grad: range(grad.ndim - 1)  # noqa: ARG005, E731


def assert_same_norms(got, ref):
    """As float32, unless JAX holds float64."""
    for one, other in zip(*map(jax.tree.leaves, (got, ref)), strict=True):
        assert_same_bits(one, np.asarray(other).astype(one.dtype))


@pytest.mark.guarantee("Inside JAX's transformations")
@pytest.mark.parametrize(
    ("dtypes", "order", "options"),
    [
        (("float32", "float16", "bfloat16"), 2.0, {}),
        (("float32", "float64"), 2.0, {"axis": 1}),
        (("bfloat16", "float32"), 3.0, {"axis": INPUTS, "eps": 9.0}),
        (("float16",), 1.0, {"rms": True}),
        (("float32", "float32"), float("inf"), {"axis": {"list": 0, "tuple": None, "none": None}}),
        (("float32", "float64", "float16"), 2.0, {"blocks": FIRST}),
        (("float32", "float32"), 3.5, {"blocks": {"list": [3, 1], "none": 0, "tuple": 3}}),
    ],
)
def test_bits_of_direct_calls(dtypes, order, options, way):  # noqa: ARG001
    grads = gradients(*dtypes)
    params = jax.tree.map(lambda g: (g * 1.5).astype(g.dtype), grads)
    own = {name: value for name, value in options.items() if name in ("axis",)}
    with jax.enable_x64("float64" in dtypes):
        for limit in (0.1, 1e300):
            calls = [(BY_BLOCK, gradkit.clip_by_block_norm, (limit, order), options)]
            if order == 2 and "blocks" not in options:
                adapted = gradkit.clip_by_adaptive_norm
                calls.append((ADAPTIVE, adapted, (params, limit), own))
            for function, direct, arguments, named in calls:
                ref, norms = direct(grads, *arguments, **named)
                clip = partial(function, **named)
                jitted = jax.jit(lambda g, clip=clip, rest=arguments: clip(g, *rest))
                for got, found in (clip(grads, *arguments), jitted(grads)):
                    assert_same_tree(got, ref)
                    assert_same_norms(found, norms)


def oracle(grads, limits, order, axes, *, mean):
    """Clipped gradients and norms in float64, of NumPy."""
    clipped, norms = [], []
    for grad, limit, along in zip(grads, limits, axes, strict=True):
        wide = np.abs(grad.astype(np.float64))
        if np.isinf(order):
            norm = wide.max(axis=along, keepdims=True, initial=0)
        else:
            norm = (wide**order).sum(axis=along, keepdims=True)
            norm = (norm / max(1, np.prod([grad.shape[a] for a in along])) if mean else norm) ** (
                1 / order
            )
        clipped.append(grad * np.minimum(1, limit / np.maximum(norm, 1e-6)))
        norms.append(norm.squeeze(along))
    return clipped, norms


@given(seeds, orders, st.booleans(), st.lists(st.sampled_from([0, 1, (0, 1), None]), min_size=1))
def test_units_beside_numpy_in_float64(seed, order, mean, axes):
    grads = [values((3, 4), "float32", seed + k) for k in range(len(axes))]
    limits = [0.25 * (k + 1) for k in range(len(axes))]
    clip = jax.jit(partial(BY_BLOCK, norm_type=order, axis=axes, rms=mean))
    clipped, norms = clip(grads, limits)
    along = [(0, 1) if axis is None else axis if type(axis) is tuple else (axis,) for axis in axes]
    known = oracle(grads, limits, order, along, mean=mean)
    for found, wanted in zip([*clipped, *norms], [*known[0], *known[1]], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@given(seeds, orders, st.lists(st.integers(0, 2), min_size=1))
def test_blocks_beside_numpy_in_float64(seed, order, keys):
    grads = [values((2, 3), "float32", seed + k) for k in range(len(keys))]
    limits = {key: 0.5 * (key + 1) for key in range(4)}  # of which not all have gradients
    clipped, norms = jax.jit(lambda g: BY_BLOCK(g, limits, order, blocks=keys))(grads)
    assert {*norms} == {*keys}
    for key, norm in norms.items():
        block = [k for k, own in enumerate(keys) if own == key]
        whole = np.stack([grads[k] for k in block])
        (wanted,), (known,) = oracle([whole], [limits[key]], order, [(0, 1, 2)], mean=False)
        np.testing.assert_allclose(norm, known, rtol=1e-5)
        np.testing.assert_allclose(np.stack([clipped[k] for k in block]), wanted, rtol=1e-5)


def model(dtype="float32"):
    """Gradients of a dense layer, a convolution, a bias and what is zero."""
    shapes = {"dense": (6, 5), "conv": (3, 3, 4, 7), "bias": (5,), "zero": (4, 4)}
    tree = {name: values(shape, dtype, k) for k, (name, shape) in enumerate(shapes.items())}
    return tree | {"zero": np.zeros_like(tree["zero"])}


PEERS = {
    "block": (partial(transforms.clip_by_block_norm, rms=True), optax.clip_by_block_rms),
    "adaptive": (partial(transforms.clip_by_adaptive_norm, axis=INPUTS), optax.adaptive_grad_clip),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("limit", [0.01, 0.3, 5.0])
def test_a_chain_clips_as_optax_does(name, limit):
    ours, theirs = (optax.chain(clip(limit), optax.adam(0.1)) for clip in PEERS[name])
    params = jax.tree.map(jnp.asarray, jax.tree.map(lambda g: g + 0.25, model()))
    grads = [jax.tree.map(lambda g, k=k: g * (k + 1), model()) for k in range(4)]
    (found, state), (known, _) = (trained(each, grads, params) for each in (ours, theirs))
    for one, other in zip(*map(jax.tree.leaves, (found, known)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    own = {"rms": True} if name == "block" else {"axis": INPUTS}
    assert_same_norms(state[0].norm, gradkit.clip_by_block_norm(grads[-1], 1.0, **own)[1])
    start = ours.init(params)[0].norm
    assert jax.tree.map(jnp.shape, start) == jax.tree.map(jnp.shape, state[0].norm)


def test_numbers_may_be_traced_and_differ():
    grads = {"w": values((4, 3), "float32"), "b": values((4,), "float32", 1)}
    limits = {"w": np.float32(0.5), "b": np.float32(2.0)}
    for given_, named in (
        (limits, {"axis": 0}),
        (limits | {"z": np.float32(1)}, {"blocks": FIRST}),
    ):
        clip = jax.jit(partial(BY_BLOCK, **named))
        got, norms = clip(grads, given_)
        ref, known = gradkit.clip_by_block_norm(grads, given_, **named)
        assert_same_tree(got, ref)
        assert_same_norms(norms, known)
    for limit in (-1.0, np.nan):
        got, _ = jax.jit(BY_BLOCK)(grads, limits | {"b": jnp.float32(limit)})
        assert np.isnan(got["b"]).all()
        assert np.isfinite(got["w"]).all()
        got, _ = jax.jit(ADAPTIVE)(grads, grads, jnp.float32(limit))
        assert np.isnan(got["b"]).all()


def test_parameters_are_found_by_key():
    own = {"w": values((4,), "float32"), "b": values((2,), "float32", 1)}
    params = jax.tree.map(lambda g: g * 3, own)  # of which JAX sorts the keys: b, w
    (clipped, norms), ref = ADAPTIVE(Pair(**own), params, 0.1), ADAPTIVE(own, params, 0.1)
    assert_same_tree((clipped._asdict(), norms._asdict()), ref)


@pytest.mark.parametrize("traced", [True, False])
def test_an_infinite_ratio_clips_nothing(traced):
    grads, zeros = {"w": values((4, 3), "float32")}, {"w": np.zeros((4, 3), "f4")}
    ratio = jnp.float32(np.inf) if traced else np.inf
    assert_same_tree(ADAPTIVE(grads, zeros, ratio, eps=0.0)[0], grads)


def test_another_number_compiles_nothing():
    grads = gradients("float32")
    BY_BLOCK(grads, 1.0)
    before = block_clipping._clip._cache_size()
    for limit in (2.0, 3.0):
        BY_BLOCK(grads, limit)
    assert block_clipping._clip._cache_size() == before


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("named", [{}, {"axis": 0}, {"blocks": FIRST}])
def test_what_is_not_finite_stays_in_its_unit(value, policy, named):
    grads = {"w": np.ones((3, 2), np.float32), "b": np.full(2, 3, np.float32)}
    grads["w"][1, 1] = value
    got, norms = jax.jit(lambda g: BY_BLOCK(g, 1.0, nonfinite=policy, **named))(grads)
    ref, known = gradkit.clip_by_block_norm(grads, 1.0, nonfinite=policy, **named)
    assert_same_tree(got, ref)
    assert_same_norms(norms, known)
    assert np.isfinite(got["b"]).all()


def test_nothing_to_clip():
    for grads in ({}, {"w": None}):
        assert BY_BLOCK(grads, 1.0) == (grads, grads)
        assert BY_BLOCK(grads, 1.0, blocks=FIRST) == (grads, {})
        assert ADAPTIVE(grads, {}) == (grads, grads)
    empty = {"w": np.ones((0, 3), np.float32)}
    clipped, norms = jax.jit(lambda g: BY_BLOCK(g, 1.0, axis=1))(empty)
    assert (clipped["w"].shape, norms["w"].shape) == ((0, 3), (0,))
    assert BY_BLOCK(empty, 1.0, axis=0)[1]["w"].tolist() == [0, 0, 0]


def test_gradients_are_clipped_where_they_lie():
    for clip in (lambda g: BY_BLOCK(g, 1.0)[0], lambda g: ADAPTIVE(g, [1.0, jnp.ones(7)])[0]):
        grads = [jnp.ones(()) * 9, jnp.ones(7)]
        places = [g.unsafe_buffer_pointer() for g in grads]
        kept = jax.jit(clip)(grads)
        assert [float(g.max()) for g in grads] == [9, 1]
        donated = jax.jit(clip, donate_argnums=0)(grads)
        assert [g.unsafe_buffer_pointer() for g in donated] == places
        assert_same_tree(donated, kept)


@pytest.mark.guarantee("Inside JAX's transformations")
@pytest.mark.parametrize("named", [{}, {"axis": 0}, {"blocks": FIRST}])
def test_every_example_of_a_vmap_has_its_own_norms(named, way):  # noqa: ARG001
    grads = {"w": values((3, 4, 2), "float32"), "b": values((3, 5), "float32", 1)}
    clip = partial(BY_BLOCK, **named)
    got, norms = jax.jit(jax.vmap(clip, (0, 0)))(grads, np.array([0.1, 0.2, 9.0], np.float32))
    for k, limit in enumerate((0.1, 0.2, 9.0)):
        own = {name: g[k] for name, g in grads.items()}
        ref, known = gradkit.clip_by_block_norm(own, np.float32(limit), **named)
        assert_same_tree(jax.tree.map(lambda a, k=k: a[k], got), ref)
        assert_same_norms(jax.tree.map(lambda a, k=k: a[k], norms), known)


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_blocks_over_devices(over, order):
    """Experts lie on one device each; dense gradients are the same on all, and count once."""
    grads = {"expert": values((4, 3), "float32"), "dense": [values((7,), "float32", 1)]}
    specs = {"expert": OWN, "dense": [SAME]}
    options = {"blocks": FIRST, "norm_type": order}
    limits = {"expert": 0.5, "dense": 1e9}
    devices = {"axis_name": "d", "replicas": {"expert": 1, "dense": 2}}
    clip = lambda g: BY_BLOCK(g, limits, **options, **devices)  # noqa: E731
    clipped, norms = over(clip, (specs,), (specs, SAME))(grads)
    ref, known = gradkit.clip_by_block_norm(grads, limits, **options)
    for one, other in zip(*map(jax.tree.leaves, ((clipped, norms), (ref, known))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    program = str(jax.make_jaxpr(over(clip, (specs,), (specs, SAME)))(grads))
    assert program.count("all_gather[") == 1
    if over.checked:
        with pytest.raises(ValueError, match="replicated"):
            over(clip, (specs,), (SAME, SAME))(grads)


def test_a_nan_on_one_device_reaches_its_block_on_all(over):
    grads = {"a": values((4, 3), "float32"), "b": values((4, 2), "float32", 1)}
    grads["a"][0, 0] = np.nan
    clip = lambda g: BY_BLOCK(g, 1.0, blocks=FIRST, axis_name="d", nonfinite="zero")  # noqa: E731
    clipped, norms = over(clip, OWN, (OWN, SAME))(grads)
    assert not clipped["a"].any()
    assert np.isnan(norms["a"])
    np.testing.assert_allclose(norms["b"], np.linalg.norm(grads["b"]), rtol=1e-6)


def test_devices_whose_limits_differ(over):
    """Norms of those blocks are NaN on all, and so are gradients."""

    def clip(grads, limit):
        limits = {"a": limit[0], "b": 1.0}
        return BY_BLOCK(grads, limits, blocks=FIRST, axis_name="d")

    grads = {"a": np.ones(2, "f4"), "b": np.ones(2, "f4")}
    step = over(clip, (SAME, OWN), (OWN, SAME))
    clipped, norms = step(grads, np.ones(2, "f4"))
    np.testing.assert_allclose(clipped["a"], np.full(4, 0.5), rtol=1e-6)
    clipped, norms = step(grads, np.array([1, 2], "f4"))
    assert np.isnan(clipped["a"]).all()
    np.testing.assert_allclose((norms["b"], *clipped["b"]), (2, *[0.5] * 4), rtol=1e-6)
    if over.checked:
        with pytest.raises(ValueError, match="replicated"):
            over(clip, (SAME, OWN), (SAME, SAME))(grads, np.ones(2, "f4"))


def test_a_transformation_over_devices(over):
    clip = partial(transforms.clip_by_block_norm, 0.5, blocks=FIRST)
    grads = {"a": values((4, 3), "float32"), "b": values((4, 2), "float32", 1)}
    state = clip(axis_name="d").init(grads)
    found = over(clip(axis_name="d").update, (OWN, SAME), (OWN, SAME))(grads, state)
    known = clip().update(grads, state)
    for one, other in zip(*map(jax.tree.leaves, (found, known)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


W = {"w": jnp.ones((2, 3)), "v": jnp.ones(3)}
MISTAKES = [
    (lambda: BY_BLOCK(W, 1.0, nonfinite="raise"), ValueError, 'pass "zero"'),
    (lambda: BY_BLOCK(W, -1.0), ValueError, "max_norm must be at least 0, not -1.0"),
    (lambda: BY_BLOCK([], -1.0), ValueError, "max_norm must be at least 0, not -1.0"),
    (lambda: BY_BLOCK(W, {"w": 1.0, "v": -1}), ValueError, r"max_norm\['v'\] must be at least 0"),
    (lambda: BY_BLOCK(W, -1.0, blocks=FIRST), ValueError, "^max_norm must be at least 0"),
    (lambda: BY_BLOCK(W, {"w": 1, "v": -1}, blocks=FIRST), ValueError, r"^max_norm\['v'\] must be"),
    (lambda: BY_BLOCK(W, jnp.ones(2)), ValueError, "max_norm has shape"),
    (lambda: BY_BLOCK(W, 1.0, axis=2), ValueError, "axis for w"),
    (lambda: BY_BLOCK(W, 1.0, axis=True), TypeError, "axis for v must be an int"),
    (lambda: BY_BLOCK(W["w"], 1.0, axis=2), ValueError, "axis for grads is 2"),
    (lambda: BY_BLOCK(W, 1.0, rms=1), TypeError, "rms must be a bool"),
    (lambda: BY_BLOCK(W, 1.0, axis=(0, 0)), ValueError, "names an axis twice"),
    (lambda: BY_BLOCK(W, 1.0, axis={"w": 1}), ValueError, "axis must be like grads, or end above"),
    (lambda: BY_BLOCK(W, 1.0, blocks=FIRST, axis=0), ValueError, "leave them out with blocks"),
    (lambda: BY_BLOCK(W, 1.0, blocks=FIRST, rms=True), ValueError, "leave them out with blocks"),
    (lambda: BY_BLOCK(W, {"w": 1.0}, blocks=FIRST), ValueError, "no limit for the block 'v'"),
    (lambda: BY_BLOCK({"a.b": W, "a": {"b": W}}, 1.0, axis=INPUTS), ValueError, r"named 'a\.b\.v'"),
    (lambda: BY_BLOCK(W, 1.0, blocks=lambda *_: None), TypeError, "blocks for v must be a key"),
    (lambda: BY_BLOCK(W, 1.0, blocks=lambda *_: []), TypeError, "blocks for v must be a key"),
    (lambda: BY_BLOCK(W, 1.0, axis_name="i"), ValueError, "axis_name goes with blocks"),
    (lambda: BY_BLOCK(W, 1.0, replicas=2), ValueError, "pass axis_name too"),
    (lambda: BY_BLOCK({"a": [jnp.ones(2, int)]}, 1.0), TypeError, r"grads\['a'\]\[0\] has dtype"),
    (lambda: BY_BLOCK(W, 1.0, 0), ValueError, "norm_type"),
    (lambda: ADAPTIVE(W, {"w": W["w"]}), ValueError, r"grads\['v'\] has no counterpart in params"),
    (lambda: ADAPTIVE(W, {"w": W["v"], "v": W["v"]}), ValueError, r"params\['w'\] has shape"),
    (lambda: ADAPTIVE(W["w"], W["v"]), ValueError, "^params has shape"),
    (lambda: ADAPTIVE(W, W | {"w": jnp.ones((2, 3), int)}), TypeError, r"params\['w'\] has dtype"),
    (lambda: ADAPTIVE(W, W, -1.0), ValueError, "clipping must be at least 0"),
    (lambda: ADAPTIVE(W, W, eps=-1.0), ValueError, "eps must be"),
    (lambda: transforms.clip_by_adaptive_norm().update(W, None), ValueError, "needs parameters"),
    (lambda: jax.grad(lambda g: BY_BLOCK(g, 1.0)[1].sum())(W["v"]), TypeError, "differentiable"),
    (lambda: jax.grad(lambda g: ADAPTIVE(g, g)[0].sum())(W["v"]), TypeError, "differentiable"),
]


@pytest.mark.parametrize(("call", "error", "said"), MISTAKES)
def test_errors_name_the_argument(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_float64_of_numpy_without_jit():
    with jax.disable_jit():
        (clipped,), (norm,) = BY_BLOCK([np.arange(3.0)], 1.0)
    assert clipped.dtype == norm.dtype == jnp.zeros(()).dtype
    assert clipped.dtype in DTYPES.values()

"""``gradkit.jax`` on several devices: ``shard_map``, axes of a ``vmap``, and plain ``jit``."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradkit
import gradkit.jax
from tests.interop.test_gradkit_jax_lists import OPTIMIZERS, TRACED
from tests.interop.test_gradkit_jax_norms import CASES, OWN, SAME, assert_close, by_running, passes
from tests.tolerances import assert_all_same_bits, assert_same_bits


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(1, 2, shape).astype(np.float32)


def batch_loss(x, scale, bias, *running, axis_name=None):
    norm = by_running if running else gradkit.jax.batch_norm
    axes = {"channel_axis": -1, "axis_name": axis_name}
    y, *statistics = norm(jnp.moveaxis(x, 1, -1), scale, bias, *running, **axes)
    return (y**3).sum(), statistics


RUNNING = pytest.mark.parametrize(
    "running", [(), (values(3, seed=3), values(3, seed=4) ** 2)], ids=["batch's", "running"]
)


@RUNNING
def test_batch_norm_of_the_whole_batch(over, running):
    """Its gradients too: JAX adds up those of parameters that all devices share."""
    given = values(6, 3, 4) + 100, values(3, seed=1), values(3, seed=2), *running
    specs = OWN, *[SAME] * (len(given) - 1)
    which = (0, 1, 2)
    (_, statistics), ref = jax.value_and_grad(batch_loss, which, has_aux=True)(*given)

    def step(*given):
        grads, statistics = jax.grad(batch_loss, which, has_aux=True)(*given, axis_name="d")
        if not over.checked:
            grads = grads[0], *jax.lax.psum(grads[1:], "d")
        return grads, statistics

    grads, found = over(step, specs, ((OWN, SAME, SAME), SAME))(*given)
    assert_close(grads, ref)
    assert_close(found, statistics)

    def total(*given):
        loss, _ = batch_loss(*given, axis_name="d")
        return jax.lax.psum(loss, "d")

    with jax.set_mesh(over.mesh):
        outside = jax.grad(over(total, specs, SAME), which)(*given)
    assert_close(outside, ref)


def test_batch_norm_without_parameters_over_devices(over):
    x = values(4, 3)
    ref = jax.grad(lambda x: batch_loss(x, None, None)[0])(x)
    step = over(jax.grad(lambda x: batch_loss(x, None, None, axis_name="d")[0]), OWN, OWN)
    assert_close(step(x), ref)


def test_devices_with_a_scale_of_their_own(over):
    """Each one's gradient of x is that of all losses, of which others have other scales."""
    x, scale = values(4, 3), values(3, seed=1)
    scales = np.stack([scale, 2 * scale])
    loss = lambda x, scale: batch_loss(x, scale, None, axis_name="d")[0]  # noqa: E731
    found = over(jax.grad(loss), (OWN, OWN), OWN)(x, scales.reshape(-1))

    def whole(x):
        normal = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return ((normal.reshape(2, 2, 3) * scales[:, None]) ** 3).sum()

    assert_close(found, jax.grad(whole)(x))


def test_infinities_of_two_devices_give_no_warning(over):
    """Sums of both signs are added up on XLA's threads, on which a warning would be an error."""
    x, dy = values(4, 3), np.ones((4, 3), np.float32)
    dy[0, 0], dy[3, 0] = np.inf, -np.inf

    def step(x, dy):
        _, gradient = jax.vjp(lambda x: gradkit.jax.batch_norm(x, axis_name="d")[0], x)
        return gradient(dy)[0]

    dx = over(step, (OWN, OWN), OWN)(x, dy)
    assert np.isnan(dx[:, 0]).all()
    assert np.isfinite(dx[:, 1:]).all()


def test_a_norm_over_devices(over):
    """A gradient that is the same on all devices stays so, and counts once."""
    grads = {"own": values(4, 3), "same": [values(7, seed=1)]}
    specs = {"own": OWN, "same": [SAME]}

    def clip(grads, scale):
        options = {"scale": scale, "axis_name": "d", "replicas": {"own": 1, "same": 2}}
        norm = gradkit.jax.grad_norm(grads, **options)
        return *gradkit.jax.clip_by_global_norm(grads, 1.0, **options), norm

    clipped, norm, alone = over(clip, (specs, SAME), (specs, SAME, SAME))(grads, 0.5)
    ref, wanted = gradkit.clip_by_global_norm(grads, 1.0, scale=0.5)
    assert norm == alone
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (clipped, ref)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    if over.checked:
        with pytest.raises(ValueError, match="replicated"):
            over(clip, (specs, SAME), (SAME, SAME, SAME))(grads, 0.5)


@pytest.mark.parametrize("argument", ["scale", "max_norm"])
def test_devices_whose_numbers_differ(over, argument):
    """The norm is NaN on all, and so are gradients, where each device would clip otherwise.

    JAX would else take a number for the same on all devices, and keep one device's.
    """

    def clip(grads, number):
        numbers = {"max_norm": 1.0, argument: number[0]}
        return gradkit.jax.clip_by_global_norm(grads, **numbers, axis_name="d")

    step, ones = over(clip, (SAME, OWN), (OWN, SAME)), np.ones(2, "f4")
    clipped, norm = step(ones, ones)
    np.testing.assert_allclose(clipped, np.full(4, 0.5), rtol=1e-6)
    np.testing.assert_allclose(norm, 2.0, rtol=1e-6)
    clipped, norm = step(ones, np.array([1.0, 2.0], "f4"))
    assert np.isnan(clipped).all()
    assert np.isnan(norm)
    if over.checked:
        with pytest.raises(ValueError, match="replicated"):
            over(clip, (SAME, OWN), (SAME, SAME))(ones, ones)


def test_statistics_over_devices(over):
    """Those of the whole gradients, copies counted once, the same on all devices."""
    grads = {"own": values(4, 3), "same": [values(7, seed=1)]}
    grads["own"][0, 1], grads["same"][0][:2] = 0, (0, np.nan)
    specs = {"own": OWN, "same": [SAME]}

    def stats(grads, **options):
        return gradkit.jax.grad_stats(grads, **options).table

    replicas = {"own": 1, "same": 2}
    step = partial(stats, axis_name="d", replicas=replicas)
    found = over(step, (specs,), SAME)(grads)
    np.testing.assert_allclose(found, gradkit.grad_stats(grads).table, rtol=1e-6)
    own = over(lambda g: stats(g)[None], (specs,), OWN)(grads)
    half = gradkit.grad_stats({**grads, "own": grads["own"][2:]}).table
    np.testing.assert_allclose(np.asarray(own)[1], half, rtol=1e-6)
    with pytest.raises(ValueError, match=r"replicas are copies.*pass axis_name too"):
        stats(grads, replicas=2)
    if over.checked:
        with pytest.raises(ValueError, match="replicated"):
            over(stats, (specs,), SAME)(grads)


def test_a_nan_on_one_device_reaches_all(over):
    x = values(4, 3)
    x[0, 0] = np.nan
    clip = lambda g: gradkit.jax.clip_by_global_norm(g, 1.0, axis_name="d", nonfinite="zero")  # noqa: E731
    clipped, norm = over(clip, OWN, (OWN, SAME))(x)
    np.testing.assert_array_equal(clipped, 0)
    assert np.isnan(norm)


def test_a_spike_guard_over_devices(over):
    from gradkit.jax import transforms

    guard = transforms.clip_spikes(warmup=2, axis_name="d")
    alone = transforms.clip_spikes(warmup=2)
    state = known = guard.init(None)
    step = over(guard.update, (OWN, SAME), (OWN, SAME))
    for size in (1.0, 2.0, 40.0):
        grads = values(4, 3) * np.float32(size)
        clipped, state = step(grads, state)
        ref, known = alone.update(grads, known)
        assert_close((clipped, state), (ref, known))


def test_some_count_over_devices(over):
    grads = {"a": values(4, 3), "b": values(4, 2, seed=1)}
    options = {"clip": {"a": True, "b": False}, "count": {"a": False, "b": True}}
    clip = lambda g, **more: gradkit.jax.clip_by_global_norm(g, 0.5, **options, **more)  # noqa: E731
    clipped, norm = over(lambda g: clip(g, axis_name="d"), OWN, (OWN, SAME))(grads)
    ref, known = clip(grads)
    assert_close((clipped, norm), (ref, known))
    np.testing.assert_allclose(norm, np.linalg.norm(grads["b"]), rtol=1e-6)


def test_all_devices_skip_or_none(over):
    """A NaN on one of them; parameters are parts, each on its device."""
    import optax

    from gradkit.jax import transforms

    optimizer = transforms.skip_steps(optax.adam(0.1), axis_name="d")
    params = values(4, 3)
    state = optimizer.init(params)
    states = jax.tree.map(lambda leaf: OWN if leaf.shape == params.shape else SAME, state)
    step = over(optimizer.update, (OWN, states, OWN), (OWN, states))
    for bad in (False, True, False):
        grads = values(4, 3, seed=2)
        grads[0, 0] = np.nan if bad else 1
        updates, following = step(grads, state, params)
        assert bool(following.taken) is not bad
        same = jax.tree.map(np.array_equal, following.inner, state.inner)
        assert jax.tree.all(same) is bad
        assert (np.asarray(updates) == 0).all() == bad
        state = following
    assert int(state.skipped) == 1


@RUNNING
def test_axes_of_a_vmap(running):
    given = values(4, 2, 3, 5), values(3, seed=1), values(3, seed=2), *running

    def loss(x, *rest):
        each, statistics = jax.vmap(lambda x: batch_loss(x, *rest, axis_name="i"), axis_name="i")(x)
        return each.sum(), statistics

    (_, statistics), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*given)
    whole = given[0].reshape(8, 3, 5), *given[1:]
    (_, known), ref = jax.value_and_grad(batch_loss, (0, 1, 2), has_aux=True)(*whole)
    assert_close([g.reshape(r.shape) for g, r in zip(grads, ref, strict=True)], ref)
    for found, wanted in zip(statistics, known, strict=True):
        assert_close(found, np.tile(wanted, (4, 1)))
    clip = jax.vmap(lambda g: gradkit.jax.clip_by_global_norm(g, 1.0, axis_name="i"), axis_name="i")
    clipped, norms = clip(given[0])
    assert len(set(np.asarray(norms).tolist())) == 1
    np.testing.assert_allclose(gradkit.grad_norm(np.asarray(clipped)), 1, rtol=1e-6)


def test_several_axes_of_vmaps():
    """As one axis of all their devices, in the order that JAX counts them in."""
    x = values(6, 2, 3)
    functions = [
        lambda x, axes: gradkit.jax.clip_by_global_norm(x, 1.0, axis_name=axes),
        lambda x, axes: gradkit.jax.grad_stats({"x": x}, axis_name=axes).table,
        lambda x, axes: jax.value_and_grad(batch_loss, has_aux=True)(x, None, None, axis_name=axes),
    ]
    for function in functions:
        many = jax.vmap(lambda x, f=function: f(x, ("i", "j")), axis_name="j")
        found = jax.vmap(many, axis_name="i")(x.reshape(2, 3, 2, 3))
        flat = jax.vmap(lambda x, f=function: f(x, "i"), axis_name="i")(x)
        for got, ref in zip(*map(jax.tree.leaves, (found, flat)), strict=True):
            assert_same_bits(np.reshape(got, ref.shape), ref)


def test_of_a_list_what_all_devices_share_stays_the_same(over):
    """Beside arrays that differ between them: a scan may carry both, and a replica leave."""
    tree = {"same": values(6), "own": values(4, seed=1)}
    specs = {"same": SAME, "own": OWN}

    def steps(tree):
        kept = jax.tree.map(jnp.square, tree)
        added = gradkit.jax.accumulate_grads(tree, tree, compensation=kept)
        descended = gradkit.jax.sgd_update(tree, tree, kept, lr=0.5, momentum=0.5)
        return *added, *descended, *gradkit.jax.adamw_update(tree, tree, kept, kept, 1, lr=0.5)[:3]

    assert_close(over(steps, (specs,), (specs,) * 7)(tree), steps(tree))


@pytest.fixture(params=[True, False], ids=["context", "arrays"])
def spread(request, mesh):
    """Puts arrays on the mesh, with an axis in parts or none; the mesh is the context's, or not."""

    def placed(array, axis=None):
        spec = [None] * np.ndim(array)
        if axis is not None:
            spec[axis] = "d"
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    with jax.set_mesh(mesh) if request.param else nullcontext():
        yield placed


def assert_spread_like(got, like):
    """In type, if the mesh has explicit axes; types of others say nothing, and so are equal."""
    for one, other in zip(*map(jax.tree.leaves, (got, like)), strict=True):
        assert jax.typeof(one).sharding.spec == jax.typeof(other).sharding.spec


def test_jit_brings_sharded_arrays_together(spread):
    """Without ``shard_map``, XLA gathers what a call reads."""
    x, scale = values(4, 6), values(6, seed=1)
    own = spread(x, 0)
    y = jax.jit(gradkit.jax.rms_norm)(own, scale)
    assert_same_bits(y, gradkit.rms_norm(x, scale)[0])
    clipped, norm = jax.jit(lambda g: gradkit.jax.clip_by_global_norm(g, 1.0))(own)
    ref, wanted = gradkit.clip_by_global_norm(x, 1.0)
    assert_same_bits(clipped, ref)
    assert norm == wanted.astype(np.float32)
    assert_spread_like([y, clipped], [own, own])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_norms_of_arrays_on_a_mesh(name, across, spread):
    """With the bits of arrays on one device; gradients are of their arrays' types."""
    case = CASES[name]
    given = case.arguments("float32", "float32")
    both = jax.jit(passes(case.ours))
    # Data is spread in another way than parameters, and each beside one that is not.
    axes = [given[0].shape.index(6) if across else 0, None][: case.data]
    axes += [-1, None, -1, None][: len(given) - case.data]
    placed = [spread(a, axis) for a, axis in zip(given, axes, strict=True)]
    found, ref = both(*placed), both(*given)
    assert_all_same_bits(found, ref)
    results = len(found) - len(given)
    assert_spread_like(found[results:], placed)
    assert_spread_like(found[:1], placed[:1])


@pytest.mark.parametrize("name", CASES)
def test_examples_of_a_vmap_on_a_mesh(name, spread):
    case = CASES[name]
    given = [np.stack([a, 2 * np.abs(a)]) for a in case.arguments("float32", "float32")]
    many = jax.jit(jax.vmap(passes(case.ours)))
    placed = [spread(a, 0) for a in given]
    found = many(*placed)
    assert_all_same_bits(found, many(*given))
    assert_spread_like(found[-len(given) :], placed)


def test_lists_of_arrays_on_a_mesh(spread):
    grads = {"w": values(4, 6), "b": values(6, seed=1), "s": np.float32(3)}
    placed = {"w": spread(grads["w"], 1), "b": spread(grads["b"], 0), "s": spread(grads["s"])}
    other = {"w": spread(grads["w"], 0), "b": spread(grads["b"]), "s": spread(grads["s"])}
    for name, function in TRACED.items():
        found, ref = jax.jit(function)(placed), jax.jit(function)(grads)
        assert_all_same_bits(*map(jax.tree.leaves, (found, ref)))
        if "stochastic" in name:
            assert_spread_like(found, placed)
    add = jax.jit(gradkit.jax.accumulate_grads)
    assert_all_same_bits(*map(jax.tree.leaves, (add(placed, other), add(grads, grads))))
    assert_spread_like(add(placed, other), placed)
    assert_spread_like(jax.jit(TRACED["clip_by_global_norm"])(placed)[0], placed)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_steps_on_a_mesh(name, same, spread):
    """Gradients and parameters are spread alike, or not."""
    optimizer = OPTIMIZERS[name]()
    params = {"w": values(4, 6), "b": values(6, seed=1)}
    placed = {"w": spread(params["w"], 0), "b": spread(params["b"])}
    state, known = optimizer.init(placed), optimizer.init(params)
    update = jax.jit(optimizer.update)
    for size in (1.0, 2.0, np.nan, 3.0):
        grads = jax.tree.map(lambda p, size=size: p * np.float32(size), params)
        own = {"w": spread(grads["w"], 0), "b": spread(grads["b"], None if same else 0)}
        updates, state = update(own, state, placed)
        ref, known = update(grads, known, params)
        assert_close((updates, state), (ref, known))
        assert_spread_like(updates, own)


def test_sums_that_each_device_has_a_part_of(mesh):
    """A product whose parts nobody has added up yet is taken for the sum."""
    if mesh.axis_types != (jax.sharding.AxisType.Explicit,):
        return  # no type says so
    x, w = values(4, 6), values(6, 4, seed=1)

    def partial_sums(function, x, w):
        return function(jnp.matmul(x, w, out_sharding=PartitionSpec(unreduced={"d"})))

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))
            for a, spec in ((x, (None, "d")), (w, ("d", None)))
        ]
        for function in (gradkit.jax.rms_norm, TRACED["clip_by_global_norm"]):
            found = jax.jit(partial(partial_sums, function))(*placed)
            assert_close(found, function(x @ w))


def test_four_devices_train_as_one(run_alone):
    """Data on one axis of a mesh and a layer's columns on the other, with every part at once."""
    program = """
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import PartitionSpec as P
    import gradkit.jax
    from gradkit.jax import transforms

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (3, 8)), "scale": jnp.ones(8),
              "last": jax.random.normal(keys[1], (8,))}
    specs = {"w": P(None, "model"), "scale": P("model"), "last": P("model")}
    x = jax.random.normal(keys[2], (16, 3))

    def loss(params, x, over):
        hidden, _, _ = gradkit.jax.batch_norm(
            x @ params["w"], params["scale"], axis_name="data" if over else None)
        out = jnp.tanh(hidden) @ params["last"]
        if over:
            out = jax.lax.psum(out, "model")
        return ((out - jnp.sin(x[:, 0])) ** 2).sum() / 16

    def losses(over, mesh=None):
        options = {"axis_name": "model"} if over else {}
        optimizer = transforms.accumulate(optax.chain(
            transforms.clip_by_global_norm(0.5, **options), optax.sgd(0.3)), 1)

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, X[0], over)
            if over:
                value = jax.lax.psum(value, "data")
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        X = []
        def run(params, x):
            X.append(x)
            return jax.lax.scan(step, (params, optimizer.init(params)), None, length=20)[1]

        if not over:
            return jax.jit(run)(params, x)
        run = jax.shard_map(run, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())
        place = lambda spec, own: jax.device_put(own, jax.sharding.NamedSharding(mesh, spec))
        return jax.jit(run)(jax.tree.map(place, specs, params), place(P("data"), x))

    one = losses(False)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
        four = losses(True, mesh)
        np.testing.assert_allclose(one, four, rtol=1e-4)
        assert four[-1] < 0.5 * four[0]
    print(len(jax.devices()), "devices")
    """
    flags = "--xla_force_host_platform_device_count=4"
    assert run_alone(program, XLA_FLAGS=flags) == "4 devices\n"

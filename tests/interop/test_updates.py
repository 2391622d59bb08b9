"""A hundred steps beside those of PyTorch's and optax's optimisers, measured in float64."""

from collections import namedtuple

import numpy as np
import pytest

import gradkit

from .libraries import framework

jax, optax, torch = map(framework, ("jax", "optax", "torch"))
jnp = jax.numpy
gradkit_jax = framework("gradkit.jax")
STEPS, SHAPES = 100, ((7, 5), (11,))
Pair = namedtuple("Pair", "w b")
FURTHEST = 1e-12  # of numbers near 1, each step of which rounds a few times


def problem():
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape) for shape in SHAPES]
    grads = [[rng.standard_normal(shape) for shape in SHAPES] for _ in range(STEPS)]
    return params, grads


def ours(name, how):
    params, every = problem()
    states = [[np.zeros_like(param) for param in params] for _ in range(2)]
    for step, grads in enumerate(every, 1):
        if name == "adamw":
            gradkit.adamw_update(params, grads, *states, step, **how)
        else:
            kept = states[:1] if how.get("momentum") else []
            gradkit.sgd_update(params, grads, *kept, **how)
    return params


def torchs(kind, how):
    params, every = problem()
    own = [torch.tensor(param, requires_grad=True) for param in params]
    optimizer = kind(own, **how)
    for grads in every:
        for param, grad in zip(own, grads, strict=True):
            param.grad = torch.tensor(grad)
        optimizer.step()
    return [param.detach().numpy() for param in own]


def optaxs(transform):
    with jax.enable_x64(True):
        params, every = problem()
        params, state = [jnp.asarray(param) for param in params], None
        state = transform.init(params)
        step = jax.jit(transform.update)
        for grads in every:
            updates, state = step([jnp.asarray(grad) for grad in grads], state, params)
            params = optax.apply_updates(params, updates)
        return [np.asarray(param) for param in params]


ADAMW = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SGD = [
    {"lr": 0.01},
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]


def check(found, wanted):
    for own, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=FURTHEST)


def test_adamw():
    found = ours("adamw", ADAMW)
    check(found, torchs(torch.optim.AdamW, ADAMW))
    b1, b2 = ADAMW["betas"]
    decay = {"eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
    check(found, optaxs(optax.adamw(ADAMW["lr"], b1, b2, **decay)))


@pytest.mark.parametrize("how", SGD, ids=str)
def test_sgd(how):
    found = ours("sgd", how)
    check(found, torchs(torch.optim.SGD, how))
    steps = [optax.add_decayed_weights(how.get("weight_decay", 0.0))]
    momentum = {"momentum": how.get("momentum"), "nesterov": how.get("nesterov", False)}
    check(found, optaxs(optax.chain(*steps, optax.sgd(how["lr"], **momentum))))


@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_new_arrays_have_the_bits_of_those_in_place(name, at_random):
    """Inside jit, with donated arrays, numbers and steps that are traced."""
    rng = np.random.default_rng(1)
    dtype = jnp.bfloat16 if at_random else np.float32
    trees = [
        {"b": rng.random(9).astype(of), "a": [rng.random((3, 4)).astype(of)]}
        for of in (dtype, dtype, np.float32, np.float32)
    ]
    how = {"lr": 0.1, "weight_decay": 0.2, "scale": np.float32(0.7)}
    how |= {"rounding": "stochastic", "seed": 3} if at_random else {}
    place = jax.tree.map(np.array, trees)
    lists = [jax.tree.leaves(tree) for tree in place]
    given = jax.tree.map(jnp.array, trees)
    if name == "adamw":
        gradkit.adamw_update(*lists, 3, **how)
        call = lambda t, step, lr: gradkit_jax.adamw_update(*t, step, **how | {"lr": lr})  # noqa: E731
        *found, step = jax.jit(call)(given, 2, 0.1)
        assert (step.shape, int(step)) == ((), 3)
        wanted = [lists[0], *lists[2:]]
    else:
        gradkit.sgd_update(*lists[:3], momentum=0.9, nesterov=True, **how)
        more = how | {"momentum": 0.9, "nesterov": True}
        call = lambda t, lr: gradkit_jax.sgd_update(*t[:3], **more | {"lr": lr})  # noqa: E731
        found, wanted = jax.jit(call)(given, 0.1), [lists[0], lists[2]]
    for own, theirs in zip(found, wanted, strict=True):
        for a, b in zip(jax.tree.leaves(own), theirs, strict=True):
            assert np.asarray(a).tobytes() == b.tobytes()


def test_a_false_verdict_gives_what_was_there():
    params, zeros = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
    grads, verdict = {"w": jnp.full(3, jnp.nan)}, jnp.array(False)
    *found, step = gradkit_jax.adamw_update(params, grads, zeros, zeros, 7, lr=0.1, verdict=verdict)
    assert int(step) == 7
    for own, old in zip(found, (params, zeros, zeros), strict=True):
        np.testing.assert_array_equal(own["w"], old["w"])


def test_gradients_and_momenta_find_their_parameters_by_key():
    params, grads = Pair(jnp.ones(4), jnp.ones(2)), {"w": jnp.ones(4), "b": jnp.full(2, 3.0)}
    zeros = jax.tree.map(jnp.zeros_like, grads)  # of which JAX sorts the keys: b, w
    moved, momenta = gradkit_jax.sgd_update(params, grads, zeros, lr=0.5, momentum=0.5)
    for own, wanted in ((moved.w, 0.5), (moved.b, -0.5), (momenta["w"], 1), (momenta["b"], 3)):
        np.testing.assert_array_equal(own, np.full_like(own, wanted))


def test_errors_of_what_gradkit_has_otherwise():
    p = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"step must be at least 0 and below 2\*\*63, not -1"):
        gradkit_jax.adamw_update(p, p, p, p, -1, lr=0.1)
    with pytest.raises(ValueError, match=r"step has shape \(2,\)"):
        gradkit_jax.adamw_update(p, p, p, p, jnp.arange(2), lr=0.1)
    with pytest.raises(ValueError, match=r"seed has shape \(2,\)"):
        gradkit_jax.sgd_update(p, p, lr=0.1, rounding="stochastic", seed=jnp.arange(2))
    with pytest.raises(ValueError, match="momenta must have the same structure as params"):
        gradkit_jax.sgd_update(p, p, {}, lr=0.1)
    with pytest.raises(TypeError, match="step has dtype float32; accepted: integers"):
        gradkit_jax.adamw_update(p, p, p, p, jnp.float32(1), lr=0.1)
    for call, lists in ((gradkit_jax.sgd_update, (p, p)), (gradkit_jax.adamw_update, [p] * 4)):
        step = () if len(lists) == 2 else (1,)
        with pytest.raises(TypeError, match=r"params\['w'\] has dtype float32; rounding="):
            call(*lists, *step, lr=0.1, rounding="stochastic", seed=1)
        for k, label in enumerate(("grads", "moments", "variances")[: len(lists) - 1], 1):
            wrong = [{"w": jnp.ones(3)} if n == k else p for n in range(len(lists))]
            with pytest.raises(ValueError, match=rf"{label}\['w'\] has shape \(3,\)"):
                call(*wrong, *step, lr=0.1)
    with pytest.raises(TypeError, match="verdict must be a bool, or a 0-d bool array"):
        gradkit_jax.sgd_update(p, p, lr=0.1, verdict=jnp.array([True]))


def test_steps_are_not_differentiated():
    move = lambda p: gradkit_jax.sgd_update(p, p, lr=0.1)[0].sum()  # noqa: E731
    with pytest.raises(TypeError, match="sgd_update is not differentiable"):
        jax.grad(move)(jnp.ones(2))

"""Programs of JAX's transformations, drawn at random, around each function and JAX's own formula.

A program is a list of transformations, the innermost first. Each takes a function of arrays that
returns a tuple of arrays, and makes another one, whose arguments may have further axes.
"""

import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradkit.jax as ours
from tests.interop.conftest import WAYS
from tests.interop.test_gradkit_jax_norms import CASES, channels, spread, values

pytestmark = pytest.mark.usefixtures("x64", "way")
TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
REFUSED = r"gradkit\.jax.* (derivative|differentiable)|forward-mode autodiff"


class Base(NamedTuple):
    """The function that a program transforms, and the arguments that it is differentiated by."""

    name: str
    given: list[Any]
    ours: Any
    formula: Any
    free: tuple[int, ...] = ()
    over: bool = False  # statistics or norms are those of all along the axis "i"


def as_tuple(made):
    return made if isinstance(made, tuple) else (made,)


# What programs begin with


@st.composite
def norms(draw):
    """A norm with or without scale and bias, of data and parameters of some dtypes."""
    name = draw(st.sampled_from(sorted(CASES)))
    types = ("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")
    case, t = CASES[name], draw(st.sampled_from(types))
    full = case.arguments(*t)
    label = [*["x"] * case.data, *case.names, *["known"] * case.constant]
    gone = {n for n in case.names if draw(st.integers(0, 3)) == 0 and not case.offset}
    places = [k for k, own in enumerate(label) if own not in gone]

    def filled(neutral, arrays):
        every = [
            np.full_like(a, label[k] == "scale") if neutral else None for k, a in enumerate(full)
        ]
        for k, array in zip(places, arrays, strict=True):
            every[k] = array
        return every

    def formula(*arrays):
        wide = [jnp.asarray(a).astype(float) for a in filled(True, arrays)]
        y, *others = as_tuple(case.formula(*wide))
        others = [jax.lax.stop_gradient(a) for a in others] if case.constant else others
        kinds = [a.dtype for a in full[:1] + full[-case.constant :] * bool(case.constant)]
        return tuple(a.astype((kinds + kinds[:1])[k]) for k, a in enumerate((y, *others)))

    own = lambda *arrays: as_tuple(case.ours(*filled(False, arrays)))  # noqa: E731
    free = tuple(k for k, place in enumerate(places) if place < len(full) - case.constant)
    return Base(name, [full[k] for k in places], own, formula, free)


def batch_norm_over():
    def formula(x, scale, bias, mean, var):
        count = jax.lax.psum(x.shape[0] * x.shape[2], "i")
        own = jax.lax.pmean(x.mean((0, 2)), "i")
        about = x - spread(own)
        size = jax.lax.pmean((about**2).mean((0, 2)), "i")
        y = about / jnp.sqrt(spread(size) + 1e-5) * spread(scale) + spread(bias)
        moved = 0.75 * mean + 0.25 * own, 0.75 * var + 0.25 * size * count / (count - 1)
        return y, *map(jax.lax.stop_gradient, moved)

    def norm(x, scale, bias, mean, var):
        known = {"running_mean": mean, "running_var": var, "momentum": 0.25}
        return ours.batch_norm(x, scale, bias, **known, axis_name="i")

    arrays = channels("float64", "float64", known=True)
    return Base("batch_norm over", arrays, norm, formula, (0, 1, 2), over=True)


def clip(over, order, eps_mode):
    """Two gradients, a limit and a scale, which are numbers if devices must have the same."""

    def formula(w, b, limit=1.5, scale=0.5):
        total = sum((abs(g * scale) ** order).sum() for g in (w, b))
        norm = (jax.lax.psum(total, "i") if over else total) ** (1 / order)
        factor = limit / (norm + 1e-6) if eps_mode == "add" else limit / norm
        return (*(g * scale * jnp.minimum(1, factor) for g in (w, b)), norm)

    def own(w, b, limit=1.5, scale=0.5):
        how = {"scale": scale, "eps_mode": eps_mode, "axis_name": "i" if over else None}
        (w, b), norm = ours.clip_by_global_norm((w, b), limit, order, **how)
        return w, b, norm

    arrays = [values((3, 4), "float64"), values(4, "float64", 1)]
    arrays += [] if over else [np.array(1.5), np.array(0.5)]
    return Base("clip_by_global_norm", arrays, own, formula, over=over)


def accumulated():
    def formula(w, b, dw, db, scale, fresh):
        return tuple(jnp.where(fresh > 0, 0, a) + scale * g for a, g in ((w, dw), (b, db)))

    def own(w, b, dw, db, scale, fresh):
        return tuple(ours.accumulate_grads([w, b], [dw, db], scale=scale, overwrite=fresh > 0))

    arrays = [values(shape, "float64", k) for k, shape in enumerate([(3, 4), 4, (3, 4), 4])]
    return Base("accumulate_grads", [*arrays, np.array(0.25), np.array(-1.0)], own, formula)


def adamw():
    def formula(w, g, m, v, step, lr):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1.0)), v / (1 - 0.999 ** (step + 1.0))
        return w - lr * (0.01 * w + m_hat / (jnp.sqrt(v_hat) + 1e-8)), m, v, step + 1

    def own(*arrays):
        *trees, step, lr = arrays
        *trees, step = ours.adamw_update(*({"w": a} for a in trees), step, lr=lr)
        return *(tree["w"] for tree in trees), step

    w, g, m, v = (values((3, 4), "float64", k) for k in range(4))
    return Base("adamw_update", [w, g, m, v**2, np.array(2), np.array(0.1)], own, formula)


def sgd():
    def formula(w, g, m, lr):
        m = 0.5 * m + g
        return w - lr * (g + 0.5 * m), m

    def own(w, g, m, lr):
        return ours.sgd_update(w, g, m, lr=lr, momentum=0.5, nesterov=True)

    return Base(
        "sgd_update",
        [*(values((3, 4), "float64", k) for k in range(3)), np.array(0.1)],
        own,
        formula,
    )


LISTS = st.builds(
    clip, st.booleans(), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from(["max", "add"])
) | st.sampled_from([accumulated, adamw, sgd]).map(lambda make: make())


# Transformations: of some arguments, a function of functions and the arguments of what it makes


def several(array, count, axis):
    """As many arrays, along a new axis, or along one that there is if ``axis`` is ``None``."""
    own = [array + k if array.dtype.kind == "i" else array * (1 + k / 2) for k in range(count)]
    own = [each.astype(array.dtype) for each in own]
    return np.concatenate(own) if axis is None else np.stack(own, axis)


def some(draw, items):
    """Not none of them."""
    return sorted(draw(st.sets(st.sampled_from(sorted(items)), min_size=1)))


def jit(draw, base):  # noqa: ARG001
    return jax.jit, base.given


def vmap(draw, base):
    size = draw(st.integers(1, 3))
    out = draw(st.sampled_from([0, -1]))
    places = range(len(base.given))
    axes = [draw(st.integers(0, a.ndim)) for a in base.given]
    chosen = some(draw, places)
    axes = tuple(axes[k] if k in chosen else None for k in places)
    arrays = [
        a if k is None else several(a, size, k) for a, k in zip(base.given, axes, strict=True)
    ]
    return lambda f: jax.vmap(f, axes, out, axis_name="i" if base.over else None), arrays


def scan(draw, base):
    chosen, count = some(draw, range(len(base.given))), draw(st.integers(1, 3))
    how = {"reverse": draw(st.booleans()), "unroll": draw(st.integers(1, 2))}

    def wrap(f):
        def scanned(*arrays):
            def body(_, parts):
                every = dict(enumerate(arrays)) | dict(zip(chosen, parts, strict=True))
                return None, f(*every.values())

            return jax.lax.scan(body, None, [arrays[k] for k in chosen], **how)[1]

        return scanned

    arrays = [several(a, count, 0) if k in chosen else a for k, a in enumerate(base.given)]
    return wrap, arrays


def layers(draw, base):
    """The first result in place of the first argument, some times; some arguments in each anew."""
    count, rest = draw(st.integers(2, 3)), range(1, len(base.given))
    chosen = some(draw, rest) if rest and draw(st.booleans()) else []

    def wrap(f):
        def chained(x, *rest):
            def body(x, parts):
                every = dict(enumerate((x, *rest))) | dict(zip(chosen, parts, strict=True))
                y, *others = f(*every.values())
                return x + jnp.tanh(y), others

            y, others = jax.lax.scan(body, x, [rest[k - 1] for k in chosen], length=count)
            return y, *others

        return chained

    arrays = [several(a, count, 0) if k in chosen else a for k, a in enumerate(base.given)]
    return wrap, arrays


def remat(draw, base):
    policy = draw(st.sampled_from([None, "everything_saveable", "dots_saveable"]))
    own = policy and getattr(jax.checkpoint_policies, policy)
    return partial(jax.checkpoint, policy=own, prevent_cse=draw(st.booleans())), base.given


def cond(draw, base):
    at = draw(st.sampled_from([-100.0, 0.0, 100.0]))

    def wrap(f):
        def branched(x, *rest):
            return jax.lax.cond(x.sum() > at, f, lambda x, *rest: f(x + x, *rest), x, *rest)

        return branched

    return wrap, base.given


def loss_of(f, used):
    def loss(*arrays):
        made = f(*arrays)
        own = [made[k % len(made)].astype(float) for k in used]
        return sum((a**2 * jnp.linspace(-1, 2, a.size).reshape(a.shape)).sum() for a in own)

    return loss


def grad(draw, base):
    which, used = tuple(some(draw, base.free or [0])), draw(st.sampled_from([(0,), (0, 1), (-1,)]))
    kind = draw(st.sampled_from(["grad", "value_and_grad", "jacrev"]))

    def wrap(f):
        loss = loss_of(f, used)
        if kind == "jacrev":
            return jax.jacrev(lambda *a: jnp.stack([loss(*a), f(*a)[0].sum().astype(float)]), which)
        slopes = getattr(jax, kind)(loss, which)
        return lambda *arrays: tuple(jax.tree.leaves(slopes(*arrays)))

    return wrap, base.given


def jvp(draw, base):  # noqa: ARG001
    def wrap(f):
        return lambda x, *rest: jax.jvp(lambda x: loss_of(f, (0,))(x, *rest), (x,), (x,))

    return wrap, base.given


def shard_map(draw, base):
    """On two devices, each of which has half of some arguments; results of each are stacked."""
    flat = [k for k, a in enumerate(base.given) if a.ndim]
    chosen, kind = some(draw, flat), draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,))
    specs = tuple(P("i") if k in chosen else P() for k in range(len(base.given)))
    how = {"mesh": mesh, "in_specs": specs, "out_specs": P("i"), "check_vma": draw(st.booleans())}

    def wrap(f):
        mapped = jax.shard_map(lambda *arrays: tuple(a[None] for a in f(*arrays)), **how)
        if kind == AxisType.Auto:
            return mapped

        @jax.jit
        def placed(*arrays):
            own = zip(arrays, specs, strict=True)
            return mapped(*(jax.sharding.reshard(a, NamedSharding(mesh, s)) for a, s in own))

        return placed

    return wrap, [several(a, 2, None) if k in chosen else a for k, a in enumerate(base.given)]


INSIDE = [jit, vmap, scan, layers, remat, cond]


def drawn_programs(test):
    """Half as many examples as other tests have, because there are two tests."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    half = -(-settings().max_examples // 2)
    return given(data=st.data())(settings(max_examples=half, suppress_health_check=checks)(test))


@pytest.mark.parametrize("way", WAYS[:1], indirect=True)
@drawn_programs
def test_programs_without_python(data):
    check_a_program(data)


# Not by copies: JAX makes them in threads of its own, where 64 bits are not switched on.
@pytest.mark.parametrize("way", WAYS[1:2], indirect=True)
@drawn_programs
def test_programs_through_python(data):
    check_a_program(data)


def check_a_program(data):
    """Of what JAX itself refuses, nothing is said; ours refuse what is not a first derivative."""
    bases = [norms(), norms(), norms(), LISTS, LISTS, st.builds(batch_norm_over)]
    base = data.draw(bases[data.draw(st.integers(0, 5))])
    program = data.draw(st.lists(st.sampled_from(INSIDE), max_size=3, unique=True))
    if base.free and data.draw(st.integers(0, 2)):
        program.insert(data.draw(st.integers(0, len(program))), grad)
    if data.draw(st.integers(0, 4)) == 4:
        program.append(data.draw(st.sampled_from([grad, jvp])))
    if base.over or data.draw(st.booleans()):
        bind = data.draw(st.sampled_from([vmap, shard_map])) if base.over else shard_map
        program.insert(data.draw(st.integers(0, len(program))), bind)
    note(f"{base.name}: {[transform.__name__ for transform in program]}")
    own, formula = base.ours, base.formula
    for transform in program:
        wrap, arrays = transform(data.draw, base)
        own, formula = wrap(own), wrap(formula)
        base = base._replace(given=arrays, over=base.over and transform not in (vmap, shard_map))
    try:
        expected = jax.jit(formula)(*base.given)
    except (TypeError, ValueError, NotImplementedError):
        reject()
    may_refuse = program.count(grad) + 2 * program.count(jvp) > (1 if base.free else 0)
    try:
        # With explicit axes JAX itself differentiates outside of jit in a context alone.
        compiled = shard_map in program or data.draw(st.booleans())
        found = (jax.jit(own) if compiled else own)(*base.given)
    except TypeError as error:
        if may_refuse and re.search(REFUSED, str(error)):
            return
        raise
    near = TOLERANCE[str(base.given[0].dtype)]
    for got, ref in zip(found, expected, strict=True):
        assert (got.dtype, got.shape) == (ref.dtype, ref.shape)
        got, ref = np.asarray(got, float), np.asarray(ref, float)
        np.testing.assert_allclose(got, ref, rtol=0, atol=near * max(1, abs(ref).max(initial=0)))

"""Each of ``gradkit.jax``'s norms inside of JAX's transformations, beside direct calls."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

import gradkit
import gradkit.jax
from gradkit import _host
from gradkit.jax import _records
from tests.interop.libraries import checking_leaks
from tests.operations import OPERATIONS
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits

TYPES = [
    *(("float32", "float32"), ("float16", "float16"), ("float16", "float32")),
    *(("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")),
    ("float64", "float64"),
]
OWN, SAME = PartitionSpec("d"), PartitionSpec()


# Each norm: its arrays, what it gives, what direct calls give, and JAX's own formula.


def values(shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).normal(0.5, 2, shape)
    return np.asarray(x).astype(DTYPES[dtype])


def rows(data, parameters, t, v):
    """Arrays of rows, a scale and perhaps a bias."""
    return [
        *(values((4, 3, 6), t, seed) for seed in range(data)),
        *(values((3, 6), v, 5 + seed) for seed in range(parameters)),
    ]


def channels(t, v, *, known=False, dtype=None):
    """An array with six channels, scale, bias, and statistics."""
    u = dtype or ("float64" if t == "float64" else "float32")
    statistics = [values(6, u, 7), np.abs(values(6, u, 8)) + DTYPES[u].type(0.25)]
    parameters = [values(6, v, 5), values(6, v, 6)]
    return [values((4, 6, 5), t), *parameters, *(statistics if known else [])]


def spread(parameter, ndim=3):
    """A parameter of channels, to be multiplied with an array."""
    return jnp.reshape(parameter, (1, -1) + (1,) * (ndim - 2))


def normal(x, over, eps, centred=True):
    mean = x.mean(over, keepdims=True) if centred else 0.0
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(over, keepdims=True) + eps)


def layer(x, scale, bias, *, offset=0.0):
    return normal(x, (1, 2), 1e-5) * (scale + offset) + bias


def rms(x, scale, *, offset=0.0):
    return normal(x, (1, 2), 1e-6, centred=False) * (scale + offset)


def group(x, scale, bias):
    parts = normal(x.reshape(4, 3, 2, 5), (2, 3), 1e-5).reshape(x.shape)
    return parts * spread(scale) + spread(bias)


def inference(x, scale, bias, mean, var):
    factor = spread(scale) / jnp.sqrt(spread(var) + 1e-5)
    return (x - spread(mean)) * factor + spread(bias)


def running(x, scale, bias, mean, var):
    y = normal(x, (0, 2), 1e-5) * spread(scale) + spread(bias)
    n = x.shape[0] * x.shape[2]
    return y, 0.75 * mean + 0.25 * x.mean((0, 2)), 0.75 * var + 0.25 * x.var((0, 2)) * n / (n - 1)


def gated(x, gate, scale, *, before):
    activated = jax.nn.silu(gate)
    y = normal(x if before else x * activated, (1, 2), 1e-6, centred=False) * (scale + 0.5)
    return y * activated if before else y


def over_rows(name, *labels, scale_offset=None):
    """A norm of rows and its formula, of a sum if there is a residual."""
    kind = layer if "layer" in name else rms

    def formula(x, *rest):
        s, parameters = (x + rest[0], rest[1:]) if "residual" in labels else (x, rest)
        y = kind(s, *parameters, offset=scale_offset or 0.0)
        return (y, s) if "residual" in labels else y

    rule = {"axis": 1} | ({} if scale_offset is None else {"scale_offset": scale_offset})
    return Case(name, labels, formula, rule)


def with_gate(before):
    rule = {"axis": 1, "scale_offset": 0.5, "norm_before_gate": before}
    return Case("gated_rms_norm", ("x", "gate", "scale"), partial(gated, before=before), rule)


def by_running(x, scale, bias, mean, var, **more):
    known = {"running_mean": mean, "running_var": var, "momentum": 0.25}
    return gradkit.jax.batch_norm(x, scale, bias, **known, **more)


class Case:
    """A norm of ``gradkit.jax``: its arrays by name, its other arguments, and JAX's formula."""

    def __init__(self, name, labels, formula, rule):
        self.name, self.labels, self.formula, self.rule = name, labels, formula, rule
        self.names = tuple(label for label in labels if label in ("scale", "bias"))
        self.data = labels.index(self.names[0])  # how many arguments have an axis of the batch
        self.constant = len(labels) - self.data - len(self.names)  # how many have no gradient
        self.offset = rule.get("scale_offset", 0.0)

    def arguments(self, t, v):
        if "axis" not in self.rule:
            return channels(t, v, known=self.constant > 0)
        x, *rest = rows(self.data, len(self.names), t, v)
        if "invertible" in self.name:  # a scale that can be divided by
            rest[0] = np.abs(rest[0]) + DTYPES[v].type(0.5)
        return [x, *rest]

    def ours(self, *given):
        made = getattr(gradkit.jax, self.name)(*given[: self.data], **self.filled(given))
        return made[0] if self.name == "batch_norm" and not self.constant else made

    def filled(self, given):
        """All but the data, by name."""
        named = dict(zip(self.labels, given, strict=True))
        return {label: named[label] for label in self.labels[self.data :]} | self.rule

    def direct(self, cotangents, *given):
        """Outputs and gradients of direct calls."""
        forward = OPERATIONS[self.name.removeprefix("invertible_")]
        backward = OPERATIONS[f"{self.name.removeprefix('add_')}_grad"]
        known = dict(zip(self.labels, given, strict=True)) | self.rule
        running = {label: known[label].copy() for label in known if label.startswith("running")}
        made = forward.function(**known | running)
        made = dict(zip(forward.results, made if isinstance(made, tuple) else (made,), strict=True))
        known |= made | dict(zip(("dy", "ds"), cotangents, strict=False))
        known["x"] = made.get("s", known["x"])
        known["wanted"] = tuple(
            n for n in backward.results if known[n.removeprefix("d")] is not None
        )
        own = backward.function(**{n: known[n] for n in backward.parameters if n in known})
        slopes = dict(zip(backward.results, own, strict=True)) | {"dresidual": own[0]}
        outputs = [made[name] for name in ("y", "s") if name in made]
        return [*outputs, *running.values()], [
            slopes.get(f"d{label}", np.zeros_like(array))
            for label, array in zip(self.labels, given, strict=True)
        ]


SUM, SCALED = ("x", "residual"), ("x", "scale", "bias")
CASES = {
    "layer_norm": over_rows("layer_norm", *SCALED),
    "layer_norm, offset": over_rows("layer_norm", *SCALED, scale_offset=1.0),
    "invertible_layer_norm": over_rows("invertible_layer_norm", *SCALED),
    "rms_norm": over_rows("rms_norm", "x", "scale"),
    "rms_norm, offset": over_rows("rms_norm", "x", "scale", scale_offset=1.0),
    "invertible_rms_norm": over_rows("invertible_rms_norm", "x", "scale"),
    "invertible_rms_norm, offset": over_rows("invertible_rms_norm", "x", "scale", scale_offset=0.5),
    "add_layer_norm": over_rows("add_layer_norm", *SUM, "scale", "bias"),
    "add_layer_norm, offset": over_rows("add_layer_norm", *SUM, "scale", "bias", scale_offset=0.5),
    "add_rms_norm": over_rows("add_rms_norm", *SUM, "scale"),
    "add_rms_norm, offset": over_rows("add_rms_norm", *SUM, "scale", scale_offset=1.0),
    "gated_rms_norm": with_gate(before=True),
    "gated_rms_norm, gate first": with_gate(before=False),
    "group_norm": Case("group_norm", SCALED, group, {"num_groups": 3}),
    "batch_norm_inference": Case("batch_norm_inference", (*SCALED, "mean", "var"), inference, {}),
    "batch_norm": Case("batch_norm", SCALED, lambda *a: running(*a, 0.0, 0.0)[0], {}),
    "batch_norm, running": Case(
        "batch_norm", (*SCALED, "running_mean", "running_var"), running, {"momentum": 0.25}
    ),
}


ALONE = [name for name in CASES if name.partition(",")[0] != "batch_norm"]  # samples are


@pytest.fixture(params=list(CASES))
def case(request):
    return CASES[request.param]


def assert_close(got, ref):
    for one, other in zip(*map(jax.tree.leaves, (got, ref)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def outputs(made):
    return [made] if isinstance(made, jax.Array) else list(made)


def passes(norm):
    """Outputs and gradients in one list; the gradient that arrives is a function of the output."""

    def both(*given):
        made, backward = jax.vjp(norm, *given)
        arriving = jax.tree.map(lambda out: jnp.cos(out.astype("float32")).astype(out.dtype), made)
        return [*outputs(made), *backward(arriving)]

    return both


def total(norm, weights):
    """A loss that every output enters."""
    return lambda *given: sum(
        (w * out**2).sum() for w, out in zip(weights, outputs(norm(*given)), strict=False)
    )


# Values


@pytest.mark.guarantee("Inside JAX's transformations")
@pytest.mark.parametrize(
    ("name", "dropped", "t", "v"),
    [
        (name, dropped, *types)
        for name, case in CASES.items()
        for types in TYPES
        for dropped in ((), ("bias",), ("scale",), ("scale", "bias"))
        if types != ("float32", "bfloat16") or not name.startswith("batch_norm")
        if not dropped or types == ("float64", "float64")
        if set(dropped) <= set(case.names) and not (case.offset and "scale" in dropped)
    ],
    ids=str,
)
def test_bits_of_direct_calls(name, dropped, t, v):
    """With a scale and a bias, one of the two, or neither; in float64 also the derivatives."""
    case = CASES[name]
    given = [
        None if label in dropped else array
        for label, array in zip(case.labels, case.arguments(t, v), strict=True)
    ]
    with jax.enable_x64(t == "float64"):
        made = outputs(case.ours(*jax.tree.map(jnp.asarray, given)))
        arriving = [values(out.shape, str(out.dtype), 9 + k) for k, out in enumerate(made)]

        @jax.jit
        def both(arriving, *given):
            out, backward = jax.vjp(lambda *a: outputs(case.ours(*a)), *given)
            return out, backward(arriving)

        found, grads = both(arriving, *given)
        if t == "float64":  # new running statistics have no gradient
            loss = total(case.ours, arriving[: 1 if case.constant else None])
            free = len(given) - case.constant
            check_grads(lambda *own: loss(*own, *given[free:]), given[:free], 1, modes=["rev"])
    wanted, slopes = case.direct(arriving, *given)
    assert_all_same_bits([*found, *jax.tree.leaves(grads)], [*wanted, *jax.tree.leaves(slopes)])
    assert_all_same_bits(made, found)


def test_what_is_not_differentiated_by_is_not_computed(case, monkeypatch):
    """One traced program, differentiated by each of its arrays in turn."""
    given = [jnp.asarray(each) for each in case.arguments("float32", "float32")]
    places = range(len(given) - case.constant)
    loss = jax.jit(total(case.ours, (1.0, 0.5)))
    every = jax.grad(loss, argnums=tuple(places))(*given)
    asked, compute = [], _records.compute

    def noting(refusal, kind, operands, numbers, shared=None):
        asked.append(numbers.get("wanted"))
        return compute(refusal, kind, operands, numbers, shared)

    monkeypatch.setattr(_records, "compute", noting)
    names = ["x" if label == "residual" else label for label in case.labels]
    for k in places:
        found = jax.grad(loss, argnums=k)(*given)
        assert asked[-1] == (f"d{names[k]}",)
        assert_same_bits(found, every[k])


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 2)], ids=str)
def test_some_gradients_through_a_scan_of_checkpoints(argnums):
    """Each layer's backward pass is traced once, for whichever arrays are differentiated by."""
    given = [values((2, 4, 6)), values((3, 6), seed=1), values((3, 6), seed=2)]

    def loss(norm, x, scales, biases):
        layer = jax.checkpoint(lambda h, own: (h + jnp.tanh(norm(h, *own)), None))
        return (jax.lax.scan(layer, x, (scales, biases))[0] ** 2).sum()

    formula = lambda x, scale, bias: normal(x, 2, 1e-5) * scale + bias  # noqa: E731
    grads = [
        jax.jit(jax.grad(partial(loss, norm), argnums))(*given)
        for norm in (gradkit.jax.layer_norm, formula)
    ]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_outside_of_jit_a_gradient_is_compiled_once(case, compilations):
    given = list(map(jnp.asarray, case.arguments("float32", "float32")))
    slope = jax.grad(total(case.ours, [1.0]), tuple(range(len(given) - case.constant)))
    jax.block_until_ready([slope(*given) for _ in range(2)])
    assert compilations  # they are counted
    compilations.clear()
    jax.block_until_ready([slope(*given) for _ in range(3)])
    assert compilations == []


def test_gradients_by_running_statistics_have_the_eps_of_the_call():
    x, scale, bias, mean, var = channels("float32", "float32", known=True)

    def ours(x, scale, bias):
        return gradkit.jax.batch_norm_inference(x, scale, bias, mean, var, eps=0.5)

    def theirs(x, scale, bias):
        factor = spread(scale) / jnp.sqrt(spread(var) + 0.5)
        return (x - spread(mean)) * factor + spread(bias)

    own, wanted = (
        jax.grad(lambda *given, norm=norm: (norm(*given) ** 3).sum(), (0, 1, 2))(x, scale, bias)
        for norm in (ours, theirs)
    )
    assert_close(own, wanted)


def test_running_statistics_are_constants():
    x, *_, mean, var = channels("float32", "float32", known=True)
    slopes = jax.grad(lambda x, m, v: sum(a.sum() for a in by_running(x, None, None, m, v)[1:]))
    np.testing.assert_array_equal(slopes(x, mean, var), np.zeros_like(x))
    by_them = jax.grad(
        lambda m, v: gradkit.jax.batch_norm_inference(x, None, None, m, v).sum(), (0, 1)
    )
    for got in by_them(mean, var):
        np.testing.assert_array_equal(got, np.zeros(6))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_running_statistics_keep_their_dtype(dtype):
    given = channels("float32", "float32", known=True, dtype=dtype)
    made = jax.jit(by_running)(*given)
    (_, *wanted), _ = CASES["batch_norm, running"].direct([given[0]], *given)
    assert_all_same_bits(made[1:], wanted)


def test_running_statistics_of_channels_last(way):  # noqa: ARG001
    x, *given = channels("float32", "float32", known=True)
    found = jax.jit(by_running)(x, *given)
    last = jax.jit(partial(by_running, channel_axis=-1))(np.moveaxis(x, 1, -1), *given)
    for one, other in zip(found[1:], last[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_running_statistics_through_a_scan():
    """A training loop carries them; a batch without elements moves nothing."""
    batches = values((5, 4, 3))
    start = np.zeros(3, "f4"), np.ones(3, "f4")

    def step(carry, x):
        _, mean, var = gradkit.jax.batch_norm(x, running_mean=carry[0], running_var=carry[1])
        return (mean, var), None

    made, _ = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(start, batches)
    mean, var = (a.copy() for a in start)
    for x in batches:
        gradkit.batch_norm(x, running_mean=mean, running_var=var)
    assert_all_same_bits(made, (mean, var))
    assert_all_same_bits(step(made, batches[0, :0])[0], made)


@pytest.mark.parametrize("axis", [-1, 2, 1])
def test_channels_on_any_axis(axis):
    x, scale, bias, mean, var = channels("float32", "float32", known=True)
    x = np.ascontiguousarray(np.moveaxis(x, 1, axis))
    rule = {"channel_axis": axis}
    made = (
        gradkit.jax.group_norm(x, 3, scale, bias, **rule),
        by_running(x, scale, bias, mean, var, **rule)[0],
        gradkit.jax.batch_norm_inference(x, scale, bias, mean, var, **rule),
    )
    wanted = (
        gradkit.group_norm(x, 3, scale, bias, **rule)[0],
        gradkit.batch_norm(x, scale, bias, **rule)[0],
        gradkit.batch_norm_inference(x, scale, bias, mean, var, **rule),
    )
    assert_all_same_bits(made, wanted)


@pytest.mark.parametrize("shape", [(0, 6, 5), (4, 6, 0)])
@pytest.mark.parametrize("name", ["group_norm", "batch_norm_inference", "batch_norm"])
def test_arrays_without_elements(name, shape):
    case, given = CASES[name], CASES[name].arguments("float32", "float32")
    given[0] = np.zeros(shape, "f4")
    grads = jax.jit(jax.grad(total(case.ours, [1.0]), (0, 1, 2)))(*given)
    for got, like in zip(grads, given, strict=False):
        np.testing.assert_array_equal(got, np.zeros_like(like))


# Transformations


@pytest.mark.guarantee("Inside JAX's transformations")
def test_vmap_is_a_loop(case, way):  # noqa: ARG001
    """Over data, over everything but data, over all, and one inside the other, with gradients."""
    examples = [case.arguments("float32", "float32") for _ in range(6)]
    stacked = [
        np.stack([e[k] * np.float32(n + 1) for n, e in enumerate(examples)])
        for k in range(len(examples[0]))
    ]
    both = passes(case.ours)
    data = [k < case.data for k in range(len(stacked))]
    for batched in (
        data,
        [not b for b in data],
        [True] * len(data),
        [True, *[False] * len(data[1:])],
    ):
        axes = tuple(0 if b else None for b in batched)
        given = [a if b else a[0] for a, b in zip(stacked, batched, strict=True)]
        made = jax.jit(jax.vmap(both, axes))(*given)
        own = [[a[n] if b else a for a, b in zip(given, batched, strict=True)] for n in range(6)]
        for got, *refs in zip(made, *(jax.jit(both)(*e) for e in own), strict=True):
            assert_same_bits(got, np.stack(refs))
    twice = [a.reshape(2, 3, *a.shape[1:]) for a in stacked]
    nested, flat = jax.vmap(jax.vmap(both))(*twice), jax.vmap(both)(*stacked)
    for got, ref in zip(nested, flat, strict=True):
        assert_same_bits(np.reshape(got, ref.shape), ref)


@pytest.mark.parametrize("name", ALONE)
def test_vmap_over_data_is_one_call(name, monkeypatch, in_python):  # noqa: ARG001
    """Forward passes with parameters in common, and gradients without parameters."""
    case, calls, operation = CASES[name], [], name.partition(",")[0]
    forward, gradient = operation.removeprefix("invertible_"), operation.removeprefix("add_")
    for function in (forward, f"{gradient}_grad"):
        of = getattr(_host.backend(), function)
        noting = lambda *a, of=of, **more: calls.append(1) or of(*a, **more)  # noqa: E731
        monkeypatch.setattr(_host.backend(), function, noting)
    given = case.arguments("float32", "float32")
    data = [np.stack([a, 2 * a, 3 * a]) for a in given[: case.data]]
    rest = given[case.data :]
    jax.clear_caches()
    many = jax.jit(jax.vmap(case.ours, (*[0] * len(data), *[None] * len(rest))))
    many(*data, *rest)
    calls.clear()  # of the trace
    made = jax.block_until_ready(many(*data, *rest))
    assert len(calls) == 1
    for k in range(3):
        alone = outputs(case.ours(*(a[k] for a in data), *rest))
        for got, ref in zip(outputs(made), alone, strict=True):
            assert_same_bits(got[k], ref)
    if case.offset:
        return
    rest = [None] * (len(rest) - case.constant) + rest[len(rest) - case.constant :]
    loss = lambda *data: total(case.ours, [1.0, 1.0])(*data, *rest)  # noqa: E731
    slopes = jax.jit(jax.vmap(jax.grad(loss)))
    jax.block_until_ready(slopes(*data))
    calls.clear()
    jax.block_until_ready(slopes(*data))
    assert len(calls) == 2
    jax.clear_caches()


def scanned(case, norm):
    """Gradients through three layers, each of which is a checkpoint."""
    given = case.arguments("float32", "float32")

    def loss(*given):
        def layer(x, _):
            inner = lambda x: outputs(norm(jnp.sin(x), *given[1:]))[0]  # noqa: E731
            return jax.checkpoint(inner)(x), None

        return (jax.lax.scan(layer, given[0], None, length=3)[0] ** 3).sum()

    return jax.jit(jax.grad(loss, tuple(range(len(given) - case.constant))))(*given)


@cache
def scanned_formula(name):
    return scanned(CASES[name], CASES[name].formula)


@pytest.mark.parametrize("name", CASES)
def test_scan_and_checkpoint(name, way):  # noqa: ARG001
    made = scanned(CASES[name], CASES[name].ours)
    for got, ref in zip(made, scanned_formula(name), strict=True):
        np.testing.assert_allclose(got, ref, rtol=5e-3, atol=5e-3 * np.abs(ref).max())


def test_nothing_of_a_trace_outlives_it(case, way):  # noqa: ARG001
    given = case.arguments("float32", "float32")
    both = passes(case.ours)
    with checking_leaks():
        made = jax.jit(both)(*given)
        many = jax.jit(jax.vmap(both))(*(a[None] for a in given))
    assert_all_same_bits(made, jax.jit(both)(*given))
    assert_close([a[0] for a in many], made)


def test_only_the_sum_is_used():
    """The gradient of what nobody reads is zero."""
    x, residual, scale = rows(2, 1, "float32", "float32")
    slope = jax.grad(lambda x, r: gradkit.jax.add_rms_norm(x, r, scale, axis=1)[1].sum(), (0, 1))
    for got in slope(x, residual):
        np.testing.assert_array_equal(got, np.ones_like(x))


# Several devices


@pytest.mark.parametrize("name", ALONE)
def test_parameters_that_all_devices_share(over, name):
    case = CASES[name]
    given = case.arguments("float32", "float32")
    which = tuple(range(len(given) - case.constant))
    grads = jax.grad(total(case.ours, [1.0, 1.0]), which)

    def step(*given):
        made = grads(*given)
        if over.checked:
            return made
        return *made[: case.data], *jax.lax.psum(made[case.data :], "d")

    specs = tuple(OWN if k < case.data else SAME for k in range(len(given)))
    assert_close(over(step, specs, specs[: len(which)])(*given), grads(*given))


def test_a_residual_that_all_devices_share(over):
    """Its gradient is the sum of those of all devices."""
    x, residual, scale = rows(2, 1, "float32", "float32")
    residual = residual[:2]
    loss = total(CASES["add_rms_norm"].ours, [1.0, 1.0])
    grads = jax.grad(loss, (0, 1))

    def step(*given):
        dx, dresidual = grads(*given)
        return dx, dresidual if over.checked else jax.lax.psum(dresidual, "d")

    ref = [grads(part, residual, scale) for part in (x[:2], x[2:])]
    wanted = np.concatenate([ref[0][0], ref[1][0]]), ref[0][1] + ref[1][1]
    assert_close(over(step, (OWN, SAME, SAME), (OWN, SAME))(x, residual, scale), wanted)


def test_one_element_per_channel_on_each_device(over):
    """Its variance is that over all devices."""
    x, *_, mean, var = channels("float32", "float32", known=True)
    given = x[:2, :, 0], mean, var
    step = lambda x, *known: by_running(x, None, None, *known, axis_name="d")[1:]  # noqa: E731
    made = over(step, (OWN, SAME, SAME), SAME)(*given)
    assert_close(made, by_running(given[0], None, None, mean, var)[1:])


def test_running_statistics_that_differ_between_devices(over):
    x, *_, mean, var = channels("float32", "float32", known=True)
    many = [np.concatenate([a, 2 * a]) for a in (mean, var)]
    step = lambda x, *known: by_running(x, None, None, *known, axis_name="d")[1:]  # noqa: E731
    made = over(step, (OWN, OWN, OWN), (OWN, OWN))(x, *many)
    ref = [by_running(x, None, None, k * mean, k * var)[1:] for k in (1, 2)]
    assert_close(made, [np.concatenate(parts) for parts in zip(*ref, strict=True)])
    if over.checked:
        with pytest.raises(ValueError, match="replicated"):
            over(step, (OWN, OWN, OWN), (SAME, SAME))(x, *many)


# Errors


@pytest.mark.parametrize("loop", [False, True])
def test_a_second_derivative_is_refused(case, loop):
    """Of a loop too, whose first derivative has forgotten JAX's custom rules."""
    given = case.arguments("float32", "float32")

    def sum_of(x, *rest):
        def layer(x, _=None):
            return outputs(case.ours(x, *rest))[0], None

        return ((jax.lax.scan(layer, x, length=2) if loop else layer(x))[0] ** 3).sum()

    first = jax.grad(sum_of)
    with pytest.raises(TypeError, match=r"gradkit\.jax\.\w+_norm\w* has no second derivative"):
        jax.eval_shape(jax.grad(lambda *a: first(*a).sum()), *given)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(case.ours, given, given)


@pytest.mark.parametrize(
    "norm",
    [
        gradkit.jax.rms_norm,
        lambda x: gradkit.jax.group_norm(x, 2),
        lambda x: gradkit.jax.batch_norm(x)[0],
        jax.grad(lambda x: gradkit.jax.layer_norm(x).sum()),
    ],
    ids=["rows", "groups", "channels", "gradient"],
)
def test_tracing_needs_no_memory_for_the_arrays(norm):
    x = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)  # 2 TiB
    assert jax.eval_shape(norm, x).shape == x.shape

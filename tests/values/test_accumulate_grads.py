"""Whole containers of buffers: the sums of single calls, and the norm of the result."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, assert_same_bits
from tests.values.test_accumulation import SAFE, added

# Of the pairs of dtypes, each of which is compiled, those that lists are drawn from.
COMMON = [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float16")]


NARROWING = [pair for pair in itertools.product(DTYPES, DTYPES) if pair not in SAFE]


def on_device(backend, value):
    return backend.asarray(np.array(value))


@st.composite
def lists(draw, most, types=COMMON):
    """Host buffers and gradients of their shapes, in any layouts."""
    pairs = draw(st.lists(st.sampled_from(types), min_size=1, max_size=4))
    shapes = [draw(draw_.shapes(most)) for _ in pairs]
    both = zip(pairs, shapes, strict=True)
    drawn = [[draw(draw_.arrays(shape, name)) for name in pair] for pair, shape in both]
    return [b for b, _ in drawn], [g for _, g in drawn]


def norm_of(backend, buffers):
    return backend.asnumpy(gradkit.grad_norm(buffers))


@given(data=st.data(), scale=st.sampled_from((1.0, 0.3, -2.0, 0.0)), overwrite=st.booleans())
def test_a_list_is_as_many_single_calls(backend, data, scale, overwrite):
    """To the bit; and the norm is grad_norm's, to the bit."""
    hosts, host_grads = data.draw(lists(backend.max_elements // 8))
    buffers, grads = ([backend.asarray(h) for h in hs] for hs in (hosts, host_grads))
    norm = on_device(backend, 7.0)
    before = [backend.memory(g) for g in grads]
    options = {"scale": scale, "overwrite": overwrite, "norm_out": norm}
    assert gradkit.accumulate_grads(buffers, grads, **options) is buffers
    for buffer, host, grad in zip(buffers, hosts, host_grads, strict=True):
        single = backend.asarray(host)
        if overwrite:
            gradkit.zero_grad(single)
            if scale == 1:
                gradkit.accumulate_grad_v2(single, backend.asarray(grad), overwrite=True)
                assert_same_bits(backend.asnumpy(buffer), backend.asnumpy(single))
                continue
        gradkit.accumulate_grad(single, backend.asarray(grad), scale=None if scale == 1 else scale)
        np.testing.assert_array_equal(backend.asnumpy(buffer), backend.asnumpy(single))
        fresh = backend.asarray(host)
        backend.assign(fresh, buffer)
        assert backend.memory(buffer) == backend.memory(fresh)  # nothing beside the elements
    assert_same_bits(backend.asnumpy(norm), norm_of(backend, buffers))
    assert [backend.memory(g) for g in grads] == before


@pytest.mark.parametrize("kinds", [*itertools.permutations(COMMON[:2])], ids=str)
def test_norm_of_several_dtypes_that_are_aligned_alike(backend, kinds):
    hosts, grads = ([draw_.values((64,), kind[k], k) for kind in kinds] for k in range(2))
    buffers, norm = [backend.asarray(h) for h in hosts], on_device(backend, 7.0)
    gradkit.accumulate_grads(buffers, [backend.asarray(g) for g in grads], norm_out=norm)
    for buffer, host, grad in zip(buffers, hosts, grads, strict=True):
        assert_same_bits(backend.asnumpy(buffer), added(host, grad))
    assert_same_bits(backend.asnumpy(norm), norm_of(backend, buffers))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("into", "addend"), SAFE)
@pytest.mark.parametrize("layout", ["C", "every third", "misaligned", "from the second on"])
def test_norms_in_every_alignment(backend, into, addend, layout):
    """If the two are not aligned alike, the norm takes a launch of its own for its bits."""
    for sizes in ((1, 7, 33), (1100, 20_000)):
        hosts = [draw_.values((n + 1,), into, n) for n in sizes]
        grads = [draw_.values((n + 1,), addend, n + 1) for n in sizes]
        if layout == "from the second on":
            grads = [g[1:] for g in grads]
        else:
            grads = [LAYOUTS[layout](g[:-1]) for g in grads]
        hosts = [h[:-1] for h in hosts]
        buffers = [backend.asarray(h) for h in hosts]
        placed = [backend.asarray(g) for g in grads]
        norm, arrived = on_device(backend, 7.0), on_device(backend, 7.0)
        gradkit.accumulate_grads(buffers, placed, norm_out=norm, grad_norm_out=arrived)
        for buffer, host, grad in zip(buffers, hosts, grads, strict=True):
            assert_same_bits(backend.asnumpy(buffer), added(host, grad))
        assert_same_bits(backend.asnumpy(norm), norm_of(backend, buffers))
        assert_same_bits(backend.asnumpy(arrived), norm_of(backend, placed))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(("update", "overwrite"), [*itertools.product((False, True), repeat=2)])
def test_flags_on_the_host_and_on_the_device(backend, name, scale, update, overwrite):
    host, grad = (np.array(v, DTYPES[name]) for v in ([np.nan, 1.0, -0.0], [2.0, 4.0, -0.0]))
    wide = grad.astype(np.float64) * scale
    expected = host if not update else wide if overwrite else host.astype(np.float64) + wide
    puts = (bool, np.bool_, lambda b: on_device(backend, b), lambda b: on_device(backend, [b]))
    for put in puts:
        for factor in (scale, on_device(backend, scale)):
            buffer, norm = backend.asarray(host), on_device(backend, 7.0)
            gradkit.accumulate_grads(
                [buffer],
                [backend.asarray(grad)],
                scale=factor,
                do_update=put(update),
                overwrite=put(overwrite),
                norm_out=norm,
            )
            got = backend.asnumpy(buffer)
            assert got.dtype == DTYPES[name]
            np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))
            np.testing.assert_array_equal(backend.asnumpy(norm), norm_of(backend, [buffer]))


@pytest.mark.parametrize(("into", "addend"), NARROWING)
@pytest.mark.parametrize(("scale", "overwrite"), [(1.0, False), (0.3, False), (0.3, True)])
def test_wider_gradients_are_rounded_once(backend, into, addend, scale, overwrite):
    """As ONNX Runtime's accumulator takes them; by default they are refused."""
    hosts = [draw_.values(shape, into, 1) for shape in ((301,), (7, 33), (2048,))]
    addends = [draw_.values(host.shape, addend, 2) for host in hosts]
    buffers, norm = [backend.asarray(h) for h in hosts], on_device(backend, 7.0)
    grads = [backend.asarray(a) for a in addends]
    with pytest.raises(TypeError, match=r"would lose precision; .*casting=\"same_kind\""):
        gradkit.accumulate_grads(buffers, grads)
    options = {"scale": scale, "overwrite": overwrite, "norm_out": norm, "casting": "same_kind"}
    gradkit.accumulate_grads(buffers, grads, **options)
    for buffer, host, grad in zip(buffers, hosts, addends, strict=True):
        one = scale * grad.astype(np.float64)
        expected = one if overwrite else host.astype(np.float64) + one
        assert_same_bits(backend.asnumpy(buffer), rounded(expected, into))
    assert_same_bits(backend.asnumpy(norm), norm_of(backend, buffers))


def rounded(wide, name):
    """Float64 numbers rounded once, which a cast by way of float32 is not."""
    if name in ("float32", "float64"):
        return wide.astype(DTYPES[name])
    near = wide.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(wide)
    towards_zero = np.where(beyond, np.nextafter(near, np.float32(0)), near)
    inexact = (near.astype(np.float64) != wide).astype(np.uint32)  # to odd, so that no tie is made
    return (towards_zero.view(np.uint32) | inexact).view(np.float32).astype(DTYPES[name])


def test_containers(backend):
    def tree(value):
        return {"w": [backend.asarray(np.full(3, value)), None], "b": backend.asarray(np.ones(2))}

    buffers = tree(1.0)
    assert gradkit.accumulate_grads(buffers, tree(2.0)) is buffers
    np.testing.assert_array_equal(backend.asnumpy(buffers["w"][0]), 3)
    np.testing.assert_array_equal(backend.asnumpy(buffers["b"]), 2)
    made = gradkit.accumulate_grads((b for b in [buffers["b"]]), [buffers["b"]])
    assert isinstance(made, list)
    np.testing.assert_array_equal(backend.asnumpy(buffers["b"]), 4)  # a buffer that is doubled


def test_gradients_go_to_the_buffers_of_their_keys(backend):
    def tree(names, first):
        arrays = {name: backend.asarray(np.full(2, first + k)) for k, name in enumerate(names)}
        return ({"layers": [arrays]},)  # dicts may be made in any order, also deep inside

    (buffers,) = gradkit.accumulate_grads(tree("wb", 10.0), tree("bw", 1.0))
    sums = {name: backend.asnumpy(b).tolist() for name, b in buffers["layers"][0].items()}
    assert sums == {"w": [12, 12], "b": [12, 12]}
    with pytest.raises(ValueError, match=r"buffers; buffers\[0\].*\['w'\] has no counterpart"):
        gradkit.accumulate_grads(tree("wb", 10.0), tree("bc", 1.0))


def test_nothing_to_add(backend):
    for empty in ([], [None], [backend.asarray(np.zeros((0, 3)))]):
        norm = np.array(7.0) if not any(e is not None for e in empty) else on_device(backend, 7.0)
        assert gradkit.accumulate_grads(empty, empty, norm_out=norm) is empty
        assert float(backend.asnumpy(norm)) == 0


def test_overwriting_ignores_what_was_there(backend):
    for scale in (1.0, 0.5):
        buffers = [backend.asarray(np.full(9, value)) for value in (np.nan, np.inf)]
        grads = [backend.asarray(np.full(9, 2.0)) for _ in buffers]
        gradkit.accumulate_grads(buffers, grads, overwrite=True, scale=scale)
        for buffer in buffers:
            np.testing.assert_array_equal(backend.asnumpy(buffer), 2 * scale)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_product_keeps_the_sign_of_zero(backend, name):
    buffers = [backend.asarray(np.ones(9, DTYPES[name]))]
    grads = [backend.asarray(np.full(9, -0.0, DTYPES[name]))]
    gradkit.accumulate_grads(buffers, grads, overwrite=True, scale=0.5)
    assert_same_bits(backend.asnumpy(buffers[0]), np.full(9, -0.0, DTYPES[name]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_on_the_device_that_is_not_finite(backend, value):
    """It is multiplied by, whatever the buffers held; a number on the host is refused."""
    buffer, grad = (backend.asarray(np.array(x)) for x in ([5.0, 0.0, 1.0], [1.0, 0.0, -2.0]))
    scale = on_device(backend, value)
    if backend.on_host:
        with pytest.raises(ValueError, match="scale must be finite"):
            gradkit.accumulate_grads([buffer], [grad], scale=scale)
        assert backend.asnumpy(buffer).tolist() == [5, 0, 1]
        return
    norm = on_device(backend, 0.0)
    gradkit.accumulate_grads([buffer], [grad], scale=scale, norm_out=norm)
    np.testing.assert_array_equal(backend.asnumpy(buffer), [value, np.nan, -value])
    assert np.isnan(backend.asnumpy(norm))


def test_a_nan_reaches_the_norm(backend):
    grads = [backend.asarray(np.array([1.0, np.nan])), backend.asarray(np.ones(5))]
    buffers = [backend.asarray(np.zeros(len(g))) for g in grads]
    norm = on_device(backend, 7.0)
    gradkit.accumulate_grads(buffers, grads, norm_out=norm)
    assert np.isnan(backend.asnumpy(norm))


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


# Gradients without weight, such as those of a micro-batch of which no token counts: 0/0

WAYS = {
    "nearest": {},
    "norms": {"norm_out": None, "grad_norm_out": None},
    "compensated": {"compensation": None},
    "stochastic": {"rounding": "stochastic", "seed": 3},
}


@pytest.mark.guarantee("No weight")
@pytest.mark.parametrize("where", ["number", "array"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_has_no_weight_is_left_out(backend, dtype, way, overwrite, where):
    """Whatever it holds; the buffers keep every bit, or are +0. Norms are of what they say."""
    if way == "stochastic" and "16" not in dtype:
        return
    kind, options = DTYPES[dtype], dict(WAYS[way])
    odd = np.array([1.5, -0.0, np.nan, np.inf, -3.0], kind)
    held = [np.resize(odd, 37), np.resize(odd[[0, 1, 4]], (4, 9))[:, ::2]]
    buffers, kept = ([backend.asarray(h) for h in held] for _ in range(2))
    before = [backend.memory(b) for b in (*buffers, *kept)]
    grads = [
        backend.asarray(np.full(h.shape, bad, kind))
        for h, bad in zip(held, (np.nan, np.inf), strict=True)
    ]
    if "compensation" in options:
        options["compensation"] = kept
    for label in ("norm_out", "grad_norm_out"):
        if label in options:
            options[label] = on_device(backend, 7.0)
    for zero in (0.0, -0.0):
        scale = on_device(backend, zero) if where == "array" else zero
        gradkit.accumulate_grads(buffers, grads, scale=scale, overwrite=overwrite, **options)
    if not overwrite:
        assert [backend.memory(b) for b in (*buffers, *kept)] == before
    else:
        for array in [*buffers, *(kept if way == "compensated" else [])]:
            assert not backend.asnumpy(array).tobytes().strip(b"\0")
    if way == "norms":
        assert_same_bits(backend.asnumpy(options["norm_out"]), norm_of(backend, buffers))
        assert np.isnan(backend.asnumpy(options["grad_norm_out"]))


def test_a_single_gradient_without_weight_is_left_out(backend):
    for scale in (0, -0.0):
        buffer, kept = backend.asarray(np.float32([1.5, -0.0])), backend.asarray(np.zeros(2, "f4"))
        grad = backend.asarray(np.float32([np.nan]))
        before = backend.memory(buffer)
        gradkit.accumulate_grad(buffer, grad, scale=scale)
        gradkit.accumulate_grad(buffer, grad, scale=scale, compensation=kept)
        assert backend.memory(buffer) == before
        assert not backend.asnumpy(kept).any()


def test_a_weighted_mean_without_an_empty_micro_batch(backend):
    batches, buffer = ((0, np.nan), (3, 2.0), (1, 6.0)), [backend.asarray(np.full(1, np.nan))]
    for k, (tokens, grad) in enumerate(batches):
        grads = [backend.asarray(np.array([grad]))]
        gradkit.accumulate_grads(buffer, grads, scale=tokens / 4, overwrite=k == 0)
    assert backend.asnumpy(buffer[0]).tolist() == [3.0]

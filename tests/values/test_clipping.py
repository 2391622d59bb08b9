"""Norms and clipping: values against exact sums, semantics, and properties."""

import math
from collections import deque, namedtuple

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_ulps

NAN, INF = math.nan, math.inf


def f(*values, dtype=np.float64):
    return np.array(values, dtype)


def norm_of(backend, grads, order=2.0, **options):
    """The norm as a Python float."""
    result = gradkit.grad_norm(grads, order, **options)
    return float(backend.asnumpy(result))


def assert_norm(backend, got, grads, order):
    """A norm within its bound of the exact one."""
    runs = any(g.itemsize < 8 for g in grads)
    bound = tolerances.norm(order, backend.run_errors, runs=runs)
    assert oracles.off_by(got, oracles.norm(grads, order)) <= bound


def draw_list(data, backend, **options):
    """A drawn list on the host, and its copy on the backend."""
    host = data.draw(draw_.gradient_lists(backend.max_elements // 4, **options))
    return host, [backend.asarray(g) for g in host]


# Norms


@pytest.mark.guarantee("Accurate norms")
@given(data=st.data(), order=draw_.orders)
def test_norm_of_any_list(backend, data, order):
    host, grads = draw_list(data, backend)
    before = [backend.memory(g) for g in grads]
    result = gradkit.grad_norm(grads, order)
    assert backend.asnumpy(result).dtype == np.float64
    assert result.shape == ()
    assert_norm(backend, backend.asnumpy(result), host, order)
    assert [backend.memory(g) for g in grads] == before


@given(data=st.data(), order=draw_.orders)
def test_norm_of_each_tensor(backend, data, order):
    host, grads = draw_list(data, backend)
    found = backend.asnumpy(gradkit.per_tensor_norms(grads, order, flat=True))
    assert found.shape == (len(grads),)
    for got, g in zip(found, host, strict=True):
        assert_norm(backend, got, [g], order)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("size", [1, 40, 127, 256, 300, 1024])
def test_norms_of_many_small_tensors(backend, name, size):
    """On the CPU they have the bits that each has alone, without company of its size."""
    host = [draw_.values(size, name, seed=seed) for seed in range(9)]
    host[1][:] = 0
    host[2][-1], host[3][0] = INF, NAN
    if name == "float64":
        host[4] *= 1e200
        host[5] *= 1e-200
    grads = [backend.asarray(h) for h in host]
    several = [grads[0], backend.asarray(np.ones(7)), *grads[1:]]
    found = np.delete(backend.asnumpy(gradkit.per_tensor_norms(several, flat=True)), 1)
    if backend.on_host:
        alone = [gradkit.per_tensor_norms([g], flat=True) for g in grads]
        assert_same_bits(found, np.concatenate(alone))
    for got, h in zip(found, host, strict=True):
        assert_norm(backend, got, [h], 2)


@pytest.mark.guarantee("Accurate norms")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("size", [1023, 1024, 1025, 4097, 16384, 16385, 131071, 131072, 131073])
@pytest.mark.parametrize(
    ("order", "kind"),
    [(1, "normal"), (1, "constant"), (2, "normal"), (2, "constant"), (INF, "spread")],
)
def test_norm_at_the_edges_of_runs_and_blocks(backend, name, size, order, kind):
    if size > backend.max_elements:
        pytest.skip("too large for this backend")
    host = draw_.values(size, name, seed=size, kind=kind)
    assert_norm(backend, norm_of(backend, backend.asarray(host), order), [host], order)


EXACT_NORMS = {
    "nothing": ([], 2, 0.0),
    "nothing, largest": ([], INF, 0.0),
    "only None": ([None, None], 2, 0.0),
    "only empty": ([f(), np.zeros((3, 0, 2), np.float16)], 2, 0.0),
    "only empty, largest": ([f(), np.zeros((0, 4), np.float32)], INF, 0.0),
    "empty among others": ([f(), f(3.0), None, np.zeros((0, 2)), f(-4.0)], 2, 5.0),
    "empty among others, largest": ([f(), f(3.0), f(-4.0)], INF, 4.0),
    "0-d": ([np.array(-3.0), np.array(4.0, np.float32)], 2, 5.0),
    "0-d alone": (np.array(-3.0), 1, 3.0),
    "squares overflow": ([f(3e200, 4e200)], 2, 5e200),
    "squares overflow in float32": (
        [f(3e30, 4e30, dtype=np.float32)],
        INF,
        float(np.float32(4e30)),
    ),
    "squares underflow": ([f(3 * 2.0**-1000, 4 * 2.0**-1000)], 2, 5 * 2.0**-1000),
    "subnormal": ([f(3 * 2.0**-1074, 4 * 2.0**-1074)], 2, 5 * 2.0**-1074),
    "sums overflow": ([f(*[1e308] * 3)], 1, INF),
    "sums nearly overflow": ([f(*[2.0**1020] * 15)], 1, 15 * 2.0**1020),
    "one large among many small": (
        [f(64.0, *[0.0028470900917830777] * 127)],
        1,
        64.36158044165646,
    ),
    "fourth powers overflow": ([f(*[-(2.0**500)] * 16)], 4, 2.0**501),
    "above float16's largest": ([np.full(4, 35008, np.float16)], 2, 70016.0),
    "above float32's largest": ([np.full(4, 2.0**127, np.float32)], 2, 2.0**128),
    "mixed dtypes": (
        [
            f(1.0),
            f(1.0, dtype=np.float32),
            f(1.0, dtype=np.float16),
            np.ones((), DTYPES["bfloat16"]),
        ],
        2,
        2.0,
    ),
    "huge beside tiny": ([f(3e300), f(1e-300), f(4e300, dtype=np.float64)], 2, 5e300),
    "one NaN": ([f(1.0), f(2.0, NAN, 3.0)], 2, NAN),
    "one NaN, largest": ([f(NAN, 1.0), f(2.0)], INF, NAN),
    "NaN last, largest": ([f(2.0, NAN)], INF, NAN),
    "NaN beside inf": ([f(INF), f(NAN)], 2, NAN),
    "NaN beside inf, largest": ([f(INF, NAN)], INF, NAN),
    "NaN beside inf, sum": ([f(NAN), f(-INF)], 1, NAN),
    "infinite": ([f(1.0), f(-INF)], 2, INF),
    "infinite, largest": ([f(-INF, 1.0)], INF, INF),
    "infinite float16": ([f(INF, dtype=np.float16)], 3, INF),
    "all zero": ([np.zeros(5), -np.zeros(5)], 2, 0.0),
    "infinity by name": ([f(3.0, -4.0)], "inf", 4.0),
}


@pytest.mark.guarantee("Safe from overflow")
@pytest.mark.parametrize(("grads", "order", "expected"), EXACT_NORMS.values(), ids=EXACT_NORMS)
def test_norm_known_exactly(backend, grads, order, expected):
    if isinstance(grads, list):
        grads = [None if g is None else backend.asarray(g) for g in grads]
    else:
        grads = backend.asarray(grads)
    got = norm_of(backend, grads, order)
    assert got == pytest.approx(expected, rel=1e-15, abs=0, nan_ok=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "power", [*range(-1040, -440, 20), -530, 470, 480, 490, 500, 504, 505, 511]
)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_squares_near_the_edges_of_float64_in_a_long_list(backend, order, power):
    """So many that sums overflow where single powers do not, and such that lose digits alike."""
    host = (1.95 + draw_.values(20_000, "float64", power + 2000) % 0.05) * 2.0**power
    assert_norm(backend, norm_of(backend, backend.asarray(host), order), [host], order)


@pytest.mark.parametrize("power", [504, -520])
def test_squares_in_a_long_list_are_scaled_in_time(backend, power):
    """Those of the test above that a bound a little too far out gets wrong."""
    host = np.linspace(1.95, 2, 20_000) * 2.0**power
    assert_norm(backend, norm_of(backend, backend.asarray(host), 2), [host], 2)


@pytest.mark.guarantee("NaN stays NaN")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("order", [1, 2, 3, 0.5, INF])
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 511, 512, 5000, 131072, 140000])
def test_one_nonfinite_element_is_never_lost(backend, order, name, value, place):
    host = draw_.values(140001, name, kind="ties")
    host[place] = value
    got = norm_of(backend, backend.asarray(host), order)
    assert math.isnan(got) if math.isnan(value) else got == INF


@given(data=st.data(), order=st.sampled_from((1.0, 2.0, INF)), power=st.integers(-20, 20))
def test_scaling_by_a_power_of_two_is_exact(backend, data, order, power):
    names = st.sampled_from(("float32", "float64"))
    host, grads = draw_list(data, backend, name=names, kind=st.sampled_from(("normal", "ties")))
    scaled = [backend.asarray(g) for g in host]  # laid out alike, so that sums take one order
    for array, g in zip(scaled, host, strict=True):
        backend.assign(array, g * g.dtype.type(2.0**power))
    assert norm_of(backend, scaled, order) == 2.0**power * norm_of(backend, grads, order)


@pytest.mark.guarantee("Repeatable")
@given(data=st.data(), order=draw_.orders)
def test_the_same_call_again_gives_the_same_bits(backend, data, order):
    host, grads = draw_list(data, backend)
    first = norm_of(backend, grads, order)
    assert norm_of(backend, grads, order) == first
    assert norm_of(backend, [backend.asarray(g) for g in host], order) == first


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_in_any_gradient_reaches_the_norm(backend, order, place):
    """Gradients so large that each is summed up by itself."""
    host = [np.ones(backend.max_elements // 3, np.float32) for _ in range(3)]
    host[place][-1] = np.nan
    assert np.isnan(norm_of(backend, [backend.asarray(g) for g in host], order))


def test_containers(backend):
    a, b = (backend.asarray(f(v)) for v in (3.0, -4.0))
    pair = namedtuple("pair", "w b")(a, b)
    for grads in (
        [a, b],
        (a, b),
        {"a": a, "b": b},
        pair,
        {"x": [a, None, {}], "y": ({"z": pair.b}, [])},
        iter([a, b]),
        (g for g in (a, b)),
        {"a": a, "b": b}.values(),
        [(g for g in (a,)), (g for g in (b,))],
    ):
        assert norm_of(backend, grads) == 5.0


def test_an_array_may_be_read_twice(backend):
    a = backend.asarray(f(3.0, 4.0))
    assert norm_of(backend, [a, a], 1) == 14.0
    assert norm_of(backend, [a, a[::-1]], INF) == 4.0


def test_disjoint_views_of_one_memory_are_written(backend):
    room = backend.asarray(np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 7.0]]))
    gradkit.clip_grad_norm([room[:2, 0], room[:2, 1], room[2:, :1]], 2.5)
    np.testing.assert_array_equal(backend.asnumpy(room), [[1.5, 2.0], [0.0, 0.0], [0.0, 7.0]])


def test_norm_into_out(backend):
    grads = [backend.asarray(f(3.0)), backend.asarray(f(-4.0))]
    out = backend.asarray(np.array(7.0))
    assert gradkit.grad_norm(grads, out=out) is out
    assert float(backend.asnumpy(out)) == 5.0
    out = backend.asarray(LAYOUTS["every third"](f(7.0, 7.0)))
    assert gradkit.per_tensor_norms(grads, flat=True, out=out) is out
    np.testing.assert_array_equal(backend.asnumpy(out), [3.0, 4.0])


@pytest.mark.parametrize("label", ["out", "found_inf"])
def test_what_an_empty_list_is_of_is_named_in_its_error(label):
    with pytest.raises(TypeError, match=f"^{label} is a masked array"):
        gradkit.grad_norm([], **{label: np.ma.ones(())})


def test_norm_into_what_is_not_aligned(backend):
    grads = [backend.asarray(f(3.0)), backend.asarray(f(-4.0))]
    for order in (1, 2, 3, INF):
        out = backend.asarray(LAYOUTS["misaligned"](np.array(7.0)))
        gradkit.grad_norm(grads, order, out=out)
        assert float(backend.asnumpy(out)) == pytest.approx(
            np.linalg.norm([3, 4], order), rel=1e-15
        )


@pytest.mark.parametrize("order", [1, INF])
def test_norms_of_more_arrays_than_one_block_takes_at_once(backend, order):
    count = min(5000, backend.max_elements)
    grads = [backend.asarray(f(1.0 + k % 3)) for k in range(count)]
    exact = 3.0 if order == INF else sum(1.0 + k % 3 for k in range(count))
    assert norm_of(backend, grads, order) == exact


@pytest.mark.parametrize("layout", ["C", "misaligned"])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_general_powers_of_ragged_runs(backend, name, layout):
    """From any element on, with less than a pack, a warp or a batch left at the end."""
    for length in (1, 7, 300, 700, 1100):
        for offset in (0, 1):
            host = LAYOUTS[layout](draw_.values((length + offset,), name, length))[offset:]
            expected = np.linalg.norm(host.astype(np.float64), 3.5)
            got = norm_of(backend, [backend.asarray(host)], 3.5)
            assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_many_dimensions_that_cannot_be_merged(backend, name):
    host = draw_.values((3,) * 6, name, 1)[(slice(None, None, 2),) * 6]
    exact = host.astype(np.float64)
    grad = backend.asarray(host)
    assert norm_of(backend, [grad], 1) == pytest.approx(np.abs(exact).sum(), rel=1e-14)
    for change, expected in (
        (lambda: gradkit.scale_grads([grad], 0.5), exact / 2),
        (lambda: gradkit.clip_grad_value([grad], 0.25), np.clip(exact / 2, -0.25, 0.25)),
        (lambda: gradkit.zero_grad([grad]), exact * 0),
    ):
        change()
        np.testing.assert_array_equal(backend.asnumpy(grad).astype(np.float64), expected)


def test_integer_orders_are_real_orders(backend):
    grads = [backend.asarray(f(1.0, 2.0, 3.0))]
    for order in (2, np.float32(2), np.int64(2), np.array(2.0)):
        assert norm_of(backend, grads, order) == norm_of(backend, grads, 2.0)


# Clipping by norm


@pytest.mark.guarantee("Products rounded once", "Accurate norms")
@given(
    data=st.data(),
    order=draw_.orders,
    ratio=st.sampled_from((0.0, 1e-3, 0.3, 0.999, 1.0, 1.5, INF)),
    eps=st.sampled_from((0.0, 1e-6, 10.0)),
)
def test_clip_of_any_list(backend, data, order, ratio, eps):
    """In place and functional: each element g * coefficient, rounded once; gaps untouched."""
    host, grads = draw_list(data, backend)
    before = norm_of(backend, grads, order)
    max_norm = 0.0 if ratio == 0 else before * ratio
    hypothesis.assume(not math.isnan(max_norm))
    copies, norm = gradkit.clip_by_global_norm(grads, max_norm, order, eps=eps)
    for g, h in zip(grads, host, strict=True):
        assert_same_bits(backend.asnumpy(g), h)  # inputs are never written
    assert float(backend.asnumpy(norm)) == before
    assert float(backend.asnumpy(gradkit.clip_grad_norm(grads, max_norm, order, eps=eps))) == before
    for g, copy, h in zip(grads, copies, host, strict=True):
        expected = oracles.clipped(h, before, max_norm, eps)
        assert_ulps(backend.asnumpy(g), expected, tolerances.CLIPPED_ULPS)
        assert_same_bits(backend.asnumpy(copy), backend.asnumpy(g))
        fresh = backend.asarray(h)
        backend.assign(fresh, g)
        assert backend.memory(g) == backend.memory(fresh)  # nothing beside the elements


@pytest.mark.guarantee("No needless change")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("max_norm", [5.0, np.nextafter(5.0, 6.0), INF])
def test_a_norm_that_does_not_exceed_keeps_every_bit(backend, name, max_norm):
    """Down to the payload of a zero's sign; at norm == max_norm the coefficient is exactly 1."""
    host = np.array([3.0, -0.0, 4.0, 0.0], DTYPES[name])
    grads = backend.asarray(host)
    for _ in range(3):
        assert float(backend.asnumpy(gradkit.clip_grad_norm(grads, max_norm, eps=0.0))) == 5.0
        assert_same_bits(backend.asnumpy(grads), host)
    norm = backend.asarray(np.array(5.0))
    assert float(backend.asnumpy(gradkit.clip_coefficient(norm, max_norm))) == 1.0


@pytest.mark.guarantee("No needless change")
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-12])
def test_max_norm_0_gives_zeros(backend, eps, value):
    grads = backend.asarray(np.full((3, 2), value))
    gradkit.clip_grad_norm(grads, 0.0, eps=eps)
    np.testing.assert_array_equal(backend.asnumpy(grads), np.zeros((3, 2)))


def test_eps_bounds_the_divisor(backend):
    grads = backend.asarray(f(0.5))
    gradkit.clip_grad_norm(grads, 0.25, eps=2.0)  # 0.25 / max(0.5, 2)
    assert float(backend.asnumpy(grads)[0]) == 0.0625


NONFINITE = {
    "NaN": (NAN, 2.0, [NAN, NAN, NAN], [NAN]),
    "infinity": (INF, 2.0, [0.0, NAN, -0.0], [0.0]),
    "negative infinity": (-INF, 2.0, [0.0, NAN, -0.0], [0.0]),
    "NaN, largest": (NAN, INF, [NAN, NAN, NAN], [NAN]),
    "infinity, sum": (INF, 1.0, [0.0, NAN, -0.0], [0.0]),
}


@pytest.mark.guarantee("NaN stays NaN")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize(("value", "order", "first", "second"), NONFINITE.values(), ids=NONFINITE)
class TestNonFinite:
    def grads(self, backend, value, name):
        return {
            "w": [backend.asarray(np.array([1.0, value, -2.0], DTYPES[name]))],
            "b": backend.asarray(f(3.0)),
        }

    def test_propagates(self, backend, value, order, first, second, name):
        grads = self.grads(backend, value, name)
        norm = gradkit.clip_grad_norm(grads, 1.0, order)
        assert float(backend.asnumpy(norm)) == pytest.approx(abs(value), nan_ok=True)
        assert_ulps(backend.asnumpy(grads["w"][0]), np.array(first, DTYPES[name]), 0)
        assert_ulps(backend.asnumpy(grads["b"]), f(*second), 0)

    def test_becomes_zero(self, backend, value, order, first, second, name):  # noqa: ARG002
        grads = self.grads(backend, value, name)
        clipped, _ = gradkit.clip_by_global_norm(grads, 1.0, order, nonfinite="zero")
        gradkit.clip_grad_norm(grads, 1.0, order, nonfinite="zero")
        for tree in (clipped, grads):
            for array in (tree["w"][0], tree["b"]):
                assert not any(backend.memory(array))  # +0 bit for bit

    def test_raises_and_writes_nothing(self, backend, value, order, first, second, name):  # noqa: ARG002
        grads = self.grads(backend, value, name)
        out = backend.asarray(np.array(7.0))
        each = backend.asarray(f(7.0, 7.0))
        twins = self.grads(backend, 7.0, name)
        arrays = [grads["w"][0], grads["b"], out, each, twins["w"][0], twins["b"]]
        before = [backend.memory(a) for a in arrays]
        options = {"norm_type": order, "nonfinite": "raise"}
        for call in (
            lambda: gradkit.clip_grad_norm(grads, 1.0, out=out, **options),
            lambda: gradkit.clip_grad_norm(grads, INF, out=out, **options),
            lambda: gradkit.clip_by_global_norm(grads, 1.0, out=(twins, out), **options),
            lambda: gradkit.grad_norm(grads, out=out, **options),
            lambda: gradkit.per_tensor_norms(grads, flat=True, out=each, **options),
        ):
            with pytest.raises(gradkit.NonFiniteNormError, match=r"grads\['w'\]\[0\]") as caught:
                call()
            assert caught.value.names == ("grads['w'][0]",)
            assert caught.value.norm == pytest.approx(abs(value), nan_ok=True)
            assert [backend.memory(a) for a in arrays] == before


def test_raise_passes_what_is_finite(backend):
    grads = [backend.asarray(f(3.0)), backend.asarray(f(4.0))]
    out = backend.asarray(np.array(7.0))
    assert gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise", out=out) is out
    assert float(backend.asnumpy(out)) == 5.0
    np.testing.assert_array_equal(backend.asnumpy(grads[1]), [4.0 * (1.0 / 5.0)])


def test_raise_where_the_norm_alone_overflows(backend):
    grads = backend.asarray(np.full(4, 1.5e308))
    with pytest.raises(gradkit.NonFiniteNormError, match="every gradient here is finite"):
        gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise")


def test_clip_rebuilds_the_callers_container(backend):
    pair = namedtuple("pair", "w b")
    a, b = backend.asarray(f(3.0)), backend.asarray(f(4.0, dtype=np.float32))
    tree = {"layers": [pair(a, None), (b,)], "none": None, "empty": []}
    clipped, norm = gradkit.clip_by_global_norm(tree, 2.5)
    assert float(backend.asnumpy(norm)) == 5.0
    first, second = clipped["layers"]
    assert type(first) is pair
    assert first.b is None
    assert type(second) is tuple
    assert clipped["none"] is None
    assert clipped["empty"] == []
    assert_same_bits(backend.asnumpy(first.w), f(1.5))
    assert_same_bits(backend.asnumpy(second[0]), f(2.0, dtype=np.float32))
    from_generator, _ = gradkit.clip_by_global_norm((g for g in (a, b)), 2.5)
    assert type(from_generator) is list
    alone, _ = gradkit.clip_by_global_norm(a, 1.5)
    assert type(alone) is type(a)
    assert_same_bits(backend.asnumpy(alone), f(1.5))


@given(data=st.data())
def test_clip_of_any_tree(backend, data):
    host = data.draw(draw_.gradient_lists(512))
    grads = [backend.asarray(g) for g in host]
    tree = data.draw(draw_.trees(grads))
    expected, norm = gradkit.clip_by_global_norm(grads, 0.5)
    clipped, again = gradkit.clip_by_global_norm(tree, 0.5)
    assert float(backend.asnumpy(again)) == float(backend.asnumpy(norm))
    assert _shape_of(clipped) == _shape_of(tree)
    assert_all_same_bits(_leaves(clipped), expected, backend)


def _leaves(tree):
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [] if tree is None else [tree]


def _shape_of(tree):
    if isinstance(tree, dict):
        return {key: _shape_of(branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_shape_of, tree))
    return None if tree is None else "array"


def test_clip_into_out(backend):
    grads = {"w": backend.asarray(f(3.0, 0.0)), "b": backend.asarray(f(4.0))}
    twins = {"w": backend.asarray(LAYOUTS["stepped"](f(7.0, 7.0))), "b": backend.asarray(f(7.0))}
    norm = backend.asarray(np.array(7.0))
    clipped, found = gradkit.clip_by_global_norm(grads, 2.5, out=(twins, norm))
    assert clipped is twins
    assert found is norm
    assert float(backend.asnumpy(norm)) == 5.0
    np.testing.assert_array_equal(backend.asnumpy(twins["w"]), [1.5, 0.0])
    np.testing.assert_array_equal(backend.asnumpy(twins["b"]), [2.0])
    clipped, found = gradkit.clip_by_global_norm(grads, 5.0, out=(None, norm))
    np.testing.assert_array_equal(backend.asnumpy(clipped["w"]), [3.0, 0.0])
    assert found is norm


def test_results_go_to_the_keys_of_their_gradients(backend):
    grads = [{"w": backend.asarray(f(3.0)), "b": backend.asarray(f(4.0))}, None]
    out = [{"b": backend.asarray(f(0.0)), "w": backend.asarray(f(0.0))}, None]
    clipped, _ = gradkit.clip_by_global_norm(grads, 2.5, out=(out, None))
    assert clipped is out
    found = {name: backend.asnumpy(g).tolist() for name, g in out[0].items()}
    assert found == {"b": [2.0], "w": [1.5]}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"w": f(0.0), "c": f(0.0)}, r"grads\['b'\]"),
        ({"w": f(0.0)}, r"grads\['b'\]"),
        ({"w": f(0.0), "b": f(0.0), "c": f(0.0)}, r"out\[0\]\['c'\]"),
        ([f(0.0), f(0.0)], r"grads\['w'\]"),
    ],
)
def test_results_need_a_place_each(wrong, named):
    said = r"out\[0\] must have the same structure as grads; "
    with pytest.raises(ValueError, match=said + named + " has no counterpart"):
        gradkit.clip_by_global_norm({"w": f(3.0), "b": f(4.0)}, 2.5, out=(wrong, None))


@pytest.mark.guarantee("In place or not")
def test_what_comes_back_is_the_callers_own(backend):
    a = backend.asarray(f(3.0, 4.0))
    for grads in (a, [a], (a,), {"a": a}):
        assert gradkit.scale_grads(grads, 1.0) is grads
        assert gradkit.clip_grad_value(grads, 9.0) is grads
    found = gradkit.scale_grads((g for g in (a,)), 2.0)
    assert type(found) is list
    assert found[0] is a
    np.testing.assert_array_equal(backend.asnumpy(a), [6.0, 8.0])


# The coefficient, scaling, and clipping by value


@given(
    norm=st.floats(0) | st.just(NAN),
    max_norm=st.floats(0),
    eps=st.floats(0, allow_infinity=False),
    mode=st.sampled_from(("max", "add")),
)
@hypothesis.example(norm=2.0, max_norm=2.0, eps=1e-6, mode="add")
def test_coefficient(backend, norm, max_norm, eps, mode):
    hypothesis.assume(norm <= max_norm or max(norm, eps) > 0)
    given = backend.asarray(np.array(norm))
    got = gradkit.clip_coefficient(given, max_norm, eps=eps, eps_mode=mode)
    assert got.shape == ()
    expected = oracles.coefficient(norm, max_norm, eps, mode)
    assert_same_bits(backend.asnumpy(got), np.array(expected))


def test_an_eps_that_is_added_in_every_clip(backend):
    """0.5 / (2 + 0.5) of each, where the larger of the two would give a quarter."""
    expected, options = [0.4], {"eps": 0.5, "eps_mode": "add"}
    grads = [backend.asarray(f(2.0))]
    clipped, _ = gradkit.clip_by_global_norm(grads, 0.5, **options)
    np.testing.assert_allclose(backend.asnumpy(clipped[0]), expected, rtol=1e-15)
    norm = gradkit.clip_grad_norm(grads, 0.5, **options)
    np.testing.assert_allclose(backend.asnumpy(grads[0]), expected, rtol=1e-15)
    grads = [backend.asarray(f(2.0))]
    gradkit.clip_grads_with_norm(grads, norm, max_norm=0.5, **options)
    np.testing.assert_allclose(backend.asnumpy(grads[0]), expected, rtol=1e-15)
    with pytest.raises(ValueError, match="eps_mode must be one of 'max', 'add', not 'sum'"):
        gradkit.clip_grad_norm(grads, 0.5, eps_mode="sum")


def test_coefficient_of_many_norms_and_of_a_number(backend):
    norms = backend.asarray(f(0.0, 1.0, 2.0, 8.0, INF, NAN))
    out = backend.asarray(np.full(6, 7.0))
    assert gradkit.clip_coefficient(norms, 2.0, out=out) is out
    np.testing.assert_array_equal(backend.asnumpy(out), [1.0, 1.0, 1.0, 0.25, 0.0, NAN])
    assert float(gradkit.clip_coefficient(8, 2.0)) == 0.25


@given(data=st.data(), factor=st.floats(-2.0, 2.0))
def test_scale(backend, data, factor):
    host, grads = draw_list(data, backend)
    coefficient = data.draw(
        st.sampled_from((factor, np.float64(factor), backend.asarray(np.array(factor))))
    )
    gradkit.scale_grads(grads, coefficient)
    for g, h in zip(grads, host, strict=True):
        with np.errstate(all="ignore"):
            expected = (h.astype(np.float64) * factor).astype(h.dtype) if factor != 1 else h
        assert_ulps(backend.asnumpy(g), expected, tolerances.CLIPPED_ULPS)


@pytest.mark.parametrize("factor", [1e-300, 2.0**-140, -(2.0**-1074), 1e300, NAN, INF])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_scale_by_what_float32_cannot_hold(backend, factor, name):
    host = np.array([0.0, -0.0, 1.0, -3.0, float(tolerances.smallest(DTYPES[name]))], DTYPES[name])
    grads = backend.asarray(host)
    gradkit.scale_grads(grads, factor)
    with np.errstate(all="ignore"):
        expected = (host.astype(np.float64) * factor).astype(host.dtype)
    assert_ulps(backend.asnumpy(grads), expected, tolerances.CLIPPED_ULPS)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_factor_of_1_keeps_every_bit(backend, name):
    host = np.array([0.0, -0.0, NAN, INF, -1.0, tolerances.smallest(DTYPES[name])], DTYPES[name])
    grads = backend.asarray(host)
    gradkit.scale_grads(grads, 1.0)
    assert_same_bits(backend.asnumpy(grads), host)


@given(data=st.data(), limit=st.sampled_from((0.0, 1e-3, 0.1, 1.0, 2.5, 1e5, 1e300, INF)))
def test_clip_value(backend, data, limit):
    host, grads = draw_list(data, backend)
    found = gradkit.clip_grad_value(grads, limit)
    assert found is grads
    for g, h in zip(grads, host, strict=True):
        with np.errstate(over="ignore"):
            high = np.array(limit).astype(h.dtype)
        expected = np.where(h > high, high, np.where(h < -high, -high, h)).astype(h.dtype)
        assert_ulps(backend.asnumpy(g), expected, 0)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_clip_value_of_what_is_not_finite(backend, name):
    grads = backend.asarray(np.array([NAN, INF, -INF, 2.0], DTYPES[name]))
    gradkit.clip_grad_value(grads, 0.5)
    assert_ulps(backend.asnumpy(grads), np.array([NAN, 0.5, -0.5, 0.5], DTYPES[name]), 0)


def test_many_small_arrays(backend):
    """More arrays than any launch has room for parameters, each of one element."""
    count = min(5000, backend.max_elements)
    grads = [backend.asarray(f(1.0 + k % 3)) for k in range(count)]
    before = np.concatenate([backend.asnumpy(g) for g in grads])
    exact = math.sqrt(math.fsum(before**2))
    norm = float(backend.asnumpy(gradkit.clip_grad_norm(grads, exact / 2, eps=0.0)))
    assert norm == pytest.approx(exact, rel=tolerances.norm(2, {}, runs=False))
    after = np.concatenate([backend.asnumpy(g) for g in grads])
    assert_ulps(after, before * (exact / 2 / norm), tolerances.CLIPPED_ULPS)


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("value", [2.0**-140, 2.0**-70, 1.0, 2.0**70, 2.0**127, NAN, INF])
def test_what_is_large_and_read_in_place(backend, name, value):
    """Longer than the scratch that values outside of the safe range go through."""
    if 8 * backend.max_elements < 1_200_000:
        pytest.skip("too large for this backend")
    grad = np.zeros(1_200_000, DTYPES[name])
    grad[[5, 700_000, 1_048_575, 1_048_576]] = value
    assert float(gradkit.grad_norm(backend.asarray(grad))) == pytest.approx(
        2 * value, rel=1e-15, abs=0, nan_ok=True
    )
    assert float(gradkit.grad_norm(backend.asarray(grad), INF)) == pytest.approx(
        value, rel=0, abs=0, nan_ok=True
    )


@pytest.mark.parametrize("order", [1, 2, 3, INF])
def test_lists_of_many_sizes(backend, order):
    """Sizes that the reference takes by the batch, in two ways, and one by one."""
    sizes = [0, 1, 700, 1024, 0, 1025, 5000, 16384, 20000, 3, 16384, 9000, 16384, 16384, 16384, 0]
    names = sorted(DTYPES)
    host = [
        draw_.values(min(size, backend.max_elements), names[k % 3 + k // 9], seed=k)
        for k, size in enumerate(sizes)
    ]
    grads = [backend.asarray(h) for h in host]
    assert_norm(backend, norm_of(backend, grads, order), host, order)
    assert_norm(backend, norm_of(backend, grads[::-1], order), host, order)


def test_an_empty_list_is_where_the_array_beside_it_is(backend):
    for call in (gradkit.grad_norm, lambda grads, **out: gradkit.clip_grad_norm(grads, 1.0, **out)):
        out = backend.asarray(np.array(7.0))
        assert call([], out=out) is out
        assert float(backend.asnumpy(out)) == 0


class TestAKnownNorm:
    """``clip_grads_with_norm``: the second half of clipping, by itself."""

    @given(data=st.data())
    def test_both_halves_are_the_whole(self, backend, data):
        host = data.draw(draw_.gradient_lists(backend.max_elements))
        limit = data.draw(st.floats(0, 10))
        whole, halves = ([backend.asarray(g) for g in host] for _ in range(2))
        norm = gradkit.clip_grad_norm(whole, limit)
        assert gradkit.clip_grads_with_norm(halves, norm, max_norm=limit) is halves
        assert_all_same_bits(halves, whole, backend)

    def test_a_number_will_do(self, backend):
        for norm in (4, 4.0, np.float32(4), np.array(4.0)):
            grad = backend.asarray(np.array([3.0, -2.0]))
            assert gradkit.clip_grads_with_norm(grad, norm, max_norm=1.0) is grad
            np.testing.assert_array_equal(backend.asnumpy(grad), [0.75, -0.5])
        gradkit.clip_grads_with_norm(grad, 0.5, max_norm=1.0)
        np.testing.assert_array_equal(backend.asnumpy(grad), [0.75, -0.5])
        assert gradkit.clip_grads_with_norm([], 4.0, max_norm=1.0) == []

    def test_a_number_and_the_limit_cannot_be_swapped(self, backend):
        """PyTorch's order, and any of two numbers, is an error; of an array and a number is not."""
        grad = backend.asarray(np.array([3.0, -2.0]))
        before, norm = backend.memory(grad), backend.asarray(np.array(4.0))
        for numbers in ((1.0, 4.0), (1, norm), (1.0, np.array(4.0))):
            with pytest.raises(TypeError, match=r"by keyword.* pass norm=1(\.0)?, max_norm="):
                gradkit.clip_grads_with_norm([grad], *numbers)
        assert backend.memory(grad) == before
        gradkit.clip_grads_with_norm([grad], norm, 1.0)
        np.testing.assert_array_equal(backend.asnumpy(grad), [0.75, -0.5])

    @pytest.mark.parametrize("on_device", [False, True])
    def test_a_norm_that_is_not_finite(self, backend, on_device):
        def clipped(norm, policy):
            grad = backend.asarray(np.array([3.0, -2.0]))
            norm = backend.asarray(np.array(norm)) if on_device else norm
            gradkit.clip_grads_with_norm([grad], norm, max_norm=1.0, nonfinite=policy)
            return backend.asnumpy(grad)

        assert np.isnan(clipped(np.nan, "propagate")).all()
        np.testing.assert_array_equal(clipped(np.inf, "propagate"), [0.0, -0.0])
        for norm in (np.nan, np.inf):
            np.testing.assert_array_equal(clipped(norm, "zero"), [0.0, 0.0])
            with pytest.raises(gradkit.NonFiniteNormError, match="every gradient here is"):
                clipped(norm, "raise")


@pytest.mark.parametrize("magnitude", [3.3e-157, 3.3e-161, 3.3e157])
def test_squares_that_lose_digits_are_scaled(backend, magnitude):
    """Sums of their plain squares are still numbers, with a few digits or none too many."""
    grads = [backend.asarray(np.full(n, magnitude)) for n in (1000, 1)]
    expected = magnitude * math.sqrt(1001)
    assert float(gradkit.grad_norm(grads)) == pytest.approx(expected, rel=1e-14, abs=0)


# Some gradients clipped, some counted


MASKS = {"a": [True, False], "b": {"c": True, "d": False}}


def masked(backend):
    """Gradients of several dtypes, and their hosts, in the masks' structure."""
    rng = np.random.default_rng(5)
    dtypes = (np.float32, np.float64, np.float16, DTYPES["bfloat16"])
    w, x, y, z = ((3 * rng.normal(size=7 + k)).astype(d) for k, d in enumerate(dtypes))
    hosts = {"a": [w, x], "b": {"c": y, "d": z}}
    device = [backend.asarray(h) for h in (w, x, y, z)]
    return hosts, {"a": device[:2], "b": dict(zip("cd", device[2:], strict=True))}


def of_leaves(tree):
    return [*tree["a"], *tree["b"].values()]


NAMED = {"a.0": True, "a.1": False, "b.c": True, "b.d": False}
SAID = {
    "a container": MASKS,
    "one that ends": {"a": [True, False], "b": {"c": True, "d": False}},
    "a function": lambda name, array: NAMED[name] and array is not None,
}


@pytest.mark.guarantee("Gradients that are not clipped")
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
@pytest.mark.parametrize("order", [2.0, INF])
def test_some_are_clipped_and_all_count(backend, said, scale, nonfinite, order):
    hosts, grads = masked(backend)
    options = {"scale": scale, "clip": said, "nonfinite": nonfinite}
    whole = np.concatenate([h.astype(np.float64) for h in of_leaves(hosts)]) * scale
    clipped, norm = gradkit.clip_by_global_norm(grads, 0.7, order, **options)
    assert float(backend.asnumpy(norm)) == pytest.approx(np.linalg.norm(whole, order), rel=1e-6)
    assert_all_same_bits(of_leaves(grads), of_leaves(hosts), backend)
    same = gradkit.clip_grad_norm(grads, 0.7, order, **options)
    assert_same_bits(backend.asnumpy(norm), backend.asnumpy(same))
    value = float(backend.asnumpy(norm))
    for new, old, host, one in zip(*map(of_leaves, (clipped, grads, hosts, MASKS)), strict=True):
        assert_same_bits(backend.asnumpy(new), backend.asnumpy(old))
        factor = scale * (oracles.coefficient(value, 0.7) if one else 1)
        expected = (host.astype(np.float64) * factor).astype(host.dtype)
        tolerances.assert_ulps(backend.asnumpy(new), expected, 1)
        if factor == 1:
            assert_same_bits(backend.asnumpy(new), host)


@pytest.mark.parametrize("kind", [tuple, namedtuple("Pair", "a b")._make, deque])
def test_options_in_containers_like_those_of_gradients(kind):
    """As a map over the gradients gives them."""
    grads = {"w": kind([np.array([3.0]), np.array([4.0])])}
    kept = {"clip": {"w": kind([True, False])}, "count": {"w": kind([False, True])}}
    clipped, norm = gradkit.clip_by_global_norm(grads, 1.0, **kept)
    assert (norm, *clipped["w"]) == (4.0, 0.75, 4.0)
    assert gradkit.grad_norm(grads, replicas={"w": kind([1, 1])}) == 5.0
    clipped, _ = gradkit.clip_by_block_norm(grads, {"w": kind([6.0, 1.0])})
    assert (*clipped["w"],) == (3.0, 1.0)
    buffers = kind([np.zeros(1, np.float16), np.zeros(1, np.float16)])
    parts = kind([np.full(1, 1 + 2**-14), np.full(1, 1 + 2**-14)])
    random = {"rounding": "stochastic", "casting": "same_kind"}
    gradkit.accumulate_grads(buffers, parts, offsets=kind([7, 7]), **random)
    assert buffers[0] == buffers[1]


@pytest.mark.guarantee("Gradients that are not clipped")
def test_all_are_clipped_and_some_count(backend):
    """Gradients that do not count may hold anything."""
    hosts, grads = masked(backend)
    grads["a"][1][0] = NAN
    flag = backend.asarray(np.array(0.0))
    norm = gradkit.clip_grad_norm(grads, 0.7, count=MASKS, found_inf=flag)
    counted = np.concatenate([hosts["a"][0], hosts["b"]["c"]], dtype=np.float64)
    value = float(backend.asnumpy(norm))
    assert value == pytest.approx(np.linalg.norm(counted), rel=1e-6)
    assert float(backend.asnumpy(flag)) == 0
    factor = oracles.coefficient(value, 0.7)
    for got, host in zip(of_leaves(grads), of_leaves(hosts), strict=True):
        expected = (host.astype(np.float64) * factor).astype(host.dtype)
        tolerances.assert_ulps(backend.asnumpy(got)[1:], expected[1:], 1)


@pytest.mark.guarantee("Gradients that are not clipped")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_norm_that_is_not_finite_leaves_what_is_not_clipped(backend, bad):
    """Or makes zeros of it, if that is asked for; errors name what counts."""
    for policy in ("propagate", "zero"):
        hosts, grads = masked(backend)
        grads["a"][0][3] = bad
        gradkit.clip_grad_norm(grads, 0.7, clip=MASKS, nonfinite=policy)
        for name in ("a", "b"):
            left, host = (t[name][1] if name == "a" else t[name]["d"] for t in (grads, hosts))
            expected = host if policy == "propagate" else np.zeros_like(host)
            assert_same_bits(backend.asnumpy(left), expected)
    hosts, grads = masked(backend)
    grads["a"][1][0] = grads["a"][0][0] = bad
    with pytest.raises(gradkit.NonFiniteNormError) as caught:
        gradkit.clip_grad_norm(grads, 0.7, count=MASKS, nonfinite="raise")
    assert caught.value.names == ("grads['a'][0]",)
    rows = [backend.asarray(np.array([value])) for value in (1.0, bad, bad)]
    with pytest.raises(gradkit.NonFiniteNormError) as caught:
        gradkit.clip_grad_norm(rows, 0.7, count=[False, False, True], nonfinite="raise")
    assert caught.value.names == ("grads[2]",)


def test_none_is_clipped_and_none_counts(backend):
    hosts, grads = masked(backend)
    norm = gradkit.clip_grad_norm(grads, 0.0, clip=False, count=False)
    assert float(backend.asnumpy(norm)) == 0
    assert_all_same_bits(of_leaves(grads), of_leaves(hosts), backend)

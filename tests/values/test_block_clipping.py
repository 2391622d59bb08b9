"""Norms and clipping unit by unit: values against exact sums, what a unit is, and semantics."""

import itertools
import math
import re
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.ranks import Counting, results, together
from tests.tolerances import CLIPPED_ULPS, DTYPES, assert_same_bits, assert_ulps

NAN, INF = math.nan, math.inf
ORDERS = (1.0, 2.0, 3.0, INF)


def units_of(host, axes):
    """The units' elements as rows, and the shape of their norms."""
    kept = [axis for axis in range(host.ndim) if axis not in axes]
    shape = tuple(host.shape[axis] for axis in kept)
    size = math.prod(host.shape[axis] for axis in axes)
    return np.transpose(host, (*kept, *axes)).reshape(math.prod(shape), size), shape


def exact_norms(host, axes, order, *, rms=False):
    """The norm of each unit in mpmath."""
    units, shape = units_of(host, axes)
    norms = [oracles.norm([unit], order) for unit in units]
    if rms and order != INF:
        root = oracles.mpmath.root(max(1, units.shape[1]), order)
        norms = [norm / root for norm in norms]
    return np.array(norms, object).reshape(shape)


def assert_norms(backend, got, host, axes, order, *, rms=False):
    got = backend.asnumpy(got)
    wanted = exact_norms(host, axes, order, rms=rms)
    assert got.dtype == np.float64
    assert got.shape == wanted.shape
    bound = tolerances.unit_norm(order, backend.run_errors, host, len(axes) == host.ndim)
    for one, exact in zip(got.flat, wanted.flat, strict=True):
        assert oracles.off_by(one, exact) <= bound


def factors(norms, limit, eps=1e-6):
    """Factor of each unit, from the norms that a call has returned."""
    with np.errstate(all="ignore"):
        return np.where(norms <= limit, 1.0, limit / np.maximum(norms, eps))


def assert_clipped(backend, got, host, axes, by):
    """Each element is its product with its unit's factor, rounded."""
    with np.errstate(all="ignore"):
        wide = host.astype(np.float64) * np.expand_dims(by, tuple(axes))
        assert_ulps(backend.asnumpy(got), wide.astype(host.dtype), CLIPPED_ULPS)


@st.composite
def lists(draw, most):
    """Host gradients in any layouts, and axes for each: some of those that it has."""
    hosts = draw(draw_.gradient_lists(most, kind=st.sampled_from(("normal", "spread", "ties"))))
    every = [
        tuple(sorted(draw(st.sets(st.integers(0, g.ndim - 1))))) if g.ndim > 1 else None
        for g in hosts
    ]
    whole = [
        tuple(range(g.ndim)) if own is None else own for g, own in zip(hosts, every, strict=True)
    ]
    return hosts, every, whole


@pytest.mark.guarantee("Block norms and adaptive clipping")
@given(data=st.data(), order=st.sampled_from(ORDERS), rms=st.booleans())
def test_units_of_any_list(backend, data, order, rms):
    """In place and not: the same bits, the exact norms, and nothing written beside elements."""
    hosts, axis, axes = data.draw(lists(backend.max_elements // 8))
    grads = [backend.asarray(g) for g in hosts]
    before = [backend.memory(g) for g in grads]
    limit = data.draw(st.sampled_from((0.0, 0.5, 30.0, INF)))
    options = {"norm_type": order, "axis": axis, "rms": rms}
    clipped, norms = gradkit.clip_by_block_norm(grads, limit, **options)
    assert [backend.memory(g) for g in grads] == before
    again = gradkit.clip_grad_block_norm(grads, limit, **options)
    for k, (host, own) in enumerate(zip(hosts, axes, strict=True)):
        assert_norms(backend, norms[k], host, own, order, rms=rms)
        assert_same_bits(backend.asnumpy(again[k]), backend.asnumpy(norms[k]))
        assert_clipped(backend, clipped[k], host, own, factors(backend.asnumpy(norms[k]), limit))
        assert_same_bits(backend.asnumpy(grads[k]), backend.asnumpy(clipped[k]))
        fresh = backend.asarray(host)
        backend.assign(fresh, grads[k])
        assert backend.memory(grads[k]) == backend.memory(fresh)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((3, 2500), (1,)),  # a unit of several chunks
        ((2500, 3), (0,)),
        ((300, 40), (0,)),
        ((300, 40), (1,)),
        ((5, 4, 3, 3), (1, 2, 3)),
        ((3, 3, 4, 5), (0, 1, 2)),
        ((6, 5, 70), (0, 2)),
        ((6, 5, 70), (1,)),  # units at two distances
        ((4, 3, 2, 5), (1, 3)),
        ((5, 4), ()),
    ],
    ids=str,
)
def test_units_of_every_kind(backend, name, order, shape, axes):
    host = draw_.values(shape, name)
    norms = gradkit.clip_grad_block_norm(backend.asarray(host), INF, order, axis=axes)
    assert_norms(backend, norms, host, axes, order)


@pytest.mark.guarantee("Block norms and adaptive clipping")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("power", [-1060, -530, -500, 0, 480, 490, 505, 900, 1020])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("rms", [False, True])
def test_no_power_overflows_or_vanishes(backend, order, power, axis, rms):
    """Beside a unit of ones, and with nine more of the unit's elements small."""
    host = np.ones((20, 3)) * 2.0 ** (power - 30)
    host[0] = host[10] = 2.0**power
    host[:, 1] = 1.0
    axes = (0, 1) if axis is None else (axis,)
    norms = gradkit.clip_grad_block_norm(backend.asarray(host), INF, order, axis=axis, rms=rms)
    assert_norms(backend, norms, host, axes, order, rms=rms)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("power", [-132, -126, -100, -63, -50, 50, 63, 100, 120])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_squares_beyond_float32(backend, name, power, axis):
    host = (np.arange(1, 1801).reshape(3, 600) % 7 * 2.0**power).astype(DTYPES[name])
    axes = (0, 1) if axis is None else (axis,)
    norms = gradkit.clip_grad_block_norm(backend.asarray(host), INF, axis=axis)
    assert_norms(backend, norms, host, axes, 2.0)


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [None, 1])
def test_a_factor_below_float32(backend, name, axis):
    host = np.array([[3.0, 4.0, 0.0]] * 2).astype(DTYPES[name]) * DTYPES[name].type(2.0**100)
    clipped, norms = gradkit.clip_by_block_norm(backend.asarray(host), 0.3 * 2.0**-40, axis=axis)
    by = factors(backend.asnumpy(norms), 0.3 * 2.0**-40)
    assert_clipped(backend, clipped, host, (0, 1) if axis is None else (1,), by)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_units_whose_parts_are_of_other_magnitudes(backend, order):
    """So long that the CPU backend takes them in parts: a large one first, a large one last."""
    host = np.full((2, 400_000), 2.0**-300)
    host[0, 0] = host[1, -1] = 3.0
    norms = gradkit.clip_grad_block_norm(backend.asarray(host), INF, order, axis=1)
    np.testing.assert_allclose(backend.asnumpy(norms), 3.0, rtol=1e-12)


@pytest.mark.guarantee("Block norms and adaptive clipping")
def test_the_mean_of_what_is_too_much_to_add_up(backend):
    host = np.full((2, 64), 1.5e308)
    for order in (1.0, 2.0, 5.0, INF):
        for axis in (None, 1):
            norms = gradkit.clip_grad_block_norm(
                backend.asarray(host), INF, order, axis=axis, rms=True
            )
            np.testing.assert_allclose(backend.asnumpy(norms), 1.5e308, rtol=1e-15)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_root_mean_square_of_equal_elements_is_theirs(backend, name):
    """So that a limit of 1 keeps ones, whatever their number."""
    host = np.ones((7, 37), DTYPES[name])
    for order in (1.0, 2.0, 3.0):
        for axis in (None, 0, 1):
            grad = backend.asarray(host)
            norms = gradkit.clip_grad_block_norm(grad, 1.0, order, axis=axis, rms=True)
            np.testing.assert_array_equal(backend.asnumpy(norms), 1.0)
            assert_same_bits(backend.asnumpy(grad), host)


@pytest.mark.guarantee("Block norms and adaptive clipping")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_norm_at_the_limit_keeps_every_bit(backend, name, axis):
    host = draw_.values((6, 9), name, kind="ties")
    host[2, 3] = -0.0
    norms = gradkit.clip_grad_block_norm(backend.asarray(host), INF, axis=axis)
    largest = float(backend.asnumpy(norms).max())
    grad = backend.asarray(host)
    gradkit.clip_grad_block_norm(grad, largest, axis=axis)
    assert_same_bits(backend.asnumpy(grad), host)
    gradkit.clip_grad_block_norm(grad, np.nextafter(largest, 0), axis=axis)
    if name == "float64":  # where a factor next to 1 shows
        assert (backend.asnumpy(grad) != host).any()


def test_eps_bounds_the_norm_in_the_division(backend):
    grad = backend.asarray(np.array([2.0**-30, 0.0]))
    gradkit.clip_grad_block_norm(grad, 2.0**-40, eps=2.0**-20)
    np.testing.assert_array_equal(backend.asnumpy(grad), [2.0**-50, 0.0])


# What is not finite


BAD = {"nan": NAN, "inf": INF, "-inf": -INF}


@pytest.mark.guarantee("Block norms and adaptive clipping")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_not_finite_stays_in_its_unit(backend, name, bad, order):
    host = draw_.values((3, 40), name, kind="ties")
    host[1, 7] = BAD[bad]
    grad, zeroed = backend.asarray(host), backend.asarray(host)
    norms = backend.asnumpy(gradkit.clip_grad_block_norm(grad, 0.25, order, axis=1))
    np.testing.assert_array_equal(np.isfinite(norms), [True, False, True])
    assert np.isnan(norms[1]) == (bad == "nan")
    others = gradkit.clip_grad_block_norm(backend.asarray(host[[0, 2]]), 0.25, order, axis=1)
    np.testing.assert_array_equal(norms[[0, 2]], backend.asnumpy(others))
    got = backend.asnumpy(grad).astype(np.float64)
    assert np.isnan(got[1, 7])
    np.testing.assert_array_equal(got[1, 8:], NAN if bad == "nan" else 0.0)
    assert np.isfinite(got[[0, 2]]).all()
    gradkit.clip_grad_block_norm(zeroed, 0.25, order, axis=1, nonfinite="zero")
    zeros = backend.asnumpy(zeroed)
    assert_same_bits(zeros[1], np.zeros(40, DTYPES[name]))
    assert_same_bits(zeros[[0, 2]], backend.asnumpy(grad)[[0, 2]])
    rows = [backend.asarray(row) for row in host]
    gradkit.clip_grad_block_norm(rows, 0.25, order, nonfinite="zero")
    assert_same_bits(backend.asnumpy(rows[1]), zeros[1])
    assert np.isfinite(backend.asnumpy(rows[0]).astype(np.float64)).all()


def test_an_error_names_gradients_and_changes_nothing(backend):
    hosts = {"w": np.ones((2, 3)), "b": np.array([1.0, NAN])}
    grads = {name: backend.asarray(g) for name, g in hosts.items()}
    out = backend.asarray(np.full(3, 7.0))
    for clip in (gradkit.clip_grad_block_norm, adaptive(gradkit.clip_grad_adaptive)):
        with pytest.raises(gradkit.NonFiniteNormError, match=r"grads\['b'\]") as caught:
            clip(grads, 0.5, axis=1, nonfinite="raise", out=out)
        assert caught.value.names == ("grads['b']",)
        for name, host in hosts.items():
            assert_same_bits(backend.asnumpy(grads[name]), host)
        np.testing.assert_array_equal(backend.asnumpy(out), 7.0)


def adaptive(clip):
    """Adaptive clipping by the gradients' own copies for parameters."""
    return lambda grads, ratio, **options: clip(
        grads, {name: g.copy() for name, g in grads.items()}, ratio, **options
    )


# Limits


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_limit_on_the_device(backend, dtype):
    host = draw_.values((4, 9), "float32")
    for limit in (0.5, 0.0, INF):
        wanted = gradkit.clip_by_block_norm(backend.asarray(host), limit, axis=1)
        there = backend.asarray(np.array(limit, dtype))
        got = gradkit.clip_by_block_norm(backend.asarray(host), there, axis=1)
        for one, other in zip(got, wanted, strict=True):
            assert_same_bits(backend.asnumpy(one), backend.asnumpy(other))


@pytest.mark.parametrize("limit", [-1.0, NAN])
def test_a_limit_on_the_device_that_is_none(backend, limit):
    if backend.on_host:
        pytest.skip("a limit on the host is looked at")
    grad = backend.asarray(np.array([[3.0, 4.0], [0.5, 0.0]], np.float32))
    gradkit.clip_grad_block_norm(grad, backend.asarray(np.array(limit)), axis=1)
    assert np.isnan(backend.asnumpy(grad)).all()


# Adaptive clipping


@pytest.mark.guarantee("Block norms and adaptive clipping")
@given(data=st.data(), ratio=st.sampled_from((0.0, 0.01, 0.5, INF)))
def test_units_beside_their_parameters(backend, data, ratio):
    hosts, axis, axes = data.draw(lists(backend.max_elements // 16))
    names = [data.draw(draw_.names) for _ in hosts]
    held = [data.draw(draw_.arrays(g.shape, n)) for g, n in zip(hosts, names, strict=True)]
    grads, params = ([backend.asarray(a) for a in arrays] for arrays in (hosts, held))
    before = [backend.memory(p) for p in params]
    clipped, norms = gradkit.clip_by_adaptive_norm(grads, params, ratio, axis=axis)
    again = gradkit.clip_grad_adaptive(grads, params, ratio, axis=axis)
    assert [backend.memory(p) for p in params] == before
    for k, (host, own) in enumerate(zip(hosts, axes, strict=True)):
        assert_norms(backend, norms[k], host, own, 2.0)
        size = gradkit.clip_by_block_norm(params[k], INF, axis=axis[k])[1]
        with np.errstate(all="ignore"):
            limit = ratio * np.maximum(backend.asnumpy(size), 1e-3)
        assert_clipped(backend, clipped[k], host, own, factors(backend.asnumpy(norms[k]), limit))
        assert_same_bits(backend.asnumpy(grads[k]), backend.asnumpy(clipped[k]))
        assert_same_bits(backend.asnumpy(again[k]), backend.asnumpy(norms[k]))


def test_adaptive_by_hand(backend):
    """A parameter of zeros counts as eps; a gradient's norm in the division as at least 1e-6."""
    grads = [np.array([3.0, 4.0]), np.array([2.0**-21, 0.0]), np.array([[3.0, 4.0], [0.3, 0.4]])]
    params = [np.zeros(2), np.zeros(2), np.array([[0.0, 2.0], [6.0, 8.0]])]
    grads, params = ([backend.asarray(a) for a in arrays] for arrays in (grads, params))
    gradkit.clip_grad_adaptive(grads, params, 0.5, eps=2.0**-30, axis=1)
    small, tiny, rows = map(backend.asnumpy, grads)
    np.testing.assert_allclose(small, np.array([0.6, 0.8]) * 2.0**-31, rtol=1e-15)
    np.testing.assert_allclose(tiny, [2.0**-21 * 2.0**-31 / 1e-6, 0.0], rtol=1e-15)
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-15)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_parameter_that_is_not_finite(backend, value):
    grad, param = np.ones(3, np.float32), np.array([1.0, value, 2.0], np.float32)
    got = gradkit.clip_by_adaptive_norm(backend.asarray(grad), backend.asarray(param), 0.1)[0]
    expected = grad if value == INF else np.full(3, NAN, np.float32)
    np.testing.assert_array_equal(backend.asnumpy(got), expected)


@pytest.mark.parametrize("as_array", [False, True])
def test_an_infinite_limit_clips_nothing(backend, as_array):
    """Also times the norm of a parameter that is 0, if eps is; a finite one clips that to 0."""
    hosts = np.array([3.0, 4.0]), np.array([[1e-300, 2.0], [1e300, 1.0]])
    params = list(map(backend.asarray, (np.zeros(2), np.array([[0.0, 0.0], [1.0, 2.0]]))))

    def clipped(limit):
        limit = backend.asarray(np.array(limit)) if as_array else limit
        return gradkit.clip_by_adaptive_norm(
            list(map(backend.asarray, hosts)), params, limit, eps=0.0, axis=1
        )[0]

    for found, host in zip(clipped(INF), hosts, strict=True):
        assert_same_bits(backend.asnumpy(found), host)
    vector, rows = map(backend.asnumpy, clipped(0.25))
    assert_same_bits(vector, np.zeros(2))
    assert_same_bits(rows[0], np.zeros(2))
    assert rows[1, 0] > 0


def test_parameters_where_gradients_are(backend):
    """None has no parameter to look at; a dict may hold parameters without gradients."""

    def one(value):
        return backend.asarray(np.full(4, value))

    grads = {"w": [one(3.0), None], "b": one(2.0)}
    params = {"frozen": 7, "b": one(1.0), "w": (one(1.0), "anything")}
    norms = gradkit.clip_grad_adaptive(grads, params, 0.5)
    assert norms["w"][1] is None
    np.testing.assert_array_equal(backend.asnumpy(grads["w"][0]), 0.5)
    np.testing.assert_array_equal(backend.asnumpy(grads["b"]), 0.5)


# Where axes and results are


def test_results_with_gaps():
    """The gradients are contiguous, and what they are written to is not."""
    room = np.zeros((3, 5))
    clipped, _ = gradkit.clip_by_block_norm(
        np.full((3, 4), 2.0), 1.0, rms=True, out=(room[:, :4], None)
    )
    assert clipped.tolist() == [[1] * 4] * 3
    assert room[:, 4].tolist() == [0] * 3


def test_axes_for_all_for_branches_and_by_name(backend):
    def tree():
        return {
            "dense": [backend.asarray(np.full((2, 3), 2.0)), backend.asarray(np.ones(3))],
            "conv": backend.asarray(np.full((4, 3, 2), 2.0)),
            "none": None,
        }

    def function(name, grad):
        seen.append(name)
        return range(1, grad.ndim) if name == "conv" else 0 if name == "dense.0" else None

    seen = []
    shapes = {
        "all": (-1, [(2,), (), (4, 3)]),
        "branches": (MappingProxyType({"dense": 0, "conv": (1, 2), "none": 5}), [(3,), (), (4,)]),
        "leaves": ({"dense": [(1, 0), None], "conv": (), "none": None}, [(), (), (4, 3, 2)]),
        "function": (function, [(3,), (), (4,)]),
    }
    for axis, wanted in shapes.values():
        norms = gradkit.clip_grad_block_norm(tree(), 1.0, axis=axis)
        found = [norms["dense"][0].shape, norms["dense"][1].shape, norms["conv"].shape]
        assert found == wanted
        assert norms["none"] is None
    gradkit.clip_grad_block_norm({3: backend.asarray(np.ones(2))}, 1.0, axis=function)
    assert seen == ["dense.0", "dense.1", "conv", "3"]


def test_results_in_the_place_of_parameters(backend):
    host = np.full((2, 3), 2.0)
    grad, param = backend.asarray(host), backend.asarray(host)
    with pytest.raises(ValueError, match="out shares memory with params"):
        gradkit.clip_grad_adaptive(grad, param, axis=1, out=param[0, :2])
    with pytest.raises(ValueError, match=r"out\[1\] shares memory with params"):
        gradkit.clip_by_adaptive_norm(grad, param, axis=1, out=(None, param[0, :2]))
    with pytest.raises(ValueError, match="shares memory with params"):
        gradkit.clip_by_adaptive_norm(grad, param, axis=1, out=(param, None))
    assert_same_bits(backend.asnumpy(param), host)
    assert_same_bits(backend.asnumpy(grad), host)


def test_norms_in_the_callers_array(backend):
    hosts = [np.full((2, 3), 2.0), np.ones(4, np.float16)]
    room = backend.asarray(np.full(6, 7.0))
    grads = [backend.asarray(g) for g in hosts]
    norms = gradkit.clip_grad_block_norm(grads, INF, axis=1, out=room[::2])
    np.testing.assert_allclose(backend.asnumpy(norms[0]), np.sqrt([12.0, 12.0]))
    found = backend.asnumpy(room)
    np.testing.assert_allclose(found, [12**0.5, 7.0, 12**0.5, 7.0, 2.0, 7.0])
    clipped = [backend.asarray(np.zeros_like(g)) for g in hosts]
    given_back, norms = gradkit.clip_by_block_norm(grads, 1.0, axis=1, out=(clipped, room[1::2]))
    assert given_back is clipped
    assert [norm.shape for norm in norms] == [(2,), ()]
    np.testing.assert_allclose(backend.asnumpy(room)[1::2], found[::2])
    np.testing.assert_allclose(np.linalg.norm(backend.asnumpy(clipped[0]), axis=1), 1.0)
    with pytest.raises(ValueError, match=r"out has shape \(3,\); expected \(2,\)"):
        gradkit.clip_grad_block_norm(grads, 1.0, out=room[:3])


def test_nothing_to_clip(backend):
    assert gradkit.clip_grad_block_norm([], 1.0) == []
    assert gradkit.clip_by_block_norm({"a": None}, 1.0) == ({"a": None}, {"a": None})
    assert gradkit.clip_grad_adaptive([None], [3.0]) == [None]
    for shape, axis, wanted in [((0,), None, ()), ((0, 3), 0, (3,)), ((0, 3), 1, (0,))]:
        for rms in (False, True):
            grads = [backend.asarray(np.ones(shape)), backend.asarray(np.full(2, 3.0))]
            norms = gradkit.clip_grad_block_norm(grads, 1.0, INF, axis=axis, rms=rms)
            np.testing.assert_array_equal(backend.asnumpy(norms[0]), np.zeros(wanted))
            assert float(backend.asnumpy(norms[1])) == 3.0


def test_the_same_array_twice(backend):
    grad = backend.asarray(np.full(4, 2.0))
    clipped, norms = gradkit.clip_by_block_norm([grad, grad], 1.0)
    assert [float(backend.asnumpy(norm)) for norm in norms] == [4.0, 4.0]
    np.testing.assert_array_equal(backend.asnumpy(clipped[1]), 0.5)
    with pytest.raises(ValueError, match="share memory"):
        gradkit.clip_grad_block_norm([grad, grad], 1.0)
    gradkit.clip_grad_adaptive(grad, grad, 0.5)  # all norms come before the first write
    np.testing.assert_array_equal(backend.asnumpy(grad), 1.0)


def test_one_launch_for_all_gradients(backend):
    """Partial sums, norms and products: three kernels, and two more for parameters."""
    if not backend.launches():
        gradkit.grad_norm(backend.asarray(np.ones(3)))
        if not backend.launches():
            pytest.skip("launches are not counted here")
    grads = [backend.asarray(np.ones((k + 1, 3), np.float32)) for k in range(70)]
    params = [grad.copy() for grad in grads]
    for call, kernels in [
        (lambda: gradkit.clip_grad_block_norm(grads, 0.1, axis=1), 3),
        (lambda: gradkit.clip_grad_adaptive(grads, params, axis=1), 5),
    ]:
        before = backend.launches()
        call()
        assert backend.launches() - before == kernels


@pytest.mark.parametrize("order", [1, 2])
def test_the_mean_of_a_long_unit(backend, order):
    """The rounding error of its sum is divided too."""
    host = 1 + np.random.default_rng(order).random(60_000)
    exact = (math.fsum(host**order) / host.size) ** (1 / order)
    norm = gradkit.clip_grad_block_norm([backend.asarray(host)], INF, order, rms=True)[0]
    assert float(backend.asnumpy(norm)) == pytest.approx(exact, rel=2.0**-49, abs=0)


@pytest.mark.parametrize("count", [1, 5, 17, 56, 57, 130])
def test_lists_of_any_length(backend, count):
    """In the parameter block with or without dimensions, and in device memory."""
    rng = np.random.default_rng(count)
    hosts = [rng.standard_normal((3, k % 5 + 1)).astype(np.float32) for k in range(count)]
    for order, axis in itertools.product("CF", (0, 1)):
        grads = [backend.asarray(np.asarray(g, order=order)) for g in hosts]
        norms = gradkit.clip_grad_block_norm(grads, 0.5, axis=axis)
        for grad, norm, host in zip(grads, norms, hosts, strict=True):
            assert_norms(backend, norm, host, (axis,), 2.0)
            assert_clipped(backend, grad, host, (axis,), factors(backend.asnumpy(norm), 0.5))


# A limit for each


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("rms", [False, True])
def test_limits_of_ones_own(backend, axis, rms):
    """A vector of one per unit; a container or a function of one per gradient."""
    rng = np.random.default_rng(3)
    hosts = {"a": rng.normal(size=(4, 6)), "b": [rng.normal(size=5), rng.normal(size=(2, 3))]}
    tree = lambda: {"a": backend.asarray(hosts["a"]), "b": [*map(backend.asarray, hosts["b"])]}  # noqa: E731
    limits = {"a": 0.5, "b": [INF, backend.asarray(np.array(0.25))]}
    by_name = {"a": 0.5, "b.0": INF, "b.1": 0.25}
    options = {"axis": axis, "rms": rms}
    leaves = [hosts["a"], *hosts["b"]]
    expected, every = [], []
    for host, limit in zip(leaves, (0.5, INF, 0.25), strict=True):
        along = axis if host.ndim > 1 else None
        mean = np.mean if rms else np.sum
        norm = np.sqrt(mean(host**2, axis=along, keepdims=along is not None))
        expected.append(host * np.minimum(1, limit / norm))
        every += [limit] * norm.size
    vector = backend.asarray(np.array(every))
    for said in (limits, lambda name, _: by_name[name], vector):
        found, _ = gradkit.clip_by_block_norm(tree(), said, **options)
        grads = tree()
        gradkit.clip_grad_block_norm(grads, said, **options)
        for tried in (found, grads):
            for got, wanted in zip([tried["a"], *tried["b"]], expected, strict=True):
                np.testing.assert_allclose(backend.asnumpy(got), wanted, rtol=1e-14)
        assert_same_bits(backend.asnumpy(grads["b"][0]), hosts["b"][0])
    assert_same_bits(backend.asnumpy(vector), np.array(every))


def test_a_limit_that_is_negative_or_nan(backend):
    """On a device it makes its unit NaN, as one number does, and no other."""
    if backend.on_host:
        with pytest.raises(ValueError, match="max_norm must be at least 0 for each unit"):
            gradkit.clip_grad_block_norm([np.ones(3), np.ones(2)], np.array([1.0, -1.0]))
        return
    for bad in (-1.0, NAN):
        grads = [backend.asarray(np.full(3, 2.0)) for _ in range(2)]
        gradkit.clip_grad_block_norm(grads, backend.asarray(np.array([bad, 1e9])))
        np.testing.assert_array_equal(backend.asnumpy(grads[0]), NAN)
        np.testing.assert_array_equal(backend.asnumpy(grads[1]), 2.0)


# Blocks of several gradients


@pytest.mark.parametrize("key", [True, 2.0, (1, 2)])
def test_keys_that_ranks_cannot_tell_each_other(key):
    said = f"blocks gives {re.escape(repr(key))} for grads; over a group, keys are strings or int"

    def work(group):
        with pytest.raises(TypeError, match=said):
            gradkit.clip_by_block_norm(np.ones(2), 1.0, blocks=lambda *_: key, group=group)

    results(work, 2)


@pytest.mark.parametrize(
    ("limits", "agree"),
    [
        (({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}), True),
        (({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0}), False),
        ((1.0, 2.0), False),
        ((1, 1.0), True),
    ],
)
def test_ranks_have_the_same_limits_of_blocks(limits, agree):
    """In whatever order."""

    def work(group):
        own = [np.ones(4), np.ones(9)], limits[group.rank]
        if agree:
            return gradkit.clip_by_block_norm(*own, blocks=["a", "b"], group=group)[1]
        with pytest.raises(gradkit.RankError, match="ranks make different calls"):
            gradkit.clip_by_block_norm(*own, blocks=["a", "b"], group=group)
        return None

    for norms in results(work, 2):
        assert norms is None or [norms["a"] ** 2, norms["b"] ** 2] == pytest.approx([8, 18])


@st.composite
def blocks_of_a_list(draw, most):
    """Host gradients, and the key of each one's block."""
    hosts = draw(draw_.gradient_lists(most, kind=st.sampled_from(("normal", "spread", "ties"))))
    return hosts, [draw(st.sampled_from(("a", "b", 3, (1, 2)))) for _ in hosts]


@pytest.mark.guarantee("Block norms and adaptive clipping")
@given(data=st.data(), order=st.sampled_from((*ORDERS, 0.5)))
def test_blocks_of_any_list(backend, data, order):
    """A block's norm is that of all its gradients, and each is clipped by its block's."""
    hosts, keys = data.draw(blocks_of_a_list(backend.max_elements // 8))
    grads = [backend.asarray(g) for g in hosts]
    limits = {key: data.draw(st.sampled_from((0.0, 0.5, 30.0, INF))) for key in {*keys, "none"}}
    clipped, norms = gradkit.clip_by_block_norm(grads, limits, order, blocks=keys)
    again = gradkit.clip_grad_block_norm(
        grads, limits, order, blocks=lambda name, _: keys[int(name)]
    )
    assert [*norms] == [*again] == [*dict.fromkeys(keys)]
    for key, norm in norms.items():
        own = [host for host, its in zip(hosts, keys, strict=True) if its == key]
        bound = 2 * max(tolerances.unit_norm(order, backend.run_errors, g, True) for g in own)
        assert oracles.off_by(backend.asnumpy(norm), oracles.norm(own, order)) <= bound
        assert_same_bits(backend.asnumpy(again[key]), backend.asnumpy(norm))
    for host, key, grad, copy in zip(hosts, keys, grads, clipped, strict=True):
        by = factors(backend.asnumpy(norms[key]), limits[key])
        assert_clipped(backend, copy, host, range(host.ndim), by)
        assert_same_bits(backend.asnumpy(grad), backend.asnumpy(copy))


@pytest.mark.parametrize("power", [-1060, -540, 505, 1020])
def test_norms_of_norms_neither_overflow_nor_vanish(backend, power):
    host = np.array([3.0, 4.0]) * 2.0**power
    grads = {
        "a": [backend.asarray(host[:1]), backend.asarray(host[1:])],
        "b": backend.asarray(host),
    }
    room = backend.asarray(np.zeros(2))
    norms = gradkit.clip_grad_block_norm(grads, INF, blocks={"a": "x", "b": "y"}, out=room)
    for found in (*map(backend.asnumpy, norms.values()), *backend.asnumpy(room)):
        assert float(found) == 5 * 2.0**power


def test_what_is_not_finite_stays_in_its_block(backend):
    hosts = np.array([1.0, NAN, 2.0]), np.full(2, 2.0), np.full(3, 3.0)
    blocks, there = ["a", "b", "a"], backend.asarray(np.array(1.0))
    for policy, wanted in (("zero", 0.0), ("propagate", NAN)):
        grads = [backend.asarray(host) for host in hosts]
        norms = gradkit.clip_grad_block_norm(
            grads, {"a": there, "b": 1.0}, INF, blocks=blocks, nonfinite=policy
        )
        assert np.isnan(backend.asnumpy(norms["a"]))
        for k in (0, 2):
            np.testing.assert_array_equal(backend.asnumpy(grads[k]), wanted)
        np.testing.assert_array_equal(backend.asnumpy(grads[1]), 1.0)
    grads = [backend.asarray(host) for host in hosts]
    with pytest.raises(gradkit.NonFiniteNormError, match=r"grads\[0\]"):
        gradkit.clip_grad_block_norm(grads, 1.0, blocks=blocks, nonfinite="raise")
    np.testing.assert_array_equal(backend.asnumpy(grads[2]), 3.0)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_and_dense_parameters_on_different_ranks(backend, order):
    """Two experts a rank, of which the last has none; all have a copy of what is dense."""
    rng = np.random.default_rng(5)
    experts, dense = [rng.normal(size=3) for _ in range(4)], rng.normal(size=4)
    exact = {"experts": oracles.norm(experts, order), "dense": oracles.norm([dense], order)}
    exact["head"] = oracles.norm([dense[:2]], order)
    limits = {"experts": 0.5, "dense": 0.25, "head": INF, "none": 1.0}

    def work(group):
        own = {f"experts.{k}": g for k, g in enumerate(experts) if k // 2 == group.rank}
        own |= {"dense.w": dense} if group.rank < 2 else {"dense.w": dense, "head.w": dense[:2]}
        counted = Counting(group)
        for _ in range(2):
            grads, sent = {name: backend.asarray(g) for name, g in own.items()}, len(counted.sent)
            norms = gradkit.clip_grad_block_norm(
                grads,
                limits,
                order,
                blocks=lambda name, _: name.partition(".")[0],
                group=counted,
                replicas={name: 3 if name == "dense.w" else 1 for name in own},
            )
        for name, grad in grads.items():
            key = name.partition(".")[0]
            by = factors(backend.asnumpy(norms[key]), limits[key])
            assert_clipped(backend, grad, own[name], (0,), by)
        return {key: float(backend.asnumpy(norm)) for key, norm in norms.items()}, counted.sent[
            sent:
        ]

    found = results(work, 3)
    assert all(each == found[0] for each in found)
    norms, sent = found[0]
    assert [*norms] == ["experts", "dense", "head"]
    assert sent == [14]  # once names are known
    for key, norm in norms.items():
        assert oracles.off_by(norm, exact[key]) <= 2 * tolerances.norm(order, {}, runs=False)


def test_norms_over_ranks_go_to_no_array(backend):
    """Other ranks may have further blocks."""
    grads, room = [backend.asarray(np.ones(3))], backend.asarray(np.zeros(1))
    how = {"blocks": ["a"], "out": (None, room)}
    message = "out takes no norms over a group, whose ranks may have further blocks"
    for error in together(lambda g: gradkit.clip_by_block_norm(grads, 1.0, group=g, **how), 2):
        assert (type(error), str(error)) == (ValueError, message)
    gradkit.clip_by_block_norm(grads, 1.0, **how)
    assert backend.asnumpy(room)[0] == np.sqrt(3)


def test_gradients_that_no_block_has(backend):
    assert gradkit.clip_grad_block_norm([], 1.0, blocks=[]) == {}
    grad = backend.asarray(np.ones(2))
    assert [
        *gradkit.clip_grad_block_norm({"a": None, "b": grad}, 1.0, blocks={"a": 1, "b": 2})
    ] == [2]

"""A scale, limits that lie on the device, and the flag that loss scalers ask for."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit import _numpy
from gradkit._calls.lists import ClipByNorm, ClipCoefficient
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_ulps

NAN, INF = math.nan, math.inf
SCALES = (1 / 3, -2.0, 1.0, 2.0**-16, 65536.0, 1e-30, 0.0)


def f(*values, dtype=np.float64):
    return np.array(values, dtype)


def number(backend, value):
    return float(backend.asnumpy(value))


def on_device(backend, value, dtype=np.float64):
    return backend.asarray(np.array(value, dtype))


def scaled(host, norm, max_norm, scale, eps=1e-6):
    """``g * (scale * coefficient)`` in float64 (wider for float64), rounded once."""
    coefficient = oracles.coefficient(norm, max_norm, eps)
    factor = scale * coefficient if coefficient else coefficient
    with np.errstate(all="ignore"):
        return (host.astype(np.float64) * factor).astype(host.dtype)


PLACES = {
    "grad_norm": (("out", "scale"), ("found_inf", "scale")),
    "clip_grad_norm": (("out", "max_norm"), ("out", "scale"), ("found_inf", "max_norm")),
    "clip_by_global_norm": (("norm", "max_norm"), ("clipped", "scale"), ("found_inf", "scale")),
    "clip_coefficient": (("out", "max_norm"),),
    "accumulate_grads": (("norm_out", "scale"),),
}


@pytest.mark.parametrize(
    ("function", "place", "label"), [(f, *row) for f, rows in PLACES.items() for row in rows]
)
def test_no_result_is_written_over_a_number_that_is_read(backend, function, place, label):
    both = on_device(backend, 2.0)
    grads = [backend.asarray(f(3.0)), backend.asarray(np.array(4.0))]
    arguments = {
        "clip_coefficient": (on_device(backend, 5.0),),
        "accumulate_grads": (grads, [backend.asarray(f(1.0)), backend.asarray(np.array(1.0))]),
    }.get(function, (grads,))
    named = {label: both}
    if "clip" in function:
        named.setdefault("max_norm", 1.0)
    clipped = [backend.asarray(f(0.0)), both]
    named |= {"norm": {"out": (None, both)}, "clipped": {"out": (clipped, None)}}.get(
        place, {place: both}
    )
    with pytest.raises(ValueError, match=rf"shares memory with {label}; pass another array"):
        getattr(gradkit, function)(*arguments, **named)
    assert [float(backend.asnumpy(g).sum()) for g in grads] == [3.0, 4.0]
    assert number(backend, both) == 2.0


def test_a_number_among_what_is_written_is_read_first(backend):
    """A limit that is itself a gradient, a scale that is a buffer: every element has the same."""
    host = np.random.default_rng(3).standard_normal(5000)
    host[4321] = 0.75
    for function, label in (
        ("clip_grad_norm", "max_norm"),
        ("clip_grad_norm", "scale"),
        ("clip_grads_with_norm", "norm"),
        ("scale_grads", "coefficient"),
        ("accumulate_grads", "scale"),
    ):
        expected, grad = backend.asarray(host), backend.asarray(host)
        limit = {} if label == "max_norm" or "clip" not in function else {"max_norm": 0.5}
        others = ([backend.asarray(host)],) if function == "accumulate_grads" else ()
        getattr(gradkit, function)([expected], *others, **limit, **{label: 0.75})
        inside = grad[4321:4322].reshape(())
        getattr(gradkit, function)([grad], *others, **limit, **{label: inside})
        assert_same_bits(backend.asnumpy(grad), backend.asnumpy(expected))


@pytest.mark.guarantee("Scaled inside")
@given(data=st.data(), order=draw_.orders, ratio=st.sampled_from((0.3, 1.0, 2.0)))
def test_scaled_clip_of_any_list(backend, data, order, ratio):
    """The norm of scale * g, and each element rounded once; in place, not, and in two steps."""
    host = data.draw(draw_.gradient_lists(backend.max_elements // 4))
    scale = data.draw(st.sampled_from(SCALES))
    grads = [backend.asarray(g) for g in host]
    plain = number(backend, gradkit.grad_norm(grads, order))
    norm = number(backend, gradkit.grad_norm(grads, order, scale=scale))
    assert_scaled(norm, plain, scale)
    limit = norm * ratio
    copies, found = gradkit.clip_by_global_norm(grads, limit, order, scale=scale)
    assert number(backend, found) == pytest.approx(norm, rel=0, abs=0, nan_ok=True)
    assert_all_same_bits(grads, host, backend)
    known = gradkit.clip_grads_with_norm(
        [backend.asarray(h) for h in host], found, limit, scale=scale
    )
    gradkit.clip_grad_norm(grads, limit, order, scale=scale)
    for g, copy, other, h in zip(grads, copies, known, host, strict=True):
        expected = scaled(h, norm, limit, scale)
        assert_ulps(backend.asnumpy(g), expected, tolerances.CLIPPED_ULPS)
        assert_same_bits(backend.asnumpy(copy), backend.asnumpy(g))
        assert_same_bits(backend.asnumpy(other), backend.asnumpy(g))


def assert_scaled(norm, plain, scale):
    exact = Fraction(plain) * Fraction(abs(scale)) if math.isfinite(plain) else plain * abs(scale)
    assert norm == pytest.approx(float(exact), rel=2.0**-51, abs=2.0**-1074, nan_ok=True)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numbers_on_the_device_are_those_on_the_host(backend, name):
    """Also as arrays of narrower dtypes, which hold these numbers exactly."""
    for dtype in DTYPES.values():
        results = []
        for put in (float, lambda value, dtype=dtype: on_device(backend, value, dtype)):
            grads = backend.asarray(draw_.values(100, name, 1))
            each = gradkit.per_tensor_norms(grads, flat=True, scale=put(0.375))
            norm = gradkit.clip_grad_norm(grads, put(0.75), scale=put(-0.375), eps=0.0)
            gradkit.clip_grads_with_norm(grads, put(3), max_norm=put(1.5), scale=put(0.75))
            factor = gradkit.clip_coefficient(put(3), put(1.5))
            results.append([backend.asnumpy(a) for a in (grads, each, norm, factor)])
        assert_all_same_bits(*results)


@pytest.mark.guarantee("No needless change")
def test_a_scale_of_1_keeps_every_bit(backend):
    for scale in (1.0, on_device(backend, 1.0)):
        grads = backend.asarray(f(3.0, -0.0, 4.0, 5e-324))
        gradkit.clip_grad_norm(grads, INF, scale=scale)
        assert_same_bits(backend.asnumpy(grads), f(3.0, -0.0, 4.0, 5e-324))


BIG, SMALL = 2.0**1023, 2.0**-1070
EXTREMES = {  # elements, order, scale, norm
    "sum": ([BIG] * 8, 1, 2.0**-1000, 2.0**26),
    "sum, just": ([BIG] * 8, 1, 0.125, BIG),
    "sum of less": ([2.0**1021] * 8, 1, 2.0**-1000, 2.0**24),
    "sum beside small": ([BIG] * 8 + [2.0**900] * 100 + [SMALL] * 3, 1, 2.0**-900, 2.0**126),
    "squares": ([BIG] * 64, 2, 2.0**-1000, 2.0**26),
    "squares, just": ([BIG] * 64, 2, 0.125, BIG),
    "largest": ([BIG] * 64, INF, 2.0**-1000, 2.0**23),
    "powers": ([BIG] * 8, 3, 2.0**-1000, 2.0**24),
    "tiny squares": ([SMALL] * 64, 2, 2.0**1000, 2.0**-67),
    "tiny sum": ([SMALL] * 64, 1, 2.0**1023, 2.0**-41),
    "tiny powers": ([SMALL] * 8, 3, 2.0**1000, 2.0**-69),
    "tiny scale": ([2.0**500] * 64, 2, SMALL, 2.0**-567),
    "huge scale": ([2.0**480] * 4, 2, 2.0**500, 2.0**981),
    "scales at an edge": ([2.0**481] * 4, 2, 2.0**500, 2.0**982),
    "subnormal scale": ([BIG] * 4, 2, 2.0**-1074, 2.0**-50),
}


@pytest.mark.guarantee("Scaled inside")
@pytest.mark.parametrize(("values", "order", "scale", "norm"), EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("device", [False, True])
def test_scales_that_bring_a_norm_back(backend, values, order, scale, norm, device):
    """If the norm of g would overflow or vanish, that of scale * g is exact."""
    grads = backend.asarray(f(*values))
    factor = on_device(backend, scale) if device else scale
    found = gradkit.grad_norm(grads, order, scale=factor)
    assert number(backend, found) == pytest.approx(norm, rel=1e-15, abs=0)
    each = gradkit.per_tensor_norms([grads], order, scale=factor, flat=True)
    assert float(backend.asnumpy(each)[0]) == pytest.approx(norm, rel=1e-15, abs=0)


@pytest.mark.guarantee("Scaled inside")
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_scale_on_the_device_that_is_not_finite(backend, value):
    """As a norm that is not: zeros on request, and no NaN out of 0 * inf."""
    scale = on_device(backend, value)
    host = f(1.0, 0.0, -2.0)
    grads, zeros = backend.asarray(host), backend.asarray(np.zeros(3))
    if type(scale) is np.ndarray:  # known to the host
        with pytest.raises(ValueError, match="scale must be finite"):
            gradkit.clip_grad_norm(grads, 1.0, scale=scale)
        return
    found = number(backend, gradkit.grad_norm(grads, scale=scale))
    assert math.isnan(found) if math.isnan(value) else found == INF
    assert math.isnan(number(backend, gradkit.grad_norm(zeros, scale=scale)))
    clipped, _ = gradkit.clip_by_global_norm(grads, 1.0, scale=scale)
    expected = np.full(3, NAN) if math.isnan(value) else np.zeros(3)
    np.testing.assert_array_equal(backend.asnumpy(clipped), expected)
    clipped, _ = gradkit.clip_by_global_norm(grads, 1.0, scale=scale, nonfinite="zero")
    assert not any(backend.memory(clipped))
    for call in (
        lambda: gradkit.clip_grad_norm(grads, 1.0, scale=scale, nonfinite="raise"),
        lambda: gradkit.clip_grads_with_norm(
            grads, 1.0, max_norm=1.0, scale=scale, nonfinite="raise"
        ),
    ):
        with pytest.raises(gradkit.NonFiniteNormError):
            call()
        assert_same_bits(backend.asnumpy(grads), host)
    gradkit.clip_grads_with_norm(grads, 1.0, max_norm=1.0, scale=scale, nonfinite="zero")
    assert not any(backend.memory(grads))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_a_scale_on_the_device_that_is_not_finite_makes_of_gradients(backend, value):
    """In place, by default: by the norm where there is one, else a product."""
    if backend.on_host:
        pytest.skip("known to the host, which refuses it")
    scale, found = on_device(backend, value), on_device(backend, 7.0)
    host, product = f(1.0, 0.0, -2.0), np.array([value, NAN, -value])
    by_norm = np.full(3, NAN) if math.isnan(value) else np.zeros(3)
    for expected, call in (
        (by_norm, lambda g: gradkit.clip_grad_norm(g, 1.0, scale=scale, found_inf=found)),
        (by_norm, lambda g: gradkit.clip_grads_with_norm(g, abs(value), max_norm=1.0, scale=scale)),
        (product, lambda g: gradkit.clip_grads_with_norm(g, 1.0, max_norm=1.0, scale=scale)),
        (product, lambda g: gradkit.scale_grads(g, scale)),
    ):
        grads = backend.asarray(host)
        call(grads)
        np.testing.assert_array_equal(backend.asnumpy(grads), expected)
    assert number(backend, found) == 0


@pytest.mark.guarantee("Scaled inside")
@pytest.mark.parametrize(
    ("limit", "factor"), [(2.5, 0.5), (5.0, 1.0), (INF, 1.0), (0.0, 0.0), (-1.0, NAN), (NAN, NAN)]
)
def test_a_limit_on_the_device(backend, limit, factor):
    """One that no number may be makes every gradient NaN."""
    grads = backend.asarray(f(3.0, -4.0))
    max_norm = on_device(backend, limit)
    if type(max_norm) is np.ndarray and math.isnan(factor):  # known to the host
        with pytest.raises(ValueError, match="max_norm must be at least 0"):
            gradkit.clip_grad_norm(grads, max_norm)
        return
    norm = on_device(backend, 5.0)
    coefficient = number(backend, gradkit.clip_coefficient(norm, max_norm))
    assert coefficient == pytest.approx(factor, abs=0, nan_ok=True)
    assert number(backend, gradkit.clip_grad_norm(grads, max_norm)) == 5.0
    np.testing.assert_array_equal(backend.asnumpy(grads), f(3.0, -4.0) * factor)


def test_a_negative_limit_that_only_the_backend_sees():
    """As one in a tensor of another library, on the host."""
    out, norm, limit = np.array(7.0), np.array(5.0), np.array(-1.0)
    _numpy.clip_coefficient(ClipCoefficient(norm=norm, max_norm=limit, eps=0.0, coefficient=out))
    assert math.isnan(out)
    grads = [f(3.0, -4.0)]
    _numpy.clip_by_norm(
        ClipByNorm(
            grads=grads, norm=norm, max_norm=limit, eps=0.0, outs=grads, zero_nonfinite=False
        )
    )
    assert np.isnan(grads[0]).all()


@pytest.mark.parametrize("computer", ["gradkit._numpy", "gradkit._cpu.lists"])
def test_an_infinite_scale_that_only_the_backend_sees(computer):
    """The norm is infinite then, and finite gradients become 0."""
    grads = [f(3.0, -4.0)]
    pytest.importorskip(computer).clip_by_norm(
        ClipByNorm(
            grads=grads,
            norm=np.array(INF),
            max_norm=1.0,
            eps=0.0,
            outs=grads,
            scale=np.array(INF),
            zero_nonfinite=False,
        )
    )
    assert grads[0].tolist() == [0.0, 0.0]


FLAGS = ((np.bool_, ()), (np.bool_, (1,)), (np.float32, (1,)), (np.float64, ()))


@pytest.mark.guarantee("`found_inf`")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", [1, 2, 3, 0.5, INF])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_found_inf_is_about_the_elements(backend, order, name):
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    for k, (value, expected) in enumerate(
        [(1.0, 0), (largest, 0), (-largest, 0), (NAN, 1), (INF, 1), (-INF, 1), (0.0, 0)]
    ):
        dtype, shape = FLAGS[k % len(FLAGS)]
        host = np.full(3000, largest if expected == 0 else 1.0, DTYPES[name])
        host[[0, -1]] = 0, value
        for grads in (host, [host[:1500], host[1500:]], host[1:]):
            many = isinstance(grads, list)
            arrays = list(map(backend.asarray, grads)) if many else backend.asarray(grads)
            found = backend.asarray(np.full(shape, 7, dtype))
            gradkit.grad_norm(arrays, order, found_inf=found)
            assert backend.asnumpy(found).reshape(()) == expected
            found = backend.asarray(np.full(shape, 7, dtype))
            gradkit.clip_by_global_norm(arrays, 1.0, order, found_inf=found, scale=0.5)
            assert backend.asnumpy(found).reshape(()) == expected


def test_found_inf_of_each_gradient(backend):
    grads = [backend.asarray(f(*v)) for v in ([1.0], [NAN, 1.0], [1e308] * 20, [-INF])]
    for order in (1, 2, 3, INF):
        found = backend.asarray(np.full(4, 7.0, np.float32))
        gradkit.per_tensor_norms(grads, order, flat=True, found_inf=found)
        np.testing.assert_array_equal(backend.asnumpy(found), [0, 1, 0, 1])


def test_found_inf_of_nothing(backend):
    found = backend.asarray(np.ones((), bool))
    gradkit.grad_norm(backend.asarray(np.ones((0, 3))), found_inf=found)
    assert not backend.asnumpy(found)


def test_found_inf_is_not_written_by_an_error(backend):
    grads, found = backend.asarray(f(NAN)), backend.asarray(np.full(1, 7.0, np.float32))
    with pytest.raises(gradkit.NonFiniteNormError):
        gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise", found_inf=found)
    assert backend.asnumpy(found)[0] == 7


def test_results_apart_from_found_inf(backend):
    grads, room = backend.asarray(f(3.0)), backend.asarray(f(7.0, 7.0))
    flag, norm = room[:1], room[:1].reshape(())
    for call in (
        lambda: gradkit.grad_norm(grads, found_inf=flag, out=norm),
        lambda: gradkit.clip_grad_norm(grads, 1.0, found_inf=flag, out=norm),
        lambda: gradkit.clip_by_global_norm(grads, 1.0, found_inf=flag, out=(flag, None)),
        lambda: gradkit.clip_by_global_norm(grads, 1.0, found_inf=flag, out=(None, norm)),
    ):
        with pytest.raises(ValueError, match=r"out.* shares memory with found_inf"):
            call()
    np.testing.assert_array_equal(backend.asnumpy(room), [7, 7])


@pytest.mark.parametrize("value", [2, np.float64(2.0), np.float32(2.0), np.array(2.0)])
def test_a_scale_of_any_kind_of_number(backend, value):
    """By a known call as by the first one."""
    for _ in range(2):
        assert float(gradkit.grad_norm([backend.asarray(np.ones(4))], scale=value)) == 4
        grads = {"w": backend.asarray(np.ones(4))}
        assert float(gradkit.clip_grad_norm(grads, 2, scale=value)) == 4
        np.testing.assert_allclose(backend.asnumpy(grads["w"]), 1.0)
    for replicas in (True, 1.0):
        with pytest.raises(TypeError, match="replicas must be an integer"):
            gradkit.grad_norm([backend.asarray(np.ones(4))], replicas=replicas)

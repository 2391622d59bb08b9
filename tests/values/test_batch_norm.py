"""Batch norm, forward and backward: every channel axis, layout and type; layer norm's twin."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import steps
from tests.layouts import LAYOUTS
from tests.problems import BATCH_TYPES, make, problems
from tests.tolerances import assert_same_bits

TYPES = pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)


def batch_norm(backend, p):
    """Statistics of 16 bits come where ``out`` has such arrays."""
    given, out = p.on(backend, "x", "scale", "bias"), None
    if "16" in p.statistics:
        out = (None, *(backend.asarray(np.empty_like(a)) for a in (p.mean, p.inv_std)))
    return gradkit.batch_norm(*given, eps=p.eps, out=out, **p.where)


def batch_norm_grad(backend, p):
    arguments = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    return gradkit.batch_norm_grad(*arguments, **p.where)


def check(backend, p):
    p.check_forward(backend, *batch_norm(backend, p))
    p.check_gradients(backend, *batch_norm_grad(backend, p))


@given(data=st.data())
def test_batch_norm(backend, data):
    p = data.draw(problems(backend.max_elements // 4, batch=True))
    p.check_forward(backend, *batch_norm(backend, p))


@pytest.mark.guarantee("Derivatives")
@given(data=st.data())
def test_batch_norm_grad(backend, data):
    p = data.draw(problems(backend.max_elements // 4, batch=True))
    dx, dscale, dbias = batch_norm_grad(backend, p)
    assert (dscale is None) == (dbias is None) == (p.scale is None)
    p.check_gradients(backend, dx, dscale, dbias)


@pytest.mark.sampled(5)
@TYPES
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1023, 1024, 1025, 4097])
def test_batch_sizes(backend, types, count):
    if count > 1:
        check(backend, make((count, 3), types, axis=1, seed=count, batch=True))
    check(backend, make((2, 3, count), types, axis=1, seed=count, batch=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("types", [BATCH_TYPES[0], BATCH_TYPES[6]], ids="-".join)
@pytest.mark.parametrize(
    "shape", [(3, 70_001, 2), (70_001, 3), (2, 3, 131_073), (65_537, 2, 3), (5, 40_000)], ids=str
)
def test_more_than_a_block(backend, types, shape):
    """Many channels, many elements a channel, and ragged blocks of either."""
    if np.prod(shape) > 4 * backend.max_elements:
        pytest.skip("too large for this backend")
    check(backend, make(shape, types, axis=1, batch=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7), (4, 3, 5, 7), (2, 3, 1, 5, 7)], ids=len)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_channel_axis_of_every_rank(backend, shape, layout):
    for axis in range(-len(shape), len(shape)):
        p = make(shape, axis=axis, seed=5 + axis, batch=True)
        p.x, p.dy = LAYOUTS[layout](p.x), LAYOUTS[layout](p.dy)
        check(backend, p)


@TYPES
@pytest.mark.parametrize("shape", [(1, 5), (1, 5, 1), (1, 5, 1, 1)])
def test_one_element_a_channel(backend, types, shape):
    """It has no variance, so a batch is refused; its gradient by given statistics is 0."""
    p = make(shape, types, axis=1, batch=True)
    with pytest.raises(ValueError, match="x has one element per channel; a variance needs two"):
        batch_norm(backend, p)
    nothing = backend.asarray(np.empty((1, 0)))  # no channel has a single element
    assert gradkit.batch_norm(nothing)[1].shape == (0,)
    dx, dscale, dbias = batch_norm_grad(backend, p)
    assert not backend.asnumpy(dx).any()
    assert not backend.asnumpy(dscale).any()
    assert_same_bits(backend.asnumpy(dbias), p.dy.reshape(-1).astype(p.scale.dtype))


@pytest.mark.parametrize("types", [BATCH_TYPES[0], BATCH_TYPES[3]], ids="-".join)
def test_channels_last_equals_channels_first(backend, types):
    """By axis, and by strides alone; each within its own bounds."""
    first = make((6, 3, 5, 7), types, axis=1, batch=True)
    last = make((6, 3, 5, 7), types, axis=1, batch=True)
    last.x, last.dy = (np.moveaxis(a, 1, -1).copy() for a in (first.x, first.dy))
    last.axis = 3
    strided = make((6, 3, 5, 7), types, axis=1, batch=True)
    strided.x, strided.dy = LAYOUTS["rolled"](first.x), LAYOUTS["rolled"](first.dy)
    mixed = make((6, 3, 5, 7), types, axis=1, batch=True)
    mixed.x = strided.x
    for p in (first, last, strided, mixed):
        check(backend, p)


@pytest.mark.guarantee("No cancellation")
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("shape", [(4, 3, 50), (301, 3, 2)], ids=str)
def test_a_mean_of_1e12_deviations(backend, shape, last):
    """A float64 number that holds such a mean is off by 1e-4 deviations; two are not."""
    x = np.rint(make(shape, BATCH_TYPES[1], 1).x * 2.0**12) / 2.0**12
    shifted = x + 2.0**40  # exact
    exact = np.vectorize(Fraction, otypes=[object])(np.moveaxis(shifted, 1, 0).reshape(3, -1))
    given = np.moveaxis(shifted, 1, -1).copy() if last else shifted
    y, *_ = gradkit.batch_norm(backend.asarray(given), channel_axis=-1 if last else 1)
    y = np.moveaxis(backend.asnumpy(y), -1 if last else 1, 0).reshape(3, -1)
    for row, got in zip(exact, y, strict=True):
        deviation = row - row.sum() / len(row)
        variance = float((deviation**2).sum() / len(row)) + 1e-5
        np.testing.assert_allclose(got, deviation.astype(float) / variance**0.5, rtol=0, atol=1e-14)


@pytest.mark.guarantee("Repeatable")
@given(data=st.data())
def test_the_same_call_again_gives_the_same_bits(backend, data):
    p = data.draw(problems(backend.max_elements // 4, batch=True))
    for one, two in zip(batch_norm_grad(backend, p), batch_norm_grad(backend, p), strict=True):
        if one is not None:
            assert_same_bits(backend.asnumpy(one), backend.asnumpy(two))


EDGE = [[1.5, -1.5, 1.2], [1.7, 1.7, 1.7], [1.7, 1.7, 1.6], [-1.7, 1.7, 1.7]]


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("times", [1, 301])
@pytest.mark.parametrize("x", EDGE, ids=str)
def test_float64_sums_and_differences_that_overflow(backend, x, times, last):
    """Another channel keeps its bits; running statistics are those of the batch."""
    x = np.stack([np.tile(x, times) * 1e308, np.arange(3.0 * times) / 3], axis=last)
    axis, column = (1, x[:, 0]) if last else (0, x[0])
    exact = np.mean(column.astype(np.longdouble)).astype(float)
    constant = np.ptp(column / 2) == 0
    tolerance = 2.0 ** (-52 if times == 1 else -48)
    running = [backend.asarray(np.zeros(2)) for _ in range(2)]
    with np.errstate(all="ignore"):
        given = backend.asarray(x)
        first = gradkit.batch_norm(given, channel_axis=axis)
        options = {"running_mean": running[0], "running_var": running[1], "momentum": 1.0}
        moved = gradkit.batch_norm(given, channel_axis=axis, **options)
        stats = steps.batch_norm_stats(given, channel_axis=axis)
        column[...] = 1
        tame = gradkit.batch_norm(backend.asarray(x), channel_axis=axis)
    for mean in (first[1], moved[1], stats[0], running[0]):
        np.testing.assert_allclose(backend.asnumpy(mean)[0], exact, rtol=tolerance)
    for inv_std in (first[2], moved[2]):  # of a variance beyond float64
        assert backend.asnumpy(inv_std)[0] == (1 / np.sqrt(1e-5) if constant else 0)
    assert backend.asnumpy(stats[1])[0] == (0 if constant else np.inf)
    assert_same_bits(backend.asnumpy(first[1])[1:], backend.asnumpy(tame[1])[1:])


@pytest.mark.parametrize("place", [0, 1])
def test_a_channel_that_overflows_leaves_a_tiny_one_alone(backend, place):
    """Squares of the one overflow if they are not scaled, those of the other vanish if they are."""
    columns = np.array([[1.7e308, -1.7e308, 1.2e308]] * 2)
    columns[place] = 1e-150, 3e-150, 2.5e-150
    calls = {
        "batch": lambda x: steps.batch_norm_stats(x.T),
        "groups": lambda x: gradkit.group_norm(x[np.newaxis], len(x), eps=0.0)[1:],
    }
    with np.errstate(all="ignore"):
        for call in calls.values():
            both, alone = (call(backend.asarray(each)) for each in (columns, columns[[place]]))
            for found, expected in zip(both, alone, strict=True):
                tiny = backend.asnumpy(found).reshape(-1)[place]
                assert tiny == backend.asnumpy(expected).reshape(-1)[0] != 0


def test_float64_channels_that_are_not_finite(backend):
    x = np.array([[1.7e308, np.nan], [np.inf, 1.7e308], [1.0, 1.7e308], [-np.inf, 1.7e308]])
    with np.errstate(all="ignore"):
        for result in gradkit.batch_norm(backend.asarray(x)):
            assert np.isnan(backend.asnumpy(result)).all()


def test_parameters_of_every_element_are_told_what_to_reshape(backend):
    """ONNX Runtime's ``spatial=0``; what the advice says computes it."""
    rng = np.random.default_rng(0)
    hosts = rng.normal(size=(6, 3, 2, 2)), rng.normal(size=(3, 2, 2)), rng.normal(size=(3, 2, 2))
    x, scale, bias = map(backend.asarray, hosts)
    said = r"scale has shape \(3, 2, 2\); expected \(3,\).*spatial=0, reshape data to \(6, 12\) and"
    with pytest.raises(ValueError, match=said):
        gradkit.batch_norm(x, scale, bias)
    flat = map(backend.asarray, (hosts[0].reshape(6, 12), hosts[1].ravel(), hosts[2].ravel()))
    y = backend.asnumpy(gradkit.batch_norm(*flat)[0]).reshape(6, 3, 2, 2)
    expected = (hosts[0] - hosts[0].mean(0)) / np.sqrt(hosts[0].var(0) + 1e-5) * hosts[1] + hosts[2]
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)

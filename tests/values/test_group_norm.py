"""Group norm, forward and backward: every layout, rank and type; what it is in special cases."""

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._numpy import channels
from tests import oracles, tolerances
from tests.backends import BACKENDS
from tests.layouts import LAYOUTS
from tests.problems import LAYER_TYPES, group_problems, make_groups
from tests.tolerances import assert_same_bits, assert_within
from tests.values.test_batch_norm import EDGE

TYPES = pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)
SHAPES = [(5, 12), (3, 12, 7), (4, 12, 3, 5), (2, 12, 3, 1, 5)]


def group_norm(backend, p):
    x, scale, bias = p.on(backend, "x", "scale", "bias")
    return gradkit.group_norm(x, p.groups, scale, bias, eps=p.eps, **p.where)


def group_norm_grad(backend, p):
    arguments = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    return gradkit.group_norm_grad(*arguments, **p.where)


def check(backend, p):
    p.check_forward(backend, *group_norm(backend, p))
    p.check_gradients(backend, *group_norm_grad(backend, p))


def channels_last(p):
    """The same problem with its channels as the last axis."""
    p.x, p.dy, p.axis = np.moveaxis(p.x, 1, -1).copy(), np.moveaxis(p.dy, 1, -1).copy(), -1
    return p


@given(data=st.data())
def test_group_norm(backend, data):
    p = data.draw(group_problems(backend.max_elements // 4))
    p.check_forward(backend, *group_norm(backend, p))


@pytest.mark.guarantee("Derivatives")
@given(data=st.data())
def test_group_norm_grad(backend, data):
    p = data.draw(group_problems(backend.max_elements // 4))
    dx, dscale, dbias = group_norm_grad(backend, p)
    assert (dscale is None) == (dbias is None) == (p.scale is None)
    p.check_gradients(backend, dx, dscale, dbias)
    for one, two in zip(group_norm_grad(backend, p), (dx, dscale, dbias), strict=True):
        if one is not None:
            assert_same_bits(backend.asnumpy(one), backend.asnumpy(two))


@pytest.mark.sampled(3)
@TYPES
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_every_rank_and_layout(backend, types, shape):
    """Groups of one channel, of a few, and all in one; channels first and last."""
    for groups in (1, 3, 4, 12):
        check(backend, make_groups(shape, groups, types, seed=groups))
        check(backend, channels_last(make_groups(shape, groups, types, seed=groups)))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_strides(backend, layout, axis):
    p = make_groups((2, 6, 6, 6), 3, axis=axis)
    p.x = LAYOUTS[layout](p.x)
    check(backend, p)
    p.dy = LAYOUTS[layout](p.dy)
    check(backend, p)


@pytest.mark.parametrize("types", LAYER_TYPES[:4], ids="-".join)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 6, 37, 3), 2), ((2, 2, 401), 1), ((3, 300, 2), 150), ((70, 6), 2), ((40, 12, 7), 4)],
    ids=str,
)
def test_samples_in_parts(monkeypatch, shape, groups, types):
    """Samples fill several blocks, of any strides: here blocks have 192 elements."""
    monkeypatch.setattr(channels, "BLOCK", 192)
    numpy = BACKENDS[0]
    p = make_groups(shape, groups, types)
    with numpy.active():
        for q in (p, channels_last(make_groups(shape, groups, types))):
            check(numpy, q)
            for layout in ("padded", "rolled"):
                q.x = LAYOUTS[layout](q.x)
                check(numpy, q)
        if types[0] == "float32":
            p.x, p.eps = (p.x * 1e-30).astype(np.float32), 0.0
            p.check_forward(numpy, *group_norm(numpy, p))


@pytest.mark.slow
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[3]], ids="-".join)
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 8, 40_000), 2), ((70_001, 6), 2), ((3, 64, 1025), 32)], ids=str
)
def test_large(backend, types, shape, groups):
    if np.prod(shape) > 4 * backend.max_elements:
        pytest.skip("too large for this backend")
    check(backend, make_groups(shape, groups, types))
    check(backend, channels_last(make_groups(shape, groups, types)))


@pytest.mark.parametrize("shape", [(3, 6, 8), (2, 6, 304), (2, 72, 30)], ids=str)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_both_ends_of_the_range_in_one_group(backend, name, shape):
    p = make_groups(shape, 3, (name, "float32", name))
    largest = float(ml_dtypes.finfo(p.x.dtype).max)
    p.x[:, :, ::2], p.x[:, :, 1::2] = largest, -largest
    for q in (p, channels_last(make_groups(shape, 3, (name, "float32", name)))):
        q.x = p.x if q is p else np.moveaxis(p.x, 1, -1).copy()
        q.check_forward(backend, *group_norm(backend, q))


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("times", [1, 301])
@pytest.mark.parametrize("x", EDGE, ids=str)
def test_float64_sums_and_differences_that_overflow(backend, x, times, last):
    """The other groups keep their bits, in the same sample and in the next one."""
    x = np.stack([np.tile(x, 2 * times) * 1e308, np.arange(6.0 * times) / 3]).reshape(4, -1)
    x = np.stack([x, np.roll(x, 2, axis=0)])  # (samples, channels, space), two channels a group
    exact = np.mean(x[0, :2].astype(np.longdouble)).astype(float)
    constant = np.ptp(x[0, :2] / 2) == 0

    def statistics():
        given = backend.asarray(x.swapaxes(1, 2).copy() if last else x)
        with np.errstate(all="ignore"):
            _, *found = gradkit.group_norm(given, 2, channel_axis=2 if last else 1)
        return [backend.asnumpy(each) for each in found]

    mean, inv_std = statistics()
    x[0, :2] = x[1, 2:] = 1
    tame = statistics()
    for sample, other in ((0, 1), (1, 0)):
        np.testing.assert_allclose(mean[sample, sample], exact, rtol=2.0**-48)
        assert inv_std[sample, sample] == (1 / np.sqrt(1e-5) if constant else 0)
        for found, alone in zip((mean, inv_std), tame, strict=True):
            assert_same_bits(found[sample, other], alone[sample, other])


@pytest.mark.parametrize("times", [8, 131])
@pytest.mark.parametrize("x", [[np.nan, 1.7], [np.inf, 1.7], [-np.inf, np.inf]], ids=str)
def test_float64_groups_that_are_not_finite(backend, x, times):
    x = np.tile(x, times).reshape(1, 2, times) * 1e308
    with np.errstate(all="ignore"):
        for result in gradkit.group_norm(backend.asarray(x), 1):
            assert np.isnan(backend.asnumpy(result)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(2, 6, 129), (2, 6, 132), (2, 12, 127)], ids=str)
def test_a_mean_that_float32_hardly_holds(backend, shape, seed):
    p = make_groups(shape, 2, seed=seed)
    p.x = p.x + np.float32(3e5)
    p.__post_init__()
    p.check_forward(backend, *group_norm(backend, p))


@pytest.mark.parametrize("shape", [(2, 8, 80), (2, 32, 21)], ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_groups_of_the_largest_elements_and_of_the_least(backend, name, shape):
    """Also one that far exceeds all others, first or later, and one of equal elements."""
    p = make_groups(shape, 2, (name, "float32", name), eps=0.0)
    dtype, half = p.x.dtype, shape[1] // 2
    large, small = np.array([2.0**120, 2.0**-110], np.float32).astype(dtype)
    x = np.clip(p.x, dtype.type(-1), dtype.type(1))
    p.x = np.concatenate([x * large, x * small, x, x]).astype(dtype)
    p.x[4, 0, 0], p.x[4, half + 1, 3], p.x[5, :half] = large, large, 3.375
    p.x[5, :half, 0] = 3.25
    with np.errstate(all="ignore"):
        p.__post_init__()
        p.check_forward(backend, *group_norm(backend, p))
    p.x[:, :half], p.eps = 0.3, 0.25
    p.__post_init__()
    y, mean, inv_std = (backend.asnumpy(a) for a in group_norm(backend, p))
    assert_same_bits(mean[:, 0], np.full_like(mean[:, 0], p.x[0, 0, 0]))
    assert (inv_std[:, 0] == 2).all()
    assert_same_bits(y[:, :half], np.broadcast_to(p.bias[:half, None], y[:, :half].shape).copy())


@pytest.mark.guarantee("No cancellation")
def test_by_mpmath_on_channels_last_data_far_from_zero(backend):
    """Mean 1e4, deviation 1, against exact arithmetic on the saved statistics."""
    p = channels_last(make_groups((2, 4, 3, 5), 2))
    p.x += np.float32(1e4)
    y, mean, inv_std = (backend.asnumpy(a) for a in group_norm(backend, p))
    p.mean, p.inv_std = mean, inv_std
    dx, dscale, dbias = (backend.asnumpy(a) for a in group_norm_grad(backend, p))
    exact = np.vectorize(lambda value: mpmath.mpf(float(value)), otypes=[object])
    with mpmath.workprec(200):
        x, dy = (exact(a).reshape(2, 15, 2, 2) for a in (p.x, p.dy))
        scale, bias = (exact(a).reshape(2, 2) for a in (p.scale, p.bias))
        deviation = x - x.sum(axis=(1, 3), keepdims=True) / 30
        variance = (deviation**2).sum(axis=(1, 3), keepdims=True) / 30
        by_root = np.vectorize(lambda v: 1 / mpmath.sqrt(v + mpmath.mpf(p.eps)), otypes=[object])
        forward = deviation * by_root(variance) * scale + bias
        saved = (exact(a)[:, None, :, None] for a in (mean, inv_std))
        centre, factor = saved
        xhat, w = (x - centre) * factor, dy * scale
        means = [a.sum(axis=(1, 3), keepdims=True) / 30 for a in (w, w * xhat)]
        refs = {
            "y": (y, forward.reshape(y.shape)),
            "dx": (dx, (factor * (w - means[0] - xhat * means[1])).reshape(dx.shape)),
            "dscale": (dscale, (dy * xhat).sum(axis=(0, 1)).reshape(-1)),
            "dbias": (dbias, dy.sum(axis=(0, 1)).reshape(-1)),
        }
    for name, (got, ref) in refs.items():
        ref = ref.astype(np.longdouble)
        bound = tolerances.summed(np.abs(ref).max(), ref, 30, got.dtype, "float32")
        assert_within(got, ref, bound, name)


@pytest.mark.guarantee("Special cases")
@TYPES
def test_one_group_is_the_layer_norm_over_channels_and_space(backend, types):
    """Scale and bias are numbers of a channel there, of an element here."""
    p = make_groups((3, 6, 5, 2), 1, types)
    x, dy, mean, inv_std = p.on(backend, "x", "dy", "mean", "inv_std")
    scale, bias = (
        backend.asarray(np.broadcast_to(a[:, None, None], p.x.shape[1:]).copy())
        for a in (p.scale, p.bias)
    )
    p.check_forward(backend, *(_with_ones(a) for a in gradkit.layer_norm(x, scale, bias, axis=1)))
    statistics = mean.reshape(3), inv_std.reshape(3)
    dx, dscale, dbias = gradkit.layer_norm_grad(dy, x, scale, *statistics, axis=1)
    p.check_gradients(backend, dx, None, None)
    p.check_gradients(backend, *group_norm_grad(backend, p))
    ours = group_norm_grad(backend, p)[1:]
    for got, each, size in zip(ours, (dscale, dbias), ("dscale_size", "dbias_size"), strict=True):
        ref = oracles.wide(backend.asnumpy(each)).sum(axis=(1, 2))
        terms = getattr(p.gradients(), size)
        bound = tolerances.summed(terms, terms, 30, got.dtype, "float32")
        assert_within(backend.asnumpy(got), ref, 2 * bound)


def _with_ones(array):
    """A statistic of rows as that of one group."""
    return array.reshape(-1, 1) if array.ndim == 1 else array


@pytest.mark.guarantee("Special cases")
@TYPES
def test_one_channel_a_group_is_an_instance_norm(backend, types):
    """The batch norm of each sample by itself."""
    p = make_groups((3, 5, 4, 7), 5, types)
    y, mean, inv_std = (backend.asnumpy(a) for a in group_norm(backend, p))
    if types[2] == types[0]:
        for n in range(3):
            x, scale, bias = (backend.asarray(a) for a in (p.x[n : n + 1], p.scale, p.bias))
            found = [backend.asnumpy(a) for a in gradkit.batch_norm(x, scale, bias)]
            for got, ref in zip((y[n : n + 1], mean[n], inv_std[n]), found, strict=True):
                tolerances.assert_ulps(got, ref, 256 if got.dtype.itemsize > 2 else 2)
    check(backend, p)


@pytest.mark.guarantee("Derivatives")
@given(data=st.data())
def test_gradients_are_derivatives(data):
    """Of the forward pass, by central differences in float64."""
    p = make_groups((2, 6, 5), data.draw(st.sampled_from((1, 2, 6))), LAYER_TYPES[1])
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    step = np.cbrt(np.finfo(float).eps)
    dx, dscale, dbias = gradkit.group_norm_grad(p.dy, p.x, p.scale, p.mean, p.inv_std)
    given_ = {"x": (p.x, dx), "scale": (p.scale, dscale), "bias": (p.bias, dbias)}
    for name, (array, gradient) in given_.items():
        along = rng.standard_normal(array.shape)
        losses = []
        for sign in (1, -1):
            moved = {"x": p.x, "scale": p.scale, "bias": p.bias, name: array + sign * step * along}
            y, *_ = gradkit.group_norm(moved["x"], p.groups, moved["scale"], moved["bias"])
            losses.append((y * p.dy).sum())
        slope = (losses[0] - losses[1]) / (2 * step)
        size = np.abs(gradient * along).sum() + 1
        assert abs(slope - (gradient * along).sum()) < tolerances.DIFFERENCES * size


@pytest.mark.parametrize("eps", [0.0, 0.25])
def test_one_element_a_group(backend, eps):
    p = make_groups((4, 6), 6, eps=eps)
    y, mean, inv_std = (backend.asnumpy(a) for a in group_norm(backend, p))
    assert_same_bits(mean, p.x)
    np.testing.assert_array_equal(inv_std, np.inf if eps == 0 else 2)
    np.testing.assert_array_equal(y, np.nan if eps == 0 else np.broadcast_to(p.bias, (4, 6)))
    if eps:
        dx, dscale, dbias = (backend.asnumpy(g) for g in group_norm_grad(backend, p))
        assert not dx.any()
        assert not dscale.any()
        np.testing.assert_allclose(dbias, p.dy.sum(axis=0), rtol=1e-6)


def test_a_scale_of_zeros(backend):
    p = make_groups((3, 6, 7), 2)
    p.scale[::2], p.bias = 0, None
    check(backend, p)


def test_results_lie_in_memory_as_x_does():
    p = make_groups((2, 4, 3, 5), 2)
    x = LAYOUTS["rolled"](p.x)
    for turned in (x, x[:, ::-1], x[..., ::-1]):  # which end there where others begin
        y, mean, inv_std = gradkit.group_norm(turned, 2)
        dx, *_ = gradkit.group_norm_grad(p.dy, turned, None, mean, inv_std)
        batch, *_ = gradkit.batch_norm(turned)
        assert y.strides == dx.strides == batch.strides == x.strides

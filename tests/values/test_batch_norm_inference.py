"""Batch norm by running statistics, and its gradient, in which the statistics are constants."""

from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, tolerances
from tests.layouts import LAYOUTS
from tests.problems import BATCH_TYPES, make, problems, tiny
from tests.tolerances import DTYPES, assert_same_bits, assert_within

TYPES = pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)


def known(p):
    """A problem with statistics that are not those of x; ``inv_std`` is what they come to."""
    rng = np.random.default_rng(p.x.size)
    dtype = DTYPES[p.statistics]
    p.mean = rng.standard_normal(p.lead).astype(dtype)
    p.var = rng.uniform(0, 2, p.lead).astype(dtype)
    with np.errstate(all="ignore"):
        p.inv_std = 1 / np.sqrt(oracles.wide(p.var) + oracles.WIDE(p.eps))
    return p


def forward(backend, p):
    given = p.on(backend, "x", "scale", "bias", "mean", "var")
    return gradkit.batch_norm_inference(*given, eps=p.eps, **p.where)


def gradient(backend, p):
    given = p.on(backend, "dy", "x", "scale", "mean", "var")
    return gradkit.batch_norm_inference_grad(*given, eps=p.eps, **p.where)


def reference(p):
    """Results, and the sizes of what they are made of, channel by channel."""
    xhat, dy = p.xhat, oracles.wide(p.rows(p.dy))
    scale, bias = (
        oracles.WIDE(fill) if a is None else oracles.wide(p.per_column(a))
        for a, fill in ((p.scale, 1), (p.bias, 0))
    )
    with np.errstate(all="ignore"):
        terms = dy * xhat
        return SimpleNamespace(
            y=xhat * scale + bias,
            y_size=np.abs(xhat * scale) + np.abs(bias),
            dx=dy * p.inv_std[:, None] * scale,
            sums={"dscale": terms, "dbias": dy},
        )


def check_forward(backend, p, y):
    y, ref = backend.asnumpy(y), reference(p)
    assert (y.shape, y.dtype) == (p.x.shape, p.x.dtype)
    bound = tolerances.elementwise("y", ref.y_size, ref.y, y.dtype)
    gain = np.abs(p.inv_std)[:, None] * (1 if p.scale is None else np.abs(p.per_column(p.scale)))
    assert_within(p.rows(y), ref.y, bound + tolerances.below_normal("y", y.dtype, gain), "y")


def check_gradient(backend, p, dx, dscale, dbias):
    dx, ref = backend.asnumpy(dx), reference(p)
    assert (dx.shape, dx.dtype) == (p.x.shape, p.x.dtype)
    bound = tolerances.elementwise("dx", np.abs(ref.dx), ref.dx, dx.dtype)
    gain = np.abs(p.inv_std)[:, None]
    assert_within(p.rows(dx), ref.dx, bound + tolerances.below_normal("dx", dx.dtype, gain), "dx")
    assert (dscale is None) == (dbias is None) == (p.scale is None)
    for name, array in {"dscale": dscale, "dbias": dbias}.items():
        if array is None:
            continue
        terms, array = ref.sums[name], backend.asnumpy(array)
        assert (array.shape, array.dtype) == (p.lead, p.scale.dtype)
        total, size = terms.sum(axis=1), np.abs(terms).sum(axis=1)
        depth = min(backend.depth, terms.shape[1])
        bound = tolerances.summed(size, total, depth, array.dtype, dx.dtype)
        bound = bound + tolerances.below_normal("sum", dx.dtype, terms.size)
        assert_within(array, total, bound, name)


def check(backend, p):
    check_forward(backend, p, forward(backend, p))
    check_gradient(backend, p, *gradient(backend, p))


@pytest.mark.guarantee("Inference")
@given(data=st.data())
def test_any_problem(backend, data):
    check(backend, known(data.draw(problems(backend.max_elements // 8, batch=True))))


@TYPES
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 5, 16), (3, 16, 5, 5)], ids=str)
def test_every_dtype_in_both_orders(backend, types, last, shape):
    p = make(shape, types, axis=1, batch=True)
    if last:
        p.x, p.dy = LAYOUTS["rolled"](p.x), LAYOUTS["rolled"](p.dy)
    check(backend, known(p))


def test_against_mpmath():
    """The oracle above is compared with the formulas in 60 digits."""
    p = known(make((4, 3, 2), BATCH_TYPES[1], axis=1, batch=True))
    ref = reference(p)
    with mpmath.workdps(60):
        for channel in range(3):
            var, mean = mpmath.mpf(float(p.var[channel])), mpmath.mpf(float(p.mean[channel]))
            factor = 1 / mpmath.sqrt(var + mpmath.mpf(p.eps))
            scale, bias = float(p.scale[channel]), float(p.bias[channel])
            for k, x in enumerate(p.rows(p.x)[channel].tolist()):
                dy = p.rows(p.dy)[channel].tolist()[k]
                for got, exact in (
                    (ref.y, (x - mean) * factor * scale + bias),
                    (ref.dx, dy * factor * scale),
                    (ref.sums["dscale"], dy * (x - mean) * factor),
                ):
                    assert abs(mpmath.mpf(float(got[channel, k])) - exact) <= 1e-15 * (
                        1 + abs(exact)
                    )


@pytest.mark.guarantee("Inference")
def test_dx_is_the_derivative_of_y():
    """By central differences, of the sum of dy * y: the statistics stay."""
    p = known(make((4, 3, 2), BATCH_TYPES[1], axis=1, batch=True))
    given = p.scale, p.bias, p.mean, p.var

    def loss(x, scale, bias):
        return float((p.dy * gradkit.batch_norm_inference(x, scale, bias, *given[2:])).sum())

    dx, dscale, dbias = gradkit.batch_norm_inference_grad(p.dy, p.x, p.scale, *given[2:])
    arguments = [p.x, p.scale, p.bias]
    for position, found in enumerate((dx, dscale, dbias)):
        for index in np.ndindex(found.shape):
            moved = [a.copy() for a in arguments]
            h = 1e-5
            moved[position][index] += h
            above = loss(*moved)
            moved[position][index] -= 2 * h
            assert abs((above - loss(*moved)) / (2 * h) - found[index]) <= tolerances.DIFFERENCES


def test_it_is_training_mode_where_the_batchs_own_statistics_are_known(backend):
    p = make((6, 3, 5), BATCH_TYPES[1], axis=1, batch=True)
    x, scale, bias = p.on(backend, "x", "scale", "bias")
    running = [backend.asarray(np.zeros(3)) for _ in range(2)]
    given = dict(zip(("running_mean", "running_var"), running, strict=True))
    gradkit.batch_norm(x, scale, bias, eps=p.eps, momentum=1.0, **given)
    running[1] = backend.asarray(backend.asnumpy(running[1]) * 29 / 30)  # biased
    y = gradkit.batch_norm_inference(x, scale, bias, *running, eps=p.eps)
    p.check_forward(backend, y, *p.on(backend, "mean", "inv_std"))


@TYPES
def test_a_mean_of_many_deviations(backend, types):
    p = make((65, 4, 3), types, axis=1, batch=True)
    offset = 1e4 if types[0] in ("float32", "float64") else 100
    p.x = (p.x.astype(np.float64) + offset).astype(p.x.dtype)
    p = known(p)
    p.mean = (p.mean.astype(np.float64) + offset).astype(p.mean.dtype)
    check(backend, p)


@pytest.mark.parametrize("types", [BATCH_TYPES[0], BATCH_TYPES[1], BATCH_TYPES[6]], ids="-".join)
def test_down_to_the_smallest_number(backend, types):
    for above in (22, 5, 1):
        p = make((30, 5, 4), types, axis=1, batch=True)
        p.dy, p.x, p.bias = tiny(p.dy, above), tiny(p.x, above), None
        p = known(p)
        p.mean[...] = 0
        check(backend, p)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)], ids=str)
def test_one_element_a_channel(backend, shape):
    check(backend, known(make(shape, axis=1, batch=True)))


def test_variances_at_and_below_zero(backend):
    """As the formula says: infinite, and NaN; other channels are as ever."""
    p = known(make((4, 3, 2), axis=1, batch=True, eps=0.0))
    p.bias = None
    fine = backend.asnumpy(forward(backend, p))
    p.var[:2] = 0, -1
    y, (dx, dscale, dbias) = forward(backend, p), gradient(backend, p)
    y, dx, dscale, dbias = map(backend.asnumpy, (y, dx, dscale, dbias))
    assert np.isinf(y[:, 0]).all()
    assert np.isinf(dx[:, 0]).all()
    assert np.isnan(y[:, 1]).all()
    assert np.isnan(dscale[1])
    assert np.isfinite(dbias).all()
    assert_same_bits(y[:, 2], fine[:, 2])


@pytest.mark.parametrize("where", ["x", "dy", "mean", "var"])
def test_nan_stays_where_it_is(backend, where):
    p = known(make((5, 3, 4), axis=1, batch=True))
    array = getattr(p, where)
    array[(2, 1, 3) if array.ndim > 1 else 1] = np.nan
    y, (dx, dscale, dbias) = forward(backend, p), gradient(backend, p)
    y, dx, dscale, dbias = (np.isnan(backend.asnumpy(a)) for a in (y, dx, dscale, dbias))
    assert y.sum() == {"x": 1, "dy": 0}.get(where, 20)
    assert dx.sum() == {"dy": 1, "var": 20}.get(where, 0)
    assert dscale.tolist() == [False, True, False]
    assert dbias.tolist() == [False, where == "dy", False]


def test_engines():
    x = np.arange(12.0).reshape(4, 3)
    given = x, None, None, np.zeros(3), np.ones(3)
    for engine in (None, "native"):
        gradkit.batch_norm_inference(*given, engine=engine)
        assert gradkit.last_engine() == "native"
    with pytest.raises(ValueError, match="needs CuPy arrays"):
        gradkit.batch_norm_inference(*given, engine="cudnn")
    with pytest.raises(ValueError, match="engine must be one of"):
        gradkit.batch_norm_inference(*given, engine="fast")

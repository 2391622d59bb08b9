"""The oracles against other mathematics: derivatives of the forward passes, mpmath, identities.

What is checked by oracles elsewhere is thereby checked by something other than itself.
"""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, tolerances
from tests import strategies as draw_

SHAPES = [(4, 7), (1, 5), (6, 2), (3, 16)]  # rows, columns
EPS = 1e-3


def forward(x, scale, bias, *, centred):
    """A norm of rows in whatever field x is: no absolute value, no comparison."""
    mean = x.mean(axis=1, keepdims=True) if centred else 0.0
    inv_std = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + EPS)
    return (x - mean) * inv_std * scale + bias


def complex_step(loss, at):
    """The gradient of an analytic function, without a difference that cancels."""
    found = np.empty(at.shape)
    for index in np.ndindex(at.shape):
        moved = at.astype(np.complex128)
        moved[index] += 1e-100j
        found[index] = loss(moved).imag / 1e-100
    return found


def central_differences(loss, at):
    """The gradient of any function, to about two thirds of its digits."""
    found, h = np.empty(at.shape), np.cbrt(tolerances.UNIT["float64"])
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += h
        down[index] -= h
        found[index] = (loss(up) - loss(down)) / (up[index] - down[index])
    return found


DERIVATIVES = [
    (complex_step, tolerances.COMPLEX_STEP),
    (central_differences, tolerances.DIFFERENCES),
]


@pytest.fixture(params=SHAPES, ids=str)
def problem(request):
    """(x, scale, bias, dy) of one shape."""
    rng = np.random.default_rng(sum(request.param))
    columns = request.param[1]
    x, dy = rng.standard_normal((2, *request.param))
    return x, 1 + rng.standard_normal(columns) / 2, rng.standard_normal(columns), dy


@pytest.mark.guarantee("Derivatives")
@pytest.mark.parametrize(("derivative", "bound"), DERIVATIVES)
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "RMS norm"])
def test_row_norms(problem, derivative, bound, centred):
    """Oracle and library agree with the derivative of the forward formula."""
    x, scale, bias, dy = problem
    bias = bias if centred else bias * 0

    def loss(x=x, scale=scale, bias=bias):
        return (forward(x, scale, bias, centred=centred) * dy).sum()

    dx = derivative(lambda moved: loss(x=moved), x)
    dscale = derivative(lambda moved: loss(scale=moved), scale)
    dbias = derivative(lambda moved: loss(bias=moved), bias)
    ref = oracles.forward(x, scale, bias, EPS, centred=centred)
    xhat = oracles.normalised(x, ref.mean if centred else None, ref.inv_std)
    from_oracle = oracles.gradients(dy, xhat, scale, ref.inv_std, centred=centred)
    if centred:
        y, mean, inv_std = gradkit.layer_norm(x, scale, bias, eps=EPS)
        from_library = gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)
        from_y = gradkit.invertible_layer_norm_grad(dy, y, scale, bias, inv_std)
    else:
        y, inv_std = gradkit.rms_norm(x, scale, eps=EPS)
        from_library = from_y = gradkit.rms_norm_grad(dy, x, scale, inv_std)
    for found in (from_oracle[:3], from_library, from_y):
        for got, exact in zip(found, (dx, dscale, dbias), strict=False):
            np.testing.assert_allclose(np.asarray(got, float), exact, rtol=0, atol=bound)


@pytest.mark.guarantee("Derivatives")
@pytest.mark.parametrize(("derivative", "bound"), DERIVATIVES)
def test_batch_norm(problem, derivative, bound):
    x, _, _, dy = problem
    channels = len(x)
    scale, bias = np.linspace(0.5, 2, channels), np.linspace(-1, 1, channels)

    def loss(x=x, scale=scale, bias=bias):
        return (forward(x, scale[:, None], bias[:, None], centred=True) * dy).sum()

    exact = (
        derivative(lambda moved: loss(x=moved), x),
        derivative(lambda moved: loss(scale=moved), scale),
        derivative(lambda moved: loss(bias=moved), bias),
    )
    y, mean, inv_std = gradkit.batch_norm(x, scale, bias, channel_axis=0, eps=EPS)
    np.testing.assert_allclose(y, forward(x, scale[:, None], bias[:, None], centred=True))
    found = gradkit.batch_norm_grad(dy, x, scale, mean, inv_std, channel_axis=0)
    xhat = oracles.normalised(x, mean, inv_std)
    ref = oracles.gradients(dy, xhat, scale[:, None], inv_std, along=1)
    for got, wanted, oracle in zip(found, exact, ref[:3], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)
        np.testing.assert_allclose(oracle.astype(float), wanted, rtol=0, atol=bound)


@given(
    values=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20),
    order=draw_.orders,
)
def test_norms_in_mpmath(values, order):
    """Oracle and library against the definition at 400 bits, to subnormals and past overflow."""
    with mpmath.workprec(400):
        exact = [mpmath.mpf(abs(v)) for v in values]
        if order == math.inf:
            expected = max(exact)
        else:
            total = mpmath.fsum(v**order for v in exact if v)
            expected = total ** (1 / mpmath.mpf(order)) if total else mpmath.mpf(0)
    bound = tolerances.norm(order, {}, runs=False)
    grads = np.array(values)
    assert oracles.off_by(gradkit.grad_norm(grads, order), expected) <= bound
    with mpmath.workprec(200):
        assert abs(oracles.norm([grads], order) - expected) <= bound * expected


def test_tolerances_themselves():
    """A helper that asserts nothing would let everything pass."""
    one = np.ones(3, np.float32)
    off = np.nextafter(one, np.float32(2))
    tolerances.assert_ulps(off, one, 1)
    for fails in (
        lambda: tolerances.assert_ulps(off, one, 0),
        lambda: tolerances.assert_ulps(one * np.float32(np.nan), one, 9),
        lambda: tolerances.assert_ulps(np.array([-5e-324]), np.array([5e-324]), 1),
        lambda: tolerances.assert_same_bits(np.zeros(3), -np.zeros(3)),
        lambda: tolerances.assert_same_bits(np.zeros(3), np.zeros(3, np.float32)),
        lambda: tolerances.assert_within(off, one.astype(np.longdouble), 1e-8),
        lambda: tolerances.assert_within(one[:2], one.astype(np.longdouble), 1.0),
        lambda: tolerances.assert_within(one * np.float32(np.inf), one.astype(np.longdouble), 1.0),
        lambda: tolerances.assert_within(one * np.float32(np.nan), one.astype(np.longdouble), 1.0),
    ):
        with pytest.raises(AssertionError):
            fails()
    for got, ref in ((np.nan, 3), (np.inf, 3), (np.nan, mpmath.inf), (3.0, mpmath.nan), (1.0, 0)):
        assert oracles.off_by(got, mpmath.mpf(ref)) == math.inf

"""Agreement with what the frameworks compute themselves, on drawn input.

Values are eighths between -8 and 8 and the epsilon of a norm is 0.1, so that no row is
ill-conditioned: then the two sides may differ by rounding alone, ``TOLERANCE`` (about 1e4
units of the dtype, which covers sums of up to 200 terms of up to 1000).
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradkit

from .libraries import framework

EPS = 0.1
TOLERANCE = {"float64": 1e-11, "float32": 5e-3}
quick = settings(deadline=None, max_examples=25)

eighths = st.integers(-64, 64).map(lambda n: n / 8)


def arrays(shape, dtype="float64"):
    return hnp.arrays(dtype, shape, elements=eighths)


@st.composite
def gradients(draw, dtype="float64"):
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    return draw(st.lists(shapes.flatmap(lambda s: arrays(s, dtype)), min_size=1, max_size=5))


@st.composite
def rows(draw, *, batch=False):
    """x, scale, bias and dy of (rows, columns), or of (batch, channels, *)."""
    dtype = draw(st.sampled_from(["float32", "float64"]))
    shape = tuple(draw(st.lists(st.integers(2, 7), min_size=2, max_size=4)))
    width = (shape[1],) if batch else shape[-1:]
    positive = hnp.arrays(dtype, width, elements=st.integers(4, 32).map(lambda n: n / 8))
    return (draw(arrays(shape, dtype)), draw(positive), draw(arrays(width, dtype)),
            draw(arrays(shape, dtype)))  # fmt: skip


def agree(ours, theirs, dtype, label):
    np.testing.assert_allclose(
        np.asarray(ours, np.float64),
        np.asarray(theirs, np.float64),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
        err_msg=label,
    )


# PyTorch


@quick
@given(gradients(), st.sampled_from([1.0, 2.0, 3.0, math.inf]), st.floats(0.01, 100))
def test_clipping_agrees_with_pytorch(values, norm_type, max_norm):
    torch = framework("torch")
    theirs = [torch.zeros(v.shape, dtype=torch.float64, requires_grad=True) for v in values]
    for holder, value in zip(theirs, values, strict=True):
        holder.grad = torch.tensor(value)
    ours = [torch.tensor(value) for value in values]

    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
    norm = gradkit.clip_grad_norm(ours, max_norm, norm_type)

    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    slack = 1e-12 + (1e-6 / float(norm) if float(norm) else 0)  # PyTorch divides by norm + 1e-6
    for grad, holder in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, holder.grad, rtol=slack, atol=0)


@quick
@given(gradients("float32"), st.floats(0, 8, width=32))
def test_clamping_agrees_with_pytorch(values, limit):
    torch = framework("torch")
    holder = [torch.zeros(v.shape, requires_grad=True) for v in values]
    for parameter, value in zip(holder, values, strict=True):
        parameter.grad = torch.tensor(value)
    ours = [torch.tensor(value) for value in values]
    torch.nn.utils.clip_grad_value_(holder, limit)
    gradkit.clip_grad_value(ours, limit)
    for grad, parameter in zip(ours, holder, strict=True):
        assert torch.equal(grad, parameter.grad)


def _leaves(torch, *values):
    return [torch.tensor(value, requires_grad=True) for value in values]


@quick
@given(rows())
def test_layer_norm_agrees_with_pytorch(drawn):
    torch = framework("torch")
    dtype = str(drawn[0].dtype)
    x, scale, bias = _leaves(torch, *drawn[:3])
    dy = torch.tensor(drawn[3])
    expected = torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, EPS)
    wanted = torch.autograd.grad(expected, (x, scale, bias), dy)

    y, mean, inv_std = gradkit.layer_norm(x, scale, bias, eps=EPS)
    agree(y, expected.detach(), dtype, "y")
    found = gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)
    inverted = gradkit.invertible_layer_norm_grad(dy, y, scale, bias, inv_std)
    for label, got, again, want in zip(
        ("dx", "dscale", "dbias"), found, inverted, wanted, strict=True
    ):
        agree(got, want, dtype, label)
        agree(again, want, dtype, f"invertible {label}")


@quick
@given(rows())
def test_rms_norm_agrees_with_pytorch(drawn):
    torch = framework("torch")
    dtype = str(drawn[0].dtype)
    x, scale = _leaves(torch, *drawn[:2])
    dy = torch.tensor(drawn[3])
    expected = torch.nn.functional.rms_norm(x, x.shape[-1:], scale, EPS)
    wanted = torch.autograd.grad(expected, (x, scale), dy)

    y, inv_std = gradkit.rms_norm(x, scale, eps=EPS)
    agree(y, expected.detach(), dtype, "y")
    found = gradkit.rms_norm_grad(dy, x, scale, inv_std)
    for label, got, want in zip(("dx", "dscale"), found, wanted, strict=True):
        agree(got, want, dtype, label)


@quick
@given(rows())
def test_residual_rms_norm_agrees_with_pytorch(drawn):
    """Gradients of both summands, from views inside wider rows, with a scale stored less 1."""
    torch = framework("torch")
    dtype = str(drawn[0].dtype)
    x, weight = _leaves(torch, *drawn[:2])
    dy = torch.tensor(drawn[3])
    residual = torch.flip(dy, [0]).requires_grad_()
    s = x + residual
    expected = torch.nn.functional.rms_norm(s, s.shape[-1:], 1 + weight, EPS)
    ones = torch.ones_like(s)
    wanted = torch.autograd.grad((expected, s), (x, residual, weight), (dy, ones))

    def lie(tensor):
        room = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=s.dtype)
        room[..., :-3] = tensor.detach()
        return room[..., :-3]

    y, total, inv_std = gradkit.add_rms_norm(lie(x), lie(residual), weight, eps=EPS, scale_offset=1)
    agree(total, s.detach(), dtype, "s")
    agree(y, expected.detach(), dtype, "y")
    dx, dscale = gradkit.rms_norm_grad(
        lie(dy), total, weight, inv_std, ds=lie(ones), scale_offset=1
    )
    for label, got, want in (("dx", dx, wanted[0]), ("dresidual", dx, wanted[1])):
        agree(got, want, dtype, label)
    agree(dscale, wanted[2], dtype, "dscale")


@quick
@given(rows(batch=True))
def test_batch_norm_agrees_with_pytorch(drawn):
    torch = framework("torch")
    dtype = str(drawn[0].dtype)
    x, scale, bias = _leaves(torch, *drawn[:3])
    dy = torch.tensor(drawn[3])
    expected = torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=EPS)
    wanted = torch.autograd.grad(expected, (x, scale, bias), dy)

    y, mean, inv_std = gradkit.batch_norm(x, scale, bias, eps=EPS)
    agree(y, expected.detach(), dtype, "y")
    found = gradkit.batch_norm_grad(dy, x, scale, mean, inv_std)
    for label, got, want in zip(("dx", "dscale", "dbias"), found, wanted, strict=True):
        agree(got, want, dtype, label)


@quick
@given(rows(batch=True), st.booleans())
def test_group_norm_agrees_with_pytorch(drawn, last):
    """Instance norm too, and channels-last tensors by their strides."""
    torch = framework("torch")
    dtype = str(drawn[0].dtype)
    x, scale, bias = _leaves(torch, *drawn[:3])
    dy, channels = torch.tensor(drawn[3]), len(drawn[1])
    laid = (lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1)) if last else (lambda t: t)
    for groups in (n for n in range(1, channels + 1) if channels % n == 0):
        expected = torch.nn.functional.group_norm(x, groups, scale, bias, EPS)
        wanted = torch.autograd.grad(expected, (x, scale, bias), dy)
        y, mean, inv_std = gradkit.group_norm(laid(x.detach()), groups, scale, bias, eps=EPS)
        agree(y, expected.detach(), dtype, "y")
        found = gradkit.group_norm_grad(dy, laid(x.detach()), scale, mean, inv_std)
        for label, got, want in zip(("dx", "dscale", "dbias"), found, wanted, strict=True):
            agree(got, want, dtype, label)


# JAX and optax


def _standardised(jnp, x, axes):
    centred = x - x.mean(axes, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axes, keepdims=True) + EPS)


def _formulas(jnp):
    """The norms written out, as functions of x, scale and bias."""

    def layer(x, scale, bias):
        return _standardised(jnp, x, -1) * scale + bias

    def rms(x, scale, bias):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale + 0 * bias

    def batch(x, scale, bias):
        wide = (slice(None),) + (None,) * (x.ndim - 2)
        axes = (0, *range(2, x.ndim))
        return _standardised(jnp, x, axes) * scale[wide] + bias[wide]

    return {"layer": layer, "rms": rms, "batch": batch}


def _ours(kind, dy, x, scale, bias):
    if kind == "rms":
        _, inv_std = gradkit.rms_norm(x, scale, eps=EPS)
        return gradkit.rms_norm_grad(dy, x, scale, inv_std)
    forward, backward = {
        "layer": (gradkit.layer_norm, gradkit.layer_norm_grad),
        "batch": (gradkit.batch_norm, gradkit.batch_norm_grad),
    }[kind]
    _, mean, inv_std = forward(x, scale, bias, eps=EPS)
    return backward(dy, x, scale, mean, inv_std)


@pytest.mark.parametrize("kind", ["layer", "rms", "batch"])
@settings(deadline=None, max_examples=8)  # JAX compiles anew for every shape
@given(data=st.data())
def test_norm_gradients_agree_with_jax(kind, data):
    jax = framework("jax")
    drawn = [v.astype(np.float32) for v in data.draw(rows(batch=kind == "batch"))]
    x, scale, bias, dy = map(jax.numpy.array, drawn)
    formula = _formulas(jax.numpy)[kind]

    def objective(x, scale, bias):
        return (formula(x, scale, bias) * dy).sum()

    wanted = jax.grad(objective, argnums=(0, 1, 2))(x, scale, bias)
    for label, got, want in zip(
        ("dx", "dscale", "dbias"), _ours(kind, dy, x, scale, bias), wanted, strict=False
    ):
        assert isinstance(got, jax.Array)
        agree(got, want, "float32", label)


def pytrees(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
        ),
        max_leaves=6,
    )


@quick
@given(pytrees(st.integers(1, 4).flatmap(lambda n: arrays((n,), "float32"))),
       st.floats(0.01, 100))  # fmt: skip
def test_global_norm_clipping_agrees_with_optax(tree, max_norm):
    jax, optax = framework("jax"), framework("optax")
    grads = jax.tree.map(jax.numpy.array, tree)
    if not jax.tree.leaves(grads):
        assert gradkit.clip_by_global_norm(grads, max_norm)[0] == grads
        return
    transform = optax.clip_by_global_norm(max_norm)
    expected, _ = transform.update(grads, transform.init(grads))
    clipped, norm = gradkit.clip_by_global_norm(grads, max_norm, eps=0.0)
    assert jax.tree.structure(clipped) == jax.tree.structure(grads)
    np.testing.assert_allclose(norm, optax.global_norm(grads), rtol=1e-6)
    for got, want in zip(jax.tree.leaves(clipped), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_allclose(got, want, rtol=2e-6)


# TensorFlow


@quick
@given(gradients("float32"), st.floats(0.01, 100))
def test_global_norm_clipping_agrees_with_tensorflow(values, max_norm):
    tf = framework("tensorflow")
    grads = [tf.constant(v) for v in values]
    expected, expected_norm = tf.clip_by_global_norm(grads, max_norm)
    clipped, norm = gradkit.clip_by_global_norm(grads, max_norm)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)
    for got, want in zip(clipped, expected, strict=True):
        assert isinstance(got, tf.Tensor)
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-30)

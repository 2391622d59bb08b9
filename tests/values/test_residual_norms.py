"""Residual norms, gradients that pass a norm by, and scales with an offset."""

import numpy as np
import pytest

import gradkit
from tests import oracles, tolerances
from tests.problems import LAYER_TYPES, every_other, make
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_within

# Vectors and single elements, several rows a block, rows that are read once and several times.
LONG = (2, 20_000)
SHAPES = [(9, 5), (37, 64), (3, 1027), LONG]
TYPES = pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)
# Kernels of long rows take long to compile: quickly in one combination of dtypes.
ROWS = pytest.mark.parametrize(
    ("shape", "types"),
    [
        pytest.param(
            *each, marks=[pytest.mark.slow] * (each[0] == LONG and each[1] != LAYER_TYPES[0])
        )
        for each in every_other(SHAPES, LAYER_TYPES)
    ],
    ids=str,
)
CENTRED = pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])


def forward(backend, p, scale="scale", **options):
    """Results, with the names of the arguments as they are given."""
    x, scale, bias = p.on(backend, "x", scale, "bias")
    if p.centred:
        return gradkit.layer_norm(x, scale, bias, eps=p.eps, **options)
    return gradkit.rms_norm(x, scale, eps=p.eps, **options)


def added(backend, p, residual, **options):
    x, scale, bias = p.on(backend, "x", "scale", "bias")
    residual = backend.asarray(residual)
    if p.centred:
        return gradkit.add_layer_norm(x, residual, scale, bias, eps=p.eps, **options)
    return gradkit.add_rms_norm(x, residual, scale, eps=p.eps, **options)


def backward(backend, p, **options):
    names = ("dy", "x", "scale", "mean", "inv_std")
    dy, x, scale, mean, inv_std = p.on(backend, *names)
    if p.centred:
        return gradkit.layer_norm_grad(dy, x, scale, mean, inv_std, **options)
    return gradkit.rms_norm_grad(dy, x, scale, inv_std, **options)


def another(p, seed=9):
    """Numbers like x, of another draw."""
    return make(p.x.shape, (str(p.x.dtype), p.statistics, "float64"), seed=seed).x


# A scale with an offset


@pytest.mark.guarantee("`scale_offset`")
@pytest.mark.sampled(7)
@CENTRED
@ROWS
def test_a_scale_offset_is_a_shifted_scale(backend, shape, types, centred):
    p = make(shape, types, centred=centred)
    p.scale = (p.scale.astype(np.float64) - 1).astype(p.scale.dtype)
    y, *statistics = forward(backend, p, scale_offset=1.0)
    dx, dscale, *dbias = backward(backend, p, scale_offset=1)
    _, plain, *of_plain = backward(backend, p)
    # Which an offset does not change.
    assert_all_same_bits((dscale, *dbias), (plain, *of_plain), backend)
    wide = p.statistics  # the dtype in which the offset is added
    p.scale = p.scale.astype(wide) + np.dtype(wide).type(1)
    if p.bias is not None:
        p.bias = p.bias.astype(wide)
    assert_all_same_bits((y, *statistics), forward(backend, p), backend)
    assert_all_same_bits((dx,), backward(backend, p)[:1], backend)


@pytest.mark.sampled(3)
@ROWS
def test_gradients_from_the_output_of_a_norm_with_an_offset(backend, shape, types):
    """Those of a norm whose scale holds the offset, and of a sum of gradients with ``ds``."""
    p = make(shape, types, centred=False)
    p.scale = (np.arange(p.scale.size) % 5 / 4 - 0.375).astype(p.scale.dtype)
    dy, y, scale, inv_std = p.on(backend, "dy", "x", "scale", "inv_std")
    ds = another(p)
    given = {"ds": backend.asarray(ds), "scale_offset": 1.0}
    dx, dscale = gradkit.invertible_rms_norm_grad(dy, y, scale, inv_std, **given)
    p.scale += p.scale.dtype.type(1)
    xhat = oracles.unscaled(p.rows(p.x), p.per_column(p.scale), None)
    ref = p.gradients(xhat)
    total = ref.dx + oracles.wide(p.rows(ds))
    bound = tolerances.elementwise("dx", ref.dx_size + np.abs(total), total, p.x.dtype)
    assert_within(p.rows(backend.asnumpy(dx)), total, bound, "dx")
    plain = gradkit.invertible_rms_norm_grad(dy, y, backend.asarray(p.scale), inv_std)
    assert_all_same_bits((dscale,), plain[1:], backend)
    p.check_gradients(backend, *plain, xhat=xhat)


def test_an_offset_is_not_rounded_to_the_scales_dtype(backend):
    """1 + w rounded to bfloat16 would lose w."""
    p = make((4, 16), ("bfloat16", "float32", "bfloat16"), centred=False)
    p.scale[:] = 2.0**-10
    ones, plain = forward(backend, p, scale_offset=1.0), make((4, 16))
    x = p.x.astype(np.float32)
    plain.x, plain.scale, plain.centred = x, np.full(16, 1 + 2.0**-10, np.float32), False
    wide, _ = forward(backend, plain)
    assert_same_bits(backend.asnumpy(ones[0]), backend.asnumpy(wide).astype(p.x.dtype))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_offset_of_zero_changes_no_bit(backend, zero):
    """Not even the sign of a scale of -0, on rows that are read at strides either."""
    p = make((5, 8), centred=False)
    p.scale[:] = -0.0
    p.dy[:] = np.abs(p.dy)  # so that zeros of both signs meet in dx
    for run in (forward, backward):
        expected = run(backend, p)
        assert_all_same_bits(run(backend, p, scale_offset=zero), expected, backend)
        strided = make((5, 8), centred=False)
        strided.scale, strided.dy = p.scale, p.dy
        strided.x = np.pad(p.x, ((0, 0), (0, 3)))[:, :8]
        assert_all_same_bits(run(backend, strided, scale_offset=zero), expected, backend)


# The sum that is normalised


@pytest.mark.guarantee("Residual sums")
@pytest.mark.sampled(5)
@CENTRED
@ROWS
def test_a_residual_norm_is_a_sum_and_then_a_norm(backend, shape, types, centred):
    p = make(shape, types, centred=centred)
    residual = another(p)
    y, s, *statistics = added(backend, p, residual, scale_offset=0.5)
    wide = np.float64 if types[0] == "float64" else np.float32
    p.x = (p.x.astype(wide) + residual.astype(wide)).astype(p.x.dtype)
    assert_same_bits(backend.asnumpy(s), p.x)
    assert_all_same_bits((y, *statistics), forward(backend, p, scale_offset=0.5), backend)


@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[2]], ids="-".join)
def test_a_residual_sum_at_the_ends_of_the_range(backend, types):
    """The sum overflows and underflows as one of its dtype does."""
    p = make((2, 8), types, centred=False, affine=False)
    largest, least = np.finfo(p.x.dtype).max, tolerances.smallest(p.x.dtype)
    p.x[0], p.x[1] = largest, least
    residual = np.array([[largest / 2] * 4 + [-largest] * 4, [least] * 4 + [-least] * 4])
    with np.errstate(over="ignore"):
        _, s, _ = added(backend, p, residual.astype(p.x.dtype))
        expected = p.x + residual.astype(p.x.dtype)
    assert_same_bits(backend.asnumpy(s), expected)


# The gradient that passes the norm by


@pytest.mark.guarantee("Residual sums")
@pytest.mark.sampled(7)
@CENTRED
@ROWS
def test_ds_joins_dx_before_it_is_rounded(backend, shape, types, centred):
    p = make(shape, types, centred=centred)
    ds = another(p)
    dx, *sums = backward(backend, p, ds=backend.asarray(ds))
    plain, *expected = backward(backend, p)
    assert_all_same_bits(sums, expected, backend)
    ref, further = p.gradients(), ds.astype(np.longdouble)
    size, exact = ref.dx_size + np.abs(further), ref.dx + further
    bound = tolerances.elementwise("dx", size, exact, p.x.dtype)
    assert_within(backend.asnumpy(dx), exact, bound, "dx")
    nothing = backward(backend, p, ds=backend.asarray(np.zeros_like(ds)))[0]
    np.testing.assert_array_equal(backend.asnumpy(nothing), backend.asnumpy(plain))


# Results over their inputs


# How other systems' orders of casts map onto ours; docs/guide.md has the table.


def _narrow(values, dtype):
    return values.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_order_of_casts_of_llama_and_gemma(backend, dtype):
    p = make((64, 96), (dtype, "float32", dtype), centred=False, eps=1e-6)
    x, w = p.x.astype(np.float32), p.scale.astype(np.float32)
    xhat = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + np.float32(1e-6))
    # Llama: weight * hidden.to(dtype): xhat is rounded first, then the product.
    llama = _narrow(_narrow(xhat, dtype).astype(np.float32) * w, dtype)
    # ONNX RMSNormalization-23 with stash_type 1: the same casts.
    # Gemma: (xhat * (1 + weight.float())).to(dtype): all in float32, rounded once.
    gemma = _narrow(xhat * (1 + w), dtype)
    ours = backend.asnumpy(forward(backend, p, scale_offset=1.0)[0])
    _within_a_float32_rounding(ours, xhat * (1 + w), dtype)
    assert np.mean(ours == gemma) > 0.99
    # Ours of two calls: without a scale y is Llama's rounded xhat, and the product is the caller's.
    unscaled = p.on(backend, "x")
    rounded = backend.asnumpy(gradkit.rms_norm(*unscaled, eps=p.eps)[0])
    assert np.mean(_narrow(rounded.astype(np.float32) * w, dtype) == llama) > 0.99
    # Of one call: not rounded in between, so nearer to the exact value, and Llama's within a unit.
    once = backend.asnumpy(forward(backend, p)[0])
    _within_a_float32_rounding(once, xhat * w, dtype)
    assert 0.5 < np.mean(once == llama) < 0.99
    exact = (xhat * w).astype(np.float64)
    off = [np.abs(y.astype(np.float64) - exact).max() for y in (once, llama)]
    assert off[0] < off[1]


def _within_a_float32_rounding(found, exact, dtype):
    """Rounded once, from what float32 can say of it."""
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype] + 2.0**-20
    error = np.abs(found.astype(np.float64) - exact.astype(np.float64))
    assert np.all(error <= unit * np.abs(exact) + 2.0**-25)

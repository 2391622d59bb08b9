"""Layer norm, RMS norm and invertible layer norm: values, semantics, identities."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, tolerances
from tests.layouts import LAYOUTS
from tests.operations import ROW_GRADIENTS, ROW_NORMS, check_norm, norm, problem
from tests.problems import ABOVE_NOTHING, LAYER_TYPES, every_other, make, problems, tiny
from tests.tolerances import DTYPES, assert_same_bits, assert_within

COLUMNS = [1, 2, 31, 32, 33, 1023, 1024, 1025, 4097, 12289, 16385]
ROWS = [1, 2, 65535, 65536, 65537]
TYPES = pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)


LAYER_NORMS = ("layer_norm", "layer_norm_grad")


# Any problem


@pytest.mark.guarantee("Derivatives")
@pytest.mark.parametrize("name", ROW_NORMS)
@given(data=st.data())
def test_any_problem(backend, name, data):
    p = data.draw(problems(backend.max_elements // 4, centred="rms" not in name))
    check_norm(backend, p, name)


@given(data=st.data())
def test_layer_norm_inverse(backend, data):
    p = data.draw(problems(backend.max_elements // 4))
    x, (_, xhat) = backend.asnumpy(norm(backend, p, "layer_norm_inverse")), p.output()
    assert (x.shape, x.dtype) == (p.x.shape, p.x.dtype)
    if x.size:
        mean, inv_std = oracles.wide(p.mean).reshape(-1, 1), oracles.wide(p.inv_std).reshape(-1, 1)
        ref = xhat / inv_std + mean
        bound = tolerances.elementwise(
            "inverse", np.abs(xhat / inv_std) + np.abs(mean), ref, x.dtype
        )
        assert_within(p.rows(x), ref, bound)


# Shapes chosen to hurt


@pytest.mark.sampled(19)
@pytest.mark.parametrize(("columns", "types"), every_other(COLUMNS, LAYER_TYPES), ids=str)
def test_row_lengths(backend, columns, types):
    for name in ROW_NORMS:
        check_norm(backend, problem(name, (5, columns), types, seed=columns), name)


@pytest.mark.guarantee("Subnormal numbers")
@pytest.mark.sampled(3)
@TYPES
@pytest.mark.parametrize("above", ABOVE_NOTHING)
def test_gradients_down_to_the_smallest_number(backend, above, types):
    """CuPy compiles kernels so that plain operations of float32 flush subnormal numbers to 0."""
    for name in ROW_GRADIENTS:
        p = problem(name, (9, 70), types)
        p.dy = tiny(p.dy, above)
        check_norm(backend, p, name)


@pytest.mark.guarantee("Subnormal numbers")
@pytest.mark.parametrize("columns", [20_000, pytest.param(140_000, marks=pytest.mark.slow)])
def test_long_rows_of_gradients_down_to_the_smallest_number(backend, columns):
    """Rows that are read twice."""
    for above in ABOVE_NOTHING[2:5]:
        p = make((2, columns))
        p.dy = tiny(p.dy, above)
        check_norm(backend, p, "layer_norm_grad")


@pytest.mark.guarantee("Subnormal numbers")
@pytest.mark.sampled(3)
@TYPES
@pytest.mark.parametrize("above", ABOVE_NOTHING)
def test_norms_down_to_the_smallest_number(backend, above, types):
    p = make((9, 70), types)
    p.x, p.bias = tiny(p.x, above), None  # beside a bias the rest would be nothing
    check_norm(backend, p, "layer_norm")
    p.centred = False
    check_norm(backend, p, "rms_norm")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("columns", [131071, 131072, 131073, 300_001])
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[1], LAYER_TYPES[3]], ids="-".join)
def test_rows_longer_than_a_block(backend, columns, types):
    if columns > backend.max_elements * 2:
        pytest.skip("too large for this backend")
    p = make((3, columns), types)
    check_norm(backend, p, *LAYER_NORMS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["C", "padded", "Fortran"])
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[3]], ids="-".join)
def test_several_tiles_either_way(backend, types, layout):
    """Rows longer than a tile, and more of them than a tile has."""
    if 4 * backend.max_elements < 492_000:
        pytest.skip("too large for this backend")
    p = make((5, 6, 16400), types)
    p.x, p.dy = LAYOUTS[layout](p.x), LAYOUTS[layout](p.dy)
    check_norm(backend, p, *LAYER_NORMS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[6]], ids="-".join)
@pytest.mark.parametrize("rows", ROWS)
def test_row_counts(backend, rows, types):
    if rows > backend.max_elements:
        pytest.skip("too large for this backend")
    for name in (*LAYER_NORMS, "rms_norm_grad"):
        check_norm(backend, problem(name, (rows, 3), types, seed=rows), name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 3, 1, 7), (2, 1, 3, 5, 7)], ids=len)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_axis_of_every_rank(backend, shape, layout):
    for axis in range(-len(shape), len(shape)):
        for name in (*LAYER_NORMS, "rms_norm_grad"):
            p = problem(name, shape, axis=axis, seed=5 + axis)
            p.x, p.dy = LAYOUTS[layout](p.x), LAYOUTS[layout](p.dy)
            check_norm(backend, p, name)


# Meaning


@pytest.mark.sampled(7)
@TYPES
@pytest.mark.parametrize("shape", [(3, 1023), (1000, 7), (2, 2047), (4097, 3), (64, 2048)], ids=str)
def test_a_constant_gradient(backend, types, shape):
    """The gradient of a sum: equal terms round the same way every time."""
    for seed in range(2):
        p = make(shape, types, seed=seed)
        p.dy = np.broadcast_to(p.dy.reshape(-1)[:1], shape)
        check_norm(backend, p, "layer_norm_grad")


@TYPES
def test_one_column_has_no_gradient(backend, types):
    p = make((6, 1), types)
    assert not backend.asnumpy(norm(backend, p, "layer_norm_grad")[0]).any()
    for name in ROW_NORMS:
        check_norm(backend, problem(name, (6, 1), types), name)


@pytest.mark.guarantee("Any magnitude")
@pytest.mark.parametrize("columns", [1, 5, 33, 1030, 4097])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constant_rows_at_the_top_of_the_range(backend, name, columns):
    """``mean * inv_std`` is infinite there: nothing but deviations may be multiplied."""
    p = make((5, columns), (name, "float64" if name == "float64" else "float32", name))
    p.x[::2] = np.ldexp(1.0, np.frexp(float(ml_dtypes.finfo(p.x.dtype).max))[1] - 1)
    p.__post_init__()
    check_norm(backend, p, "layer_norm_grad")


@pytest.mark.guarantee("Any magnitude")
@pytest.mark.parametrize("function", ["layer_norm_grad", "rms_norm_grad", "batch_norm_grad"])
@pytest.mark.parametrize("columns", [5, 33, 1030])
def test_gradients_up_to_the_range_of_their_sums(backend, function, columns):
    """Powers of two change no bit of results while sums of magnitudes are finite in float32."""
    rng = np.random.default_rng(columns)
    x, dy = rng.standard_normal((2, 8, columns)).astype(np.float32)
    dy = np.sign(dy) * rng.uniform(1, 2, dy.shape).astype(np.float32)
    axis = 0 if function.startswith("batch") else 1
    scale = np.ones(columns, np.float32)
    deviations = x - x.mean(axis, keepdims=True)
    inv_std = 1 / np.sqrt((deviations**2).mean(axis))
    mean = () if function.startswith("rms") else (x.mean(axis),)
    least = np.abs(x * dy * np.expand_dims(inv_std, axis)).sum(axis).max() + np.abs(dy).sum(1).max()
    top = 2.0 ** (125 - int(np.ceil(np.log2(least))))
    rest = list(map(backend.asarray, (x, scale, *mean, inv_std)))
    plain = getattr(gradkit, function)(backend.asarray(dy), *rest)
    large = getattr(gradkit, function)(backend.asarray(dy * np.float32(top)), *rest)
    for own, other in zip(plain, large, strict=True):
        assert_same_bits(backend.asnumpy(other), backend.asnumpy(own) * np.float32(top))


@TYPES
@pytest.mark.parametrize("mean", [16.0, 100.0])
def test_means_that_a_single_number_hardly_holds(backend, types, mean):
    """Half a unit of their last place is some units of the smaller deviations' last place."""
    p = make((64, 257), types)
    p.x = (p.x.astype(np.float64) + mean).astype(p.x.dtype)
    p.__post_init__()
    check_norm(backend, p, "layer_norm")


def test_rows_do_not_feel_how_large_the_means_of_others_are(backend):
    p = make((2, 8192))
    p.x += np.float32([[0.01], [1000.0]])
    both = norm(backend, p, "layer_norm")[0]
    p.x = p.x[:1]
    assert_same_bits(backend.asnumpy(norm(backend, p, "layer_norm")[0]), backend.asnumpy(both)[:1])


@pytest.mark.guarantee("Without `eps`")
def test_without_eps_a_reciprocal_may_be_beyond_float32(backend):
    signs = np.array([[1, -1]], np.float32)
    for deviation, eps, wanted in ((3e-39, 0.0, signs), (2.9e-39, 0.0, signs * np.inf)):
        x = backend.asarray(signs * np.float32(deviation))
        y, _, inv_std = (backend.asnumpy(a) for a in gradkit.layer_norm(x, eps=eps))
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
        np.testing.assert_allclose(backend.asnumpy(gradkit.rms_norm(x, eps=eps)[0]), wanted, 1e-6)
        assert np.isfinite(inv_std) == np.isfinite(wanted).all()
    for finite in (gradkit.layer_norm(x, eps=1e-76), gradkit.rms_norm(x, eps=1e-76)):
        assert np.isfinite(backend.asnumpy(finite[0])).all()


@pytest.mark.guarantee("Batch-invariant")
@given(data=st.data())
def test_a_row_does_not_depend_on_the_rows_beside_it(backend, data):
    """Bit for bit, from one row to several blocks of them."""
    if not backend.on_host:
        pytest.skip("long rows are split by the number of rows")
    shape = data.draw(st.sampled_from([(2, 1), (9, 33), (3000, 40), (70, 1030), (3, 70_001)]))
    first = data.draw(st.integers(0, shape[0] - 1))
    some = slice(first, data.draw(st.integers(first + 1, shape[0])))
    for types in (LAYER_TYPES[1], data.draw(st.sampled_from(LAYER_TYPES))):
        p = make(shape, types, seed=first)
        batch = p.dy, p.x, p.mean, p.inv_std
        alone = _of_each_row(p, *(array[some] for array in batch))
        for got, ref in zip(alone, _of_each_row(p, *batch), strict=True):
            assert_same_bits(got, ref[some])


def _of_each_row(p, dy, x, mean, inv_std):
    """All results that have a row for each row of the data."""
    return (
        *gradkit.layer_norm(x, p.scale, p.bias),
        *gradkit.add_rms_norm(x, dy, p.scale),
        gradkit.layer_norm_grad(dy, x, p.scale, mean, inv_std)[0],
        gradkit.rms_norm_grad(dy, x, p.scale, inv_std)[0],
        gradkit.invertible_layer_norm_grad(dy, x, p.scale, p.bias, inv_std)[0],
        gradkit.layer_norm_inverse(x, p.scale, p.bias, mean, inv_std),
        *gradkit.gated_rms_norm(x, dy, p.scale),
        *gradkit.gated_rms_norm_grad(dy, x, dy, p.scale, inv_std)[:2],
    )


def test_a_long_scale_without_inverse_is_known_by_its_first_zero():
    scale, statistic = np.ones(20_000, np.float16), np.ones(1, np.float32)
    scale[[9_000, 15_000]] = 0
    with pytest.raises(ValueError, match=r"flat index 9000 \(2 in all\)"):
        gradkit.layer_norm_inverse(scale[None], scale, None, statistic, statistic)


@pytest.mark.parametrize("columns", [32, 4104])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_outputs_of_scales_whose_inverse_is_subnormal(backend, name, columns):
    """Or which are infinite, beside others."""
    tiny = np.finfo(name).smallest_normal
    kinds = np.array([2 / tiny, 1.5, -2 / tiny, tiny, -1 / tiny, 3, 0.75, np.inf], name)
    scale = np.tile(kinds, columns // 8)
    xhat = np.tile(np.array([[1, -0.5, 0.5, -1], [-1, 0.5, 0.5, 0.25]]), columns // 4)
    xhat[:, np.isinf(scale)] = 0
    y = np.where(np.isinf(scale), 1, xhat * np.where(np.isinf(scale), 1, scale)).astype(name)
    dy = np.tile(np.array([[2, 4, 1, 2, 4], [1, 4, 8, 2, 4]]) / 2**15, columns)[:, :columns]
    dy, finite = np.ascontiguousarray(dy, name), np.isfinite(scale)
    inv_std = backend.asarray(np.ones((2, 1), name))

    def gradients(columns):
        host = (np.ascontiguousarray(a[..., columns]) for a in (dy, y, scale))
        on = [backend.asarray(a) for a in host]
        with np.errstate(all="ignore"):
            of_rms = gradkit.invertible_rms_norm_grad(*on, inv_std)
            _, of_layer, _ = gradkit.invertible_layer_norm_grad(*on, None, inv_std)
        return [backend.asnumpy(g) for g in (*of_rms, of_layer)]

    for dscale in gradients(slice(None))[1:]:
        np.testing.assert_allclose(dscale, (dy * xhat).sum(0), rtol=1e-6)
    dx = gradients(finite)[0]
    xhat, w = xhat[:, finite], (dy * scale.astype(np.float64))[:, finite]
    correct = w - xhat * (w * xhat).mean(1, keepdims=True)
    np.testing.assert_allclose(dx, correct, atol=1e-5 * abs(correct).max())


# Identities


@given(data=st.data(), power=st.integers(-10, 10))
def test_scaling_dy_by_a_power_of_two_is_exact(backend, data, power):
    p = data.draw(problems(backend.max_elements // 8, types=LAYER_TYPES[:2]))
    p.dy = np.array(p.dy, order="C")  # as its multiple is
    plain = [None if g is None else backend.asnumpy(g) for g in norm(backend, p, "layer_norm_grad")]
    p.dy = p.dy * p.dy.dtype.type(2.0**power)
    for got, ref in zip(norm(backend, p, "layer_norm_grad"), plain, strict=True):
        if got is not None:
            np.testing.assert_array_equal(backend.asnumpy(got), ref * ref.dtype.type(2.0**power))


@pytest.mark.guarantee("No cancellation")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_first_element_far_from_the_others(backend, name):
    """Squares of distances from it are thousands of times their variance."""
    p = make((3, 3000), (name, "float64" if name == "float64" else "float32", name))
    p.x[:, 0] = 1e4
    p.__post_init__()
    p.check_forward(backend, *norm(backend, p, "layer_norm"))


@pytest.mark.guarantee("Any magnitude")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("exponent", [-30, -21, 30])
@pytest.mark.parametrize("mean", [0, 1e4])
def test_squares_outside_float32(backend, name, exponent, mean):
    """Variances that over- or underflow float32 although no element of x does."""
    if name == "float16":
        exponent, mean = exponent // 8, mean / 1000  # what float16 holds
    p = make((3, 300), (name, "float64" if name == "float64" else "float32", name), eps=0.0)
    p.x = ((p.x.astype(np.float64) + mean) * 10.0**exponent).astype(p.x.dtype)
    y, *statistics = norm(backend, p, "layer_norm")
    p.check_forward(backend, y, *statistics)
    x, scale, bias = p.on(backend, "x", "scale", "bias")
    gradkit.layer_norm(x, scale, bias, eps=p.eps, out=(x, None, None))
    assert_same_bits(backend.asnumpy(x), backend.asnumpy(y))
    p.centred, p.bias = False, None
    check_norm(backend, p, "rms_norm")

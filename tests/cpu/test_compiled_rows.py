"""Edges of the compiled norms over rows: of ranges, of regimes and of scratch."""

import threading
import time
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import gradkit
from tests import strategies as draw_
from tests.cpu.test_compiled import _restored, check_everywhere, compiled  # noqa: F401
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, unit


@pytest.mark.parametrize("shape", [(3, 5), (3, 77), (40, 33)], ids=str)
def test_bfloat16_is_a_nan_whatever_the_bits_of_what_it_comes_from(shape):
    """Rounded as numbers are, some NaNs would be infinite, or zero."""
    rng = np.random.default_rng(0)
    dy, x = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(2))
    scale = np.linspace(1, 2, shape[1]).astype(ml_dtypes.bfloat16)
    for bits in (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F810001, 0x7FFF8000, 0xFF80FFFF):
        mean, inv_std = np.linspace(1, 2, 2 * shape[0], dtype="f4").reshape(2, -1)
        mean[1:2].view("u4")[:] = bits
        dx, dscale, _ = gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)
        found = np.isnan(dx.astype("f4"))
        assert found[1].all(), hex(bits)
        assert not found[::2].any(), hex(bits)
        assert np.isnan(dscale.astype("f4")).all(), hex(bits)
        with np.errstate(invalid="ignore"):
            back = gradkit.layer_norm_inverse(dy, scale, None, mean, inv_std)
        assert np.isnan(back.astype("f4"))[1].all(), hex(bits)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [32_767, 32_768, 32_769])
def test_statistics_of_the_longest_rows_that_are_visited_once(width, dtype):
    x = np.random.default_rng(0).integers(-9, 10, (2, width)).astype(dtype)
    exact = x.astype(np.float64)
    _, mean, inv_std = gradkit.layer_norm(x, eps=0.0)
    np.testing.assert_allclose(mean, exact.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(inv_std, 1 / exact.std(axis=1), rtol=1e-6)
    of_rms = gradkit.rms_norm(x, eps=0.0)[1]
    np.testing.assert_allclose(of_rms, np.mean(exact**2, axis=1) ** -0.5, rtol=1e-6)
    dx = gradkit.layer_norm_grad(x, x, None, mean, inv_std)[0]
    np.testing.assert_allclose(dx, 0, atol=1e-5)


def test_equal_terms_of_very_many_rows_round_alike():
    """Runs grow with the number of rows, so that neither they nor their total have many terms."""
    one, nothing, some = np.ones(2), np.zeros(1 << 20), np.ones(1 << 20)
    for value in (0.1, 1 / 3, 0.9):
        dy = np.full((1 << 20, 2), value)
        dbias = gradkit.layer_norm_grad(dy, dy, one, nothing, some)[2]
        exact = value * 2.0**20  # not rounded
        assert (np.abs(dbias - exact) <= 128 * unit(dy.dtype) * exact).all()


def test_equal_terms_of_long_rows_round_alike():
    """So few have one total in float32 that their mean is off by some units alone."""
    dy = np.full((1, 32_768), np.float32(0.1))
    nothing, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    dx = gradkit.layer_norm_grad(dy, 0 * dy, None, nothing, one)[0]
    assert (np.abs(dx) <= 8 * unit(dy.dtype) * dy).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_nothing_is_added_where_no_bias_is(dtype):
    """Not even the sign of -0 changes."""
    x = np.array([[-0.0, 0.0, -1.0, 1.0] * 5], DTYPES[dtype])
    for y in (gradkit.rms_norm(x)[0], gradkit.layer_norm(x)[0], gradkit.add_rms_norm(x, x)[0]):
        np.testing.assert_array_equal(np.signbit(y), np.signbit(x))


def test_zeros_of_a_gradient_from_the_output_have_the_other_ones_signs():
    dy, y, one = np.full((2, 5), -0.0), np.array([[-1.0, 1, 2, -2, 3]] * 2), np.ones(5)
    found = gradkit.invertible_rms_norm_grad(dy, y, one, np.ones(2))[0]
    assert_same_bits(found, gradkit.rms_norm_grad(dy, y, one, np.ones(2))[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_subnormal_sums_are_rounded_to_16_bits(dtype):
    """Beside every tie of subnormal numbers, and of the least normal ones."""
    least = {"float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype]
    dy = np.zeros((33, 8192), np.float32)
    dy[0] = np.arange(-4096, 4096) * (least / 8)
    scale, statistics = np.ones(8192, DTYPES[dtype]), np.zeros(33, np.float32)
    dbias = gradkit.layer_norm_grad(dy, dy, scale, statistics, statistics)[2]
    np.testing.assert_array_equal(dbias.astype("f4"), dy[0].astype(dbias.dtype).astype("f4"))


def test_python_runs_in_other_threads_while_a_long_call_computes():
    x = np.broadcast_to(np.ones(1024, np.float32), (1 << 20, 1024))
    y = np.lib.stride_tricks.as_strided(np.empty(1024, np.float32), x.shape, (0, 4))
    inv_std, ends, seen = np.empty(len(x), np.float32), [], []

    def work():
        ends.append(time.perf_counter())
        compiled.rms_norm(0b1010101010, 1, 1e-5, 0.0, x, None, y, inv_std)
        ends.append(time.perf_counter())

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        seen.append(time.perf_counter())
        time.sleep(0.001)
    begin, end = ends
    third = (end - begin) / 3
    assert any(begin + third < moment < end - third for moment in seen)


def channels_first(values):
    """Rows whose neighbours in memory belong to other rows."""
    first = min(values.ndim - 2, 1)  # behind the samples, if there are any
    return np.moveaxis(np.moveaxis(values, -1, first).copy(), first, -1)


@pytest.mark.guarantee("Strided rows")
@pytest.mark.parametrize("shape", [(3, 40, 37), (2, 5, 9, 100), (33, 17), (4, 200, 90)])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_rows_that_lie_across_change_no_bit(name, shape):
    """They are copied some at a time, of which the last are fewer; a result may be an input."""
    x, dy, ds, gate = (draw_.values(shape, name, seed) for seed in range(4))
    scale, bias = (1 + abs(draw_.values(shape[-1:], name, seed)) for seed in (4, 5))
    own = np.broadcast_to(scale, (shape[0], *(1,) * (len(shape) - 2), shape[-1])).copy()

    def all_of(lay):
        data = [lay(each) for each in (x, dy, ds, gate)]
        y, mean, inv_std = gradkit.layer_norm(data[0], scale, bias, out=(lay(x), None, None))
        in_place = lay(dy)
        gradkit.layer_norm_grad(
            in_place, data[0], scale, mean, inv_std, ds=data[2], out=(in_place, None, None)
        )
        gated, inv_rms = gradkit.gated_rms_norm(data[0], data[3], scale)
        return [
            *(y, mean, inv_std, in_place, gated),
            *gradkit.add_layer_norm(data[0], data[2], scale, bias, out=(None, lay(x), None, None)),
            *gradkit.layer_norm(data[0], own if len(shape) > 2 else scale, None),
            *gradkit.layer_norm_grad(data[1], data[0], scale, mean, inv_std),
            *gradkit.invertible_layer_norm_grad(data[1], lay(y), scale, bias, inv_std),
            gradkit.layer_norm_inverse(lay(y), scale, bias, mean, inv_std),
            *gradkit.gated_rms_norm_grad(data[1], data[0], data[3], scale, inv_rms),
        ]

    assert_all_same_bits(all_of(channels_first), all_of(LAYOUTS["C"]))
    check_everywhere(partial(all_of, channels_first))


@pytest.mark.parametrize("shape", [(11, 261), (6, 300), (3, 5, 272), (9, 33_001)], ids=str)
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_sums_over_rows_alone_have_the_bits_of_those_beside_dx(name, shape):
    """They are taken of four rows at a time, if these are wide."""
    dy, x = (draw_.values(shape, name, seed) for seed in range(2))
    of_samples = (shape[0], 1, shape[-1]) if len(shape) > 2 else shape[-1:]
    scale, bias = (draw_.values(of_samples, name, seed) for seed in (2, 3))

    def sums(*names):
        y, *statistics = gradkit.layer_norm(x, scale, bias)
        of_rms = gradkit.rms_norm(x, scale)[1]
        both = (*names, "dscale", "dbias")
        found = [
            *gradkit.layer_norm_grad(dy, x, scale, *statistics, wanted=both)[1:],
            gradkit.rms_norm_grad(dy, x, scale, of_rms, wanted=both[:-1])[1],
        ]
        if len(shape) == 2:  # it has no scale of each sample
            last = bias, statistics[1]
            found += gradkit.invertible_layer_norm_grad(dy, y, scale, *last, wanted=both)[1:]
        return found

    assert_all_same_bits(sums(), sums("dx"))
    check_everywhere(sums)

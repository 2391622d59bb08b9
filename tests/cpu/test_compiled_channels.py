"""Edges of the compiled norms over channels: of gaps, units, slices and signs."""

import math
from functools import partial

import numpy as np
import pytest

import gradkit
from tests import steps
from tests.cpu.test_compiled import _restored, of_both  # noqa: F401
from tests.layouts import LAYOUTS
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, unit


def test_large_results_leave_gaps_alone():
    """Results without gaps are written past the caches, as one line."""
    x = np.random.default_rng(0).standard_normal((2800, 6, 259)).astype(np.float32)
    memory = np.full((*x.shape[:2], 264), np.float32(7))
    y = memory[..., :259]
    gradkit.group_norm(x, 3, out=(y, None, None))
    assert_same_bits(y[:2], gradkit.group_norm(x[:2], 3)[0])
    assert (memory[..., 259:] == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_results_at_any_address(dtype):
    x = np.random.default_rng(0).standard_normal((2800, 6, 256)).astype(dtype)
    y = LAYOUTS["misaligned"](x)
    gradkit.group_norm(x, 3, out=(y, None, None))
    assert_same_bits(np.array(y[:2]), gradkit.group_norm(x[:2], 3)[0])


@pytest.mark.parametrize("space", [8, 9, 15])
def test_large_results_of_images_shorter_than_a_vector(space):
    x = np.random.default_rng(0).standard_normal((11_200, 48, space)).astype(np.float32)
    scale = np.linspace(1, 2, 48, dtype=np.float32)
    y, *_ = gradkit.group_norm(x, 4, scale)
    assert_same_bits(y[-2:], gradkit.group_norm(x[-2:], 4, scale)[0])


@pytest.mark.parametrize("groups", [None, 2, 5000])  # a batch norm, wide groups and small ones
@pytest.mark.parametrize("shape", [(3, 40_000), (2, 40_000, 3)], ids=str)
def test_slices_of_many_channels_read_and_write_any_strides(shape, groups):
    """Of every parameter, statistic and sum, each of which has strides of its own."""
    rng, channels = np.random.default_rng(0), shape[1]
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))

    def found(*steps):
        turn = iter(steps)

        def lay(values):
            step = next(turn)
            room = np.full((*values.shape[:-1], values.shape[-1] * abs(step)), np.float32(7))
            view = room[..., ::step]
            view[...] = values
            return view

        scale, bias, *known = (
            lay(np.linspace(low, low + 1, channels, dtype="f4")) for low in (1, -1, 0, 2, 3, 4)
        )
        if groups:
            small = np.zeros((shape[0], groups), "f4")
            saved, sums = [lay(small), lay(small + 1)], [lay(known[0]), lay(known[1])]
            y, *_ = gradkit.group_norm(x, groups, scale, bias, out=(None, *saved))
            dx, *_ = gradkit.group_norm_grad(dy, x, scale, *saved, out=(None, *sums))
            return [y, *saved, dx, *sums]
        moved, saved, sums = known[:2], known[2:], [lay(known[0] * 0), lay(known[0] * 0)]
        running = dict(zip(("running_mean", "running_var"), moved, strict=True))
        y, *_ = gradkit.batch_norm(x, scale, bias, **running, out=(None, *saved))
        same = gradkit.batch_norm_inference(x, scale, bias, *moved)
        dx, *_ = gradkit.batch_norm_grad(dy, x, scale, *saved, out=(None, *sums))
        constant = gradkit.batch_norm_inference_grad(dy, x, scale, *moved)
        return [y, *moved, *saved, same, dx, *sums, *constant]

    assert_all_same_bits(found(2, 3, -1, 2, -3, 4, -2, 3, 5, -4), found(*[1] * 10))


def test_wide_groups_behind_an_axis_of_one():
    x = np.random.default_rng(0).standard_normal((3, 33_002))
    expected = gradkit.group_norm(x, 2)
    y, *statistics = gradkit.group_norm(x[:, np.newaxis], 2, channel_axis=2)
    assert_all_same_bits([y[:, 0], *statistics], expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(1, 33_002), (3, 33_002), (2, 33_002, 2), (1, 33_002, 40)], ids=str
)
def test_groups_in_slices_are_those_of_numpy(shape, dtype):
    """Of more channels than one slice has; one sample, and several."""
    rng = np.random.default_rng(0)
    dy, x = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    scale, bias = (np.linspace(*ends, shape[1]).astype(dtype) for ends in ((1, 2), (-1, 1)))

    def found():
        y, *saved = gradkit.group_norm(x, 2, scale, bias)
        return [y, *saved, *gradkit.group_norm_grad(dy, x, scale, *saved)]

    for got, ref in zip(*of_both(found), strict=True):
        assert (np.abs(got - ref) <= 64 * unit(got.dtype) * max(1, np.abs(ref).max())).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(40, 34, 13, 17), (64, 9000)], ids=str)
def test_parts_of_the_last_channels(shape, dtype):
    """Fewer than other units have, with sums of several pieces."""
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-9, 10, shape).astype(dtype) for _ in range(2))
    axes, exact, wide = (0, *range(2, len(shape))), x.astype(float), np.result_type(dtype, "f4")
    mean, var = steps.batch_norm_stats(x, channel_axis=1)
    np.testing.assert_allclose(mean, exact.mean(axes), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(var, exact.var(axes), rtol=1e-6)
    zero, one = np.zeros(shape[1], wide), np.ones(shape[1], wide)
    products, sums = steps.batch_norm_grad_sums(dy, x, zero, one, channel_axis=1)
    np.testing.assert_array_equal(products, (exact * dy).sum(axes))
    np.testing.assert_array_equal(sums, dy.astype(float).sum(axes))


def test_threads_change_no_bit_of_many_rows_of_many_channels():
    """One thread computes them in ranges of channels, four threads in ranges of rows."""
    x = np.random.default_rng(0).standard_normal((320, 12_000)).astype(np.float32)
    found = []
    for threads in (1, 4):
        gradkit.set_num_threads(threads)
        found.append(steps.batch_norm_stats(x, channel_axis=1))
    assert_all_same_bits(*found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("groups", [0, 1], ids=["batch", "group"])
def test_sums_are_rounded_to_16_bits_once(groups, dtype):
    places = {"float16": 11, "bfloat16": 8}[dtype]
    dy = np.zeros((33, 2), np.float32)
    dy[0], dy[1], dy[32] = 1, 2.0**-places, 2.0**-24
    dy = dy.astype(np.float32 if groups else DTYPES[dtype])
    shape = (33, 1) if groups else 2
    call = gradkit.group_norm_grad if groups else gradkit.batch_norm_grad
    given = np.ones(2, DTYPES[dtype]), np.zeros(shape, "f4"), np.ones(shape, "f4")
    for sign in (1, -1):
        _, *found = call(sign * dy, np.ones_like(dy), *given)
        for got in found:
            assert got.astype(float).tolist() == [sign * (1 + 2.0 ** (1 - places))] * 2


def test_statistics_of_float32_are_float64():
    x = np.array([[1.0, 0.0], [1 + 2.0**-23, 0.0]], np.float32)
    for layout in ("C", "Fortran"):
        mean, var = steps.batch_norm_stats(LAYOUTS[layout](x))
        assert mean.tolist() == [1 + 2.0**-24, 0]
        assert var.tolist() == [2.0**-48, 0]


@pytest.mark.parametrize("gaps", range(3), ids=["now", "batch", "out"])
def test_running_statistics_of_which_one_has_gaps(gaps):
    rng, stepped = np.random.default_rng(1), LAYOUTS["stepped"]
    now, batch, own = (
        [stepped(each) if k == gaps else each for each in rng.random((2, 200))] for k in range(3)
    )
    move = partial(steps.update_running_statistics, *now, *batch, 9.0)
    with gradkit.use_cpu_backend("numpy"):
        expected = move()
    move(out=tuple(own))
    assert_all_same_bits(own, expected)


def test_means_at_both_ends_of_the_range():
    means = np.array([[1.7e308], [-1.7e308]])
    combine = partial(steps.combine_stats, means, np.zeros((2, 1)), np.array([3.0, 1.0]))
    found, expected = of_both(combine)
    assert_all_same_bits(found, expected)
    assert np.isfinite(found[0]).all()


def test_signs_of_zeros():
    """A bias that is not there adds nothing, not even to -0."""
    x = np.array([[-0.0], [0.0], [1.0]], np.float32)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    y = gradkit.batch_norm_inference(x, one, None, zero, one)
    assert np.signbit(y[:, 0]).tolist() == [True, False, False]
    y = gradkit.batch_norm_inference(x, -one, None, zero, one)
    assert np.signbit(y[:, 0]).tolist() == [False, True, True]
    given = np.ones((3, 2), np.float32), None, None, np.array([-0.0, 0.0]), np.ones(2)
    assert not np.signbit(steps.batch_norm_apply(*given)[1]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of infinity
@pytest.mark.parametrize("groups", [None, 2])
def test_means_that_a_few_elements_say_nothing_of(groups, last, dtype):
    """Sums begin about the mean of four elements far apart, of which any may be anything."""
    rng, size = np.random.default_rng(0), 64

    def normed(x):
        memory = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
        given = np.moveaxis(memory, -1, 1) if last else x
        return gradkit.batch_norm(given) if groups is None else gradkit.group_norm(given, groups)

    for place in (0, 16, 32, 48):
        for value in (np.inf, -np.inf, np.nan, 6e4):
            x = rng.standard_normal((1, 4, size)).astype(DTYPES[dtype])
            x[0, 0, place] = value
            y, mean, inv_std = (np.asarray(each, np.float64) for each in normed(x))
            wide = x.astype(np.float64).reshape(4 if groups is None else groups, -1)
            means, inv_stds = wide.mean(axis=1), 1 / np.sqrt(wide.var(axis=1) + 1e-5)
            finite = slice(0 if math.isfinite(value) else 1, None)
            assert (
                np.isfinite(mean.ravel()).all() == np.isfinite(inv_std).all() == (finite.start == 0)
            )
            np.testing.assert_allclose(mean.ravel()[finite], means[finite], rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(inv_std.ravel()[finite], inv_stds[finite], rtol=1e-5)
            assert np.isfinite(y[0, -1]).all()
    for value in (6e4, 1e-7, 3.0):
        equal = np.full((1, 4, size), value, DTYPES[dtype])
        y, mean, _ = normed(equal)
        assert not y.any()
        assert (mean.astype(np.float32) == equal.astype(np.float32)[0, 0, 0]).all()

"""float16 to float32 and back: the same bits as NumPy's own casts, which go number by number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._numpy import casts
from tests.tolerances import DTYPES, assert_same_bits

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]


def widened(source):
    target = np.full(source.shape, 7, np.float32)
    casts.widen(source, target)
    return target


def check_narrow(values):
    target, room = np.full(values.shape, 7, np.float16), np.empty(values.size, np.float32)
    assert casts.pays(target)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
        casts.narrow(values.copy(), target, room)
    np.testing.assert_array_equal(np.isnan(target), np.isnan(expected))
    assert_same_bits(target[~np.isnan(target)], expected[~np.isnan(expected)])


def test_widening_every_number():
    assert casts.pays(FINITE)
    assert_same_bits(widened(FINITE), FINITE.astype(np.float32))
    assert_same_bits(widened(FINITE[::-2]), FINITE[::-2].astype(np.float32))


def test_widening_what_is_not_finite():
    np.testing.assert_array_equal(widened(HALVES), HALVES.astype(np.float32))
    for value in (np.inf, -np.inf, np.nan, -np.nan):
        some = np.append(FINITE, np.float16(value))
        np.testing.assert_array_equal(widened(some), some.astype(np.float32))


def test_narrowing_every_number_tie_and_neighbour():
    bits = HALVES.astype(np.float32).view(np.uint32)
    for beyond in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF):
        check_narrow((bits + np.uint32(beyond)).view(np.float32))


def test_narrowing_ties_of_subnormal_numbers():
    ties = (np.arange(-(1 << 14), 1 << 14) * 2.0**-25).astype(np.float32)
    for towards in (-np.inf, 0, np.inf):
        check_narrow(np.nextafter(ties, np.float32(towards)))
    check_narrow(ties)


@given(seed=st.integers(0, 2**32 - 1))
def test_narrowing_any_bits(seed):
    check_narrow(
        np.random.default_rng(seed).integers(0, 2**32, 1 << 14, np.uint32).view(np.float32)
    )


def test_narrowing_into_gaps():
    values = np.linspace(-7e4, 7e4, 1 << 15, dtype=np.float32)
    target = np.zeros((1 << 14, 4), np.float16)
    casts.narrow(values.reshape(-1, 2).copy(), target[:, ::2], np.empty(values.size, np.float32))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).reshape(-1, 2)
    assert_same_bits(target[:, ::2], expected)
    assert not target[:, 1::2].any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(6,), (64, 500)], ids=str)
def test_narrowing_float64_beside_ties_of_bfloat16(shape, sign):
    """Too near for float32 to tell them from ties, on either side."""
    beside = sign * np.array([1, 1 + 2.0**-40, 1 - 2.0**-40])  # 1 + 2^-8 is a tie: to even
    values = np.resize(np.concatenate([[np.inf, np.nan, 0.0], 1 * sign + beside / 256]), shape)
    target = np.full(shape, 7, DTYPES["bfloat16"])
    with np.errstate(all="ignore"):
        casts.narrow(values.copy(), target, np.empty(values.size))
    expected = np.resize([np.inf, np.nan, 0, sign, sign * (1 + 2.0**-7), sign], shape)
    np.testing.assert_array_equal(target.astype(np.float64), expected)


OPERATIONS = {
    "clip_grad_value": lambda g, _: gradkit.clip_grad_value(g, 0.7),
    "scale_grads": lambda g, _: gradkit.scale_grads(g, 0.37),
    "scale_grads, beyond float32": lambda g, _: gradkit.scale_grads(g, 1e39),
    "accumulate_grad": gradkit.accumulate_grad,
    "accumulate_grad, scaled": lambda g, other: gradkit.accumulate_grad(g, other, scale=0.37),
    "accumulate_grad, transposed": lambda g, other: gradkit.accumulate_grad(g.T, other.T),
}


@pytest.mark.parametrize("into", [np.float16, np.float32])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_many_elements_are_taken_as_few_are(operation, into):
    rng = np.random.default_rng(0)
    whole, other = rng.permutation(HALVES).astype(into), rng.permutation(HALVES)
    few = whole.copy()
    operation(whole.reshape(256, 256), other.reshape(256, 256))
    for part, addend in zip(few.reshape(16, 64, 64), other.reshape(16, 64, 64), strict=True):
        operation(part, addend)
    nan = np.isnan(few)
    np.testing.assert_array_equal(np.isnan(whole), nan)
    assert_same_bits(whole[~nan], few[~nan])

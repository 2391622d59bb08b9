"""Arithmetic of list kernels in float32 in place of float64: norms, products rounded once."""

import math

import ml_dtypes
import numpy as np
import pytest

from tests import oracles, tolerances
from tests.backends import KernelDevice, kernel_mark
from tests.cuda.lists import run
from tests.tolerances import DTYPES

pytestmark = kernel_mark

SIXTEEN = ("bfloat16", "float16")
NARROW = ("bfloat16", "float16", "float32")
# Random, next to 1, exact, with the digits of ties; and beyond where floats enclose products.
FACTORS = (
    *(
        1 / 3,
        -0.7231904,
        1 + 2.0**-24,
        1 - 2.0**-30,
        0.5,
        -0.5,
        1.5,
        1 + 2.0**-8,
        1 + 2.0**-11,
        1000.1,
    ),
    *(2.0**-70, 0.99 * 2.0**-70, 2.0**100, 1.01 * 2.0**100, 1e-30, 1e-45, 1e-300, 1e38, 1e300),
    *(0.0, -0.0, math.inf, -math.inf, math.nan),
)


@pytest.fixture
def device():
    return KernelDevice(multiprocessors=1)


def scaled(device, host, factor):
    grad, out = device.xp.asarray(host), device.xp.empty(host.shape, host.dtype)
    run(device, "scale_grads", grads=[grad], coefficient=factor, outs=[out])
    return np.array(out)


def assert_same_numbers(got, ref):
    """The same bits, but for those of NaN."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(ref))
    finite = ~np.isnan(ref)
    tolerances.assert_same_bits(got[finite], ref[finite])


def products(host, factor):
    """In double, rounded once to the dtype of ``host``."""
    with np.errstate(all="ignore"):
        return _rounded(host.astype(np.float64) * factor, host.dtype)


def _rounded(exact, dtype):
    """One rounding to nearest even: ml_dtypes rounds a float64 to float32 first."""
    if dtype != DTYPES["bfloat16"]:
        return exact.astype(dtype)
    single = exact.astype(np.float32)
    bits = single.view(np.uint32)
    inexact = np.isfinite(single) & (single.astype(np.float64) != exact)
    away = inexact & (np.abs(single.astype(np.float64)) > np.abs(exact))
    odd = np.where(inexact, (bits - away.astype(np.uint32)) | np.uint32(1), bits)
    return odd.astype(np.uint32).view(np.float32).astype(dtype)


def _half_unit(array):
    """Half of what is between an array's numbers and the next, in float64."""
    digits = {"bfloat16": 8, "float16": 11, "float32": 24}[str(array.dtype)]
    return np.spacing(np.abs(array.astype(np.float32))).astype(np.float64) * 2.0 ** (23 - digits)


def every(name):
    """All numbers of a dtype of 16 bits, and a few more, so that chunks end in part of a batch."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    return np.concatenate([bits, bits[:77]]).view(DTYPES[name])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", SIXTEEN)
def test_products_of_all_16_bit_numbers(device, name, factor):
    host = every(name)
    assert_same_numbers(scaled(device, host, factor), products(host, factor))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("factor", FACTORS)
def test_products_of_float32(device, factor):
    """Of any bits, and of some whose products are close to halfway between two numbers."""
    rng = np.random.default_rng(7)
    host = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    host[5::50] = np.tile(np.array([0, -0.0, np.inf, -np.inf, np.nan], np.float32), 80)
    assert_same_numbers(scaled(device, host, factor), products(host, factor))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("distance", [0, 2.0**-52, 2.0**-47, 2.0**-40, 2.0**-30])
def test_products_beside_a_tie(device, name, distance):
    """The factor makes x * factor halfway between two numbers, or so far from it."""
    digits = {"bfloat16": 8, "float16": 11, "float32": 24}[name]
    for x in (1.0, -1.0, 1 + 2.0 ** (1 - digits), 1 + 2.0**-3):
        for sign in (1, -1):
            factor = (1 + 3 * 2.0**-digits) * (1 + sign * distance) / abs(x)
            host = np.full(300, x, DTYPES[name])
            expected = products(host, factor)
            assert_same_numbers(scaled(device, host, factor), expected)


def test_products_next_to_what_a_float_holds(device):
    """Elements whose products, or what rounding takes from them, are subnormal floats."""
    exponents = np.arange(-149, 128)
    for name, bits in (("float32", 1 + 2.0**-2 + 2.0**-23), ("bfloat16", 1.3359375)):
        host = np.ldexp(bits, exponents).astype(DTYPES[name])
        for factor in (1 / 3, 2.0**-60 / 3, 2.0**-69, 2.0**60 / 3):
            assert_same_numbers(scaled(device, host, factor), products(host, factor))


# Sums


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grad", NARROW)
@pytest.mark.parametrize("name", SIXTEEN)
def test_sums_of_all_16_bit_numbers(device, name, grad):
    """A buffer of each number, and gradients that bring it close to halfway to the next."""
    buffer = every(name)
    rng = np.random.default_rng(13)
    with np.errstate(all="ignore"):
        half = _half_unit(buffer).astype(np.float32)
        shares = rng.choice([1, -1, 1 + 2.0**-20, 1 - 2.0**-20, 2.0**-9, 3.7, 1e6], buffer.size)
        added = (half * shares).astype(DTYPES[grad])
        expected = _rounded(buffer.astype(np.float64) + added.astype(np.float64), buffer.dtype)
    ours, theirs = device.xp.asarray(buffer), device.xp.asarray(added)
    run(device, "accumulate_grad", buffer=ours, grad=theirs)
    assert_same_numbers(np.array(ours), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("factor", FACTORS, ids=repr)
@pytest.mark.parametrize("grad", NARROW)
@pytest.mark.parametrize("name", NARROW)
def test_scaled_sums(device, name, grad, factor):
    """Beside halfway between two numbers, cancelling, and at the ends of what floats enclose."""
    rng = np.random.default_rng(17)
    with np.errstate(all="ignore"):
        bits = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32)
        added = (
            bits.view(np.float32)
            if grad == "float32"
            else bits.astype(np.uint16).view(DTYPES[grad])
        )
        term = added.astype(np.float64) * factor
        half = _half_unit(_rounded(term, DTYPES[name]))
        shares = rng.choice(
            [0, 1, -1, 1 + 2.0**-30, 1 - 2.0**-22, 2.0**9, 2.0**20, 1e30], term.size
        )
        buffer = _rounded(
            rng.choice([1, -1, -1, 0], term.size) * term + shares * half, DTYPES[name]
        )
        expected = _rounded(buffer.astype(np.float64) + term, buffer.dtype)
    if factor == 0:  # what has no weight is left out
        expected = buffer.copy()
    ours, theirs = device.xp.asarray(buffer), device.xp.asarray(added)
    run(device, "accumulate_grad", buffer=ours, grad=theirs, scale=factor)
    assert_same_numbers(np.array(ours), expected)


@pytest.mark.parametrize("grad", NARROW)
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("distance", [2.0**-k for k in (9, 14, 19, 21, 23, 25, 27)])
def test_scaled_sums_beside_a_tie(device, name, grad, distance):
    """Halfway between two numbers of the buffer's dtype, and so far to either side."""
    unit = float(np.spacing(np.float32(1))) * 2.0 ** (
        24 - {"bfloat16": 8, "float16": 11}.get(name, 24)
    )
    buffer = (1 + unit * np.arange(200)).astype(np.float32).astype(DTYPES[name])
    buffer = buffer[buffer < 1.9]
    for side in (-1, 0, 1):
        factor = unit * (5 + (1 + side * distance) / 2)
        ours = device.xp.asarray(np.concatenate([buffer, -buffer]))
        added = np.repeat([1, -1], buffer.size).astype(DTYPES[grad])
        run(device, "accumulate_grad", buffer=ours, grad=device.xp.asarray(added), scale=factor)
        exact = buffer.astype(np.float64) + factor
        expected = _rounded(np.concatenate([exact, -exact]), buffer.dtype)
        tolerances.assert_same_bits(np.array(ours), expected)


# Norms


def norm_of(device, host, p):
    out = device.xp.empty((), np.float64)
    run(device, "grad_norm", grads=[device.xp.asarray(host)], norm_type=p, norm=out)
    return float(out)


def check_norm(device, host, p):
    bound = tolerances.PAIRS.get(p, 0)
    assert oracles.off_by(norm_of(device, host, p), oracles.norm([host], p)) <= bound


@pytest.mark.guarantee("Accurate norms")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("name", NARROW)
def test_norms_of_every_magnitude(device, name, p):
    """Elements of one magnitude, then with a few that are larger and smaller between them."""
    rng = np.random.default_rng(11)
    info = ml_dtypes.finfo(DTYPES[name])
    first, last = math.log2(float(info.smallest_subnormal)), math.log2(float(info.max))
    for exponent in np.arange(first, last - 1, 5):
        host = (rng.uniform(1, 2, 700) * 2.0**exponent).astype(DTYPES[name])
        check_norm(device, host, p)
        with np.errstate(over="ignore"):
            host[::97] *= DTYPES[name].type(16)
        host[5::31] = DTYPES[name].type(2.0 ** max(first, exponent - 20))
        host[6::31] = DTYPES[name].type(0)
        check_norm(device, host, p)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_squares_at_both_ends_of_float32(device, name):
    """Either side of where a batch is summed in double, in any place of the batch."""
    kind = DTYPES[name].type
    sizes = [2.0**-75, 2.0**-76, 2.0**-63, 2.0**-50, 2.0**-48, 2.0**-47, 2.0**61, 2.0**64]
    for size in (*sizes, 1.2003 * 2.0**-58, 1.2003 * 2.0**-62):  # squares are rounded
        for beside in (0.0, 2.0**-133, 2.0**-70, 2.0**-49, size / 4, size * 1.5):
            host = np.full(530, size).astype(DTYPES[name])
            host[3::7] = kind(beside)
            check_norm(device, host, 2.0)
            check_norm(device, host[::-1].copy(), 2.0)


@pytest.mark.parametrize("name", NARROW)
def test_sums_that_float32_cannot_hold(device, name):
    largest = DTYPES[name].type(ml_dtypes.finfo(DTYPES[name]).max)
    for p in (1.0, 2.0, math.inf):
        check_norm(device, np.full(1000, largest), p)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("name", NARROW)
def test_what_float32_sums_round_off_is_kept(device, name, p):
    """One large element and many small ones, each of which a float would lose."""
    info = ml_dtypes.finfo(DTYPES[name])
    small = max(2.0**-14, float(info.smallest_normal))
    host = np.full(4096, small).astype(DTYPES[name])
    host[17] = DTYPES[name].type(2.0**12)
    check_norm(device, host, p)


@pytest.mark.parametrize("name", NARROW)
def test_norms_of_zeros(device, name):
    for zeros in (np.zeros(600, DTYPES[name]), np.full(600, -0.0).astype(DTYPES[name])):
        for p in (1.0, 2.0, math.inf):
            assert norm_of(device, zeros, p) == 0

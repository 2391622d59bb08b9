"""Every tolerance of the suite, with its reason. No test writes a bound of its own.

``u`` is half the distance between 1 and the next number: the relative error of one rounding.
Element-wise relative bounds are wrong for the gradients of norms, which cancel: a bound there
is in units of the terms that were added up, which the oracles return beside the result.
"""

import ml_dtypes
import numpy as np

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
LARGEST_FLOAT64 = float(np.finfo(np.float64).max)
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

FACTOR = {
    # dx is a dozen operations deep, on terms that S adds up: 3.2 u S was the most measured.
    "dx": 16,
    # A sum of n terms in one running total: n roundings, and four in each term.
    "sum": 4,
    # y takes x - mean in two pieces, inv_std, scale, bias: six roundings, and inv_std's own.
    "y": 16,
    # An activated gate is a dozen operations deep, its derivative twice as many beside dx's.
    "gate": 48,
    # Mean: one rounding of the result, and of the deviations that correct it.
    "mean": 4,
    # A mean is rounded twice, at its first estimate and when that is corrected.
    "held": 2,
    # 1 / sqrt(variance): a dozen roundings beside the sums, halved by the root.
    "inv_std": 8,
    # Undoing a norm: (y - bias) / scale / inv_std + mean, four roundings of partial results.
    "inverse": 8,
    # Sums, a root and a quotient in float64.
    "norm": 4,
    # A term of a mean over ranks: its weight, its distance, their product, and the sum.
    "combined": 8,
    # A running average: its distance, the part of it, their product, and the sum.
    "moved": 4,
    # A step of a spike guard: at most a dozen roundings in float64, halved by a root or not.
    "guard": 8,
}
# x^p of float64 numbers costs p times the rounding of log x; and the root divides by p.
POWER_NORM = 1e-12
# A clipped element is g * coefficient rounded once, where a backend may round twice.
CLIPPED_ULPS = 1
# buffer + grad is one rounding, everywhere.
ACCUMULATED_ULPS = 0
# buffer + scale * grad is two roundings in float64 and one of the result.
SCALED_TERM = 4 * UNIT["float64"]
# Central differences with h = cbrt(u): u / h + h^2, times a third derivative of order 1e2.
DIFFERENCES = 1e-7
# The complex step loses nothing: what is left is both formulas' own rounding in float64.
COMPLEX_STEP = 1e-13
# Working memory beyond the outputs, whatever the size of the input.
WORKING_MEMORY = 16 << 20
# The main thread's time in `import gradkit` by that in the `import numpy` before it.
IMPORT_TIME = 0.75


def accumulation(name):
    """The dtype in which sums of elements of a dtype are held."""
    return "float64" if name == "float64" else "float32"


def unit(dtype):
    """The rounding of a dtype."""
    return UNIT[str(dtype)]


def smallest(dtype):
    """The smallest subnormal of a dtype."""
    return float(ml_dtypes.finfo(dtype).smallest_subnormal)


def rounded(ref, dtype):
    """One rounding of a result into its dtype."""
    return unit(dtype) * np.abs(ref) + smallest(dtype) / 2


def elementwise(kind, size, ref, dtype):
    """A few roundings of terms of a certain size, then one of the result."""
    u = UNIT[accumulation(str(dtype))]
    return FACTOR[kind] * u * size + rounded(ref, dtype)


def below_normal(kind, dtype, gain=1):
    """Bound of roundings of subnormal partial results, which are not relative; ``gain`` follows."""
    return FACTOR[kind] * smallest(DTYPES[accumulation(str(dtype))]) / 2 * (1 + gain)


def averaged(kind, size, ref, depth, dtype):
    """Bound if a mean of ``depth`` terms of both signs is used: roundings walk randomly."""
    walk = 2 * np.sqrt(depth) * UNIT[accumulation(str(dtype))] * size
    return walk + elementwise(kind, size, ref, dtype)


def summed(terms, ref, depth, dtype, work):
    """A sum whose terms' absolute values add up to ``terms``, held in ``work``."""
    u = UNIT[accumulation(str(work))]
    return (depth + FACTOR["sum"]) * u * terms + rounded(ref, dtype)


# Relative errors of norms of elements narrower than float64, by p, where float64 does better.
# The compiled CPU backend's totals take 32 terms in float64 before their rounding errors are kept.
RUNS = {1: 2.0**-48, 2: 2.0**-48}
# On a GPU a warp adds up in pairs of float32 what a few turns of its loop bring.
PAIRS = {1: 2.0**-40, 2: 2.0**-40}


def norm(order, run_errors, *, runs):
    """The relative error of a p-norm.

    ``runs``: whether some elements are narrower than float64, and so added up in runs;
    ``run_errors``: what that costs, by p.
    """
    if order == np.inf:
        return 0.0
    if order not in (1, 2):
        return POWER_NORM
    exact = FACTOR["norm"] * UNIT["float64"]
    return run_errors.get(order, exact) if runs else exact


def grad_mean(size, run_errors):
    """A mean of elements of both signs whose magnitudes have the mean ``size``, as a 1-norm's."""
    return run_errors[1] * size + smallest(DTYPES["float64"])


def unit_norm(order, run_errors, host, whole):
    """The relative error of the norm of a unit of an array.

    The CPU backend sums units in float64, those of several dimensions in order: a rounding a term.
    On a GPU, and over a whole array, a unit's norm is that of a list of one.
    """
    exact = norm(order, run_errors, runs=host.itemsize < 8)
    return exact if whole or order == np.inf else max(exact, host.size * UNIT["float64"])


def guarded(size):
    """Bound of roundings of a spike guard's step, of a result whose terms have a size."""
    return FACTOR["guard"] * (UNIT["float64"] * size + smallest(DTYPES["float64"]))


def combined(size, ranks):
    """A weighted mean of numbers up to a size, one of each rank: some roundings a rank."""
    return FACTOR["combined"] * ranks * (UNIT["float64"] * size + smallest(DTYPES["float64"]))


def exchanged(ranks):
    """By how much of itself a mean of float64 means of ranks is off."""
    return FACTOR["combined"] * ranks * UNIT["float64"]


def over_ranks(order):
    """The relative error of a norm over ranks: shares are p-th powers of rounded quotients."""
    return 0.0 if order == np.inf else POWER_NORM


def assert_within(got, ref, bound, what=""):
    """Every element within its bound; NaN must be NaN, and only what is too large infinite."""
    largest = float(ml_dtypes.finfo(got.dtype).max)
    got, ref = got.astype(np.longdouble), np.asarray(ref)
    assert got.shape == ref.shape, f"{what}: shape {got.shape}, expected {ref.shape}"
    bound = np.broadcast_to(bound, ref.shape)
    with np.errstate(all="ignore"):
        fine = (np.abs(got - ref) <= bound) | (got == ref) | (np.isnan(got) & np.isnan(ref))
        fine |= np.isinf(got) & (got * ref > 0) & (np.abs(ref) + bound > largest)
    if not fine.all():
        worst = tuple(int(i[0]) for i in np.nonzero(~fine))
        raise AssertionError(
            f"{what}: {np.count_nonzero(~fine)} of {ref.size} out of bounds, first at {worst}: "
            f"{got[worst]!r}, expected {ref[worst]!r} within {bound[worst]!r}"
        )


def bits(array):
    """An array's elements as unsigned integers: NaN equals itself and -0 is not +0."""
    array = np.asarray(array)
    return np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(array.shape)


def assert_same_bits(got, ref):
    """The same dtype, shape and bits."""
    got, ref = np.asarray(got), np.asarray(ref)
    assert got.dtype == ref.dtype
    np.testing.assert_array_equal(bits(got), bits(ref), strict=True)


def assert_all_same_bits(found, expected, backend=None):
    """As many arrays, each the same: of a backend's, where one is given."""
    host = np.asarray if backend is None else backend.asnumpy
    for got, ref in zip(found, expected, strict=True):
        assert_same_bits(host(got), host(ref))


def assert_same_numbers(got, ref):
    """The same bits, but any NaN for a NaN."""
    nan = np.isnan(ref)
    np.testing.assert_array_equal(np.isnan(got), nan)
    assert_same_bits(got[~nan], ref[~nan])


def assert_ulps(got, ref, most):
    """Elements of one dtype at most so many representable numbers apart; NaN equals NaN."""
    got, ref = np.asarray(got), np.asarray(ref)
    assert got.dtype == ref.dtype
    assert got.shape == ref.shape
    nan = np.isnan(got)
    np.testing.assert_array_equal(nan, np.isnan(ref))
    apart = np.abs(_ordinal(got) - _ordinal(ref))[~nan]
    assert apart.max(initial=0) <= most, f"{apart.max()} ulps apart"


def _ordinal(array):
    """Count of representable numbers above 0; in Python integers where int64 may overflow."""
    magnitude = bits(np.abs(array)).astype(np.int64)
    signed = np.where(np.signbit(array), -magnitude, magnitude)
    return signed.astype(object) if array.itemsize == 8 else signed

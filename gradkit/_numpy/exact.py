"""Exact sums of magnitudes or squares, whatever the order of elements, cuts or ranks.

Squares of 16- and 32-bit elements are exact in float64, and so are their sums as whole numbers of
``2**LEAST_BIT``. ``kernels/cpu/exact_sums.h`` has the same constants.
"""

import numpy as np

from gradkit._calls.lists import DIGIT_BITS, DIGITS, LEAST_BIT, ExactSums
from gradkit._numpy.blocks import Array, blocks, part

_BLOCK = 1 << 16  # elements, so that sums of their halves are exact
_HALF = 26  # bits of a half of a float64's mantissa, but for one


def exact_sums(call: ExactSums) -> None:
    """Write the digits of each row's sum, and the sum of what is not finite behind them."""
    totals = [0] * len(call.sums)
    call.sums[:, DIGITS] = 0
    for grad, row in zip(call.grads, call.rows, strict=True):
        for index in blocks(grad.shape, _BLOCK):
            values = np.abs(part(grad, index).astype(np.float64)).reshape(-1)
            beyond = ~np.isfinite(values)
            if beyond.any():
                call.sums[row, DIGITS] += values[beyond].sum()
                values[beyond] = 0
            totals[row] += _whole(values * values if call.norm_type == 2 else values)
    for digits, total in zip(call.sums, totals, strict=True):
        digits[:DIGITS] = [total >> DIGIT_BITS * k & (1 << DIGIT_BITS) - 1 for k in range(DIGITS)]


def _whole(terms: Array) -> int:
    """The sum of terms, as a whole number of the least bit's worth."""
    mantissas, exponents = np.frexp(terms)
    halves = np.modf(np.ldexp(mantissas, _HALF))
    places = exponents - 2 * _HALF - 1
    least = int(places.min(initial=0))
    total = 0
    for half, above in zip(halves, (0, _HALF + 1), strict=True):
        whole = half if above else np.ldexp(half, _HALF + 1)
        sums = np.bincount(places - least, weights=whole)
        total += sum(int(n) << k + above for k, n in enumerate(sums.tolist()))
    shift = least - LEAST_BIT
    return total << shift if shift >= 0 else total >> -shift

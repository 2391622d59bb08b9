"""Norms whose bits do not depend on how gradients are cut, ordered or spread over ranks."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from gradkit._calls.lists import DIGIT_BITS, DIGITS, LEAST_BIT, ExactSums
from gradkit._calls.roles import Numbers
from gradkit._open.gradients import Gradients
from gradkit._ranks.collective import Collective, State

_ROOT_BITS = 64  # of a root at least, before it is rounded to float64
_INDIVISIBLE = 1 << 53  # what no float64 holds exactly from here on
_LONG = DIGITS + 2  # digits of a sum times a number below that


def check(gradients: Gradients, order: float) -> None:
    """Raise unless sums of these gradients can be exact."""
    if order not in (1, 2):
        raise ValueError(f"exact=True is for norm_type 1, 2 and infinity, not {order}")
    for name, view in gradients.named():
        if view.dtype == np.float64:
            raise TypeError(
                f"{name} is float64, whose squares are not exact; exact=True takes float16, "
                "bfloat16 and float32"
            )


class Own(NamedTuple):
    """A rank's sum, as a whole number of the least bit's worth, of which it counts a fraction."""

    total: int
    common: int  # what it is divided by
    beyond: float  # the sum of what is not finite

    def head(self) -> State:
        """Numbers that ranks exchange first."""
        return np.array([float(self.common)])

    def digits(self, factor: int = 1) -> State:
        """The sum times a number, and what is not finite."""
        total = self.total * factor
        digits = [total >> DIGIT_BITS * k & (1 << DIGIT_BITS) - 1 for k in range(_LONG)]
        return np.array([*digits, self.beyond])


def own_of(gradients: Gradients, order: float, copies: Sequence[int] | None) -> Own:
    """A rank's sum.

    Copies count a fraction each, so that it is made a whole number by a common multiple.
    """
    counts = copies or [1] * len(gradients.views)
    distinct = sorted({*counts}) or [1]
    common = math.lcm(*distinct)
    if common >= _INDIVISIBLE:
        raise ValueError("replicas have a common multiple above 2**53; exact=True needs it")
    sums = np.zeros((len(distinct), DIGITS + 1))
    gradients.backend.exact_sums(
        ExactSums(
            grads=gradients.views,
            norm_type=order,
            rows=[distinct.index(count) for count in counts],
            sums=Numbers(sums),
        )
    )
    each = zip(sums, distinct, strict=True)
    total = sum(_whole(row[:DIGITS]) * (common // count) for row, count in each)
    with np.errstate(invalid="ignore"):  # infinity and NaN
        return Own(total, common, float(sums[:, DIGITS].sum()))


def exchanged(sums: Own, heads: State, collective: Collective) -> State:
    """All ranks' sums, a row (common, digits, beyond) each, or one row of what they add up to.

    They can be added digit by digit if a common multiple of all is small enough: then each rank
    receives as much whatever their number.
    """
    common = math.lcm(*map(int, heads[:, 0]))
    if common < _INDIVISIBLE and collective.adds:
        total = collective.total(sums.digits(common // sums.common))
        return np.array([[common, *total]])
    return np.hstack([heads, collective.rows(sums.digits())])


def norm_of(states: State, order: float, by: float) -> tuple[float, float]:
    """The norm, rounded once from the exact sum of all rows, and whether all is finite.

    ``by``: what gradients are to be multiplied by, at least 0 or NaN.
    """
    beyond = states[:, -1]
    any_beyond = float(beyond.any())
    if any_beyond or not math.isfinite(by):
        with np.errstate(invalid="ignore"):
            return float(beyond.sum() * by) if any_beyond else by, any_beyond
    total = sum(Fraction(_whole(state[1:-1]), int(state[0])) for state in states)
    total *= Fraction(by) ** int(order) * Fraction(2) ** LEAST_BIT
    return _rounded(Fraction(total), int(order)), any_beyond


def _whole(digits: Any) -> int:
    return sum(int(digit) << DIGIT_BITS * k for k, digit in enumerate(digits.tolist()))


def _rounded(total: Fraction, order: int) -> float:
    """The correctly rounded value, or for order 2 root, of a number that is at least 0."""
    try:
        return float(total if order == 1 else _root(total))
    except OverflowError:
        return math.inf


def _root(square: Fraction) -> Fraction:
    """A number that is rounded as the square root is: its first bits, and one more for the rest."""
    above, below = square.numerator, square.denominator
    # Twice as many bits as the root has; an even number of places.
    shift = max(0, 2 * _ROOT_BITS + below.bit_length() - above.bit_length()) // 2 + 1
    whole, rest = divmod(above << 2 * shift, below)
    root = math.isqrt(whole)
    inexact = bool(rest) or root * root != whole
    return Fraction(2 * root + inexact, 2 << shift)

"""Floating-point arithmetic on fractions: what each opcode must give, bit for bit."""

import math
from fractions import Fraction
from typing import NamedTuple


class Format(NamedTuple):
    """A binary format: its width, the bits of its significand, and its normal exponents."""

    bits: int
    precision: int
    least: int
    most: int

    @property
    def sign_bit(self):
        return 1 << (self.bits - 1)

    @property
    def infinity(self):
        return (self.sign_bit - 1) >> (self.precision - 1) << (self.precision - 1)


F32 = Format(32, 24, -126, 127)
F64 = Format(64, 53, -1022, 1023)
F16 = Format(16, 11, -14, 15)
BF16 = Format(16, 8, -126, 127)
FORMATS = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}
NAN = None
INF = math.inf


def decode(bits, form):
    """(sign, magnitude) of a number, the magnitude a fraction or infinite; NAN for a NaN."""
    sign, magnitude = bits >> (form.bits - 1), bits & (form.sign_bit - 1)
    if magnitude > form.infinity:
        return NAN
    if magnitude == form.infinity:
        return sign, INF
    exponent, fraction = divmod(magnitude, 1 << (form.precision - 1))
    if exponent:
        fraction += 1 << (form.precision - 1)
    power = max(exponent, 1) - 1 + form.least - form.precision + 1
    return sign, Fraction(fraction) * Fraction(2) ** power


def encode(number, form, mode="rn"):
    """The bits of a number, rounded once."""
    if number is NAN:
        return NAN
    sign, magnitude = number
    top = sign << (form.bits - 1)
    if magnitude == INF:
        return top | form.infinity
    if magnitude == 0:
        return top
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    exponent = max(exponent, form.least)
    count, rest = divmod(magnitude / Fraction(2) ** (exponent - form.precision + 1), 1)
    count += _upwards(mode, sign, rest, count)
    result = (exponent - form.least << (form.precision - 1)) + count
    if result >= form.infinity:
        result = form.infinity - (mode not in ("rn", "rm" if sign else "rp"))
    return top | result


def _upwards(mode, sign, rest, count):
    """Return whether the magnitude grows in rounding; ``rest`` is in units of the last place."""
    if mode == "rn":
        return rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2 == 1)
    return rest > 0 and mode == ("rm" if sign else "rp")


def flush(bits, form, ftz):
    """A subnormal as zero, if subnormals are flushed."""
    if bits is not NAN and ftz and bits & (form.sign_bit - 1) < 1 << (form.precision - 1):
        return bits & form.sign_bit
    return bits


def clamp(bits, form):
    """A result as .sat leaves it: from 0 to 1, NaN as 0."""
    if bits is NAN or bits & form.sign_bit:
        return 0
    return min(bits, encode((0, Fraction(1)), form))


def _signed(number):
    return -number[1] if number[0] else number[1]


def add(a, b, mode="rn"):
    if a is NAN or b is NAN:
        return NAN
    if INF in (a[1], b[1]):
        if a[1] == b[1] and a[0] != b[0]:
            return NAN
        return a if a[1] == INF else b
    total = _signed(a) + _signed(b)
    if total == 0:
        both = a[0] == b[0] and a[1] == 0  # zeros of one sign; else they cancel
        return (a[0] if both else int(mode == "rm")), Fraction(0)
    return int(total < 0), abs(total)


def mul(a, b):
    if a is NAN or b is NAN:
        return NAN
    sign = a[0] ^ b[0]
    if INF in (a[1], b[1]):
        return NAN if 0 in (a[1], b[1]) else (sign, INF)
    return sign, a[1] * b[1]


def div(a, b):
    if a is NAN or b is NAN:
        return NAN
    sign = a[0] ^ b[0]
    if a[1] == INF:
        return NAN if b[1] == INF else (sign, INF)
    if b[1] == INF:
        return sign, Fraction(0)
    if b[1] == 0:
        return NAN if a[1] == 0 else (sign, INF)
    return sign, a[1] / b[1]


def sqrt(a):
    """The root, or where it is irrational a number that rounds as it does."""
    if a is NAN or (a[0] and a[1]):
        return NAN
    if a[1] in (0, INF):
        return a
    scale = 1200  # bits behind the point: more than two roots of a double have between them
    whole = a[1] * 4**scale
    root = math.isqrt(math.floor(whole))
    exact = root * root == whole
    return 0, Fraction(2 * root + (not exact), 2 << scale)


def arithmetic(name, form, mode="rn", ftz=False, sat=False):
    """The function on bits that the opcode ``name`` is, NAN where it gives one."""

    def compute(*operands):
        values = [decode(flush(bits, form, ftz), form) for bits in operands]
        result = flush(encode(_exact(name, values, mode), form, mode), form, ftz)
        return clamp(result, form) if sat else result

    return compute


def _exact(name, values, mode):
    one = 0, Fraction(1)
    if name == "sub" and values[1] is not NAN:
        values = [values[0], (1 - values[1][0], values[1][1])]
    if name in ("add", "sub"):
        return add(*values, mode)
    if name in ("fma", "mad"):
        product = mul(*values[:2])
        return add(product, values[2], mode)
    functions = {"mul": mul, "div": div, "sqrt": sqrt, "rcp": lambda a: div(one, a)}
    return functions[name](*values)


def as_float(number):
    """A number as a Python float; a double's value is not changed."""
    if number is NAN:
        return math.nan
    return -float(number[1]) if number[0] else float(number[1])

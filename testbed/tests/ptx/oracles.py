"""For every opcode that computes from registers alone: what it must give, by Python's integers."""

import math
from fractions import Fraction

from testbed.ptx.opcodes import OPCODES, WIDTHS
from testbed.tests.ptx.exact import (
    BF16,
    F16,
    FORMATS,
    NAN,
    arithmetic,
    clamp,
    decode,
    encode,
    flush,
)

_APPROXIMATE = ("approx", "full")
EXACT = {name for name in OPCODES if not set(name.split(".")) & set(_APPROXIMATE)}
ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def signed(bits, width):
    """The value of a two's complement."""
    return bits - (bits >> (width - 1) << width)


def value(bits, kind):
    """Value of an integer register's bits, by its type."""
    return signed(bits, WIDTHS[kind]) if kind[0] == "s" else bits


def oracle(spelling):
    """The function that the opcode is: from operands' bits to its result's, NAN for a NaN."""
    name, *words = spelling.split(".")
    kind = words[-1]
    if name == "cvt":
        return _conversion(words)
    if name in ("selp", "slct", "setp", "testp", "copysign"):
        return globals()[f"_{name}"](words)
    if kind in FORMATS:
        return _floating(name, words)
    if kind == "f32x2":
        return _paired(name, words)
    if name == "prmt":
        return _permutation(words)
    return _integer(name, words, kind)


# Floats


def _floating(name, words):
    form, ftz = FORMATS[words[-1]], "ftz" in words
    if name in ("abs", "neg"):
        change = form.sign_bit - 1 if name == "abs" else form.sign_bit
        operate = int.__and__ if name == "abs" else int.__xor__
        return lambda a: operate(flush(a, form, ftz), change)
    if name in ("min", "max"):
        return _extreme(max if name == "max" else min, form, ftz, "NaN" in words)
    mode = next((word for word in words if word in ROUNDINGS), "rn")
    return arithmetic(name, form, mode, ftz, "sat" in words)


def _no_nan(bits, form):
    return NAN if bits & (form.sign_bit - 1) > form.infinity else bits


def order(bits, form):
    """A number's place among all, -0 before +0."""
    magnitude = bits & (form.sign_bit - 1)
    return -magnitude - 1 if bits & form.sign_bit else magnitude


def _extreme(pick, form, ftz, contagious):
    def compute(a, b):
        a, b = flush(a, form, ftz), flush(b, form, ftz)
        numbers = [bits for bits in (a, b) if _no_nan(bits, form) is not NAN]
        if not numbers or (contagious and len(numbers) < 2):
            return NAN
        return pick(numbers, key=lambda bits: order(bits, form))

    return compute


def _paired(name, words):
    one = arithmetic(name, FORMATS["f32"], "rn", "ftz" in words)

    def compute(*operands):
        halves = [one(*(bits >> at & 0xFFFFFFFF for bits in operands)) for at in (0, 32)]
        low, high = (0x7FFFFFFF if half is NAN else half for half in halves)
        return high << 32 | low

    return compute


def _compare(words, a, b):
    """Return whether a comparison holds between numbers; None as an operand is NaN."""
    word = words[0]
    unordered = a is None or b is None
    if word in ("num", "nan"):
        return unordered == (word == "nan")
    if unordered:
        return word.endswith("u") and word in ("equ", "neu", "ltu", "leu", "gtu", "geu")
    tests = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    return tests[word if word in tests else word[:2]]


def _setp(words):
    kind = words[-1]
    if kind in FORMATS:
        form, ftz = FORMATS[kind], "ftz" in words

        def compare(a, b):
            numbers = (decode(flush(bits, form, ftz), form) for bits in (a, b))
            return int(_compare(words, *(None if n is NAN else _plain(n) for n in numbers)))

        return compare
    names = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    renamed = [names.get(words[0], words[0])]
    return lambda a, b: int(_compare(renamed, value(a, kind), value(b, kind)))


def _plain(number):
    return -number[1] if number[0] else number[1]


def _selp(_):
    return lambda a, b, p: a if p else b


def _slct(words):
    if words[-1] == "s32":
        return lambda a, b, c: a if signed(c, 32) >= 0 else b
    form = FORMATS["f32"]

    def select(a, b, c):
        number = decode(flush(c, form, "ftz" in words), form)
        return a if number is not NAN and _plain(number) >= 0 else b

    return select


def _copysign(words):
    bit = FORMATS[words[-1]].sign_bit
    return lambda a, b: (b & (bit - 1)) | (a & bit)


def _testp(words):
    form = FORMATS[words[-1]]
    least = 1 << (form.precision - 1)
    tests = {
        "finite": lambda m: m < form.infinity,
        "infinite": lambda m: m == form.infinity,
        "number": lambda m: m <= form.infinity,
        "notanumber": lambda m: m > form.infinity,
        "normal": lambda m: least <= m < form.infinity,
        "subnormal": lambda m: 0 < m < least,
    }
    return lambda a: int(tests[words[0]](a & (form.sign_bit - 1)))


# Conversions


def _conversion(words):
    *modifiers, into, source = words
    mode = next((word for word in modifiers if word in ROUNDINGS), "rn")
    if into.endswith("x2"):
        half = _narrowing(FORMATS[into[:-2]], FORMATS[source], mode, "relu" in modifiers)
        return lambda a, b: _number(half(a)) << 16 | _number(half(b))
    if source in FORMATS and into in FORMATS:
        if modifiers and modifiers[0] in INTEGRAL:
            return _to_integral(modifiers, FORMATS[source])
        return _between_formats(modifiers, FORMATS[into], FORMATS[source], mode)
    if into in FORMATS:
        form = FORMATS[into]
        return lambda a: encode(
            (int(value(a, source) < 0), Fraction(abs(value(a, source)))), form, mode
        )
    if source in FORMATS:
        return _to_integer(modifiers, into, FORMATS[source])
    if "sat" in modifiers:
        least, most = limits(into)
        return lambda a: min(max(value(a, source), least), most) % (1 << WIDTHS[into])
    return lambda a: value(a, source) % (1 << WIDTHS[into])


def _number(bits):
    return 0x7FFF if bits is NAN else bits


def limits(kind):
    """The least and the greatest value of an integer type."""
    width = WIDTHS[kind]
    return (
        (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    )


def _narrowing(form, source, mode, relu):
    def convert(a):
        result = encode(decode(a, source), form, mode)
        return 0 if relu and result is not NAN and result & form.sign_bit else result

    return convert


def _between_formats(modifiers, form, source, mode):
    ftz = "ftz" in modifiers
    if form in (F16, BF16):
        return _narrowing(form, source, mode, "relu" in modifiers)

    if source is BF16 and form is FORMATS["f32"]:
        return lambda a: a << 16  # a NaN's bits stay

    def convert(a):
        if source is FORMATS["f32"]:
            a = flush(a, source, ftz)
        result = encode(decode(a, source), form, mode)
        if form is FORMATS["f32"]:
            result = flush(result, form, ftz)
        return clamp(result, form) if "sat" in modifiers else result

    return convert


def _whole(number, modifiers):
    return INTEGRAL[modifiers[0]](_plain(number))


def _to_integral(modifiers, form):
    ftz = "ftz" in modifiers

    def convert(a):
        number = decode(flush(a, form, ftz), form)
        if number is NAN or number[1] == math.inf:
            return encode(number, form)
        return encode((number[0], Fraction(abs(_whole(number, modifiers)))), form)

    return convert


def _to_integer(modifiers, into, source):
    least, most = limits(into)

    def convert(a):
        number = decode(flush(a, source, "ftz" in modifiers), source)
        if number is NAN:
            return 0
        if number[1] == math.inf:
            return (least if number[0] else most) % (1 << WIDTHS[into])
        return min(max(_whole(number, modifiers), least), most) % (1 << WIDTHS[into])

    return convert


# Integers


def _integer(name, words, kind):
    width = WIDTHS[kind]
    if name == "mul" or name == "mad":
        return _product(words[0], kind, width)
    if name in ("shl", "shr"):
        return _shift(name, kind, width)
    if name in ("bfe", "bfi", "shf", "lop3"):
        return {"bfe": _bfe, "bfi": _bfi, "shf": _shf, "lop3": _lop3}[name](words, kind, width)
    if kind == "pred" and name == "not":
        return lambda a: 1 - a
    function = _INTEGERS[name]

    def compute(*operands):
        result = function(width, *(value(bits, kind) for bits in operands))
        return result % (1 << (32 if name in ("popc", "clz", "bfind") else width))

    return compute


def _quotient(width, a, b):
    """Toward zero; by zero, which PTX leaves open, all ones."""
    if b == 0:
        return (1 << width) - 1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _found(_, a):
    a = ~a if a < 0 else a
    return a.bit_length() - 1


_INTEGERS = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "div": _quotient,
    "rem": lambda w, a, b: a - b * _quotient(w, a, b) if b else a,
    "min": lambda _, a, b: min(a, b),
    "max": lambda _, a, b: max(a, b),
    "sad": lambda _, a, b, c: c + abs(a - b),
    "abs": lambda _, a: abs(a),
    "neg": lambda _, a: -a,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "cnot": lambda _, a: int(a == 0),
    "popc": lambda _, a: a.bit_count(),
    "clz": lambda w, a: w - a.bit_length(),
    "bfind": _found,
    "brev": lambda w, a: int(f"{a:0{w}b}"[::-1], 2),
}


def _product(part, kind, width):
    double = 2 * width

    def compute(a, b, c=0):
        product = value(a, kind) * value(b, kind)
        if part == "wide":
            return (product + c) % (1 << double)
        if part == "hi":
            product >>= width
        return (product + c) % (1 << width)

    return compute


def _shift(name, kind, width):
    if name == "shl":
        return lambda a, n: (a << min(n, width)) % (1 << width)
    return lambda a, n: (value(a, kind) >> min(n, width)) % (1 << width)


def _shf(words, *_):
    left, wraps = words[0] == "l", words[1] == "wrap"

    def compute(a, b, c):
        n = c % 32 if wraps else min(c, 32)
        both = b << 32 | a
        return (both << n >> 32 if left else both >> n) % (1 << 32)

    return compute


def _bfe(_, kind, width):
    def compute(a, at, n):
        at, n = at % 256, n % 256
        sign = a >> min(at + n - 1, width - 1) & 1 if kind[0] == "s" and n else 0
        bits = [a >> (at + i) & 1 if i < n and at + i < width else sign for i in range(width)]
        return sum(bit << i for i, bit in enumerate(bits))

    return compute


def _bfi(_, __, width):
    def compute(a, b, at, n):
        at, n = at % 256, n % 256
        for i in range(min(n, max(0, width - at))):
            b = b & ~(1 << at + i) | (a >> i & 1) << at + i
        return b

    return compute


def _lop3(*_):
    def compute(a, b, c, table):
        rows = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32)]
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    return compute


# From the highest byte of the result to the lowest, by the selector's two bits.
_MODES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def _permutation(words):
    def compute(a, b, selector):
        source = (b << 32 | a).to_bytes(8, "little")
        if words[-1] in _MODES:
            return int(
                "".join(f"{source[int(k)]:02x}" for k in _MODES[words[-1]][selector & 3]), 16
            )
        taken = []
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = source[nibble & 7]
            taken.append(255 * (byte >> 7) if nibble & 8 else byte)
        return int.from_bytes(bytes(taken), "little")

    return compute

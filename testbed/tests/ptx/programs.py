"""Small kernels in PTX that put opcodes to arrays of operands."""

import itertools
import random

import numpy as np

from testbed.ptx.opcodes import OPCODES, WIDTHS
from testbed.tests.ptx.exact import BF16, F16, F32, F64, FORMATS

HEAD = ".version 8.8\n.target sm_100\n.address_size 64\n"
SAMPLES = 512
_TYPES = {"pred": ".pred", 16: ".b16", 32: ".b32", 64: ".b64", 8: ".b16"}


def kernel(name, parameters, body, registers="", bounds=1024):
    """A kernel's text; pointers and integers are parameters of eight bytes."""
    listed = ",\n".join(f"  .param .u64 {p}" for p in parameters)
    return f"""{HEAD}
.visible .entry {name}(
{listed}
)
.maxntid {bounds}, 1, 1
{{
  .reg .pred %p<64>;
  .reg .b16 %rs<64>;
  .reg .b32 %r<64>;
  .reg .b64 %rd<64>;
  .reg .f32 %f<64>;
  .reg .f64 %fd<64>;
{registers}
{body}
  ret;
}}
"""


def applying(opcodes):
    """A kernel `apply` that puts each opcode to its operands: one thread a sample.

    ``in`` is u64 [opcode, operand, sample]; ``out`` is u64 [opcode, sample].
    """
    lines = [
        "ld.param.u64 %rd60, [in];",
        "ld.param.u64 %rd61, [out];",
        "mov.u32 %r60, %tid.x;",
        "mul.wide.u32 %rd62, %r60, 8;",
        "add.s64 %rd60, %rd60, %rd62;",
        "add.s64 %rd61, %rd61, %rd62;",
    ]
    for number, spelling in enumerate(opcodes):
        lines += ["{", *_one(spelling, number), "}"]
    return kernel("apply", ("in", "out"), "\n".join(lines), bounds=SAMPLES)


def _one(spelling, number):
    opcode = OPCODES[spelling]
    kinds = [opcode.result, *opcode.operands]
    lines = [f".reg {_register(kind)} %x{i};" for i, kind in enumerate(kinds)]
    lines += [f".reg .b64 %y{i};" for i in range(len(kinds))]
    for i, kind in enumerate(opcode.operands, 1):
        if spelling.startswith("lop3") and i == 4:
            continue
        lines.append(f"ld.global.u64 %y{i}, [%rd60+{((4 * number + i - 1) * SAMPLES) * 8}];")
        lines.append(_from_u64(i, kind))
    names = [f"%x{i}" for i in range(len(kinds))]
    if spelling.startswith("lop3"):
        names[4] = "0xCA"
    lines.append(f"{spelling} {', '.join(names)};")
    lines.append(_to_u64(opcode.result))
    lines.append(f"st.global.u64 [%rd61+{number * SAMPLES * 8}], %y0;")
    return lines


def _register(kind):
    return ".pred" if kind == "pred" else f".b{max(16, WIDTHS[kind])}"


def _from_u64(i, kind):
    if kind == "pred":
        return f"setp.ne.b64 %x{i}, %y{i}, 0;"
    width = max(16, WIDTHS[kind])
    return f"mov.b64 %x{i}, %y{i};" if width == 64 else f"cvt.u{width}.u64 %x{i}, %y{i};"


def _to_u64(kind):
    if kind == "pred":
        return "selp.b64 %y0, 1, 0, %x0;"
    width = WIDTHS[kind]
    return "mov.b64 %y0, %x0;" if width == 64 else f"cvt.u64.u{width} %y0, %x0;"


# Operands


def _float_edges(form):
    one = form.most << (form.precision - 1)  # the bits of 1
    unit = 1 << (form.precision - 1)
    positive = [
        *(0, 1, 2, unit - 1, unit, unit + 1),  # zero, subnormals, the least normal ones
        *(one, one + 1, one - 1, one + unit // 2, one + unit, one - unit),
        *(form.infinity - 1, form.infinity, form.infinity | unit // 2, form.infinity + 1),
        one + 3 * unit + unit // 4,
    ]
    return [bits | sign for sign in (0, form.sign_bit) for bits in positive]


def _random_float(draw, form):
    kind = draw.randrange(3)
    if kind == 0:  # of any size
        return draw.getrandbits(form.bits)
    if kind == 1:  # near 1, so that sums cancel and products are ties
        significand = draw.getrandbits(form.precision - 1) & -1 << draw.randrange(form.precision)
        exponent = form.most + draw.randrange(-3, 4)
    else:  # about the least normal number
        significand, exponent = draw.getrandbits(form.precision - 1), draw.randrange(4)
    return draw.getrandbits(1) * form.sign_bit | exponent << (form.precision - 1) | significand


def _integer_edges(width):
    half = 1 << (width - 1)
    return [0, 1, 2, 3, 7, half - 1, half, half + 1, 2 * half - 2, 2 * half - 1, 0x55 % half]


# Where floats become integers, and the other way round, there is more to be tried.
_HALVES = [0x3F000000, 0x3FC00000, 0x40200000, 0xBF000000, 0xBFC00000, 0x4EFFFFFF, 0x4F000000]
_HALVES += [0x4F7FFFFF, 0x4F800000, 0xCF000000, 0xCF000001, 0x5EFFFFFF, 0x5F000000, 0x5F800000]
_COUNTS = [0, 1, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 2**32 - 1]


def operands(spelling):
    """SAMPLES operands, or tuples of them: what is at an edge, and what is drawn."""
    draw = random.Random(spelling)
    kinds = OPCODES[spelling].operands
    tables = [_edges(spelling, i, kind) for i, kind in enumerate(kinds)]
    found = list(itertools.product(*tables))
    draw.shuffle(found)
    found = found[: 2 * SAMPLES // 3]
    while len(found) < SAMPLES:
        row = [_drawn(draw, kind, table) for kind, table in zip(kinds, tables, strict=True)]
        if spelling.startswith(("fma", "mad.r")) and draw.randrange(2):
            row = _cancelling(draw, row, FORMATS.get(kinds[0], F32))
        found.append(tuple(row))
    return found


def _cancelling(draw, row, form):
    """An addend near minus the product."""
    one = form.most << (form.precision - 1)
    a, b = (one | draw.getrandbits(form.precision - 1) for _ in "ab")
    exact = (a & (1 << form.precision - 1) - 1) + (b & (1 << form.precision - 1) - 1)
    near = min(one + exact, form.infinity - 1)
    row[:3] = a, b, (near + draw.randrange(-2, 3)) | form.sign_bit
    return row


def _edges(spelling, place, kind):
    name = spelling.partition(".")[0]
    if kind == "pred":
        return [0, 1]
    if (name in ("shl", "shr") and place == 1) or (name == "shf" and place == 2):
        return _COUNTS
    if (name == "bfe" and place) or (name == "bfi" and place > 1):
        return _COUNTS
    if name == "lop3" and place == 3:
        return [0xCA]
    if kind in FORMATS:
        edges = _float_edges(FORMATS[kind])
        if name == "cvt" and kind == "f32":
            edges += _HALVES
        if name == "cvt" and kind == "f64":
            edges += [
                int(np.float64(np.uint32(h).view(np.float32)).view(np.uint64)) for h in _HALVES
            ]
        return edges
    return _integer_edges(WIDTHS[kind])


def _drawn(draw, kind, table):
    if draw.randrange(4) == 0 or kind == "pred" or len(table) == 1:
        return draw.choice(table)
    if table is _COUNTS:
        return draw.randrange(70)
    if kind in FORMATS:
        return _random_float(draw, FORMATS[kind])
    return draw.getrandbits(WIDTHS[kind]) >> draw.randrange(WIDTHS[kind])


def is_nan(bits, kind):
    """Return whether a result is a NaN of its type; in f32 there is but one."""
    if kind in ("f32", "f16", "bf16"):
        return bits == {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}[kind]
    return kind == "f64" and bits & (F64.sign_bit - 1) > F64.infinity


__all__ = ["BF16", "F16", "HEAD", "SAMPLES", "applying", "is_nan", "kernel", "operands"]

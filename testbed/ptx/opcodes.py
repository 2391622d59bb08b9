"""The opcodes that compute from registers alone: how each is spelt, and its function in machine/.

A row has the opcode's name, its modifiers in PTX's order, and the form of its operands. Its
function's template arguments are the modifiers; one that is left out has a default.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Opcode:
    """One spelling: the C++ function to call, and the types of its result and operands."""

    function: str
    result: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class _Slot:
    """The spellings of one modifier with their C++ names; the empty one if it may be left out."""

    choices: tuple[tuple[str, str], ...]


def _slot(text: str, absent: str | None = None, **names: str) -> _Slot:
    choices = [(word, names.get(word, word)) for word in text.split()]
    return _Slot((*choices, *([("", absent)] if absent is not None else [])))


_ROUND = _slot("rn rz rm rp")
_ROUNDED = _slot("rn rz rm rp", "rn")
_NEAREST = _slot("rn")
_INTEGRAL = _slot("rni rzi rmi rpi")
_FTZ = _slot("ftz", "keep")
_NO_FTZ = _slot("", "keep")
_SAT = _slot("sat", "open")
_NO_SAT = _slot("", "open")
_NAN = _slot("NaN", "number")
_F32, _F64 = _slot("f32"), _slot("f64")
_INTEGERS = _slot("u16 s16 u32 s32 u64 s64")
_BYTES = _slot("u8 s8 u16 s16 u32 s32 u64 s64")
_BITS = _slot("b16 b32 b64")
_LONG_BITS = _slot("b32 b64")
_PART = _slot("lo hi", lo="low", hi="high")
_HALF = _slot("f16 bf16")
_INT_COMPARE = _slot("eq ne lt le gt ge")
_UNSIGNED_COMPARE = _slot("lo ls hi hs")
_FLOAT_COMPARE = _slot("eq ne lt le gt ge equ neu ltu leu gtu geu num nan")

_Row = tuple[str, tuple[_Slot, ...], str] | tuple[str, tuple[_Slot, ...], str, str]

# (names, modifiers, form, C++ function if it is not called like the opcode). A form has the
# result and the operands: T is the last modifier, S the one before it, W twice as wide as T.
_ROWS: tuple[_Row, ...] = (
    ("add sub min max div rem", (_INTEGERS,), "T T T"),
    ("mul", (_PART, _INTEGERS), "T T T"),
    ("mul", (_slot("wide"), _slot("u16 s16 u32 s32")), "W T T"),
    ("mad", (_PART, _INTEGERS), "T T T T"),
    ("mad", (_slot("wide"), _slot("u16 s16 u32 s32")), "W T T W"),
    ("sad", (_INTEGERS,), "T T T T"),
    ("abs neg", (_slot("s16 s32 s64"),), "T T"),
    ("and or xor", (_slot("pred b16 b32 b64"),), "T T T"),
    ("not", (_slot("pred b16 b32 b64"),), "T T"),
    ("cnot", (_BITS,), "T T"),
    ("shl", (_BITS,), "T T b32"),
    ("shr", (_slot("b16 b32 b64 u16 s16 u32 s32 u64 s64"),), "T T b32"),
    ("shf", (_slot("l r"), _slot("wrap clamp"), _slot("b32")), "T T T T", "shf<{0}, {1}>"),
    ("popc clz", (_LONG_BITS,), "b32 T"),
    ("brev", (_LONG_BITS,), "T T"),
    ("bfind", (_slot("u32 s32 u64 s64"),), "b32 T"),
    ("bfe", (_slot("u32 s32 u64 s64"),), "T T b32 b32"),
    ("bfi", (_LONG_BITS,), "T T T b32 b32"),
    ("lop3", (_slot("b32"),), "T T T T b32", "lop3"),
    ("prmt", (_slot("b32"), _slot("f4e b4e rc8 ecl ecr rc16", "any")), "S S S S", "prmt<{1}>"),
    ("selp", (_slot("b16 b32 b64 u16 s16 u32 s32 u64 s64 f32 f64"),), "T T T pred"),
    ("slct", (_slot("b32 b64 u32 s32 u64 s64 f32 f64"), _slot("s32")), "S S S T",
     "slct_by_integer<{0}>"),
    ("slct", (_FTZ, _slot("b32 b64 u32 s32 u64 s64 f32 f64"), _F32), "S S S T", "slct<{0}, {1}>"),
    ("setp", (_INT_COMPARE, _INTEGERS), "pred T T"),
    ("setp", (_UNSIGNED_COMPARE, _slot("u16 u32 u64")), "pred T T"),
    ("setp", (_slot("eq ne"), _BITS), "pred T T"),
    ("setp", (_FLOAT_COMPARE, _FTZ, _F32), "pred T T"),
    ("setp", (_FLOAT_COMPARE, _NO_FTZ, _F64), "pred T T"),
    ("add sub mul", (_ROUNDED, _FTZ, _SAT, _F32), "T T T"),
    ("add sub mul", (_ROUNDED, _NO_FTZ, _NO_SAT, _F64), "T T T"),
    ("fma", (_ROUND, _FTZ, _SAT, _F32), "T T T T"),
    ("fma", (_ROUND, _NO_FTZ, _NO_SAT, _F64), "T T T T"),
    ("mad", (_ROUND, _FTZ, _SAT, _F32), "T T T T", "fma<{0}, {1}, {2}, {3}>"),
    ("mad", (_ROUND, _NO_FTZ, _NO_SAT, _F64), "T T T T", "fma<{0}, {1}, {2}, {3}>"),
    ("div", (_ROUND, _FTZ, _NO_SAT, _F32), "T T T"),
    ("div", (_ROUND, _NO_FTZ, _NO_SAT, _F64), "T T T"),
    ("sqrt rcp", (_ROUND, _FTZ, _F32), "T T"),
    ("sqrt rcp", (_ROUND, _NO_FTZ, _F64), "T T"),
    ("add sub mul", (_NEAREST, _FTZ, _slot("f32x2")), "b64 b64 b64", "{name}_pair<{0}, {1}>"),
    ("fma", (_NEAREST, _FTZ, _slot("f32x2")), "b64 b64 b64 b64", "fma_pair<{0}, {1}>"),
    ("abs neg", (_FTZ, _F32), "T T"),
    ("abs neg", (_NO_FTZ, _F64), "T T"),
    ("min max", (_FTZ, _NAN, _F32), "T T T"),
    ("min max", (_NO_FTZ, _slot("", "number"), _F64), "T T T"),
    ("copysign", (_slot("f32 f64"),), "T T T"),
    ("testp", (_slot("finite infinite number notanumber normal subnormal", number="a_number"),
               _slot("f32 f64")), "pred T"),
    ("cvt", (_NO_SAT, _BYTES, _BYTES), "S T"),
    ("cvt", (_slot("sat"), _BYTES, _BYTES), "S T"),
    ("cvt", (_ROUND, _slot("f32 f64"), _BYTES), "S T", "from_integer<{0}, {1}, {2}>"),
    ("cvt", (_INTEGRAL, _FTZ, _INTEGERS, _F32), "S T", "to_integer<{0}, {1}, {2}, {3}>"),
    ("cvt", (_INTEGRAL, _NO_FTZ, _INTEGERS, _F64), "S T", "to_integer<{0}, {1}, {2}, {3}>"),
    ("cvt", (_INTEGRAL, _FTZ, _F32, _F32), "S T", "to_integral<{0}, {1}, {3}>"),
    ("cvt", (_INTEGRAL, _NO_FTZ, _F64, _F64), "S T", "to_integral<{0}, {1}, {3}>"),
    ("cvt", (_FTZ, _slot("sat"), _F32, _F32), "S T", "saturated<{0}>"),
    ("cvt", (_FTZ, _F64, _F32), "S T", "widened<{0}>"),
    ("cvt", (_ROUND, _FTZ, _SAT, _F32, _F64), "S T", "narrowed<{0}, {1}, {2}>"),
    ("cvt", (_F32, _HALF), "S T", "to_f32<{1}>"),
    ("cvt", (_F64, _HALF), "S T", "to_f64<{1}>"),
    ("cvt", (_slot("rn rz"), _slot("relu", "signed_"), _HALF, _F32), "S T",
     "narrowed_16<{0}, {1}, {2}, {3}>"),
    ("cvt", (_slot("rn rz"), _HALF, _F64), "S T", "narrowed_16<{0}, signed_, {1}, {2}>"),
    ("cvt", (_slot("rn rz"), _slot("relu", "signed_"), _slot("f16x2 bf16x2", f16x2="f16",
     bf16x2="bf16"), _F32), "b32 T T", "packed_16<{0}, {1}, {2}>"),
    ("rcp sqrt rsqrt ex2 lg2", (_slot("approx"), _FTZ, _F32), "T T", "{name}_approx<{1}, f32>"),
    ("div", (_slot("approx full"), _FTZ, _F32), "T T T", "div_approx<{1}, f32>"),
    ("rcp rsqrt", (_slot("approx"), _slot("ftz"), _F64), "T T", "{name}_approx_double"),
    ("rsqrt", (_slot("approx"), _F64), "T T", "rsqrt_approx_double"),
)  # fmt: skip
_WIDER = {"u16": "b32", "s16": "b32", "u32": "b64", "s32": "b64"}
_KEYWORDS = {"and", "or", "xor", "not"}


def _expand(row: _Row) -> Iterator[tuple[str, Opcode]]:
    names, slots, form = row[:3]
    for name in names.split():
        for chosen in itertools.product(*(slot.choices for slot in slots)):
            words = [word for word, _ in chosen]
            arguments = [argument for _, argument in chosen]
            if len(row) == 4:
                function = row[3].format(*arguments, name=name)
            else:
                function = f"{name}_" if name in _KEYWORDS else name
                function += f"<{', '.join(arguments)}>"
            last, before = words[-1], words[-2] if len(words) > 1 else ""
            types = {"T": last, "S": before, "W": _WIDER.get(last, "")}
            result, *operands = (types.get(kind, kind) for kind in form.split())
            spelling = ".".join(filter(None, [name, *words]))
            yield spelling, Opcode(function, result, tuple(operands))


OPCODES: dict[str, Opcode] = dict(entry for row in _ROWS for entry in _expand(row))
WIDTHS = {"pred": 1, "f16": 16, "bf16": 16} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)
}


def cpp_type(kind: str) -> str:
    """Return the C++ type that holds the bits of a register of this kind."""
    return f"u{max(8, WIDTHS[kind])}"

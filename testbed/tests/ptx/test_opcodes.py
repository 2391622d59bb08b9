"""Every opcode against exact arithmetic, through parser, translator and machine."""

import numpy as np
import pytest

from testbed.ptx import PtxDevice
from testbed.ptx.opcodes import OPCODES
from testbed.tests.ptx.exact import FORMATS, as_float, decode
from testbed.tests.ptx.oracles import EXACT, oracle
from testbed.tests.ptx.programs import SAMPLES, applying, is_nan, kernel, operands


def run(opcodes, rows):
    """The results of each opcode on its own rows of operands."""
    device = PtxDevice()
    given = np.zeros((len(opcodes), 4, SAMPLES), np.uint64)
    for number, row in enumerate(rows):
        given[number, : len(row[0])] = np.array(row, np.uint64).T
    out = device.xp.empty((len(opcodes), SAMPLES), np.uint64)
    apply = device.load(applying(opcodes)).get_function("apply")
    apply((1,), (SAMPLES,), (device.xp.asarray(given), out))
    return out.tolist()


def by_family():
    """Opcodes in as few kernels as compile quickly: by name and by what they compute with."""
    found = {}
    for spelling in sorted(EXACT):
        name, kind = spelling.partition(".")[0], OPCODES[spelling].operands[0]
        family = "cvt" if name == "cvt" else "floats" if kind in FORMATS else "integers"
        found.setdefault(family, []).append(spelling)
    size = 130
    return {
        f"{family}-{at // size}": names[at : at + size]
        for family, names in found.items()
        for at in range(0, len(names), size)
    }


FAMILIES = by_family()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact(family):
    opcodes = FAMILIES[family]
    rows = [operands(spelling) for spelling in opcodes]
    wrong = []
    for spelling, row, results in zip(opcodes, rows, run(opcodes, rows), strict=True):
        compute, kind = oracle(spelling), OPCODES[spelling].result
        for given, got in zip(row, results, strict=True):
            expected = compute(*given)
            if not (is_nan(got, kind) if expected is None else got == expected):
                shown = "NaN" if expected is None else f"{expected:#x}"
                wrong.append(f"{spelling} {[hex(g) for g in given]}: {got:#x}, not {shown}")
                break
    assert wrong == []


# What PTX states for each: units in the last place, or of the result's size.
APPROXIMATE = {
    "rcp.approx": (lambda a: 1 / a, 2.0**-23),
    "sqrt.approx": (np.sqrt, 2.0**-23),
    "rsqrt.approx": (lambda a: 1 / np.sqrt(a), 2.0**-22.9),
    "ex2.approx": (np.exp2, 2.0**-22),
    "lg2.approx": (np.log2, 2.0**-22),
}


def test_approximate():
    opcodes = sorted(set(OPCODES) - EXACT)
    assert {".".join(name.split(".")[:2]) for name in opcodes} == {
        *APPROXIMATE,
        *("div.approx", "div.full"),
    }
    opcodes = [name for name in opcodes if not name.startswith("div")]
    rows = [operands(spelling) for spelling in opcodes]
    for spelling, row, results in zip(opcodes, rows, run(opcodes, rows), strict=True):
        function, bound = APPROXIMATE[".".join(spelling.split(".")[:2])]
        form = FORMATS[spelling.split(".")[-1]]
        bound = bound if form is FORMATS["f32"] else 2.0**-20
        given = np.array([as_float(decode(bits[0], form)) for bits in row])
        got = np.array([as_float(decode(bits, form)) for bits in results])
        with np.errstate(all="ignore"):
            expected = function(given)
        usual = np.isfinite(expected) & (np.abs(expected) > 2.0**-125)
        usual &= (np.abs(expected) < 2.0**127) & (np.abs(given) > 2.0**-125)
        assert usual.sum() > SAMPLES / 8
        error, size = np.abs(got[usual] - expected[usual]), np.abs(expected[usual])
        if spelling.startswith("lg2"):
            size = np.maximum(size, 1)  # near 1 the error is absolute
        assert (error / size).max() <= bound, spelling


@pytest.mark.parametrize("kind", ["approx", "full"])
def test_approximate_division(kind):
    opcodes = [f"div.{kind}.f32", f"div.{kind}.ftz.f32"]
    rows = [[(b, 0x40400000) for (b,) in operands("rcp.approx.f32")] for _ in opcodes]
    for row, results in zip(rows, run(opcodes, rows), strict=True):
        for (a, _), got in zip(row, results, strict=True):
            number = as_float(decode(a, FORMATS["f32"]))
            if 2.0**-120 < abs(number) < 2.0**127:
                quotient = as_float(decode(got, FORMATS["f32"]))
                assert abs(quotient - number / 3) <= 2.0**-22 * abs(number)


# The 16-bit formats, exhaustively

WIDE = {"f16": np.float16, "bf16": None}


def every_value(kind):
    """All 65,536 patterns as f32: exact, by the definition of each format."""
    patterns = np.arange(1 << 16, dtype=np.uint32)
    if kind == "bf16":
        return (patterns << 16).view(np.float32)
    return patterns.astype(np.uint16).view(np.float16).astype(np.float32)


def map_array(code, source, results):
    """Put a piece of PTX (%r0 in, %rd0 or %r1 out) to an array of u32, by many threads."""
    device = PtxDevice()
    given = device.xp.asarray(source)
    out = device.xp.empty(source.shape, results)
    load, store = 4, np.dtype(results).itemsize
    body = f"""
  ld.param.u64 %rd60, [in];
  ld.param.u64 %rd61, [out];
  mov.u32 %r60, %ctaid.x;
  mov.u32 %r61, %ntid.x;
  mov.u32 %r62, %tid.x;
  mad.lo.s32 %r60, %r60, %r61, %r62;
  mul.wide.u32 %rd62, %r60, {load};
  add.s64 %rd60, %rd60, %rd62;
  mul.wide.u32 %rd62, %r60, {store};
  add.s64 %rd61, %rd61, %rd62;
  ld.global.b32 %r0, [%rd60];
  {code}
  st.global.b{8 * store} [%rd61], {"%r1" if store == 4 else "%rd1"};
"""
    text = kernel("convert", ("in", "out"), body)
    device.load(text).get_function("convert")((source.size // 256,), (256,), (given, out))
    return np.array(out)


@pytest.mark.parametrize("kind", WIDE)
def test_widening_of_every_value(kind):
    patterns = np.arange(1 << 16, dtype=np.uint32)
    take = "cvt.u16.u32 %rs0, %r0;"
    single = map_array(f"{take} cvt.f32.{kind} %r1, %rs0;", patterns, np.uint32)
    double = map_array(f"{take} cvt.f64.{kind} %rd1, %rs0;", patterns, np.uint64)
    expected = every_value(kind)
    np.testing.assert_array_equal(single.view(np.float32), expected)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(double.view(np.float64), expected.astype(np.float64))
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(single.view(np.float32))[zeros], [False, True])


@pytest.mark.parametrize("kind", WIDE)
def test_narrowing_at_every_tie(kind):
    values = every_value(kind)
    top = 0x7C00 if kind == "f16" else 0x7F80
    down = np.arange(top, dtype=np.uint32)  # each number, and its neighbour away from zero
    low = values[:top].astype(np.float64)
    high = np.append(low[1:], 2.0 ** (16 if kind == "f16" else 128))
    middle = ((low + high) / 2).astype(np.float32)
    bits = middle.view(np.uint32)
    given = np.concatenate([low.astype(np.float32).view(np.uint32), bits - 1, bits, bits + 1])
    nearest = np.concatenate([down, down, down + down % 2, down + 1])
    toward_zero = np.concatenate([down] * 4)
    given = np.concatenate([given, given | 1 << 31])
    padding = -given.size % 256
    for mode, expected in (("rn", nearest), ("rz", toward_zero)):
        both = np.concatenate([expected, expected | 0x8000])
        padded = np.append(given, np.zeros(padding, np.uint32)).astype(np.uint32)
        single = f"cvt.{mode}.{kind}.f32 %rs1, %r0; cvt.u32.u16 %r1, %rs1;"
        got = map_array(single, padded, np.uint32)[: given.size]
        np.testing.assert_array_equal(got, both)
        packed = f"mov.b32 %r2, 0x3F800000; cvt.{mode}.{kind}x2.f32 %r1, %r0, %r2;"
        got = map_array(packed, padded, np.uint32)[: given.size]
        one = 0x3C00 if kind == "f16" else 0x3F80
        np.testing.assert_array_equal(got, both << 16 | one)

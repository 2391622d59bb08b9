"""Products and sums that become one fma, and those that must not."""

import numpy as np
import pytest

from testbed.ptx import Module, PtxDevice, contract
from testbed.ptx.parse import Instruction
from testbed.tests.ptx.programs import kernel


def fused(text):
    """The opcodes of a body after contraction, and how many pairs were fused."""
    function = Module.of(kernel("k", ("x",), text)).functions["k"].parse()
    count = contract(function)
    return [i.opcode for i in function.body if isinstance(i, Instruction)][:-1], count


FUSED = {
    "mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;": ["fma.rn.f32"],
    "mul.f64 %fd1, %fd2, %fd3; add.f64 %fd4, %fd5, %fd1;": ["fma.rn.f64"],
    "mul.ftz.f32 %f1, %f2, %f3; add.ftz.f32 %f4, %f1, %f5;": ["fma.rn.ftz.f32"],
    "mul.f32 %f1, %f2, %f3; sub.f32 %f4, %f1, %f5;": ["neg.f32", "fma.rn.f32"],
    "mul.f32 %f1, %f2, %f3; sub.f32 %f4, %f5, %f1;": ["neg.f32", "fma.rn.f32"],
    "mul.f32 %f1, %f2, 0f40000000; sub.f32 %f4, %f1, 0f3F800000;": ["fma.rn.f32"],
    "mul.f32 %f1, %f2, %f3; mov.f32 %f9, %f8; add.f32 %f4, %f1, %f5;": ["mov.f32", "fma.rn.f32"],
    "mul.f32 %f1, %f2, %f3; mul.f32 %f4, %f5, %f6; add.f32 %f7, %f1, %f4;": [
        "mul.f32",
        "fma.rn.f32",
    ],
}
LEFT = {
    "a product that is rounded": "mul.rn.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;",
    "a sum that is rounded": "mul.f32 %f1, %f2, %f3; add.rn.f32 %f4, %f1, %f5;",
    "a second use": "mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5; st.global.f32 [%rd1], %f1;",
    "a square of the product": "mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f1;",
    "across a label": "mul.f32 %f1, %f2, %f3;\n$L1:\nadd.f32 %f4, %f1, %f5; bra $L1;",
    "across a branch": "mul.f32 %f1, %f2, %f3;\n@%p1 bra $L1;\nadd.f32 %f4, %f1, %f5;\n$L1:",
    "across a barrier": "mul.f32 %f1, %f2, %f3; bar.sync 0; add.f32 %f4, %f1, %f5;",
    "one flushes, the other not": "mul.ftz.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;",
    "a factor that changes": "mul.f32 %f1, %f2, %f3; mov.f32 %f2, %f6; add.f32 %f4, %f1, %f5;",
    "a product set twice": "mov.f32 %f1, %f9; mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;",
    "a guarded product": "@%p1 mul.f32 %f1, %f2, %f3; add.f32 %f4, %f1, %f5;",
    "a guarded sum": "mul.f32 %f1, %f2, %f3; @%p1 add.f32 %f4, %f1, %f5;",
    "a clamped sum": "mul.f32 %f1, %f2, %f3; add.sat.f32 %f4, %f1, %f5;",
    "integers": "mul.lo.s32 %r1, %r2, %r3; add.s32 %r4, %r1, %r5;",
}


@pytest.mark.parametrize("text", FUSED)
def test_fused(text):
    assert fused(text) == (FUSED[text], 1)


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name):
    function = Module.of(kernel("k", ("x",), LEFT[name])).functions["k"].parse()
    before = list(function.body)
    assert contract(function) == 0
    assert function.body == before


VALUES = np.array([1 + 2.0**-12, 1 - 2.0**-12, 3.0], np.float32)
FORMS = {
    "add.f32 %f4, %f3, %f5;": lambda a, b, c: a * b + c,
    "add.f32 %f4, %f5, %f3;": lambda a, b, c: a * b + c,
    "sub.f32 %f4, %f3, %f5;": lambda a, b, c: a * b - c,
    "sub.f32 %f4, %f5, %f3;": lambda a, b, c: c - a * b,
    "sub.f32 %f4, %f3, 0f3F800000;": lambda a, b, _: a * b - 1,
    "sub.f32 %f4, 0f3F800000, %f3;": lambda a, b, _: 1 - a * b,
}


@pytest.mark.parametrize("contracted", [False, True])
def test_values(contracted):
    lines = [
        "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];",
        "ld.global.f32 %f1, [%rd1]; ld.global.f32 %f2, [%rd1+4]; ld.global.f32 %f5, [%rd1+8];",
    ]
    for number, form in enumerate(FORMS):
        own = f"{{ .reg .f32 %own; mul.f32 %own, %f1, %f2; {form.replace('%f3', '%own')} }}"
        lines += [own, f"st.global.f32 [%rd2+{4 * number}], %f4;"]
    device = PtxDevice(contracted=contracted)
    out = device.xp.empty(len(FORMS), np.float32)
    run = device.load(kernel("k", ("x", "out"), "\n".join(lines))).get_function("k")
    run((1,), (1,), (device.xp.asarray(VALUES), out))
    a, b, c = VALUES if not contracted else VALUES.astype(np.float64)  # exact, rounded once
    assert out.tolist() == [np.float32(compute(a, b, c)) for compute in FORMS.values()]

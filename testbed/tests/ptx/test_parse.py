"""PTX as text: what is known is read to the letter, and anything else is an error with its line."""

import pytest

from testbed.ptx import Module, UnsupportedPtxError, translate
from testbed.ptx.parse import Address, Immediate, Instruction, Label, Pair, Register, Symbol, Vector
from testbed.tests.ptx.programs import HEAD, kernel


def body_of(text, registers=""):
    return Module.of(kernel("k", ("x",), text, registers)).functions["k"].parse().body


def test_operands():
    found = body_of(
        "{ .reg .b32 %t; mov.b64 {%t, _}, %rd1; }\n"
        "ld.global.v2.f32 {%f1, %f2}, [%rd2+-8];\n"
        "@!%p1 bra $L__BB0_2;\n"
        "$L__BB0_2:\n"
        "shfl.sync.bfly.b32 %r3|%p2, %r4, -1, 0x1f, 4294967295U;\n"
        "fma.rn.f32 %f1, %f2, 0fBF800000, %f3; // -1\n"
        "mov.u64 %rd3, somewhere;\n"
    )
    (load,) = (i for i in found if isinstance(i, Instruction) and i.opcode.startswith("ld"))
    assert load.operands == (
        Vector((Register("f1_0", "f32"), Register("f2_0", "f32"))),
        Address(Register("rd2_0", "b64"), -8),
    )
    assert found[0].operands[0] == Vector((Register("t_1", "b32"), None))
    branch, label, shuffle, fma, move, _ = found[2:]
    assert branch.guard == Register("p1_0", "pred", negated=True)
    assert branch.operands == (Symbol("L_L__BB0_2_0"),) == (Symbol(label.name),)
    assert isinstance(label, Label)
    assert shuffle.operands[0] == Pair(Register("r3_0", "b32"), Register("p2_0", "pred"))
    assert shuffle.operands[2:] == (Immediate(-1), Immediate(31), Immediate(2**32 - 1))
    assert fma.operands[2] == Immediate(0xBF800000, 32)
    assert move.operands[1] == Symbol("somewhere")
    assert fma.line == shuffle.line + 1


def test_heads():
    module = Module.of(
        HEAD
        + """
.global .align 4 .u32 four[2] = {1, -1};
.func (.param .b32 out) f(.param .b64 a);
.visible .entry k(
  .param .u64 .ptr .global .align 16 p,
  .param .align 8 .b8 list[40],
  .param .f32 s
)
.maxntid 32, 4, 1
.minnctapersm 2
{
  ret;
}
.func (.param .b32 out) f(.param .b64 a)
{
  ret;
}
"""
    )
    assert list(module.functions) == ["k", "f"]
    assert module.variables["four"].initial == b"\1\0\0\0\xff\xff\xff\xff"
    function = module.functions["k"].parse()
    assert (function.is_entry, function.max_threads) == (True, 128)
    assert [(p.name, p.size, p.alignment) for p in function.parameters] == [
        ("p", 8, 8),
        ("list", 40, 8),
        ("s", 4, 4),
    ]
    called = module.functions["f"].parse()
    assert [v.name for v in called.returned + called.parameters] == ["out", "a"]


UNKNOWN = {
    "opcode": "frobnicate.u32 %r1, %r2;",
    "modifier": "add.rn.u32 %r1, %r2, %r3;",
    "order of modifiers": "add.ftz.rn.f32 %f1, %f2, %f3;",
    "type": "add.f16 %rs1, %rs2, %rs3;",
    "operands": "add.u32 %r1, %r2;",
    "width of a register": "add.u32 %r1, %r2, %rd3;",
    "width of a result": "add.u64 %r1, %rd2, %rd3;",
    "predicate": "selp.u32 %r1, %r2, %r3, %r4;",
    "immediate": "add.f32 %f1, %f2, 1;",
    "double immediate": "add.f32 %f1, %f2, 0d3FF0000000000000;",
    "symbol": "mov.u64 %rd1, nowhere;",
    "hint": "ld.global.L1::whatever.u32 %r1, [%rd1];",
    "cache policy": "ld.global.L2::cache_hint.u32 %r1, [%rd1], %rd2;",
    "strong load": "ld.acquire.gpu.global.u32 %r1, [%rd1];",
    "vector": "ld.global.v4.u32 {%r1, %r2}, [%rd1];",
    "vector of 64 bytes": "ld.global.v8.u64 {%rd1,%rd2,%rd3,%rd4,%rd5,%rd6,%rd7,%rd8}, [%rd9];",
    "store to constants": "st.const.u32 [%rd1], %r1;",
    "parameter": "ld.param.u64 %rd1, [x+8];",
    "barrier": "bar.sync 1;",
    "counted barrier": "bar.sync 0, 64;",
    "reduction by a barrier": "bar.red.xor.pred %p1, 0, %p2;",
    "shuffle": "shfl.sync.rotate.b32 %r1, %r2, 1, 31, -1;",
    "old shuffle": "shfl.bfly.b32 %r1, %r2, 1, 31;",
    "vote": "vote.ballot.b32 %r1, %p1;",
    "reduction": "redux.sync.add.f32 %f1, %f2, -1;",
    "atomic": "atom.global.add.f32 %f1, [%rd1], %f2;",
    "fence": "fence.proxy.async;",
    "asynchronous copy": "cp.async.wait_all;",
    "call": "call.uni vprintf;",
    "indirect call": "call %rd1, (x);",
    "branch": "brx.idx %r1, $L;",
    "special register": "mov.u64 %rd1, %globaltimer;",
    "address": "ld.global.u32 %r1, %rd1;",
    "register": "add.u32 %r1, %r2, %nothing;",
    "register beyond the last": "add.u32 %r1, %r2, %r64;",
    "pragma": '.pragma "something";',
    "directive": ".branchtargets A, B;",
    "variable": ".global .u32 state;",
    "kind of register": ".reg .b128 %q<2>;",
    "character": "add.u32 %r1, %r2, #3;",
    "wide move": "mov.b128 %rd1, %rd2;",
    "space of an address": "cvta.shared.u32 %r1, %r2;",
    "conversion": "cvt.rna.tf32.f32 %r1, %f1;",
    "matrix": "wmma.load.a.sync.f16 %r1, [%rd1];",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    text = kernel("k", ("x",), UNKNOWN[name])
    with pytest.raises(UnsupportedPtxError) as caught:
        translate(Module.of(text), "k")
    assert caught.value.function == "k"
    assert text.split("\n")[caught.value.line - 1] == UNKNOWN[name]
    assert UNKNOWN[name] in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        ".visible .global .texref picture;",
        ".alias a, b;",
        ".surfref s;",
        ".entry k() .maxclusterrank 2 { ret; }",
        "trailing",
    ],
)
def test_unknown_at_the_top_level(line):
    with pytest.raises(UnsupportedPtxError) as caught:
        Module.of(f"{HEAD}\n{line}\n")
    assert caught.value.line == 5
    assert line.removesuffix(" ret; }") in str(caught.value)


def test_a_kernel_that_is_not_asked_for_is_not_read():
    text = kernel("good", ("x",), "") + kernel("bad", ("x",), "frobnicate;").removeprefix(HEAD)
    module = Module.of(text)
    assert translate(module, "good").opcodes == {"ret": 1}
    with pytest.raises(UnsupportedPtxError, match="frobnicate"):
        translate(module, "bad")

"""Instructions that are no arithmetic: memory, predicates, shuffles, votes, atomics, calls."""

import itertools

import numpy as np
import pytest

from testbed.emulator.runtime import SCHEDULES
from testbed.ptx import PtxDevice
from testbed.tests.ptx.programs import HEAD, kernel

START = """
  ld.param.u64 %rd0, [x];
  cvta.to.global.u64 %rd0, %rd0;
  ld.param.u64 %rd9, [out];
  cvta.to.global.u64 %rd9, %rd9;
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd8, %r0, 4;
  add.s64 %rd7, %rd0, %rd8;
  add.s64 %rd8, %rd9, %rd8;
"""


def run(body, x, out, *, threads=1, grid=1, shared=0, registers="", schedule="ascending"):
    """Run a piece of PTX: x and out in %rd0 and %rd9, a thread's own words in %rd7 and %rd8."""
    device = PtxDevice(schedule=schedule)
    given, result = device.xp.asarray(x), device.xp.zeros(np.shape(out), np.asarray(out).dtype)
    text = kernel("tried", ("x", "out"), START + body, registers)
    device.load(text).get_function("tried")((grid,), (threads,), (given, result), shared)
    return np.array(result)


WORDS = np.arange(1, 65, dtype=np.uint32) * 0x01010101
VECTORS = [
    ("v2.b16", ("%rs0", "%rs1"), 4),
    ("v4.u16", ("%rs0", "%rs1", "%rs2", "%rs3"), 8),
    ("v2.u8", ("%rs0", "%rs1"), 2),
    ("v2.b32", ("%r1", "%r2"), 8),
    ("v4.f32", ("%f1", "%f2", "%f3", "%f4"), 16),
    ("v2.f64", ("%fd1", "%fd2"), 16),
    ("v2.b64", ("%rd1", "%rd2"), 16),
    ("v4.b64", ("%rd1", "%rd2", "%rd3", "%rd4"), 32),
    ("v8.b32", tuple(f"%r{k}" for k in range(1, 9)), 32),
    ("u8", ("%rs0",), 1),
    ("s8", ("%rs0",), 1),
    ("b16", ("%rs0",), 2),
    ("f32", ("%f1",), 4),
    ("s64", ("%rd1",), 8),
]


@pytest.mark.parametrize("load", ["global", "global.nc", "global.nc.L1::no_allocate.L2::256B", ""])
def test_loads_and_stores_of_every_form(load):
    lines, expected = [], np.zeros((len(VECTORS), 64), np.uint8)
    for number, (form, names, size) in enumerate(VECTORS):
        listed = f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]
        lines.append(f"ld{load and '.'}{load}.{form} {listed}, [%rd0+32];")
        lines.append(f"st.global.cs.{form} [%rd5+{64 * number + 32}], {listed};")
        expected[number, 32 : 32 + size] = WORDS.view(np.uint8)[32 : 32 + size]
    out = np.zeros((len(VECTORS), 16), np.uint32)
    got = run("mov.u64 %rd5, %rd9;" + "\n".join(lines), WORDS, out)
    np.testing.assert_array_equal(got.view(np.uint8), expected)


def test_narrow_loads_extend():
    body = """
  ld.global.s8 %r1, [%rd0];
  ld.global.u8 %r2, [%rd0];
  ld.global.s16 %r3, [%rd0];
  ld.global.s32 %rd1, [%rd0];
  cvt.u32.u64 %r4, %rd1;
  shr.u64 %rd1, %rd1, 32;
  cvt.u32.u64 %r5, %rd1;
  st.global.v4.u32 [%rd9], {%r1, %r2, %r3, %r4};
  st.global.u32 [%rd9+16], %r5;
  st.global.u8 [%rd9+20], %r1;"""
    got = run(body, np.array([0x8081_8283], np.uint32), np.zeros(8, np.uint32))
    assert [hex(word) for word in got] == [
        *("0xffffff83", "0x83", "0xffff8283", "0x80818283", "0xffffffff", "0x83", "0x0", "0x0"),
    ]


def test_spaces_and_generic_addresses():
    body = """
  mov.u32 %r1, buffer;
  mov.u64 %rd1, more;
  cvta.shared.u64 %rd2, %rd1;
  st.shared.u32 [%r1+4], 11;
  st.u32 [%rd2], 12;
  ld.shared.u32 %r2, [%rd1];
  ld.shared.u32 %r3, [buffer+4];
  cvta.to.shared.u64 %rd3, %rd2;
  sub.s64 %rd3, %rd3, %rd1;
  cvt.u32.u64 %r4, %rd3;
  mov.u64 %rd4, depot;
  cvta.local.u64 %rd5, %rd4;
  st.local.u32 [%rd4+8], 13;
  ld.u32 %r5, [%rd5+8];
  ld.local.u32 %r6, [depot+8];
  mov.b64 %rd6, x;
  ld.param.u64 %rd6, [%rd6];
  setp.eq.u64 %p1, %rd6, %rd0;
  selp.u32 %r7, 1, 0, %p1;
  st.global.v4.u32 [%rd9], {%r2, %r3, %r4, %r5};
  st.global.v2.u32 [%rd9+16], {%r6, %r7};"""
    registers = ".shared .align 4 .b8 buffer[8];\n.local .align 8 .b8 depot[16];"
    text = kernel("tried", ("x", "out"), START + body, registers)
    text = text.replace(HEAD, f"{HEAD}.extern .shared .align 16 .b8 more[];\n")
    device = PtxDevice()
    out = device.xp.zeros(6, np.uint32)
    run = device.load(text).get_function("tried")
    run((1,), (1,), (device.xp.zeros(1, np.uint32), out), 16)
    assert out.tolist() == [12, 11, 0, 13, 13, 1]
    assert run.max_dynamic_shared_size_bytes == 48 * 1024 - 8


def test_constants_of_the_module():
    body = """
  ld.global.u32 %r1, [table+4];
  mov.u64 %rd1, small;
  ld.const.u16 %r2, [%rd1+2];
  st.global.v2.u32 [%rd9], {%r1, %r2};"""
    text = kernel("tried", ("x", "out"), START + body).replace(
        HEAD,
        f"{HEAD}.global .align 4 .u32 table[2] = {{7, 9}};\n"
        ".visible .const .align 2 .b8 small[4] = {1, 2, 3, 4};\n",
    )
    device = PtxDevice()
    out = device.xp.zeros(2, np.uint32)
    device.load(text).get_function("tried")((1,), (1,), (device.xp.zeros(1, np.uint32), out))
    assert out.tolist() == [9, 0x0403]


def test_moves_that_pack_and_take_apart():
    body = """
  ld.global.u64 %rd1, [%rd0];
  mov.b64 {%r1, %r2}, %rd1;
  mov.b64 %rd2, {%r2, %r1};
  mov.b64 {%rs0, %rs1, %rs2, %rs3}, %rd1;
  mov.b32 %r3, {%rs3, %rs0};
  mov.b64 {_, %r4}, %rd2;
  mov.b64 %fd1, %rd1;
  mov.b64 %rd3, %fd1;
  mov.b32 %f1, 0f3F800000;
  mov.b32 %r5, %f1;
  st.global.u64 [%rd9], %rd2;
  st.global.v2.u32 [%rd9+8], {%r3, %r4};
  st.global.u64 [%rd9+16], %rd3;
  st.global.u32 [%rd9+24], %r5;"""
    got = run(body, np.array([0x0123456789ABCDEF], np.uint64), np.zeros(4, np.uint64))
    assert [hex(word) for word in got] == [
        *("0x89abcdef01234567", "0x89abcdefcdef0123", "0x123456789abcdef", "0x3f800000"),
    ]


def test_predicates():
    body = """
  setp.lt.u32 %p1|%p2, %r0, 3;
  setp.ge.and.s32 %p3|%p4, %r0, 2, %p1;
  setp.eq.or.s32 %p5, %r0, 7, !%p1;
  setp.ne.xor.u32 %p6, %r0, 2, %p1;
  mov.pred %p7, 1;
  and.pred %p8, %p7, %p5;
  mov.u32 %r1, 0;
  @%p1 add.s32 %r1, %r1, 1;
  @%p2 add.s32 %r1, %r1, 2;
  @%p3 add.s32 %r1, %r1, 4;
  @%p4 add.s32 %r1, %r1, 8;
  @%p5 add.s32 %r1, %r1, 16;
  @%p6 add.s32 %r1, %r1, 32;
  @!%p8 add.s32 %r1, %r1, 64;
  st.global.u32 [%rd8], %r1;"""
    got = run(body, WORDS, np.zeros(8, np.uint32), threads=8)
    for i, bits in enumerate(got):
        less = i < 3
        expected = [less, not less, i >= 2 and less, i < 2 and less, i == 7 or not less]
        expected += [(i != 2) != less, not expected[4]]
        assert bits == sum(int(p) << k for k, p in enumerate(expected)), i


def source_lane(mode, lane, b, c):
    """Shfl.sync, as the PTX manual writes it out: the lane that is read, and the predicate."""
    clamp, mask = c & 31, c >> 8 & 31
    most, least = (lane & mask) | (clamp & ~mask), lane & mask
    if mode == "up":
        j = lane - b
        inside = j >= most
    elif mode == "down":
        j = lane + b
        inside = j <= most
    elif mode == "bfly":
        j = lane ^ b
        inside = j <= most
    else:
        j = least | (b & ~mask)
        inside = j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode):
    lines, expected = [], []
    cases = itertools.product((0, 16, 24, 30, 31), (0, 1, 3, 8, 31), (0, 9, 31))
    for k, (segment, b, limit) in enumerate(cases):
        c = segment << 8 | limit
        lines += [
            f"shfl.sync.{mode}.b32 %r1|%p1, %r2, {b}, {c}, -1;",
            "selp.u32 %r3, 1000, 0, %p1;",
            "add.u32 %r1, %r1, %r3;",
            f"st.global.u32 [%rd8+{128 * k}], %r1;",
        ]
        places = [source_lane(mode, lane, b, c) for lane in range(32)]
        expected.append([100 + lane + 1000 * inside for lane, inside in places])
    body = "add.u32 %r2, %r0, 100;\n" + "\n".join(lines)
    got = run(body, WORDS, np.zeros((75, 32), np.uint32), threads=32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_votes_and_reductions(schedule):
    body = """
  setp.gt.u32 %p1, %r0, 20;
  setp.lt.u32 %p2, %r0, 99;
  vote.sync.ballot.b32 %r1, %p1, -1;
  vote.sync.any.pred %p3, %p1, -1;
  vote.sync.all.pred %p4, %p1, -1;
  vote.sync.uni.pred %p5, %p2, -1;
  vote.sync.uni.pred %p6, %p1, -1;
  vote.sync.all.pred %p7, !%p1, -1;
  selp.u32 %r2, 1, 0, %p3;
  @%p4 add.u32 %r2, %r2, 2;
  @%p5 add.u32 %r2, %r2, 4;
  @%p6 add.u32 %r2, %r2, 8;
  @%p7 add.u32 %r2, %r2, 16;
  sub.s32 %r3, %r0, 16;
  redux.sync.add.s32 %r4, %r3, -1;
  redux.sync.min.s32 %r5, %r3, -1;
  redux.sync.min.u32 %r6, %r3, -1;
  redux.sync.max.u32 %r7, %r3, -1;
  redux.sync.xor.b32 %r8, %r3, -1;
  mov.u32 %r9, %lanemask_lt;
  mov.u32 %r10, %laneid;
  mov.u32 %r11, %warpid;
  mad.lo.u32 %r10, %r11, 100, %r10;
  bar.red.popc.u32 %r12, 0, %p1;
  bar.red.or.pred %p3, 0, %p1;
  bar.red.and.pred %p4, 0, %p1;
  selp.u32 %r13, 1, 0, %p3;
  @%p4 add.u32 %r13, %r13, 2;
  activemask.b32 %r14;
  shr.u32 %r14, %r14, %r10;
  setp.ne.u32 %p1, %r0, 40;
  @%p1 bra $L1;
  st.global.v4.u32 [%rd9], {%r1, %r2, %r4, %r5};
  st.global.v4.u32 [%rd9+16], {%r6, %r7, %r8, %r9};
  st.global.v4.u32 [%rd9+32], {%r10, %r12, %r13, %r14};
$L1:"""
    got = run(body, WORDS, np.zeros(12, np.uint32), threads=64, schedule=schedule)
    lanes = [lane + 32 - 16 for lane in range(32)]
    xor = 0
    for lane in lanes:
        xor ^= lane
    expected = [2**32 - 1, 1 + 2 + 4 + 8, sum(lanes), 16, 16, 47, xor, 0xFF]
    assert got.tolist() == [*expected, 108, 43, 1, 0]


def test_a_clock_moves_on():
    body = """
  mov.u64 %rd1, %clock64;
  mov.u64 %rd2, %clock64;
  setp.gt.u64 %p1, %rd2, %rd1;
  selp.u32 %r1, 1, 0, %p1;
  st.global.u32 [%rd9], %r1;"""
    assert run(body, WORDS, np.zeros(1, np.uint32)).tolist() == [1]


ATOMICS = {
    "add.u32": lambda old, a, _: old + a,
    "add.u64": lambda old, a, _: old + a,
    "inc.u32": lambda old, a, _: 0 if old >= a else old + 1,
    "dec.u32": lambda old, a, _: a if old == 0 or old > a else old - 1,
    "min.u32": lambda old, a, _: min(old, a),
    "max.u64": lambda old, a, _: max(old, a),
    "min.s32": lambda old, a, _: min(old, a, key=lambda v: v ^ 1 << 31),
    "max.s64": lambda old, a, _: max(old, a, key=lambda v: v ^ 1 << 63),
    "and.b32": lambda old, a, _: old & a,
    "or.b32": lambda old, a, _: old | a,
    "xor.b64": lambda old, a, _: old ^ a,
    "exch.b32": lambda _, a, __: a,
    "cas.b32": lambda old, a, b: b if old == a else old,
    "cas.b64": lambda old, a, b: b if old == a else old,
}
VALUES = (0, 1, 5, 6, 2**31 - 1, 2**31, 2**32 - 1)


@pytest.mark.parametrize("form", ["atom.global", "atom", "atom.acq_rel.gpu.global", "red.global"])
def test_atomics(form):
    is_silent = form.startswith("red")
    tried = [name for name in ATOMICS if not (is_silent and name.startswith(("exch", "cas")))]
    lines = []
    for number, operation in enumerate(tried):
        width = int(operation[-2:])
        register = "%r1" if width == 32 else "%rd1"
        third = ", 6" if operation.startswith("cas") else ""
        result = "" if is_silent else f"{register}, "
        lines.append(f"mov.b{width} {register}, 0;")
        for k, old in enumerate(VALUES):
            at = 16 * (number * len(VALUES) + k)
            lines += [
                f"st.global.u{width} [%rd9+{at}], {old};",
                f"{form}.{operation} {result}[%rd9+{at}], 5{third};",
                f"st.global.u{width} [%rd9+{at + 8}], {register};",
            ]
    got = run("\n".join(lines), WORDS, np.zeros((len(tried), len(VALUES), 2), np.uint64))
    for operation, results in zip(tried, got.tolist(), strict=True):
        for old, (now, before) in zip(VALUES, results, strict=True):
            assert now == ATOMICS[operation](old, 5, 6) % (1 << int(operation[-2:]))
            assert before == (0 if is_silent else old)


def test_the_last_block_to_arrive_sees_what_the_others_wrote():
    body = """
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %nctaid.x;
  add.s32 %r3, %r1, 10;
  mul.wide.u32 %rd1, %r1, 4;
  add.s64 %rd1, %rd9, %rd1;
  st.global.u32 [%rd1+64], %r3;
  fence.acq_rel.gpu;
  atom.global.inc.u32 %r4, [%rd9], %r2;
  add.s32 %r2, %r2, -1;
  setp.ne.u32 %p1, %r4, %r2;
  @%p1 bra $L2;
  membar.gl;
  mov.u32 %r5, 0;
  mov.u32 %r6, 0;
$L1:
  mul.wide.u32 %rd2, %r6, 4;
  add.s64 %rd2, %rd9, %rd2;
  ld.global.u32 %r7, [%rd2+64];
  add.s32 %r5, %r5, %r7;
  add.s32 %r6, %r6, 1;
  setp.le.u32 %p2, %r6, %r2;
  @%p2 bra $L1;
  prefetch.global.L2 [%rd9];
  st.global.u32 [%rd9+4], %r5;
$L2:"""
    for schedule in SCHEDULES:
        got = run(body, WORDS, np.zeros(32, np.uint32), grid=5, schedule=schedule)
        assert got[1] == sum(range(10, 15))


CALLED = """
.func (.param .b64 func_retval0) twice(.param .b64 twice_param_0, .param .b32 twice_param_1);
.func (.param .b64 func_retval0) twice(
  .param .b64 twice_param_0,
  .param .b32 twice_param_1
)
{
  .reg .f64 %fd<4>;
  .reg .b32 %r<2>;
  ld.param.f64 %fd1, [twice_param_0];
  ld.param.u32 %r1, [twice_param_1];
  cvt.rn.f64.u32 %fd2, %r1;
  mul.rn.f64 %fd3, %fd1, %fd2;
  st.param.f64 [func_retval0+0], %fd3;
  ret;
}
"""


def test_calls_and_scopes():
    once = """
  {
  .reg .b32 temp_param_reg;
  .param .b64 param0;
  st.param.f64 [param0+0], %fd1;
  .param .b32 param1;
  st.param.b32 [param1+0], FACTOR;
  .param .b64 retval0;
  call.uni (retval0), twice, (param0, param1);
  ld.param.f64 %fd1, [retval0+0];
  }
"""
    body = "ld.global.f64 %fd1, [%rd0];" + once.replace("FACTOR", "3") + once.replace("FACTOR", "5")
    text = kernel("tried", ("x", "out"), START + body + "st.global.f64 [%rd9], %fd1;")
    device = PtxDevice()
    out = device.xp.zeros(1, np.float64)
    module = device.load(text.replace(HEAD, HEAD + CALLED))
    module.get_function("tried")((1,), (1,), (device.xp.asarray(np.array([1.5])), out))
    assert out[0] == 22.5


def test_a_label_belongs_to_its_scope():
    part = "{\n.reg .b32 %n;\nmov.u32 %n, 0;\nAGAIN:\nadd.u32 %n, %n, 1;\nadd.u32 %r1, %r1, 1;\n"
    part += "setp.lt.u32 %p1, %n, LIMIT;\n@%p1 bra AGAIN;\n}\n"
    body = "mov.u32 %r1, 0;\n" + part.replace("LIMIT", "4") + part.replace("LIMIT", "7")
    got = run(f"{body} st.global.u32 [%rd9], %r1;", WORDS, np.zeros(1, np.uint32))
    assert got[0] == 11

"""Each check fires on a fault planted in PTX or in CUDA, and says where."""

import numpy as np
import pytest

from testbed.emulator import EmulatorFault
from testbed.emulator.runtime import SCHEDULES
from testbed.ptx import PtxDevice
from testbed.tests.ptx.programs import kernel

LOAD = "ld.param.u64 %rd0, [x]; cvta.to.global.u64 %rd0, %rd0;"
INDEX = "mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;"
SHARED = ".shared .align 16 .b8 buffer[128];"


def launch(body, *, threads=32, registers="", array=None, shared=0, schedule="ascending"):
    """Run a kernel over one array of 32 words."""
    device = PtxDevice(schedule=schedule)
    x = device.xp.zeros(32, np.uint32) if array is None else array(device)
    run = device.load(kernel("faulty", ("x",), f"{LOAD}\n{body}", registers)).get_function("faulty")
    run((1,), (threads,), (x,), shared)
    return x


def uninitialised(device):
    return device.xp.empty(32, np.uint32)


PLANTED = {
    "past the end": ("out-of-bounds", f"{INDEX} ld.global.u32 %r1, [%rd1+4];", {}),
    "before the start": ("out-of-bounds", f"{INDEX} st.global.u32 [%rd1+-4], %r0;", {}),
    "a vector over the end": (
        "out-of-bounds",
        "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0+128];",
        {"threads": 1},
    ),
    "null": ("null-pointer", "mov.u64 %rd1, 8; ld.global.u32 %r1, [%rd1];", {}),
    "misaligned word": ("misaligned", "ld.global.u32 %r1, [%rd0+2];", {}),
    "misaligned vector": (
        "misaligned",
        "ld.global.v2.u32 {%r1, %r2}, [%rd0+4];",
        {"threads": 1},
    ),
    "misaligned 32 bytes": (
        "misaligned",
        "ld.global.v4.u64 {%rd1, %rd2, %rd3, %rd4}, [%rd0+16];",
        {"threads": 1},
    ),
    "atomic out of bounds": ("out-of-bounds", "atom.global.add.u32 %r1, [%rd0+128], 1;", {}),
    "shared memory as global": (
        "out-of-bounds",
        "mov.u64 %rd1, buffer; cvta.shared.u64 %rd1, %rd1; ld.global.u32 %r1, [%rd1];",
        {"registers": SHARED},
    ),
    "past static shared memory": (
        "out-of-bounds",
        "mov.u32 %r1, buffer; st.shared.u32 [%r1+128], %r1;",
        {"registers": SHARED},
    ),
    "past dynamic shared memory": (
        "out-of-bounds",
        "mov.u32 %r1, 64; st.shared.u32 [%r1], %r1;",
        {"shared": 64},
    ),
    "far beyond shared memory": (
        "out-of-bounds",
        "mov.u32 %r1, -64; ld.shared.u32 %r1, [%r1];",
        {"registers": SHARED},
    ),
    "past the parameters": (
        "out-of-bounds",
        "mov.b64 %rd1, x; add.s64 %rd1, %rd1, 8; ld.param.u32 %r1, [%rd1];",
        {},
    ),
    "past local memory": (
        "out-of-bounds",
        "mov.u64 %rd1, depot; st.local.u32 [%rd1+16], 0;",
        {"registers": ".local .align 8 .b8 depot[16];"},
    ),
    "uninitialised": ("uninitialised", "ld.global.u32 %r1, [%rd0];", {"array": uninitialised}),
    "uninitialised shared": (
        "uninitialised",
        "mov.u32 %r1, buffer; ld.shared.u32 %r1, [%r1];",
        {"registers": SHARED},
    ),
    "race": (
        "race",
        f"{INDEX} st.global.u32 [%rd1], %r0; xor.b32 %r0, %r0, 1; mul.wide.u32 %rd1, %r0, 4;"
        "add.s64 %rd1, %rd0, %rd1; ld.global.u32 %r1, [%rd1];",
        {},
    ),
    "two barriers": (
        "barrier",
        "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 7;\n@%p0 bra $L1;\nbar.sync 0;\nbra $L2;\n"
        "$L1:\nbar.sync 0;\n$L2:",
        {},
    ),
    "a thread that returned": (
        "barrier",
        "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 31;\n@%p0 ret;\nbar.sync 0;",
        {},
    ),
    "a lane outside of the mask": (
        "shuffle",
        "mov.u32 %r0, %tid.x; setp.gt.u32 %p0, %r0, 15;\n@%p0 bra $L1;\n"
        "shfl.sync.bfly.b32 %r1, %r0, 16, 31, 65535;\n$L1:",
        {},
    ),
    "a mask without the caller": ("mask", "vote.sync.ballot.b32 %r1, %p0, 1;", {}),
    "a lane that never comes": (
        "mask",
        "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 3;\n@%p0 bra $L1;\nbar.warp.sync -1;\n"
        "bra $L2;\n$L1:\nbar.sync 0;\n$L2:",
        {},
    ),
    "trap": ("trap", "trap;", {}),
    "a load before the wait": (
        "early",
        "ld.global.u32 %r1, [%rd0];\ngriddepcontrol.wait;",
        {},
    ),
    "a store before the wait": ("early", f"{INDEX}\nst.u32 [%rd1], 1;\ngriddepcontrol.wait;", {}),
    "an atomic before the wait": (
        "early",
        "red.global.add.u32 [%rd0], 1;\ngriddepcontrol.wait;",
        {},
    ),
    "an end before the wait": (
        "early",
        "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 31;\n@%p0 ret;\ngriddepcontrol.wait;",
        {},
    ),
    "a wait that a thread leaves out": (
        "early",
        f"{INDEX} setp.ne.u32 %p0, %r0, 31;\n@%p0 griddepcontrol.wait;\nst.global.u32 [%rd1], %r0;",
        {},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name):
    kind, body, options = PLANTED[name]
    with pytest.raises(EmulatorFault) as caught:
        launch(body, **options)
    fault = caught.value
    assert fault.kind == kind
    assert fault.kernel == "faulty"
    assert fault.block == (0, 0, 0)
    assert fault.thread is not None
    lines = kernel("faulty", ("x",), f"{LOAD}\n{body}", options.get("registers", "")).split("\n")
    assert fault.line is not None
    assert lines[fault.line - 1].strip() in str(fault)
    assert any(word in lines[fault.line - 1] for word in body.replace(";", " ").split())


def test_an_endless_loop_that_touches_no_memory():
    with pytest.raises(EmulatorFault, match="goes on and on without arriving") as caught:
        launch("$L1:\nadd.s32 %r0, %r0, 1;\nbra.uni $L1;", threads=1)
    assert caught.value.kind == "deadlock"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_right_runs_on_every_schedule(schedule):
    body = f"""{INDEX}
  st.global.u32 [%rd1], %r0;
  bar.sync 0;
  xor.b32 %r0, %r0, 1;
  mul.wide.u32 %rd2, %r0, 4;
  add.s64 %rd2, %rd0, %rd2;
  ld.global.u32 %r1, [%rd2];
  bar.sync 0;
  st.global.u32 [%rd1], %r1;"""
    x = launch(body, schedule=schedule)
    np.testing.assert_array_equal(x, np.arange(32) ^ 1)


def test_what_needs_no_wait_may_come_before_it():
    """A launch of dependents orders nothing; shared memory and parameters are the block's own."""
    body = f"""{INDEX}
  griddepcontrol.launch_dependents;
  mov.u32 %r2, buffer;
  shl.b32 %r3, %r0, 2;
  add.s32 %r2, %r2, %r3;
  st.shared.u32 [%r2], %r0;
  griddepcontrol.wait;
  ld.shared.u32 %r1, [%r2];
  st.global.u32 [%rd1], %r1;"""
    np.testing.assert_array_equal(launch(body, registers=SHARED), np.arange(32))


SOURCE = """
extern "C" __global__ void __launch_bounds__(64) copy(const float* x, float* out, int n) {
  const int i = threadIdx.x;
  out[i] =
      x[i + n];
}
extern "C" __global__ void spoil(const float* x, float* out) {
  const_cast<float*>(x)[threadIdx.x] = out[threadIdx.x];
}
"""


@pytest.fixture
def device():
    return PtxDevice()


def arrays(device):
    return device.xp.zeros(32, np.float32), device.xp.empty(32, np.float32)


def test_a_fault_names_the_source_too(device):
    copy = device.compile(SOURCE).get_function("copy")
    copy((1,), (32,), (*arrays(device), np.int32(0)))
    with pytest.raises(EmulatorFault) as caught:
        copy((1,), (32,), (*arrays(device), np.int32(1)))
    fault = caught.value
    assert (fault.kind, fault.array, fault.index, fault.thread) == (
        "out-of-bounds",
        "x",
        32,
        (31, 0, 0),
    )
    assert "ld.global.f32" in str(fault)
    assert "of the source's line 5: x[i + n];" in str(fault)


def test_a_write_to_an_input(device):
    spoil = device.compile(SOURCE).get_function("spoil")
    x, out = arrays(device)
    out[...] = 1
    with pytest.raises(EmulatorFault, match="read-only: write of 4 bytes of x"):
        spoil((1,), (32,), (x, out))

"""Counts of instructions: by hand for a loop, and none unless they are asked for."""

import numpy as np
import pytest

from testbed.nvrtc import compile_ptx, cupy_options
from testbed.ptx import Executed, Module, PtxDevice, collect, translate
from testbed.ptx.executed import is_double
from testbed.tests.ptx.programs import kernel

# A thread runs 3 instructions, 5 in each of n turns, of which 2 compute in double precision, then
# 2 and the ret.
LOOP = kernel(
    "turns",
    ("out", "n"),
    """
  ld.param.u64 %rd1, [out];
  ld.param.u64 %rd2, [n];
  mov.f64 %fd1, 0d0000000000000000;
$L_turn:
  add.f64 %fd1, %fd1, 0d3FF0000000000000;
  add.s64 %rd2, %rd2, -1;
  setp.gt.f64 %p2, %fd1, 0d0000000000000000;
  setp.ne.s64 %p1, %rd2, 0;
  @%p1 bra $L_turn;
  st.global.f64 [%rd1], %fd1;
  @!%p2 st.global.f64 [%rd1], %fd1;
""",
)


def turns(n, launches=1):
    """Return what so many launches execute."""
    device = PtxDevice(counted=True)
    out = np.zeros(1)
    run = device.load(LOOP).get_function("turns")
    for _ in range(launches):
        run((1,), (1,), (out, np.uint64(n)))
        assert out[0] == n
    return run.executed()


def test_every_turn_of_a_loop_counts():
    assert turns(7) == Executed(3 + 7 * 5 + 3, 7 * 2)


def test_launches_add_up():
    """Each device counts from 0, also if it shares a library with the one before."""
    assert turns(3, launches=2) == Executed(2 * (3 + 3 * 5 + 3), 2 * 3 * 2)
    assert turns(5) == Executed(3 + 5 * 5 + 3, 5 * 2)


def test_what_is_counted_is_in_no_report():
    """It may be a part of a source, with blocks of its own under the same title."""
    PtxDevice(counted=True).load(LOOP, "sm_80").get_function("turns")
    assert "turns" not in collect()


def test_kernels_that_do_not_count_are_as_they_were():
    module = Module.of(LOOP)
    plain, counted = translate(module, "turns"), translate(module, "turns", counted=True)
    assert "ptx_ran" not in plain.text
    assert counted.text.count("++ptx_ran") == len(plain.blocks)
    out = np.zeros(1)
    run = PtxDevice().load(LOOP).get_function("turns")
    run((1,), (1,), (out, np.uint64(1)))
    with pytest.raises(ValueError, match="does not count"):
        run.executed()


def test_a_device_says_what_each_of_its_kernels_executed():
    device = PtxDevice(counted=True)
    source = """
    extern "C" __global__ void one(double* x) { x[threadIdx.x] *= 3; }
    extern "C" __global__ void two(float* x) { x[threadIdx.x] *= 3; }
    """
    module = device.compile(source)
    module.get_function("one")((1,), (8,), (np.ones(8),))
    module.get_function("two")((1,), (4,), (np.ones(4, np.float32),))
    executed = device.executed()
    assert executed["one"].double == 8
    assert executed["two"].double == 0
    assert executed["one"].instructions > executed["two"].instructions > 4


DOUBLE = ("add.f64", "fma.rn.f64", "cvt.f64.f32", "cvt.rn.f32.f64")
OTHER = ("mov.f64", "ld.global.f64", "selp.f64", "add.f32", "st.v2.f64")  # moves, and floats


@pytest.mark.parametrize("opcode", [*DOUBLE, *OTHER])
def test_double_precision(opcode):
    assert is_double(opcode) == (opcode in DOUBLE)


def test_ptx_is_the_same_for_a_virtual_architecture():
    """So no machine code has to be made of a source whose PTX is wanted."""
    source = 'extern "C" __global__ void k(float* x) { *x = *x * 3 + __fdividef(*x, 7); }'
    real = cupy_options((), 90)
    virtual = [option.replace("=sm_", "=compute_") for option in real]
    assert compile_ptx(source, real) == compile_ptx(source, virtual)

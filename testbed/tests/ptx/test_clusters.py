"""PTX about clusters that NVRTC does not choose for the intrinsics."""

import numpy as np
import pytest

from testbed.emulator import EmulatorFault
from testbed.ptx import PtxDevice, UnsupportedPtxError
from testbed.tests.ptx.programs import kernel

SHARED = ".shared .align 16 .b8 buffer[64];"
START = """
  ld.param.u64 %rd9, [out];
  mov.u32 %r0, %cluster_ctarank;
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %rd8, %r1, 4;
  add.s64 %rd8, %rd9, %rd8;
  mov.u32 %r2, buffer;
  xor.b32 %r3, %r0, 1;
  mapa.shared::cluster.u32 %r4, %r2, %r3;
  barrier.cluster.arrive.release.aligned;
  barrier.cluster.wait.acquire.aligned;
"""
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"


def run(body, grid=2):
    device = PtxDevice(architecture=90)
    out = device.xp.zeros(grid, np.uint32)
    text = kernel("tried", ("out",), f"{START}{body}\n{MEET}", SHARED)
    text = text.replace(".maxntid", ".explicitcluster\n.reqnctapercluster 2\n.maxntid", 1)
    device.load(text).get_function("tried")((grid,), (1,), (out,))
    return out.tolist()


@pytest.mark.parametrize(
    "body",
    [
        f"st.shared::cluster.u32 [%r4+8], %r0; {MEET} ld.shared::cta.u32 %r5, [%r2+8];",
        f"st.shared.u32 [%r2+8], %r0; {MEET} ld.shared::cluster.u32 %r5, [%r4+8];",
        # An address of the block's own shared memory is one of the cluster's.
        f"st.shared::cluster.u32 [%r2], %r3; {MEET} ld.shared.u32 %r5, [%r2];",
        # Generic addresses, mapped or made of mapped ones.
        "cvt.u64.u32 %rd1, %r2; cvta.shared.u64 %rd2, %rd1; mapa.u64 %rd3, %rd2, %r3;"
        f"st.v2.u32 [%rd3], {{%r0, %r0}}; {MEET} ld.shared.v2.u32 {{%r6, %r5}}, [%r2];",
        "cvt.u64.u32 %rd1, %r4; cvta.shared::cluster.u64 %rd2, %rd1;"
        f"st.u32 [%rd2], %r0; {MEET} ld.u32 %r5, [%rd2]; xor.b32 %r5, %r0, 1;",
        "cvt.u64.u32 %rd1, %r4; cvta.shared::cluster.u64 %rd2, %rd1;"
        "cvta.to.shared::cluster.u64 %rd3, %rd2; cvt.u32.u64 %r6, %rd3;"
        f"st.shared::cluster.u32 [%r6+4], %r0; {MEET} ld.shared.u32 %r5, [%r2+4];",
        # Mapped to itself.
        "mapa.shared::cluster.u32 %r6, %r2, %r0; st.shared::cluster.u32 [%r6], %r3;"
        "ld.shared.u32 %r5, [%r2];",
    ],
)
def test_addresses_in_shared_memory_of_the_cluster(body):
    assert run(f"{body} st.global.u32 [%rd8], %r5;", grid=4) == [1, 0, 1, 0]


def test_special_registers():
    body = """
  mov.u32 %r5, %cluster_nctarank;
  mov.u32 %r6, %clusterid.x;
  mov.u32 %r7, %nclusterid.x;
  mov.u32 %r8, %cluster_ctaid.x;
  mad.lo.u32 %r5, %r5, 10, %r6;
  mad.lo.u32 %r5, %r5, 10, %r7;
  mad.lo.u32 %r5, %r5, 10, %r8;
  st.global.u32 [%rd8], %r5;"""
    assert run(body, grid=6) == [2030, 2031, 2130, 2131, 2230, 2231]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("st.shared.u32 [%r4], %r0;", "out-of-bounds"),  # of the cluster, by an access of the block
        ("mapa.shared::cluster.u32 %r6, %r2, 9; st.shared::cluster.u32 [%r6], 1;", "out-of-bounds"),
        ("mapa.shared::cluster.u32 %r6, %r2, 2; st.shared::cluster.u32 [%r6], 1;", "out-of-bounds"),
        ("st.shared::cluster.u32 [%r4+64], %r0;", "out-of-bounds"),
        ("st.shared::cluster.u32 [%r4+2], %r0;", "misaligned"),
        ("ld.shared::cluster.u32 %r6, [%r4];", "uninitialised"),
    ],
)
def test_faults(body, kind):
    with pytest.raises(EmulatorFault) as caught:
        run(body)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "body",
    [
        "barrier.cluster.arrive.relaxed;",
        "barrier.cluster.wait.release;",
        "mapa.shared.u64 %rd1, %rd2, %r0;",
        "atom.shared::cluster.add.u32 %r5, [%r4], 1;",
        "fence.acq_rel.cluster;",
    ],
)
def test_refused(body):
    with pytest.raises(UnsupportedPtxError, match=body.split()[0].split(".")[0]):
        run(body)

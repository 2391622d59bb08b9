"""Kernels that may start before the kernel in front of them has ended: kernels/dependent.cuh."""

import re

import numpy as np
import pytest

from gradkit._calls.backend import OPERATIONS
from gradkit._cuda import CudaBackend
from gradkit._cuda.dry_run import DryDevice, needed_by
from gradkit._cuda.launch.grids import column_sums
from gradkit._cuda.launch.kernels import Launch, kernels_in, source_of
from testbed.emulator import EmulatedDevice, EmulatorFault
from testbed.ptx import PtxDevice
from tests.combinations import ON_GPUS, combinations

WAIT = "wait_for_kernels_in_front();"


def sum_columns(device):
    """Launch the kernel that all gradients of rows end with; return what is right, and its sums."""
    partials = device.xp.asarray(np.arange(240, dtype=np.float32).reshape(2, 3, 40))
    first, second = device.xp.zeros(40, np.float32), device.xp.zeros(40, np.float32)
    launch = column_sums(device, "float32", "float32", 40, planes=2)
    launch(partials, first, second, np.int64(3), np.int64(40))
    return np.arange(240).reshape(2, 3, 40).sum(axis=1), [first, second]


def test_they_wait_before_all_else(monkeypatch):
    """All that are launched so, and no others."""
    found, made = set(), Launch.__init__

    def note(self, kernel, *sizes, dependent=False, **more):
        made(self, kernel, *sizes, dependent=dependent, **more)
        if dependent:
            found.add(kernel.name)

    monkeypatch.setattr(Launch, "__init__", note)
    expected, sums = sum_columns(EmulatedDevice())
    np.testing.assert_array_equal(sums, expected)
    needed_by(CudaBackend(DryDevice(ON_GPUS[-1].idle)), OPERATIONS, {"float32"})
    assert found == {"column_sums"}
    for file in sorted({file for file, _ in combinations()}):
        source = source_of(file)
        waiting = {
            name
            for name in kernels_in(file)
            if re.search(rf"\b{name}\([^;{{]*\) {{\s*{re.escape(WAIT)}", source)
        }
        assert waiting == found & {*kernels_in(file)}


@pytest.mark.ptx
@pytest.mark.parametrize("architecture", [80, 90])
def test_each_thread_waits(architecture):
    expected, sums = sum_columns(PtxDevice(architecture=architecture))
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.ptx
def test_a_wait_behind_the_first_access_is_found():
    """Behind the block's return for an output that is not wanted, too."""
    text = source_of("column_sums")
    late = text.replace(f"    {WAIT}\n", "").replace(
        "if (!out) return;", f"if (!out) return;\n    {WAIT}"
    )
    device = PtxDevice(architecture=90)
    options = "-std=c++17", "-DACC_T=float", "-DPARAM_T=float"
    run = device.compile(late, options).get_function("column_sums")
    partials, first = device.xp.zeros((1, 3, 40), np.float32), device.xp.zeros(40, np.float32)
    with pytest.raises(EmulatorFault, match=r"before griddepcontrol\.wait"):
        run((2, 2), (32, 32), (partials, first, None, np.int64(3), np.int64(40)))

"""For ``pytest -p testbed.driver.plugin``: CuPy finds the driver's devices.

A fault of a kernel, or an error of the device that no test took, fails the test that it came in.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cupy import install

driver, machine = install()
import cupy  # noqa: E402 - only now does it find the driver

if not cupy.is_available():
    raise RuntimeError("CuPy finds no device of the driver, so that every test would be skipped")


@pytest.fixture(autouse=True)
def _sound_device() -> Iterator[None]:
    """Wait for the device after each test, and fail the test if something went wrong there."""
    from cupy.cuda import runtime

    yield
    for number in range(runtime.getDeviceCount()):
        try:
            runtime.setDevice(number)
            runtime.deviceSynchronize()
        except runtime.CUDARuntimeError:
            pass  # what it is follows
    runtime.setDevice(0)
    message = driver.message()
    broken = driver.mend()
    faults, machine.faults[:] = list(machine.faults), []
    if faults:
        raise faults[0]
    if broken:
        pytest.fail(f"the device is broken: error {broken}, {message}")

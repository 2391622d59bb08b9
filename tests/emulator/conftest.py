"""The emulator's own tests: every schedule, and a compiler or a reason why not."""

import os

import pytest

from testbed.emulator.compiler import compiler_path
from testbed.emulator.device import EmulatedDevice
from testbed.emulator.runtime import SCHEDULES


@pytest.fixture(autouse=True)
def needs_compiler() -> None:
    """Skip without g++; in CI let the tests fail, since there they must run."""
    if compiler_path() is None and os.environ.get("CI") != "true":
        pytest.skip("no g++ on this machine")


@pytest.fixture(params=SCHEDULES)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(schedule=request.param, seed=1)

"""Most of the emulator's tests run under every schedule."""

import pytest

from testbed.emulator import SCHEDULES, EmulatedDevice


@pytest.fixture(params=SCHEDULES)
def device(request):
    return EmulatedDevice(schedule=request.param, seed=1)

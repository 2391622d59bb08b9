"""The ``backend`` fixture, and how hard Hypothesis tries."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests import alone
from tests.backends import BACKENDS, has_gpu

_COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=8, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("dev", max_examples=40, **_COMMON)
settings.register_profile("fuzz", max_examples=100, print_blob=True, **_COMMON)
if os.environ.get("GRADKIT_REQUIRE_GPU") == "1" and not has_gpu():
    raise pytest.UsageError("CuPy finds no GPU, and GRADKIT_REQUIRE_GPU asks for one")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(
    scope="module", params=[pytest.param(b, id=b.name, marks=b.marks) for b in BACKENDS]
)
def backend(request):
    """Each backend in turn: where a test's arrays live and what computes on them."""
    with request.param.active():
        yield request.param


def pytest_configure(config):
    """A worker of pytest-xdist keeps to its turn."""
    if hasattr(config, "workerinput") and alone.fcntl:
        config.pluginmanager.register(alone.Turns(__file__, alone.__file__))


def pytest_terminal_summary(terminalreporter):
    """Say how much bad input was tried, if any was."""
    table = sys.modules.get("tests.bad_input")
    if table is None or not table.tested:
        return
    cells, backends = sum(table.tested.values()), ", ".join(table.tested)
    terminalreporter.write_line(f"bad input: {len(table.ROWS)} rows, {cells} cells on {backends}")

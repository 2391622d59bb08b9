"""Tests of compiled kernels need tools that not every machine has."""

import os

import pytest

from testbed.tools import missing


@pytest.fixture(autouse=True)
def needs_tools():
    """Skip without them; in CI let the tests fail, since there they must run."""
    if os.environ.get("CI") != "true" and (absent := missing("g++", "nvrtc")):
        pytest.skip(f"not installed: {', '.join(absent)}")

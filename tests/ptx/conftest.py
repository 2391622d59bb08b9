"""The machine's tests need g++, and a few of them NVRTC."""

import os

import pytest

from testbed.emulator.compiler import compiler_path
from testbed.nvrtc.nvrtc import library_path


@pytest.fixture(autouse=True)
def needs_compilers():
    """Skip without them; in CI let the tests fail, since there they must run."""
    if os.environ.get("CI") != "true" and (compiler_path() is None or library_path() is None):
        pytest.skip("g++ or nvidia-cuda-nvrtc-cu12 is not installed")

"""Tests whose tools are not installed are skipped; in CI they fail, since there they must run."""

import os
from pathlib import Path

import pytest

from testbed.tools import missing

HERE = Path(__file__).parent
NEEDED = {
    "driver": ("g++", "nvrtc"),
    "emulator": ("g++",),
    "machine_code": ("nvrtc", "nvdisasm"),
    "nvrtc": ("nvrtc",),
    "ptx": ("g++", "nvrtc"),
    "test_clusters.py": ("g++", "nvrtc"),
    "test_launch.py": ("g++", "nvrtc"),
    "test_project.py": (),
    "test_readme.py": ("g++", "nvrtc", "nvdisasm"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """All skips are from here, so that pytest reports one line a reason."""
    if os.environ.get("CI") == "true":
        return
    needed = NEEDED[item.path.relative_to(HERE).parts[0]]
    if "[emulated" in item.name:
        needed = ("g++",)
    if absent := missing(*needed):
        pytest.skip(f"not installed: {', '.join(absent)}")

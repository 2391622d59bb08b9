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
    "test_readme.py": ("g++", "nvrtc", "nvdisasm"),
}


def pytest_collection_modifyitems(items):
    if os.environ.get("CI") == "true":
        return
    for item in (item for item in items if HERE in item.path.parents):
        if absent := missing(*NEEDED[item.path.relative_to(HERE).parts[0]]):
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(absent)}"))

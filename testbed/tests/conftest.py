"""Tests whose tools are not installed are skipped; in CI they fail, since there they must run."""

import os
from pathlib import Path

import pytest

from testbed.tools import missing

HERE = Path(__file__).parent
NEEDED = {
    "emulator": ("g++",),
    "machine_code": ("nvrtc", "nvdisasm"),
    "nvrtc": ("nvrtc",),
    "ptx": ("g++", "nvrtc"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and os.environ.get("CI") != "true":
            directory = item.path.relative_to(HERE).parts[0]
            if absent := missing(*NEEDED.get(directory, ())):
                item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(absent)}"))

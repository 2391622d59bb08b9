"""Tests that measure time run while no other does."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import alone

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: as the suite's")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(alone.Turns(__file__, "test_them.py"))
"""
TESTS = """
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", [
    *range(6), *(pytest.param(k, marks=pytest.mark.alone) for k in (6, 7)), *range(8, 12)
])
def test_takes_a_while(number):
    start = time.monotonic()
    time.sleep(0.05)
    Path(__file__).with_name(f"{number}.times").write_text(f"{start} {time.monotonic()}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks on files")
def test_who_is_alone_overlaps_nobody(tmp_path):
    pytest.importorskip("xdist", reason="pip install pytest-xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    xdist = ("-p", "xdist", "-n", "2")
    command = [sys.executable, "-m", "pytest", "-q", *xdist, "--rootdir", tmp_path, tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "12 passed" in done.stdout, done.stdout
    times = {
        int(path.stem): tuple(map(float, path.read_text().split()))
        for path in tmp_path.glob("*.times")
    }
    assert len(times) == 12
    beside = {
        pair
        for pair in combinations(sorted(times), 2)
        if max(times[k][0] for k in pair) < min(times[k][1] for k in pair)
    }
    assert beside  # some were at work at once
    assert not {6, 7} & {number for pair in beside for number in pair}

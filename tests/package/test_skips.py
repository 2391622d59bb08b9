"""A run says why tests were skipped, in a line for each reason."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

marked = pytest.mark.skipif(True, reason="no such device")

@marked
def test_one():
    pass

@pytest.mark.parametrize("n", range(3))
def test_two(n):
    pytest.skip("no such device" if n else "too large")

@pytest.mark.xfail(reason="known")
def test_three():
    assert False
"""
CONFTEST = "from tests.conftest import pytest_terminal_summary\n"


def test_a_line_for_each_reason_and_the_count_at_the_end(tmp_path):
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("import pytest; pytest.importorskip('not_there')\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ("-q", "-rfExX", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *options, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if "skip" in line.lower()] == [
        "skipped, 3: no such device",
        "skipped, 1: could not import 'not_there': No module named 'not_there'",
        "skipped, 1: too large",
        lines[-1],
    ]
    assert re.fullmatch(r"5 skipped, 1 xfailed in .*", lines[-1])
    assert "XFAIL test_them.py::test_three - known" in lines

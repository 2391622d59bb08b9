"""Output of a run: a line for each reason to skip tests, dots for many tests, all that fails."""

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
CONFTEST = """
from tests.conftest import pytest_collection_finish, pytest_report_teststatus
from tests.conftest import pytest_terminal_summary
"""
MANY = """
import pytest

@pytest.mark.parametrize("n", range(1000))
def test_many(n):
    if n == 500:
        pytest.skip("no such device")
    assert n != 700
"""


def printed(folder, *options, **files):
    """The lines that a run of some files prints."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(text)
    # With no settings of the checkout: the temporary directory may be in it.
    settings = ("-c", os.devnull, "--rootdir", folder)
    options = ("-q", "-rfExX", "-p", "no:cacheprovider", *settings, *options)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *options, folder]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_a_line_for_each_reason_and_the_count_at_the_end(tmp_path):
    none = "import pytest; pytest.importorskip('{}')\n".format
    lines = printed(
        tmp_path, test_them=TESTS, test_one=none("not_there"), test_two=none("not_there.inner")
    )
    assert [line for line in lines if "skip" in line.lower()] == [
        "skipped, 3: no such device",
        "skipped, 2: not_there is not installed",
        "skipped, 1: too large",
        lines[-1],
    ]
    assert re.fullmatch(r"6 skipped, 1 xfailed in .*", lines[-1])
    assert "XFAIL test_them.py::test_three - known" in lines


def test_many_tests_print_a_hundred_dots_and_each_failure(tmp_path):
    lines = printed(tmp_path, test_many=MANY)
    assert re.fullmatch(r"\.{69,70}F\.{1,2} \[ ?\d+%\]", lines[0])
    assert re.fullmatch(r"\.{27,29} +\[100%\]", lines[1])
    assert "FAILED test_many.py::test_many[700] - assert 700 != 700" in lines
    assert re.fullmatch(r"1 failed, 998 passed, 1 skipped in .*", lines[-1])
    assert len(lines) < 25

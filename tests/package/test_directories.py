"""Which directory may import which: benchmarks need no tests, and the testbed needs no gradkit."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What each directory must not import of the others.
REFUSED = {
    "gradkit": {"benchmarks", "examples", "testbed", "tests"},
    "testbed": {"benchmarks", "examples", "gradkit", "tests"},
    "tests/devices": {"benchmarks", "examples", "hypothesis", "pytest"},
    "examples": {"benchmarks", "tests"},
    "benchmarks": {"examples", "tests"},
}
# No tests: gradkit's arrays on the testbed's devices, and the recorded machine code.
SHARED = {"benchmarks": ("tests.devices", "tests.machine_code")}


def imported(text):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


@pytest.mark.parametrize("folder", REFUSED)
def test_a_directory_imports_only_what_it_may(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported(path.read_text())
        if name.partition(".")[0] in REFUSED[folder] and not name.startswith(SHARED.get(folder, ()))
    ]
    assert found == []


def test_imports_are_found_wherever_they_stand():
    text = "import a.b, c\ndef f():\n    from d.e import g\n    from . import h\n"
    assert list(imported(text)) == ["a.b", "c", "d.e"]

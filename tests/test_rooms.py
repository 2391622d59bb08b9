"""Which part of the project may import which: nobody needs the tests to run a benchmark."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What each folder must not import of the others.
REFUSED = {
    "gradkit": {"benchmarks", "examples", "testbed", "tests"},
    "testbed": {"benchmarks", "examples", "tests"},
    "examples": {"benchmarks", "tests"},
    "benchmarks": {"examples", "tests"},
}


def imported(text):
    """The top-level names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("folder", REFUSED)
def test_a_room_imports_only_what_it_may(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported(path.read_text())
        if name in REFUSED[folder]
    ]
    assert found == []


def test_imports_are_found_wherever_they_stand():
    text = "import a.b, c\ndef f():\n    from d.e import g\n    from . import h\n"
    assert list(imported(text)) == ["a", "c", "d"]

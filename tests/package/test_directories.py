"""Imports that each directory may have, and those in which `make test-gpu` looks for tests."""

import ast
import re
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


def runs_on_gpus(text):
    """True if a file has a test marked ``gpu``, or one of the fixture that CuPy is a backend of."""
    nodes = [*ast.walk(ast.parse(text))]
    tests = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    marked = any(getattr(n, "attr", "") == "gpu" or getattr(n, "id", "") == "ON_GPU" for n in nodes)
    return marked or any(each.arg == "backend" for test in tests for each in test.args.args)


def test_make_test_gpu_collects_the_files_with_tests_for_gpus_and_no_folder_without():
    found = re.search(r"^ON_GPU := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    listed = [ROOT / word for word in found[1].replace("\\\n", " ").split()]
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if runs_on_gpus(path.read_text())]
    assert [t for t in tests if not {t, *t.parents} & {*listed}] == []
    assert [each for each in listed if not any({t, *t.parents} & {each} for t in tests)] == []

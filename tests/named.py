"""Tests by name, for tables and pages that say which test holds what."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def is_test(name):
    """True if there is such a test, or such a class of tests: ``tests/test_x.py::test_y``."""
    file, _, path = name.partition("::")
    return (ROOT / file).is_file() and path in _tests_in(file)


@cache
def _tests_in(file):
    tree = ast.parse((ROOT / file).read_text())
    found = {node.name: node for node in tree.body if hasattr(node, "name")}
    inner = {
        f"{name}::{method.name}"
        for name, node in found.items()
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if hasattr(method, "name")
    }
    return {name for name in {*found, *inner} if name.split("::")[-1].lower().startswith("test")}

"""The project's file lists every package, and every file of C++ that they read."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed():
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert LISTED["packages"] == ["testbed", *(f"testbed.{name}" for name in sorted(found))]


def test_every_file_that_a_package_reads_is_listed():
    folders = {name: ROOT / name.partition(".")[2] for name in LISTED["packages"]}
    patterns = LISTED["package-data"].items()
    listed = [path for name, some in patterns for each in some for path in folders[name].glob(each)]
    assert sorted(listed) == sorted([*ROOT.glob("*/*/*.h"), *ROOT.glob("*/*/*.cpp")])

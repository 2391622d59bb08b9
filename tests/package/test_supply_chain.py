"""Parts that gradkit is made of; it does nothing but compute."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# What fetches, runs or unpacks what others wrote, or leaves something behind.
REFUSED = (
    "ctypes.dlopen",
    "http.",
    "os.exec",
    "os.fork",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.system",
    "pickle.",
    "shutil.",
    "socket.",
    "subprocess.",
    "tempfile.",
    "urllib.",
)
EVERYTHING = f"""
import os, random, sys
import gradkit
from tests.backends import BACKENDS
from tests.soak import every_operation

def refuse(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event.startswith({REFUSED}):
        raise PermissionError(event, *map(repr, arguments))

sys.addaudithook(refuse)
for seed in range(8):
    every_operation(BACKENDS[0], random.Random(seed))
gradkit.show_config()
print("done")
"""
FORBIDDEN = {name.partition(".")[0] for name in REFUSED} - {"ctypes", "os"}
FORBIDDEN |= {"marshal", "multiprocessing", "requests", "shelve", "ssl"}


def test_every_operation_computes_and_does_nothing_else():
    """No network, no process, no pickle, no library, no file written: Python would tell."""
    command = [sys.executable, "-B", "-W", "error", "-c", EVERYTHING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("event", ["socket.create", "pickle", "write"])
def test_python_tells(event, tmp_path):
    """The refusal itself works."""
    wrong = {
        "socket.create": "import socket; socket.socket()",
        "pickle": "import pickle; pickle.loads(pickle.dumps(random.Random))",
        "write": f"open({str(tmp_path / 'file')!r}, 'w')",
    }[event]
    script = EVERYTHING.replace("for seed in range(8):", f"{wrong}\nfor seed in ():")
    command = [sys.executable, "-B", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_nothing_is_imported_that_fetches_or_runs_code():
    used = set()
    for path in (ROOT / "gradkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {(path.name, alias.name.partition(".")[0]) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used.add((path.name, (node.module or "").partition(".")[0]))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used.add((path.name, f"{node.func.id}()"))
    forbidden = FORBIDDEN | {"eval()", "exec()", "compile()", "__import__()"}
    # A record's class gets an __init__ of its fields.
    assert {each for each in used if each[1] in forbidden} == {("record.py", "exec()")}


def locked(file):
    """The pinned requirements of a lock, and its text."""
    text = (ROOT / "requirements" / file).read_text()
    return [Requirement(line) for line in re.findall(r"^([\w-]+==[^\\#\n]+)", text, re.M)], text


def _name(requirement):
    return requirement.name.replace("_", "-")


LOCKS = {  # file: extras, and what else it has
    "ci.txt": (("demo", "lint", "test"), "requirements/ci.in"),
    "cupy13.txt": (("test",), "requirements/cupy13.in"),
    "cupy14.txt": (("test",), "requirements/cupy14.in"),
    "frameworks.txt": (("demo", "test"), "requirements/frameworks.in"),
}


@pytest.mark.parametrize("file", LOCKS)
def test_locks_pin_what_is_asked_for(file):
    """For every Python that CI has; `make lock` writes them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, beside = LOCKS[file]
    asked = list(project["dependencies"])
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    lines = (ROOT / beside).read_text().splitlines()
    asked += [line for line in lines if not line.startswith("#")]
    pins, text = locked(file)
    for python in ("3.11", "3.12", "3.13"):
        here = {"python_version": python, "python_full_version": f"{python}.0"}
        found = {
            p.name.replace("-", "_"): p for p in pins if not p.marker or p.marker.evaluate(here)
        }
        for requirement in map(Requirement, asked):
            (pin,) = found[requirement.name.replace("-", "_")].specifier
            assert requirement.specifier.contains(pin.version, prereleases=True), requirement
    assert not re.search(r"file:|https?:|@ |--(extra-)?index-url|--find-links", text)


@pytest.mark.parametrize(
    "file", ["ci.txt", "cupy13.txt", "cupy14.txt", "nvrtc13.txt", "package.txt"]
)
def test_every_pin_of_ci_has_hashes(file):
    pins, text = locked(file)
    entries = re.split(r"^(?=[\w-]+==)", text, flags=re.M)[1:]
    assert len(entries) == len(pins)
    assert all("--hash=sha256:" in entry for entry in entries)


def test_dependencies_are_few_and_bounded():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    assert {requirement.name for requirement in needed} == {"numpy", "ml_dtypes"}
    for requirement in needed:
        assert {s.operator for s in requirement.specifier} == {">=", "<"}, requirement


def test_environments_of_gradkits_tests_have_what_the_testbed_needs():
    """They import it from the checkout, and nothing installs it there."""
    ours, testbed = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "testbed")
    )
    extras = testbed["optional-dependencies"]
    needed = {*testbed["dependencies"], *extras["nvidia"], *extras["test"]}
    needed.remove("gradkit-testbed[nvidia]")
    assert needed <= {*ours["dependencies"], *ours["optional-dependencies"]["test"]}


def test_messages_name_no_package_that_nobody_has_published():
    """Until gradkit is on an index, its own name there could be anybody's."""
    for path in sorted((ROOT / "gradkit").rglob("*.py")):
        assert not re.search(r"pip install [^.\n]{0,2}gradkit", path.read_text()), path


def test_what_builds_gradkit_is_what_the_environments_have():
    """They build without isolation, so that only what is pinned runs."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for file in ("ci.in", "package.in"):
        assert set(wanted) <= set((ROOT / "requirements" / file).read_text().splitlines()), file

"""Metadata of the package, as an index and an installer see it; `make check-package` builds it."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gradkit
from tests import check_package

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
SYSTEMS = [
    {"sys_platform": "darwin", "platform_machine": "arm64"},
    {"sys_platform": "darwin", "platform_machine": "x86_64"},
    {"sys_platform": "linux", "platform_machine": "aarch64"},
    {"sys_platform": "linux", "platform_machine": "x86_64"},
    {"sys_platform": "win32", "platform_machine": "AMD64"},
]


def described():
    """The README as its substitutions leave it."""
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text()
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def wheel(folder, description):
    path = folder / "gradkit-0-py3-none-any.whl"
    head = "Keywords: a\nClassifier: b\nLicense-Expression: c\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("gradkit-0.dist-info/METADATA", f"{head}\n{description}")
    return path


def test_the_description_keeps_the_text_and_loses_the_links(tmp_path):
    text = described()
    assert "docs/guarantees.md has all of them" in text
    assert "![" not in text
    assert check_package.metadata(wheel(tmp_path, text))


@pytest.mark.parametrize("lost", ["[a](docs/a.md)", '<img src="docs/a.png">', "![a](a.png)"])
def test_a_link_that_an_index_cannot_follow_is_found(tmp_path, lost):
    with pytest.raises(SystemExit, match="cannot follow"):
        check_package.metadata(wheel(tmp_path, f"{described()}\n{lost}\n"))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: " ".join(system.values()))
@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_ask_only_for_what_a_system_has(extra, system):
    """NVIDIA's packages and CuPy exist for Linux and Windows, and cuDNN 8 for x86-64."""
    asked = [Requirement(line) for line in EXTRAS[extra]]
    names = {r.name for r in asked if not r.marker or r.marker.evaluate(system)}
    cuda = {name for name in names if name.startswith(("cupy", "cuda", "nvidia"))}
    if system["sys_platform"] == "darwin" or (extra == "test" and system is not SYSTEMS[3]):
        assert cuda == set()
    elif extra == "cudnn8":
        assert bool(cuda) == (system["platform_machine"] in ("x86_64", "AMD64"))
    else:
        assert bool(cuda) == extra.startswith(("cuda", "cudnn", "test"))


def test_an_editable_install_finds_no_neighbours_of_the_checkout(tmp_path):
    """A folder named cupy beside it would be taken for CuPy."""
    code = "import sys; from scikit_build_core.build import build_editable as b; b(sys.argv[1])"
    pure = os.environ | {"GRADKIT_PURE": "1"}  # the path is the same, and nothing is compiled
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, env=pure)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".pth"))
        found = archive.read(name).decode().splitlines()
    assert [line for line in found if not line.startswith("import ")] == [str(ROOT)]


def test_interpreters_are_those_that_gradkit_supports():
    found = check_package.interpreters()
    versions = [tuple(map(int, version.rstrip("t").split("."))) for version in found]
    assert versions == sorted(versions)
    assert versions[0] >= check_package.OLDEST


def test_every_file_names_the_version_and_none_says_that_it_is_released():
    """A date is for a tag; until then a version ends in dev0, and is above all in the changelog."""
    log = (ROOT / "CHANGELOG.md").read_text()
    latest, *versions = re.findall(r"^## \[(.*?)\]", log, re.M)
    assert latest == "Unreleased"  # for what comes next
    citation = (ROOT / "CITATION.cff").read_text()
    version = PYPROJECT["project"]["version"]
    assert version == gradkit.__version__
    assert re.search(rf"^version: {re.escape(version)}$", citation, re.M)
    assert version.endswith(".dev0")
    released = [int(n) for n in versions[0].split(".")] if versions else [0]
    assert [int(part) for part in version.split(".")[:3]] > released
    assert "date-released" not in citation


def test_workflows_try_every_python_that_is_supported():
    """And free-threaded 3.14; make has what they call, which tests/package/test_pages.py shows."""
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", text)
    tried = re.findall(r"3\.\d+", matrix)
    prefix = "Programming Language :: Python :: 3."
    classified = [c for c in PYPROJECT["project"]["classifiers"] if c.startswith(prefix)]
    assert {f"3.{c.removeprefix(prefix)}" for c in classified} <= {*tried}
    assert tried == ["3.11", "3.12", "3.13", "3.14"]
    assert re.findall(r"^ {12}(3.*)$", text, re.M) == ["3.14t", *reversed(tried)]


@pytest.mark.parametrize("name", ["publish", "test"])
def test_workflows_hold_no_more_rights_than_they_need(name):
    """Nothing is written but by trusted publishing, and nobody's token stays in a checkout."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    jobs = text.partition("\njobs:\n")[2]
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert jobs.count("timeout-minutes:") == len(re.findall(r"^  \w+:$", jobs, re.M))
    assert re.findall(r"(\S+): write", text) == ["id-token"] * (name == "publish")
    assert "secrets." not in text


def test_exceptions_from_the_repositorys_review_have_reasons():
    """`make check-package` fails on what sp-repo-review finds beside them."""
    ignored = PYPROJECT["tool"]["repo-review"]["ignore"]
    assert [name for name, reason in ignored.items() if len(reason.split()) < 3] == []

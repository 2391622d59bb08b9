"""README and docs: their code runs, their links lead somewhere, their tables are complete."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import gradkit
from tests.named import is_test

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
NAMED = r"`(tests/[\w/]+\.py::[\w:]+)`"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_in(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks)


def relative(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if python_in(p)], ids=relative)
def test_code_runs(page):
    exec(compile(python_in(page), relative(page), "exec"), {})


def test_readme_example_is_right(capsys):
    names = {}
    exec(compile(python_in(README), "README.md", "exec"), names)
    grads, norm = names["grads"], names["norm"]
    assert capsys.readouterr().out == f"{norm} -> {gradkit.grad_norm(grads)}\n"
    assert gradkit.grad_norm(grads) == pytest.approx(1.0, rel=1e-15)

    def loss(params):
        x = np.random.default_rng(0)
        x.normal(size=(4, 3))
        h = x.normal(size=(2, 8, 4)) @ params["weights"]
        centred = h - h.mean(axis=-1, keepdims=True)
        xhat = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        return ((xhat * params["scale"]) ** 4).sum() / 4

    for name, param in names["params"].items():
        for i in np.ndindex(param.shape):
            step = np.zeros_like(param)
            step[i] = 1e-6
            up, down = ({**names["params"], name: param + s} for s in (step, -step))
            slope = (loss(up) - loss(down)) / 2e-6
            # The loss is about 40: rounding costs 40 * 1e-16 / 1e-6, doubled.
            assert grads[name][i] * norm == pytest.approx(slope, abs=1e-7)


def test_readme_lists_every_function():
    rows = re.findall(r"^\| (`.*?) \|", README.read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    errors = {name for name in gradkit.__all__ if name.endswith("Error")}
    assert listed == {*gradkit.__all__} - errors


def test_the_reference_lists_every_public_name_once(monkeypatch):
    """In the concepts' tables, from which `make docs` makes a page for each."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    public_names = importlib.import_module("public_names").public_names()
    listed = []
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for module, rows in re.findall(
            r"currentmodule:: ([\w.]+)\n\n.. autosummary::\n(?:   :.*\n)*\n((?:   \w+\n)+)",
            page.read_text(),
        ):
            listed += [f"{module}.{name}" for name in rows.split()]
    assert {f"gradkit.{name}" for name in gradkit.__all__} < {*public_names}
    assert sorted(listed) == sorted(public_names)


def test_guarantees_name_the_tests_that_check_them():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    guarantees = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    guarantees += re.findall(r"^\| .*", text, re.MULTILINE)[1:]
    assert len(guarantees) > 30
    without = [g for g in guarantees if not re.search(NAMED, g)]
    assert without == []
    assert [name for name in re.findall(NAMED, text) if not is_test(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [
        link for link in links if not re.match(r"\w+:", link) and not (page.parent / link).exists()
    ]
    assert missing == []


def test_the_map_of_the_house_has_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [path.parent.name for path in sorted((ROOT / "gradkit").glob("*/__init__.py"))]
    assert [room for room in rooms if f"`gradkit/{room}/`" not in text] == []
    assert len(rooms) > 4

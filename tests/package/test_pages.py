"""README and docs: their code runs, their links lead somewhere, their tables are complete."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import gradkit
from tests import guarantees

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FENCE = r"^```([^\n]*)\n(.*?)^```"
# Code that needs a framework, ranks or devices, and what runs it.
RUN_ELSEWHERE = {
    "docs/gpu.md": {"tests/gpu/test_pages.py": 1},
    "docs/frameworks.md": {"tests/interop/test_examples.py": 2},
    "docs/jax.md": {"tests/interop/test_gradkit_jax.py": 6},
    "docs/torch.md": {"tests/interop/test_gradkit_torch_page.py": 11},
    "docs/parallelism.md": {"tests/processes/cut_models.py": 6},
    "docs/distributed.md": {
        "tests/processes/test_examples.py": 3,
        "tests/distributed/test_device_groups.py": 1,
        "tests/distributed/test_several_devices.py": 2,
    },
}
# What a reader asks for, and the words that the section must have which two links lead to.
QUESTIONS = {
    "how to clip over ranks": ("clip_grad_norm(own_grads, 1.0, group=group)", "from_torch("),
    "how to accumulate by tokens": ("scale=1 / tokens",),
    "what happens to a NaN": ('nonfinite="raise"', 'nonfinite="zero"', '"propagate"'),
    "how to use it in autograd": ("gradkit.torch.replace_norms(model)",),
    "how to clip DTensors": ("shards_of(model.named_parameters())", "from_torch()"),
}


def python_in(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks)


def relative(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if python_in(p)], ids=relative)
def test_code_runs(page, capsys):
    """And prints, where the page says what, just that: the lines that begin with ``# ->``."""
    code = python_in(page)
    exec(compile(code, relative(page), "exec"), {})
    said = re.findall(r"^# -> (.*)$", code, re.MULTILINE)
    assert not said or capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_code_is_left_unrun(page):
    """``python`` runs here, ``py`` where the table says; the rest is a formula or for a shell."""
    kinds = [kind.split()[0] if kind else "" for kind, _ in fences(page)]
    assert {*kinds} <= {"python", "py", "console", "math"} | {k for k in kinds if k[:1] == "{"}
    ran = RUN_ELSEWHERE.get(relative(page), {})
    assert kinds.count("py") == sum(ran.values())
    for test in ran:
        assert page.name in (ROOT / test).read_text(), test


def fences(page):
    return re.findall(FENCE, page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("home", [README, ROOT / "docs" / "index.md"], ids=relative)
def test_two_links_lead_to_an_answer(home, question):
    """Links in the text alone: the site's menus have more."""
    first = links_to_sections(home)
    seen = first | {link for page, _ in first for link in links_to_sections(page)}
    wanted = QUESTIONS[question]
    assert any(all(word in section(*link) for word in wanted) for link in seen)


@cache
def links_to_sections(page):
    """The pages that a page's text links to, each with the heading."""
    found = re.findall(r"\]\(([^)#:]*\.md)(?:#([^)]*))?\)", page.read_text())
    found += [(f"{name}.md", "") for name in re.findall(r"^:link: (\S+)", page.read_text(), re.M)]
    targets = {((page.parent / file).resolve(), unquote(place)) for file, place in found}
    return {(file, place) for file, place in targets if file.exists()}


@cache
def section(page, heading):
    """The text below a heading, or the first screen of a page."""
    text = page.read_text()
    if not heading:
        return "\n".join(text.splitlines()[:60])
    parts = re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)
    sections = {slug(name): below for name, below in zip(parts[1::2], parts[2::2], strict=True)}
    return sections.get(heading, "")


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_to_headings(page):
    for file, place in links_to_sections(page):
        if place and file.suffix == ".md":
            assert section(file, place), (file, place)


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob(".github/**/*.*"))], ids=relative)
def test_make_has_every_target_that_is_named(page):
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|\$ |run: )make ([a-z][\w-]*)", page.read_text())
    assert [name for name in named if name not in targets] == []


def test_make_help_lists_six_targets():
    text = (ROOT / "Makefile").read_text()
    first = re.findall(r"^([a-z][\w-]*):.* ### \w", text, re.MULTILINE)
    assert sorted(first) == ["check", "demo", "docs", "lint", "test", "venv"]


def test_the_install_page_has_every_extra_and_what_it_costs():
    """But for those that only a developer's environment has."""
    extras = {*PYPROJECT["project"]["optional-dependencies"]} - {"lint", "test"}
    text = (ROOT / "docs" / "install.md").read_text()
    assert {*re.findall(r"`pip install '\.\[(\w+)\]'`", text)} == extras
    assert {*re.findall(r"^\| `(\w+)` \| \d+ \|", text, re.MULTILINE)} == extras


def test_readme_takes_three_minutes():
    """At 230 words a minute, but for code and tables, which are for looking up."""
    text = re.sub(FENCE, "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert 300 < len(" ".join(lines).split()) < 3 * 230


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "tutorial.md"], ids=relative)
def test_pictures_say_what_a_page_says_of_them(page):
    """`make pictures` writes it into the file."""
    pictures = re.findall(r"^!\[(.*)\]\((.*\.png)\)", page.read_text(), re.MULTILINE)
    assert pictures
    for said, file in pictures:
        assert said.encode() in (page.parent / file).read_bytes()


def test_the_picture_has_every_directory():
    text = (ROOT / "docs" / "pictures" / "layers.svg").read_text()
    directories = {path.parent.name for path in (ROOT / "gradkit").glob("*/__init__.py")}
    found = {*re.findall(r"(?:>|, )(\w+)/(?=[<,])", text)}
    assert found == directories | {"kernels", "testbed"}


def test_readme_example_is_right(capsys):
    names = {}
    exec(compile(python_in(README), "README.md", "exec"), names)
    grads, norm = names["grads"], names["norm"]
    first, last = capsys.readouterr().out.splitlines()
    assert f"# {first}\n" in README.read_text()
    assert last == f"{norm} -> {gradkit.grad_norm(grads)}"
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


def test_the_page_of_functions_lists_every_one():
    page = ROOT / "docs" / "functions.md"
    rows = re.findall(r"^\| (`.*?) \|", page.read_text().partition("## What runs")[0], re.M)
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


def test_every_guarantee_has_tests_and_is_on_the_page():
    """`python -m tests.guarantees` writes the names of tests that are marked with it."""
    page, tests = guarantees.PAGE.read_text(), guarantees.marked()
    items, rows = guarantees.names(page)
    assert len(items) == len(re.findall("^- ", page, re.MULTILINE)) > 50
    assert len(rows) > 10
    assert sorted(tests) == sorted([*items, *rows])
    assert guarantees.written(page, tests) == page


def test_warmup_takes_what_the_gpu_page_names():
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^ *\| .* \| (`.*) \|$", text, re.MULTILINE)
    names = re.findall(r"`(\w+)`", "".join(rows))
    assert len(names) > 10
    assert gradkit.warmup(np.ones(2), *[getattr(gradkit, name) for name in names]) == 0


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [
        link for link in links if not re.match(r"\w+:", link) and not (page.parent / link).exists()
    ]
    assert missing == []


def test_the_layout_has_every_directory():
    """tests/package/test_structure.py reads the part that is about gradkit."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tops = ["benchmarks", "docs", "examples", "kernels", "requirements", "testbed", "tests"]
    assert [name for name in tops if f"`{name}/`" not in text] == []


SCRIPTS = sorted((ROOT / "docs" / "gallery").glob("*.py"))
FOR_SCRIPTS = {"gradkit", "jax", "matplotlib", "mpi4py", "numpy", "sklearn", "torch", "tqdm"}


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_scripts_of_the_gallery_import_only_what_is_installed(script):
    """They are downloaded one by one; a quoted script of theirs counts too."""
    assert script.name.startswith("plot_")
    imported = re.findall(r"^(?:import|from) (\w+)", script.read_text(), re.M)
    assert {*imported} - FOR_SCRIPTS <= sys.stdlib_module_names


def test_a_script_of_the_gallery_runs_alone(tmp_path):
    source = (ROOT / "docs" / "gallery" / "plot_accumulation.py").read_text()
    (tmp_path / "downloaded.py").write_text(source)
    folders = {"HOME": tmp_path, "MPLCONFIGDIR": tmp_path, "MPLBACKEND": "Agg"}
    environment = {"PATH": os.environ["PATH"], **{k: str(v) for k, v in folders.items()}}
    command = [sys.executable, "-W", "error", "downloaded.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

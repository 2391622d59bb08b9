"""The built site, read as a browser reads it: `make docs` sets GRADKIT_SITE."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from matplotlib.figure import Figure

import gradkit

if "GRADKIT_SITE" not in os.environ:
    pytest.skip("`make docs` builds what is read here", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ["GRADKIT_SITE"]).resolve()
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
from legends import under_legends  # noqa: E402
from public_names import public_names  # noqa: E402

TEXTS = "a", "code", "h1", "h2", "h3", "h4", "pre"
PAGES = sorted(path for path in SITE.rglob("*.html") if path.parent.name != "_static")
MINIMAL = """
import sys
sys.path.insert(0, {extensions!r})
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary",
              "docstrings", "every_public_name"]
root_doc = "docs/index"
templates_path = ["templates"]
autosummary_imported_members = True
numpydoc_show_class_members = False
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
suppress_warnings = ["myst.xref_missing"]
"""


class Page(HTMLParser):
    """Links of a page, files it loads, ids that can be linked to, and code without a link."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.ids, self.highlighted = [], [], set(), 0
        self.unlinked, self._open = [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in TEXTS:
            self._open.append(tag)
            self.unlinked += [""] * (self._open == ["code"])
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        self.highlighted += "highlight" in (attrs.get("class") or "").split()
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag in ("script", "img", "link") and not {"canonical", "search"} & {attrs.get("rel")}:
            self.loaded += [attrs[key] for key in ("src", "href") if attrs.get(key)]

    def handle_endtag(self, tag):
        if tag in TEXTS:
            self._open.pop()

    def handle_data(self, data):
        if self._open == ["code"]:
            self.unlinked[-1] += data


@cache
def page(path):
    return Page(path)


def target(path, link):
    """The file that a link of a page leads to, and the place in it; None beyond the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    return found, unquote(parts.fragment)


@pytest.fixture(scope="module")
def index():
    """Read the index of the search."""
    return json.loads((SITE / "searchindex.js").read_text().strip()[len("Search.setIndex(") : -1])


def test_there_is_a_site():
    assert len(PAGES) > 80
    assert (SITE / "index.html").exists()
    for name in [
        "install",
        "tutorial",
        "guide",
        "numerics",
        "migration",
        "faq",
        "versioning",
        "gpu",
        "distributed",
    ]:
        assert SITE / "docs" / f"{name}.html" in PAGES


def test_every_internal_link_leads_somewhere():
    broken = []
    for path in PAGES:
        for link in page(path).links:
            found = target(path, link)
            if found is None:
                continue
            file, place = found
            if not file.is_file() or (
                place and file.suffix == ".html" and place not in page(file).ids
            ):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert broken == []


OWN = [
    path
    for path in PAGES
    if re.match(r"docs/(generated/gallery/)?\w+\.", str(path.relative_to(SITE)))
]
OF_OTHERS = {"functions", "jax", "migration", "torch"}  # with columns of other libraries' names


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_public_names_in_the_text_lead_to_the_reference(path):
    assert len(OWN) > 30
    assert unlinked_names(path) == []


def unlinked_names(path):
    names = {*public_names()}
    if path.stem not in OF_OTHERS:
        names |= {name.removeprefix("gradkit.") for name in names if name.count(".") == 1}
    return [code for code in page(path).unlinked if code.removesuffix("()") in names]


def test_an_unlinked_name_is_found(tmp_path):
    linked = "<a href='#'><code>scale_grads</code></a>"
    text = f"<p>{linked} <code>grad_norm</code> <code>gradkit.zero_grad()</code> <code>x</code></p>"
    (tmp_path / "page.html").write_text(text)
    assert unlinked_names(tmp_path / "page.html") == ["grad_norm", "gradkit.zero_grad()"]


def test_the_table_of_functions_leads_to_each():
    links = page(SITE / "docs" / "functions.html").links
    for name in gradkit.__all__:
        if not name.endswith("Error"):
            assert f"generated/reference/gradkit.{name}.html#gradkit.{name}" in links


@pytest.mark.parametrize("inventory", sorted(ROOT.glob("docs/inventories/*")), ids=lambda p: p.stem)
def test_names_of_other_libraries_lead_to_their_documentation(inventory):
    linked = {link for path in PAGES for link in page(path).links if link.startswith("https://")}
    names = [line.split()[0] for line in inventory.read_text().splitlines() if line[0] != "#"]
    assert names
    anchors = {urlsplit(link).fragment.removeprefix("module-") for link in linked}
    assert [name for name in names if name not in anchors] == []


def test_what_pages_load_is_on_the_site():
    """They work without a network."""
    for path in PAGES:
        for link in page(path).loaded:
            found = target(path, link)
            assert found is not None, (path, link)
            assert found[0].is_file(), (path, link)


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_a_page_that_search_finds(name, index):
    file = SITE / "docs" / "generated" / "reference" / f"{name}.html"
    assert name in page(file).ids
    assert f"docs/generated/reference/{name}" in index["docnames"]
    module, _, last = name.rpartition(".")
    assert last in {entry[-1] for entry in index["objects"][module]}


def test_search_knows_the_pages(index):
    assert {"batch", "nccl", "overflow"} <= {*index["terms"]} | {*index["titleterms"]}


def test_code_blocks_can_be_copied():
    with_code = [path for path in PAGES if page(path).highlighted]
    assert len(with_code) > 50
    for path in with_code:
        scripts = [link for link in page(path).loaded if "copybutton.js" in link]
        assert scripts, path


def test_formulas_need_no_script():
    text = (SITE / "docs" / "reference" / "clipping.html").read_text()
    assert text.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 4
    assert not any("mathjax" in link.lower() for link in page(PAGES[0]).loaded)


def test_the_gallery_was_run():
    scripts = sorted((ROOT / "docs" / "gallery").glob("plot_*.py"))
    assert scripts
    for script in scripts:
        html = (SITE / "docs/generated/gallery" / f"{script.stem}.html").read_text()
        figure = re.search(rf"_images/sphx_glr_{script.stem}_001", html)
        assert figure.start() < html.index('<div class="highlight'), script
        assert "Text(0" not in html


def test_a_legend_over_a_line_is_found():
    """As the build does, which fails then."""
    axes = Figure().subplots()
    axes.plot([0, 1], label="under")
    axes.plot([1, 0], label="beside")
    axes.legend(loc="lower left")
    assert under_legends(axes.figure) == ["under"]


SCRIPTS = sorted(path.stem for path in (ROOT / "docs" / "gallery").glob("plot_*.py"))


def downloaded(name):
    """Return the path of a file that a page of the gallery offers."""
    return next(SITE.glob(f"_downloads/*/{name}"))


def statements(code):
    """Code without what is text: a script's docstrings."""
    body = ast.parse(code).body
    return [ast.dump(s) for s in body if not isinstance(getattr(s, "value", None), ast.Constant)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_download_of_the_gallery_runs_alone(tmp_path, name):
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MPLBACKEND": "Agg"}
    quickly = ["--steps", "2", "--plot"] if "gpt" in name else []
    command = [sys.executable, downloaded(f"{name}.py"), *quickly]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert name != "plot_spike_guard" or "steps clipped: [ 60 120 121 180]" in done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_notebooks_and_archives_have_the_code_of_the_script(name):
    cells = json.loads(downloaded(f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert statements("\n".join(code)) == statements(downloaded(f"{name}.py").read_text())
    with zipfile.ZipFile(downloaded(f"{name}.zip")) as archive:
        assert {f"{name}.py", f"{name}.ipynb"} <= {Path(each).name for each in archive.namelist()}


def test_a_public_name_without_a_page_fails_the_build(tmp_path):
    """The error says the name, and no other one."""
    forgotten = ["clip_spikes", "from_mpi", "zero_grad"]
    source = tmp_path / "docs"
    (source / "reference").mkdir(parents=True)
    for file in (ROOT / "docs" / "reference").glob("*.md"):
        text = file.read_text()
        for name in forgotten:
            text = text.replace(f"\n   {name}\n", "\n")
        (source / "reference" / file.name).write_text(text)
    (source / "index.md").write_text("# x\n\n```{toctree}\nreference/index\n```\n")
    conf = MINIMAL.format(extensions=str(ROOT / "docs" / "_ext"))
    (tmp_path / "conf.py").write_text(conf)
    template = tmp_path / "templates" / "autosummary" / "class.rst"  # lists no attributes
    template.parent.mkdir(parents=True)
    template.write_text("{{ fullname | underline }}\n\n.. autoclass:: {{ fullname }}\n")
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going"]
    done = subprocess.run(
        [*command, "-b", "dummy", tmp_path, tmp_path / "out"], capture_output=True, text=True
    )
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == len(forgotten), done.stderr
    assert sorted(re.findall(r"(\w+) has no page", done.stderr)) == forgotten
    assert done.returncode == 1


def text_of(name):
    html = (SITE / "docs" / "generated" / "reference" / f"{name}.html").read_text()
    return re.sub(r"<[^>]+>", "", html.partition('id="main-content"')[2])


@pytest.mark.parametrize("name", ["LayerNorm", "AddLayerNorm", "RMSNorm", "AddRMSNorm"])
def test_modules_have_the_arguments_of_pytorchs(name):
    said = re.sub(r"\s+", " ", text_of(f"gradkit.torch.{name}"))
    assert "(normalized_shape, eps=" in said
    assert "*, scale_offset=0.0)" in said


@pytest.mark.parametrize("name", ["clip_grad_norm", "grad_norm", "batch_norm"])
def test_examples_come_before_the_keywords_about_ranks(name):
    text = text_of(f"gradkit.{name}")
    assert 0 < text.index("Examples") < text.index("Parameters")

"""The built site in headless Chromium: search, copy buttons, and pages as wide as a screen.

`make docs-look` runs these, and leaves screenshots to look at in build/docs-look.
"""

import json
import os
import re
import shutil
import subprocess
import threading
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gradkit

if "GRADKIT_LOOK" not in os.environ:
    pytest.skip("`make docs-look` asks for a browser", allow_module_level=True)

SITE = Path(os.environ["GRADKIT_SITE"]).resolve()
SHOTS = Path(os.environ["GRADKIT_LOOK"]).resolve()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
PAGES = {
    "home": "docs/index.html",
    "tutorial": "docs/tutorial.html",
    "performance": "docs/performance.html",
    "thumbnails": "docs/generated/gallery/index.html",
    "gpu": "docs/gpu.html",
    "gpt": "docs/generated/gallery/plot_numpy_gpt.html",
    "function": "docs/generated/reference/gradkit.clip_grad_norm.html",
    "concept": "docs/reference/row-norms.html",
    "gallery": "docs/generated/gallery/plot_norm_errors.html",
    "record": "docs/records/nvidia-h200-cases.html",
}
SEARCHES = {
    "clip_grad_norm": "gradkit.clip_grad_norm.html",
    "gradient clipping": "gradkit.clip_grad_norm.html",
    "loss scale": "docs/guide.html",
    "freeze batch norm": "docs/guide.html",
    "DDP": "docs/torch.html",
    "resume": "docs/guide.html",
}
EVERY = sorted([*SITE.glob("docs/*.html"), *SITE.glob("docs/generated/gallery/*.html")])
LOOKS = PAGES | {"search": "search.html?q=gradient+clipping"}
# A page in a frame as wide as a screen, since Chromium's windows have a least width. The title says
# by how much the page, or what it says, is wider; code and formulas scroll by themselves, tables on
# a phone. It then names the pictures that are missing, and the columns beside the text that are
# empty.
FRAME = """<!DOCTYPE html><title>not loaded</title><style>body {{ margin: 0 }}</style>
<iframe src="/{path}" width="{width}" height="1400" style="border: 0" onload="
const page = this.contentDocument;
const texts = [...page.querySelectorAll('article :is(p, dt, dd, td, h1, h2, code)')].filter(
    text => !text.closest('pre, .math, .pst-scrollable-table-container'));
const edges = texts.map(text => text.getBoundingClientRect().right);
const tables = [...page.querySelectorAll('.pst-scrollable-table-container')].map(
    table => {width} < 1000 ? 0 : {width} + table.scrollWidth - table.clientWidth);
const widest = Math.max(page.documentElement.scrollWidth, ...edges, ...tables);
const missing = [...page.images].filter(image => image.complete && !image.naturalWidth);
const columns = [...page.querySelectorAll('.bd-sidebar-primary, .bd-sidebar-secondary')];
const empty = columns.filter(
    column => {width} > 1000 && column.checkVisibility()
        && ![...column.querySelectorAll('nav a')].some(link => link.checkVisibility()));
document.title = 'wider by ' + Math.floor(widest - {width}) + '; '
    + [...missing.map(image => image.src), ...empty.map(column => 'empty ' + column.className)];
"></iframe>"""
# Presses the first copy button; the title is what would be in the clipboard.
COPYING = """<!DOCTYPE html><title>not copied</title>
<iframe src="/{path}" width="1300" height="900" onload="
const page = this.contentDocument;
page.execCommand = () => {{
    document.title = JSON.stringify(page.querySelector('textarea[readonly]').value);
    return true;
}};
page.querySelector('.copybtn').click();
"></iframe>"""
THEME = "<script>localStorage.mode = localStorage.theme = '{theme}'</script>"


class Handler(SimpleHTTPRequestHandler):
    """Serves the site; also /light/PAGE and /dark/PAGE, /framed/WIDTH/PATH and /copying/PAGE."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        kind, _, rest = self.path.lstrip("/").partition("/")
        if kind == "framed":
            width, _, path = rest.partition("/")
            self.reply(FRAME.format(width=width, path=path))
        elif kind == "copying":
            self.reply(COPYING.format(path=rest))
        elif kind in ("dark", "light"):
            head = f'<head><base href="/{rest}">' + THEME.format(theme=kind)
            self.reply((SITE / rest.partition("?")[0]).read_text().replace("<head>", head, 1))
        else:
            super().do_GET()

    def reply(self, html):
        body = html.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def address():
    handler = partial(Handler, directory=str(SITE))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def chromium(tmp_path, url, *options):
    """Return the output of Chromium; an error in a page's console fails."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", *options, url]
    command[1:1] = ["--enable-logging=stderr", "--log-level=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.findall(r".*CONSOLE.*(?:Error|Failed|Uncaught).*", done.stderr) == []
    return done.stdout


@pytest.mark.parametrize("query", SEARCHES)
def test_search_finds(address, tmp_path, query):
    """Among the first ten results."""
    page = f"{address}/search.html?q={query.replace(' ', '+')}"
    html = chromium(tmp_path, page, "--dump-dom")
    results = re.findall(r'<li class="kind-.*?href="([^"]*)"', html, re.DOTALL)
    assert any(SEARCHES[query] in result for result in results[:10]), results[:10]


@pytest.mark.parametrize("page", PAGES)
def test_code_has_copy_buttons(address, tmp_path, page):
    html = chromium(tmp_path, f"{address}/{PAGES[page]}", "--dump-dom")
    blocks = len(re.findall(r'<div class="highlight">', html))
    assert len(re.findall(r'<button class="copybtn', html)) == blocks


def test_a_copy_has_the_code_without_prompts_and_results(address, tmp_path):
    html = chromium(tmp_path, f"{address}/copying/{PAGES['function']}", "--dump-dom")
    copied = json.loads(unescape(re.search(r"<title>(.*?)</title>", html)[1]))
    doc = gradkit.clip_grad_norm.__doc__
    assert copied.splitlines() == re.findall(r"^ +(?:>>>|\.\.\.) (.*)$", doc, re.MULTILINE)


@pytest.mark.parametrize("width", [390, 1366])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", LOOKS)
def test_a_page_fits_the_screen(address, tmp_path, page, theme, width):
    """And its screenshot is there to look at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = SHOTS / f"{page}-{theme}-{width}.png"
    url = f"{address}/framed/{width}/{theme}/{LOOKS[page]}"
    size = f"--window-size={max(width, 500)},1400"
    chromium(tmp_path, url, size, f"--screenshot={shot}")
    assert excess(tmp_path, url, size) <= 0
    assert shot.stat().st_size > 10_000


@pytest.mark.parametrize("width", [390, 1366])
@pytest.mark.parametrize("page", EVERY, ids=lambda path: path.stem)
def test_every_page_fits_a_phone_and_a_screen(address, tmp_path, page, width):
    url = f"{address}/framed/{width}/light/{page.relative_to(SITE)}"
    assert excess(tmp_path, url, f"--window-size={max(width, 500)},1400") <= 0


def excess(tmp_path, url, size):
    """By how many pixels a framed page is wider than its frame; what is missing or empty fails."""
    html = chromium(tmp_path, url, size, "--dump-dom")
    wider, missing = re.search(r"<title>wider by (-?\d+); (.*)</title>", html).groups()
    assert missing == ""
    return int(wider)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("<script>undefined_name()</script>", "ReferenceError"),
        ("<img src='/no.png'>", "no.png"),
        ("<p>x</p><div class='bd-sidebar-secondary'><p></p></div>", "empty"),
        (
            "<p>x</p><div class='bd-sidebar-primary'><h2>Section Navigation</h2>"
            "<nav hidden><a href='#'>x</a></nav></div>",
            "empty",
        ),
        ("<p style='width: 1500px'>x</p>", "wider"),
        ("<p style='overflow: hidden'><code style='padding: 0 800px'>x</code></p>", "wider"),
        (
            "<div class='pst-scrollable-table-container' style='overflow: auto'>"
            "<table style='width: 1500px'><tr><td>x</table></div>",
            "wider",
        ),
    ],
)
def test_a_fault_is_seen(address, tmp_path, monkeypatch, fault, found):
    text = f"<!DOCTYPE html><html><head></head><body><article>{fault}</article></body></html>"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "page.html").write_text(text)
    monkeypatch.setitem(globals(), "SITE", tmp_path / "site")
    url = f"{address}/framed/1366/light/page.html"
    with pytest.raises(AssertionError, match=found):
        assert excess(tmp_path, url, "--window-size=1366,1400") <= 0, "wider"

"""Adapts links and figures of Markdown pages, which also work on a code host, to the site.

- A link to a script of the gallery leads to its page, one to the folder to its first page.
- ``<!-- figure: plot_name 2 -->`` is the script's second figure.
"""

import re
from pathlib import PurePosixPath

from sphinx.application import Sphinx

GALLERY = PurePosixPath("docs/generated/gallery")
LINK = re.compile(r"\]\((?:[./]*)(?:docs/)?gallery/(?:(plot_\w+)\.py)?\)")
FIGURE = re.compile(r"^<!-- figure: (plot_\w+) (\d+) -->$", re.MULTILINE)


def _rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    if not str(app.env.doc2path(docname)).endswith(".md"):
        return
    up = "../" * docname.count("/")
    source[0] = LINK.sub(lambda match: f"]({up}{GALLERY}/{match[1] or 'index'}.rst)", source[0])
    source[0] = FIGURE.sub(
        lambda match: (
            f"```{{image}} /{GALLERY}/images/sphx_glr_{match[1]}_{int(match[2]):03}.png\n"
            f":target: {up}{GALLERY}/{match[1]}.html\n:class: figure\n```"
        ),
        source[0],
    )


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

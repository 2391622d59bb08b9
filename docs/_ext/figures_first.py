"""Figures of the gallery in front of the code that draws them, the first one of any code."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx_gallery.directives import imgsgnode


def _move(app: Sphinx, document: nodes.document) -> None:
    if not app.env.docname.startswith("docs/generated/gallery/plot_"):
        return
    blocks = [*document.findall(nodes.literal_block)]
    for number, figure in enumerate([*document.findall(imgsgnode)]):
        siblings = figure.parent.children[: figure.parent.index(figure)]
        own = [node for node in siblings if isinstance(node, nodes.literal_block)]
        block = own[-1] if number else blocks[0]
        figure.parent.remove(figure)
        block.parent.insert(block.parent.index(block), figure)


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("doctree-read", _move)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Links from gradkit's public names, written as code in the text of a page, to their reference.

A name may stand alone or be called: ``grad_norm``, ``gradkit.grad_norm``, ``n = grad_norm(x)``. A
short name is that of the module that the page is about, or else of gradkit. Names in headings, in
the reference itself and in a table's columns of other libraries' names stay as they are, and so do
those of kernels.
"""

import re
from collections.abc import Iterator

from docutils import nodes
from public_names import public_names
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

ABOUT = {
    "docs/torch": ["gradkit.torch"],
    "docs/jax": ["gradkit.jax", "gradkit.jax.transforms"],
}
LEFT = ("docs/reference/", "docs/generated/reference/", "kernels/", "testbed/")
OTHERS = {"you write", "operator", "library", "PyTorch", "optax, flax", "ONNX Runtime", "elsewhere"}
CALL = re.compile(r"(?:[\w, ]+ = )?((?:\w+\.)*\w+)(?:\(.*\))?", re.DOTALL)


def full_names(docname: str) -> dict[str, str]:
    """Return the full name of each name that a page may write."""
    found = {name: name for name in public_names()}
    for module in ["gradkit.distributed", "gradkit", *ABOUT.get(docname, ())]:
        for name in public_names():
            if name.rpartition(".")[0] == module:
                found[name.rpartition(".")[2]] = name
                found[name.removeprefix("gradkit.").removeprefix("jax.")] = name
    return found


class _Links(SphinxPostTransform):
    default_priority = 890  # before other libraries' names

    def run(self, **kwargs) -> None:  # noqa: ARG002
        docname, builder = self.env.docname, self.app.builder
        if docname.startswith(LEFT):
            return
        places = self.env.get_domain("py").objects
        names = full_names(docname)
        skipped = {*_of_others(self.document)}
        for literal in list(self.document.findall(nodes.literal)):
            call = CALL.fullmatch(literal.astext())
            name = names.get(call[1]) if call else None
            if name not in places or literal in skipped or _within(literal):
                continue
            entry = places[name]
            link = make_refnode(builder, docname, entry.docname, entry.node_id, [], name)
            literal.replace_self(link)
            link += literal


def _within(node: nodes.Node) -> bool:
    """Say if a node is in a link or in a heading."""
    while node := node.parent:
        if isinstance(node, nodes.reference | nodes.title):
            return True
    return False


def _of_others(document: nodes.document) -> Iterator[nodes.literal]:
    """The code in columns of other libraries' names."""
    for table in document.findall(nodes.tgroup):
        (head, *_), others = table.findall(nodes.row), set()
        others = {k for k, entry in enumerate(head) if entry.astext() in OTHERS}
        for row in table.findall(nodes.row):
            for k, entry in enumerate(row):
                if k in others:
                    yield from entry.findall(nodes.literal)


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_post_transform(_Links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

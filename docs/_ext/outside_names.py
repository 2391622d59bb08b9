"""Links from the names of other libraries, written as code, to those libraries' documentation.

The names are those of ``intersphinx``'s inventories, stored as text in docs/inventories, so that a
build needs no network.
"""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform


class _Links(SphinxPostTransform):
    default_priority = 900

    def run(self, **kwargs) -> None:  # noqa: ARG002
        inventories = self.env.intersphinx_named_inventory.values()
        places = {
            name: item
            for inventory in inventories
            for kind in inventory.values()
            for name, item in kind.items()
        }
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext().removesuffix("()")
            if name.startswith("np."):
                name = f"numpy.{name.removeprefix('np.')}"
            if name in places and not isinstance(literal.parent, nodes.reference):
                title = f"{name}, in the documentation of {places[name].project_name}"
                link = nodes.reference("", "", internal=False, refuri=places[name].uri)
                link["reftitle"] = title
                literal.replace_self(link)
                link += literal


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_post_transform(_Links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

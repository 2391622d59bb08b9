"""Adapts docstrings, which are written for ``help``, to Sphinx."""

import inspect
import re

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

TYPE = re.compile(r"[\w, ]+ : ")


def _escape_shapes(app, what, name, obj, options, lines: list[str]) -> None:
    """Escape asterisks in shapes such as ``(*rows, *normalised)``, which are not emphasis."""
    lines[:] = [
        re.sub(r"(?<=[( ])\*(?=\w)", r"\\*", line) if TYPE.match(line) else line for line in lines
    ]


def _skip_fields(app, what, name, obj, skip: bool, options) -> bool | None:
    """Skip the fields of named tuples: "Alias for field number 0" does not describe them."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


# What people search for, and the page that should come first.
SEARCHED = {
    "gradkit.clip_grad_norm": "gradient clipping, clip gradients",
    "gradkit.accumulate_grads": "gradient accumulation",
    "gradkit.SpikeGuard": "loss spikes",
    "gradkit.batch_norm_inference": "freeze batch norm",
}


class _Index(SphinxTransform):
    """Adds entries to the index, which the search reads, under names that the text lacks.

    They lead to the function itself: the search shows no text of a directive's own, empty target.
    """

    default_priority = 840  # before domains collect the index

    def apply(self, **_) -> None:
        """Called by Sphinx for every page."""
        name = self.env.docname.rpartition("/")[2]
        words = SEARCHED.get(name, "").split(", ")
        entries = [("single", word, name, "main", None) for word in words if word]
        self.document.insert(0, addnodes.index(entries=entries))


def _arguments(app, what, name, obj, options, signature: str, result) -> tuple[str, None] | None:
    """Name the arguments that a module of gradkit.torch passes on to the one of PyTorch."""
    if not (what == "class" and name.startswith("gradkit.torch") and "*args" in (signature or "")):
        return None
    theirs = next(base for base in obj.__mro__ if base.__module__.startswith("torch.nn"))
    own = [p for p in inspect.signature(obj).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given = [*inspect.signature(theirs).parameters.values(), *own]
    plain = [p.replace(annotation=p.empty) for p in given]
    return str(inspect.Signature(plain)), None


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _escape_shapes, priority=400)  # before numpydoc
    app.connect("autodoc-process-signature", _arguments)
    app.add_transform(_Index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Adapts docstrings, which are written for ``help``, to Sphinx."""

import re

from sphinx.application import Sphinx

TYPE = re.compile(r"[\w, ]+ : ")


def _escape_shapes(app, what, name, obj, options, lines: list[str]) -> None:
    """Escape asterisks in shapes such as ``(*rows, *normalised)``, which are not emphasis."""
    lines[:] = [
        re.sub(r"(?<=[( ])\*(?=\w)", r"\\*", line) if TYPE.match(line) else line for line in lines
    ]


def _skip_fields(app, what, name, obj, skip: bool, options) -> bool | None:
    """Skip the fields of named tuples: "Alias for field number 0" does not describe them."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _escape_shapes, priority=400)  # before numpydoc
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""What docstrings write for readers of ``help`` and Sphinx would misread."""

import re

from sphinx.application import Sphinx

TYPE = re.compile(r"[\w, ]+ : ")


def _escape_shapes(app, what, name, obj, options, lines: list[str]) -> None:
    """``(*rows, *normalised)`` is a shape, and its asterisks are no emphasis."""
    lines[:] = [
        re.sub(r"(?<=[( ])\*(?=\w)", r"\\*", line) if TYPE.match(line) else line for line in lines
    ]


def _skip_fields(app, what, name, obj, skip: bool, options) -> bool | None:
    """A named tuple's docstring says what its fields are; "Alias for field number 0" does not."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _escape_shapes, priority=400)  # before numpydoc
    return {"parallel_read_safe": True, "parallel_write_safe": True}

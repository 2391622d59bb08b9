"""Warns about each public name without a page, so that the build fails."""

from public_names import public_names
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    documented = {*env.get_domain("py").objects}
    for name in public_names():
        if name not in documented:
            logging.getLogger(__name__).warning(
                "%s has no page: add a line for it to a table in docs/reference/", name
            )


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

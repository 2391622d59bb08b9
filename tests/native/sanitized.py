"""A plugin for pytest: the compiled backend is the library that GRADKIT_COMPILED names."""

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import spec_from_loader


class Finder:
    """Finder of the module, asked before any other."""

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != "gradkit._cpu.compiled":
            return None
        return spec_from_loader(name, ExtensionFileLoader(name, os.environ["GRADKIT_COMPILED"]))


sys.meta_path.insert(0, Finder())


def pytest_terminal_summary(terminalreporter):
    """Say so: the tests would pass without it, too."""
    from gradkit._cpu import compiled

    assert compiled.__file__ == os.environ["GRADKIT_COMPILED"]
    terminalreporter.write_line(f"compiled: {compiled.__file__}")

"""A pytest plugin that runs the suite on a mutant: one file's text with one piece replaced.

``pytest -p tests.mutants.plugin --mutant FILE OLD NEW`` (through ``python -m tests.mutants``).
Nothing on disk changes: a kernel's text is replaced where it is read, a module's where it is
imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--mutant", nargs=3, metavar=("FILE", "OLD", "NEW"))


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before any conftest can import gradkit."""
    chosen = early_config.known_args_namespace.mutant
    if chosen:
        plant(*chosen)


def plant(file: str, old: str, new: str) -> None:
    """Make this process see the mutant in place of the file."""
    if file.startswith("kernels/"):
        _plant_kernel(ROOT / file, old, new)
    else:
        sys.meta_path.insert(0, _Finder(file, old, new))


def mutated(path: Path, old: str, new: str) -> str:
    """The file's text with its one occurrence of ``old`` replaced."""
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{path.name} holds {text.count(old)} times, not once: {old!r}")
    return text.replace(old, new)


def _plant_kernel(target: Path, old: str, new: str) -> None:
    text = mutated(target, old, new)
    read_text = Path.read_text

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.parent.name == "kernels" and self.name == target.name:
            return text
        return read_text(self, *args, **kwargs)

    Path.read_text = read  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder):
    """Imports one module of gradkit from mutated text."""

    def __init__(self, file: str, old: str, new: str):
        self._path = ROOT / file
        self._text = mutated(self._path, old, new)
        self._module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")

    def find_spec(
        self,
        fullname: str,
        path: Any = None,  # noqa: ARG002
        target: Any = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        loader = _Loader(fullname, str(self._path), self._text)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, text: str):
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        """Compile the mutant; the cached bytecode is the original's."""
        return compile(self._text, self.get_filename(fullname), "exec", dont_inherit=True)

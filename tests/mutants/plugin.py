"""A pytest plugin that plants a mutant, or records which test runs which line.

``pytest -p tests.mutants.plugin --mutant FILE START END NEW`` runs tests on a mutant. Nothing on
disk changes: a kernel's text is replaced where it is read, a module's where it is imported.

``--covered FOLDER`` writes, for each test that passes, the statements of gradkit's functions that
it runs and the kernels that it launches in the emulator. Modules are imported with a mark before
each statement, which costs a few percent; a tracer would double the time.
"""

import ast
import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.mutants import compiled
from tests.mutants.mutant import ROOT

_DIGITS = bytes([ord("0"), ord("1"), *[0] * 254])
_marks: dict[str, bytearray] = {}  # of each module: whether a line ran


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--mutant", nargs=4, metavar=("FILE", "START", "END", "NEW"))
    parser.addoption("--covered", metavar="FOLDER")


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before any conftest can import gradkit."""
    options = early_config.known_args_namespace
    if options.mutant:
        file, start, end, new = options.mutant
        text = (ROOT / file).read_text()
        _plant(ROOT / file, text[: int(start)] + new + text[int(end) :])
    if options.covered:
        sys.meta_path.insert(0, _Finder(_marked))


def pytest_configure(config: Any) -> None:
    folder = config.getoption("--covered")
    if folder:
        worker = getattr(config, "workerinput", {}).get("workerid", "main")
        if worker == "main":
            shutil.rmtree(ROOT / folder, ignore_errors=True)
            (ROOT / folder).mkdir(parents=True)
        config.pluginmanager.register(_Recorder(ROOT / folder / f"{worker}.json"))


def _plant(file: Path, text: str) -> None:
    """Make this process see ``text`` in place of a file."""
    if file.suffix == ".py":
        sys.meta_path.insert(0, _Finder(lambda path: text if path == file else None))
        return
    if file.parent.name == "cpu":
        sys.meta_path.insert(0, _Compiled(compiled.build(file, text)))
        return
    read_text = Path.read_text

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        same = self.name == file.name and self.parent.name == file.parent.name
        return text if same else read_text(self, *args, **kwargs)

    Path.read_text = read  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder):
    """Imports modules of gradkit from the texts or trees that ``source_of`` gives for files."""

    def __init__(self, source_of: Callable[[Path], Any]):
        self._source_of = source_of

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if fullname.partition(".")[0] != "gradkit":
            return None
        base = ROOT.joinpath(*fullname.split("."))
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        source = self._source_of(file) if file.exists() else None
        if source is None:
            return None
        loader = _Loader(fullname, str(file))
        loader.source = source
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


class _Compiled(importlib.abc.MetaPathFinder):
    """Imports ``gradkit._cpu.compiled`` from another file."""

    def __init__(self, path: Path):
        self._path = path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if fullname != "gradkit._cpu.compiled":
            return None
        return importlib.util.spec_from_file_location(fullname, self._path)


class _Loader(importlib.machinery.SourceFileLoader):
    source: Any

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source; the cached bytecode is the original's."""
        return compile(self.source, self.get_filename(fullname), "exec", dont_inherit=True)


def _marked(path: Path) -> ast.Module:
    """A module in which each statement of a function first sets the mark of its line."""
    tree = ast.parse(path.read_text())
    name = f"__covered_{len(_marks)}__"
    marks = _marks[path.relative_to(ROOT).as_posix()] = bytearray(tree.body[-1].end_lineno + 1)
    setattr(builtins, name, marks)
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        for node in [function, *ast.walk(function)]:
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list) and not hasattr(node, f"{field}_marked"):
                    setattr(node, f"{field}_marked", True)
                    marked = [s for old in statements for s in (*_mark_of(old, name), old)]
                    setattr(node, field, marked)
    return tree


def _mark_of(statement: ast.stmt, name: str) -> list[ast.stmt]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return []  # a docstring, before which nothing may stand
    [mark] = ast.parse(f"{name}[{statement.lineno}] = 1").body
    for node in ast.walk(mark):
        ast.copy_location(node, statement)
    return [mark]


class _Recorder:
    """Writes for each test that passes what it ran, and how long it took."""

    def __init__(self, path: Path):
        self._path = path
        self._tests: dict[str, Any] = {}
        self._passed = False
        self._launched: set[tuple[str, str]] = set()

    def pytest_collection(self) -> None:
        """Make what launches kernels tell which; imported here, since it may import gradkit."""
        from testbed.emulator import compiler, module

        run, complaints = module.EmulatedKernel._run, compiler.complaints

        def noted(kernel: Any, *args: Any) -> Any:
            self._launched.add((kernel._compiled.library.name[7:15], kernel._source))
            return run(kernel, *args)

        def noted_complaints(source: str, options: Any, warning: str) -> Any:
            self._launched.add(("", source))
            return complaints(source, options, warning)

        module.EmulatedKernel._run = noted
        compiler.complaints = noted_complaints

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Clear all marks, and read them when the test is over."""
        for marks in _marks.values():
            if 1 in marks:
                marks[:] = bytes(len(marks))
        self._launched.clear()
        self._passed = not item.get_closest_marker("alone")
        start = time.perf_counter()
        result = yield
        seconds = round(time.perf_counter() - start, 3)
        if self._passed:
            # For each file a number in hexadecimal, whose bit k says whether line k ran.
            ran = {file: marks[::-1] for file, marks in _marks.items() if 1 in marks}
            lines = {f: f"{int(marks.translate(_DIGITS), 2):x}" for f, marks in ran.items()}
            kernels = defaultdict(list)  # for each file the libraries that it is compiled into
            for library, source in self._launched:
                for file in _files_of(source):
                    kernels[file] += [library] if library else []  # checked, but not compiled
            self._tests[item.nodeid] = (seconds, lines, kernels)
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._passed &= report.passed

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._tests))


@functools.cache
def _files_of(source: str) -> list[str]:
    """The kernels' files in a source whose includes are expanded: those whose title is there."""
    files = (ROOT / "kernels").glob("*.cu*")
    return [f"kernels/{f.name}" for f in files if f.read_text().partition("\n")[0] in source]

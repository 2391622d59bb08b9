"""The shape of the house: imports go down the map, without a cycle, and functions stay short."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gradkit

PACKAGE = Path(gradkit.__file__).parent
FILES = {
    "gradkit"
    + "".join(f".{part}" for part in path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
# From the ground up. A module imports from its own line or from a lower one; the public modules
# stand on top of them all, and the package on those.
MAP = (
    (
        *("gradkit.errors", "gradkit._dtypes", "gradkit._backend"),
        *("gradkit._open.shards", "gradkit._open.trees"),
    ),
    ("gradkit._calls",),
    ("gradkit._numpy",),
    ("gradkit._cuda.launch",),
    ("gradkit._cuda.cudnn",),
    ("gradkit._cuda",),
    ("gradkit._arrays",),
    ("gradkit._open",),
    ("gradkit._ranks",),
    ("gradkit.distributed",),
    ("gradkit._config", "gradkit._warmup"),
)
# Imported by those who want them: they stand on the package, which imports none of them.
ADAPTERS = ("gradkit.jax", "gradkit.torch")
LONGEST = 40


def level(module):
    """The line of the map that a module is on; public modules are above all of it."""
    if any(within(module, name) for name in ADAPTERS):
        return len(MAP) + 2
    lines = [
        (len(name), number)
        for number, line in enumerate(MAP)
        for name in line
        if within(module, name)
    ]
    if not lines:
        assert module.count(".") <= 1, f"{module} is not on the map"
    return max(lines)[1] if lines else len(MAP) + (module == "gradkit")


def within(module, name):
    return module == name or module.startswith(name + ".")


def imported(path):
    """The modules of gradkit that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if within(alias.name, "gradkit"))
        elif isinstance(node, ast.ImportFrom) and within(node.module or "", "gradkit"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


IMPORTS = {name: sorted(set(imported(path)) - {name}) for name, path in MODULES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_map(module):
    assert [name for name in IMPORTS[module] if level(name) > level(module)] == []


def test_no_module_imports_itself_through_others():
    assert len(list(TopologicalSorter(IMPORTS).static_order())) == len(MODULES)


def test_the_map_has_no_room_that_is_gone():
    for line in (*MAP, ADAPTERS):
        for name in line:
            assert any(within(module, name) for module in MODULES), name


def functions():
    """Every function of gradkit with the number of its lines, docstring and signature aside."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = ast.get_docstring(node, clean=False) is not None
                body = node.body[1:] if documented else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                yield f"{name}.{node.name}", lines


def test_functions_fit_on_a_screen():
    long = {name: lines for name, lines in functions() if lines > LONGEST}
    assert long == {}
    assert len(list(functions())) > 400  # they were found

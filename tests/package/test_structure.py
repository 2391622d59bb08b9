"""The shape of gradkit: imports go down CONTRIBUTING.md's layout, and functions stay short.

Of what is private, autograd imports few modules.
"""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gradkit
from tests.sizes import class_names, repeated, size_of

PACKAGE = Path(gradkit.__file__).parent
FILES = {
    "gradkit"
    + "".join(f".{part}" for part in path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
ROOT = PACKAGE.parent
KERNELS = ROOT / "kernels"
PUBLIC, ALL = "gradkit/*.py", "gradkit"  # the rows of public modules, and of the package itself


def layout():
    """The rows of CONTRIBUTING.md's table, from the ground up: the modules or packages of each."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| in `gradkit/` |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    names = [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in reversed(rows)]
    return [[module_of(name) for name in row] for row in names]


def module_of(path):
    if path in ("*.py", "__init__.py"):
        return PUBLIC if path == "*.py" else ALL
    return "gradkit." + path.removesuffix("/").removesuffix(".py").replace("/", ".")


LAYOUT = layout()
LONGEST = 40
TORCH_MODULES = ("AddLayerNorm", "GroupNorm", "LayerNorm")


def level(module):
    """The row of the table that a module is in."""
    found = [
        (len(name), number)
        for number, row in enumerate(LAYOUT)
        for name in row
        if name not in (PUBLIC, ALL) and within(module, name)
    ]
    if found:
        return max(found)[1]
    assert module.count(".") <= 1, f"{module} is in no row of CONTRIBUTING.md"
    row = ALL if module == "gradkit" else PUBLIC
    return next(number for number, names in enumerate(LAYOUT) if row in names)


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


COMPILED = "gradkit._cpu.compiled"  # which is no Python and imports nothing


@cache
def imports():
    """Modules of gradkit that each module imports."""
    return {n: sorted(set(imported(path)) - {n, COMPILED}) for n, path in MODULES.items()}


def test_imports_go_down_the_layout():
    up = [(own, name) for own in MODULES for name in imports()[own] if level(name) > level(own)]
    assert up == []


def test_no_module_imports_itself_through_others():
    assert len(list(TopologicalSorter(imports()).static_order())) == len(MODULES)


# Records and the doors that run them; what else a framework needs of its own arrays and streams.
RECORDS = {"_calls.channels", "_calls.record", "_calls.rows", "_dtypes", "_open.dispatch"}
PRIVATE = {
    "jax": RECORDS
    | {"_calls.checks", "_calls.layouts", "_calls.lists", "_calls.roles"}
    | {
        "_arrays",
        "_arrays.cuda",
        "_arrays.dlpack",
        "_backend",
        "_host",
        "_numpy.floating_point",
        "_open.foreign",
        "_open.units",
    }
    | {"_ranks.statistics"},
    "torch": RECORDS
    | {
        "_arrays.torch",
        "_calls.engines",
        "_host",
        "_open.foreign",
        "_ranks.torch",
        "_typing",
    },
}


@pytest.mark.parametrize("package", PRIVATE)
def test_autograd_stands_on_records_and_their_doors(package):
    """A module that it newly needs is rather a public function, or a record."""
    own = f"gradkit.{package}"
    names = {name for module in MODULES if within(module, own) for name in imports()[module]}
    private = {name for name in names if "._" in name and not within(name, own)}
    assert private == {f"gradkit.{name}" for name in PRIVATE[package]}


def test_the_layout_names_nothing_that_is_gone():
    named = [name for row in LAYOUT for name in row if name not in (PUBLIC, ALL)]
    assert len(named) > 12
    assert [name for name in named if not any(within(m, name) for m in MODULES)] == []


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
    found = [*functions()]
    assert {name: lines for name, lines in found if lines > LONGEST} == {}
    assert len(found) > 400


def test_no_class_name_stands_twice():
    """But modules of PyTorch have the names of their operations' records, as users expect."""
    found = class_names()
    assert {n for n, count in found.items() if count > 1} <= set(TORCH_MODULES)
    assert all(found[name] <= 2 for name in TORCH_MODULES)


WRITTEN = ("benchmarks", "docs", "examples", "gradkit", "testbed", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("directory", WRITTEN)
def test_docstrings_begin_with_a_verb_or_the_thing(directory):
    """Not with a question. The title of a gallery's page, in Python too, is none."""
    riddle = re.compile(r'("""|)\s*(How|What|Where|Whether|Which|Who|Whom|Whose)\b')
    found, files = [], [*(ROOT / directory).rglob("*.py"), *(ROOT / directory).rglob("*.pyi")]
    for path in files:
        source = path.read_text()
        if not any(each[1] for each in riddle.finditer(source)):  # which is quicker than to parse
            continue
        nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, DOCUMENTED))
        texts = (ast.get_docstring(node) or "" for node in nodes)
        found += [(path, t) for t in texts if riddle.match(t) and "\n====" not in t]
    assert found == []
    assert files


SOURCES = [*FILES.values(), *(p for end in ("cu*", "cpp", "h") for p in KERNELS.rglob(f"*.{end}"))]


def test_six_lines_of_logic_stand_once():
    assert repeated(SOURCES, 6) == []
    assert len(SOURCES) > 200


def test_what_stands_twice_is_found(tmp_path):
    """Without comments, blank lines and arguments that are handed on."""
    python = "def f(a):\n    b = 1\n    # why\n    c(\n        b=b,\n    )\n    return c\n"
    (tmp_path / "one.py").write_text(python)
    (tmp_path / "two.py").write_text(python.replace("# why", "").replace("f(a)", "g()"))
    (tmp_path / "one.cu").write_text("// what\nint i;\n#define N\nint j;\n\nint i;\n}\nint j;\n")
    found = repeated(sorted(tmp_path.iterdir()), 2)
    assert [[place.rpartition("/")[2] for place in places] for places in found] == [
        ["one.cu:2", "one.cu:6"],
        ["one.py:2", "two.py:2"],
        ["one.py:4", "two.py:4"],
    ]


def test_variables_of_headers_are_inline():
    """GCC 16 refuses to link a specialisation that several files define."""
    headers = [path.read_text() for path in (KERNELS / "cpu").glob("*.h")]
    assert sum(text.count("template <> inline constexpr") for text in headers) == 2
    assert not [text for text in headers if "template <> constexpr" in text]


def test_lines_are_counted_without_what_is_no_code():
    """One each of a blank line, a comment, a docstring and dots."""
    source = '"""Of a module."""\n\n# Why.\ndef f(\n    x,  # which\n): ...\n\n\n'
    source += 'def g():\n    """Of a function\n\n    in two lines."""\n    return """\n\n"""\n'
    size = size_of(source)
    assert size.code == {4, 5, 6, 9, 13, 14, 15}
    assert size.signatures == {4, 5, 6, 9}
    assert size.functions == [3, 4]

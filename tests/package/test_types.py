"""Types are in the functions' own signatures, which type checkers read in `tests/typing`."""

import ast
import inspect
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_overloads

import numpy as np
import pytest

import gradkit
from gradkit._calls import channels, rows
from gradkit._calls.backend import names_in, record_of
from gradkit._calls.record import Call
from gradkit._cuda import channel_kernels
from gradkit._cuda.channel_kernels import Exact, Means, Named, Partials, Parts
from tests.cuda.test_kernels import ARGUMENTS

PACKAGE = Path(gradkit.__file__).parent
# By the functions in their own modules, where overloads are registered.
OVERLOADS = {
    name: get_overloads(inspect.unwrap(getattr(gradkit, name)))
    for name in gradkit.__all__
    if callable(getattr(gradkit, name))
}
OVERLOADED = [name for name, overloads in OVERLOADS.items() if overloads]


def test_every_function_is_in_a_program_that_type_checkers_read():
    programs = (Path(__file__).parents[1] / "typing").glob("*.py")
    text = "\n".join(program.read_text() for program in programs)
    named = {*re.findall(r"\bgradkit\.(\w+)", text)}
    functions = {name for name in gradkit.__all__ if not name.endswith("Error")}
    assert functions - named == {"show_config"}  # which returns nothing


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_have_the_parameters_of_the_function(name):
    own = inspect.signature(getattr(gradkit, name)).parameters
    defaults = {parameter: set() for parameter in own}
    for overload in OVERLOADS[name]:
        found = inspect.signature(overload).parameters
        assert [(p.name, p.kind) for p in found.values()] == [
            (p.name, p.kind) for p in own.values()
        ]
        for parameter in found.values():
            defaults[parameter.name].add(parameter.default)
    for parameter in own.values():  # an overload may ask for what has a default
        assert parameter.default in defaults[parameter.name]
        assert defaults[parameter.name] <= {parameter.default, parameter.empty}


def test_compiled_norms_take_the_fields_of_their_records_in_order():
    """Python passes them by place alone; numbers come first."""
    numbers = pytest.importorskip("gradkit._cpu.norms").NUMBERS
    source = (PACKAGE.parent / "kernels" / "cpu" / "module.cpp").read_text()
    found = {}
    for name, parameters in re.findall(r"^void (\w+)\(\s*(int[^)]*Given[^)]*)\)", source, re.M):
        found[name] = [each.split()[-1] for each in parameters.split(",")[1:]]
    for name in names_in(channels.ChannelOperations, rows.RowOperations):
        record = record_of(name)
        fields = [numbers[field] for field in record.__annotations__ if field in numbers]
        fields += [*record.array_names, *record.result_names]
        assert found[name] == fields + ["var"] * (name == "batch_norm")


# The roles of records' fields by name, but for those that have several.
FIELDS = [
    (name, role)
    for kind in (*vars(rows).values(), *vars(channels).values())
    if inspect.isclass(kind) and issubclass(kind, Call)
    for name, kind_of in kind.__annotations__.items()
    for role in re.findall(r"(?:In|InOut|Out)\[.*?roles\.(\w+)", str(kind_of))
]
ROLES = {name: {role for other, role in FIELDS if other == name} for name, _ in FIELDS}
for of in (Partials, Parts, Exact, Means):
    ROLES.setdefault(of.__name__.lower(), set()).add(of.__name__)
ANY_ORDER = "_types_of"  # which looks only at what some arrays' dtypes are
BY_ROLE = (*("_cuda/channels.py", "_cuda/rows.py"),)


@pytest.mark.slow
def test_arguments_of_different_roles_cannot_be_swapped(tmp_path):
    """Of two that stand side by side, swapped in each function of a backend, mypy refuses each."""
    if not os.environ.get("CI"):  # there, a missing package is a failure
        pytest.importorskip("mypy")
    from mypy import api

    shutil.copytree(PACKAGE, tmp_path / "gradkit")
    swapped = {}
    for name in BY_ROLE:
        path = tmp_path / "gradkit" / name
        text, functions = with_swaps(path.read_text())
        path.write_text(text)
        swapped |= {(name, function): lines for function, lines in functions.items()}
    cache = ["--strict", "--cache-dir", str(tmp_path / "cache")]
    said, _, _ = api.run([*cache, str(tmp_path / "gradkit")])
    errors = re.findall(r"gradkit/(\S+\.py):(\d+): error: ", said)
    refused = {
        (name, f)
        for (name, f), lines in swapped.items()
        for n, k in errors
        if n == name and int(k) in lines
    }
    assert {*swapped} - refused == set()
    assert len(swapped) > 20


def with_swaps(source):
    """Code with the last two arguments swapped of each function that has such, and its lines."""
    lines, changed = source.splitlines(keepends=True), {}
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for function in (each for each in functions if each.name != ANY_ORDER):
        inside = list(ast.walk(function))
        listed = [n.args for n in inside if isinstance(n, ast.Call)]
        listed += [n.elts for n in inside if isinstance(n, ast.Tuple)]
        for one, other in reversed([pair for nodes in listed for pair in pairwise(nodes)]):
            roles = [ROLES.get(name_of(node), set()) for node in (one, other)]
            if all(roles) and not set.intersection(*roles) and one.lineno == other.lineno:
                line = lines[one.lineno - 1]
                first, second = (line[n.col_offset : n.end_col_offset] for n in (one, other))
                between = line[one.end_col_offset : other.col_offset]
                rest = line[other.end_col_offset :]
                lines[one.lineno - 1] = line[: one.col_offset] + second + between + first + rest
                changed[function.name] = range(function.lineno, function.end_lineno + 1)
                break
    return "".join(lines), changed


def name_of(node):
    """Of a variable or an attribute."""
    return getattr(node, "attr", None) or getattr(node, "id", None)


@pytest.mark.parametrize(
    "kernel", [of for of in vars(channel_kernels).values() if isinstance(of, Named)]
)
def test_the_roles_of_kernels_are_those_of_their_parameters(kernel):
    """In their order, by name or, of numbers, by type; numbers that launchers add may follow."""
    parameters = [each.split() for each in ARGUMENTS[kernel].split(",")]
    roles = get_args(kernel.__orig_class__)
    assert getattr(channel_kernels, kernel) is kernel
    for (*_, kind, name), role in zip(parameters, roles, strict=False):
        if "*" not in kind:
            assert role is {"double": np.float64, "i64": np.int64, "u32": np.uint32}[kind]
        else:
            of, *none = get_args(role) or (role,)
            assert of.__name__ in ROLES[name]
            assert set(none) <= {type(None)}
    assert all("*" not in kind for *_, kind, _ in parameters[len(roles) :])

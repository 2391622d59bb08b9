"""What type checkers read says what the functions are: `gradkit/__init__.pyi`."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import gradkit

TREE = ast.parse((Path(gradkit.__file__).parent / "__init__.pyi").read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {}
for _node in TREE.body:
    if isinstance(_node, ast.FunctionDef):
        FUNCTIONS.setdefault(_node.name, []).append(_node)
NO_DEFAULT = inspect.Parameter.empty


def options(name):
    """The keywords of a ``TypedDict``, and those of the one that it builds on."""
    node = CLASSES[name]
    inherited = [option for base in node.bases for option in options_if_any(base.id)]
    return [*inherited, *(field.target.id for field in node.body if hasattr(field, "target"))]


def options_if_any(name):
    return options(name) if name in CLASSES else []


def said(function):
    """The parameters that the types name, each with its default; ``...`` stands for any."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [NO_DEFAULT] * (len(plain) - len(given.defaults)) + list(map(value, given.defaults))
    yield from zip((a.arg for a in plain), defaults, strict=True)
    yield from zip((a.arg for a in given.kwonlyargs), map(value, given.kw_defaults), strict=True)
    if given.vararg:
        yield given.vararg.arg, NO_DEFAULT
    if given.kwarg:
        yield from ((name, ...) for name in options(given.kwarg.annotation.slice.id))


def value(node):
    return NO_DEFAULT if node is None else ast.literal_eval(node)


def test_every_public_name_has_a_type():
    imported = {
        alias.asname
        for node in TREE.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted({*gradkit.__all__} - imported - set(FUNCTIONS) - set(CLASSES)) == []


def test_every_function_is_in_a_program_that_type_checkers_read():
    programs = (Path(__file__).parent / "typing").glob("*.py")
    text = "\n".join(program.read_text() for program in programs)
    named = {*re.findall(r"\bgradkit\.(\w+)", text)}
    functions = {name for name in gradkit.__all__ if not name.endswith("Error")}
    assert functions - named == {"show_config"}  # which returns nothing


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_name_the_parameters(name):
    own = inspect.signature(getattr(gradkit, name)).parameters.values()
    defaults = {parameter.name: set() for parameter in own}
    for overload in FUNCTIONS[name]:
        by_place = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [argument.arg for argument in overload.args.args] == by_place
        found = dict(said(overload))
        assert sorted(found) == sorted(defaults)
        for parameter, default in found.items():
            defaults[parameter].add(default)
    for parameter in own:  # an overload may ask for what has a default
        assert parameter.default in defaults[parameter.name] or ... in defaults[parameter.name]
        assert defaults[parameter.name] <= {parameter.default, NO_DEFAULT, ...}

"""Types are in the functions' own signatures, which type checkers read in `tests/typing`."""

import inspect
import re
from pathlib import Path
from typing import get_overloads

import pytest

import gradkit

OVERLOADED = [name for name in gradkit.__all__ if get_overloads(getattr(gradkit, name))]


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
    for overload in get_overloads(getattr(gradkit, name)):
        found = inspect.signature(overload).parameters
        assert [(p.name, p.kind) for p in found.values()] == [
            (p.name, p.kind) for p in own.values()
        ]
        for parameter in found.values():
            defaults[parameter.name].add(parameter.default)
    for parameter in own.values():  # an overload may ask for what has a default
        assert parameter.default in defaults[parameter.name]
        assert defaults[parameter.name] <= {parameter.default, parameter.empty}

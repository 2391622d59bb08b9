"""Every row of the bad-input table on every backend."""

import pytest

from tests import bad_input
from tests.bad_input import ROWS
from tests.bad_input.arguments import Cell, Factory, NoSuchArrayError, good
from tests.named import is_test
from tests.operations import OPERATIONS

HERE = {title: row for title, row in ROWS.items() if isinstance(row[0], Cell)}
REFUSED = [title for title, row in HERE.items() if row[0].raises]
ANSWERED = [title for title in HERE if title not in REFUSED]


def try_all(backend, title):
    for cell in HERE[title]:
        try:
            cell.check(backend)
        except NoSuchArrayError:
            continue
        except BaseException as error:
            error.add_note(f"in the cell: {cell.name}")
            raise
        bad_input.tested[backend.name] += 1


@pytest.mark.guarantee("Dtypes", "Casting", "Aliasing", "Errors change nothing")
@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused(backend, title):
    try_all(backend, title)


@pytest.mark.guarantee("Safe from overflow", "No gradients", "No cancellation", "In place or not")
@pytest.mark.guarantee("Dtypes", "Casting", "Aliasing")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("title", ANSWERED)
def test_what_is_answered(backend, title):
    try_all(backend, title)


def test_other_rows_are_held_elsewhere():
    named = [name for title, row in ROWS.items() if title not in HERE for name in row]
    assert named
    assert [name for name in named if not is_test(name)] == []


@pytest.mark.guarantee("In place or not")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", OPERATIONS)
def test_what_the_rows_change_is_good(backend, function):
    """Each row's error is the fault of what it changed: without it there is none."""
    operation = OPERATIONS[function]
    for types in operation.types:
        a = Factory(backend)
        arguments = good(function, a, types)
        before = a.memory()
        operation(**arguments)
        assert (a.memory() != before) == bool(operation.writes)

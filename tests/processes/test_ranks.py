"""Each check of ``suites.py`` over processes of each library; one launch runs all of them."""

import functools

import pytest

from tests.processes.launch import StuckError, launch
from tests.processes.suites import checks

LAUNCHES = [*(("mpi", size) for size in (1, 2, 3, 4, 6)), ("torch", 4), ("jax", 4)]
# Processes on few cores, for the checks where their number counts.
MANY = [("mpi", 16), ("jax", 16)]
CASES = [
    pytest.param(library, size, name, id=f"{library}-{size}-{name}")
    for library, size in (*LAUNCHES, *MANY)
    for name in checks("cut models" if (library, size) in MANY else "everything", library, size)
]


@pytest.fixture(scope="session")
def launched(tmp_path_factory, there):
    """The records of a launch, which starts when the first of its tests asks."""

    @functools.cache
    def records(library, size):
        there(library)
        directory = tmp_path_factory.mktemp(f"{library}-{size}")
        suite = "cut models" if (library, size) in MANY else "everything"
        try:
            return launch(library, size, suite, directory)
        except StuckError as error:
            return error

    def found(library, size):
        records_or_error = records(library, size)
        if isinstance(records_or_error, StuckError):
            pytest.fail(str(records_or_error), pytrace=False)
        return records_or_error

    return found


@pytest.mark.parametrize(("library", "size", "name"), CASES)
def test_on_every_rank(launched, library, size, name):
    records = launched(library, size)[name]
    assert len(records) == size
    assert [record["error"] for record in records] == [""] * size
    same = {record["same"] for record in records}
    if name.startswith("fault: "):
        assert "noticed" in same
    else:
        assert len(same) == 1, "ranks differ"


def test_bits_do_not_depend_on_the_number_of_ranks(launched):
    found = {launched(library, size)["whole numbers"][0]["same"] for library, size in LAUNCHES}
    assert len(found) == 1
    assert len(found.pop()) == 3 * 16

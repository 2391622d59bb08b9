"""A call's results do not depend on the calls before it."""

import pytest

from tests.backends import BACKENDS
from tests.operations import OPERATIONS
from tests.sequences import check_calls_in_a_row, check_each_value_after_each_other


@pytest.mark.parametrize("family", sorted({each.family for each in OPERATIONS.values()}))
def test_calls_say_nothing_of_the_next(backend, family):
    check_calls_in_a_row(backend, family)


@pytest.mark.parametrize("backend", [BACKENDS[1]], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_value_of_a_property_after_each_other(backend, name):
    check_each_value_after_each_other(backend, name)

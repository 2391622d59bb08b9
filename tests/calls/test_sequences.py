"""A call's results do not depend on the calls before it; and what is refused is named."""

import pytest

from tests import sequences
from tests.backends import BACKENDS
from tests.operations import OPERATIONS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted({each.family for each in OPERATIONS.values()}))
def test_calls_say_nothing_of_the_next(backend, family):
    sequences.check_calls_in_a_row(backend, family)


@pytest.mark.parametrize("backend", [BACKENDS[1]], ids=["compiled"], indirect=True)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_value_of_a_property_after_each_other(backend, name, every):
    sequences.check_each_value_after_each_other(backend, name, every=every)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_refused_is_named(name):
    sequences.check_what_is_refused_is_named(name)

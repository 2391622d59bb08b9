"""A call's results do not depend on the calls before it."""

import pytest

from tests.operations import OPERATIONS
from tests.sequences import check_calls_in_a_row


@pytest.mark.parametrize("family", sorted({each.family for each in OPERATIONS.values()}))
def test_calls_say_nothing_of_the_next(backend, family):
    check_calls_in_a_row(backend, family, {} if backend.on_host else {"most_types": 2})

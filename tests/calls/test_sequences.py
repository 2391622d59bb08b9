"""A call's results do not depend on the calls before it."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.operations import OPERATIONS
from tests.sequences import Sequences


@pytest.mark.parametrize("family", sorted({each.family for each in OPERATIONS.values()}))
def test_calls_say_nothing_of_the_next(backend, family):
    names = tuple(name for name, each in OPERATIONS.items() if each.family == family)
    limits = {} if backend.on_host else {"most_types": 2}
    machine = type("Calls", (Sequences,), {"backend": backend, "operations": names, **limits})
    most = max(settings().max_examples, 3 * len(names))
    run_state_machine_as_test(machine, settings=settings(max_examples=most, stateful_step_count=16))

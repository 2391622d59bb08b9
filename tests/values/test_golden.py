"""The bits of every operation are those in ``golden.json``, on every device that runs kernels."""

import itertools
import re
from contextlib import ExitStack
from functools import cache
from itertools import islice

import pytest

import gradkit
from gradkit._calls.backend import OPERATIONS, operations_of
from tests import golden

MULTIPROCESSORS = 2, 46, 108, 132  # of emulated devices; a GPU has its own number
FUNCTIONS = sorted({name.split()[0] for name in golden.recorded()})


@cache
def cases():
    """All cases by name: not at import, since every worker imports this file."""
    return {case.name: case for case in golden.cases()}


@pytest.fixture(scope="module")
def put(backend):
    """Functions that put an array on a device, on devices that differ in their number of blocks."""
    if backend.on_host:
        pytest.skip("the CPU backends add in other orders; test_compiled.py compares their bits")
    with ExitStack() as devices:
        yield [
            devices.enter_context(backend.sized(multiprocessors=count, **golden.DEVICE))
            for count in MULTIPROCESSORS
        ]


def differing(backend, put, cases):
    """The names of the cases whose bits are not those recorded."""
    recorded = golden.recorded()
    for case, on in zip(cases, itertools.cycle(put), strict=False):
        if backend.has_cudas_pow or not golden.depends_on_pow(case.name):
            found = [None if a is None else backend.asnumpy(a) for a in case.call(on)]
            if golden.digest(found) != recorded[case.name]:
                yield case.name


def in_one_dtype(name):
    """True if a case is of float32 alone or a few arrays, or of what 16-bit dtypes alone have."""
    return not re.search("float16|float64|120 arrays", name) or "at random" in name


@pytest.mark.guarantee("Any GPU")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_few_bits(backend, put, function):
    """Every kernel in every dtype, or in one; ``python -m tests.golden`` records bits anew."""
    chosen = [c for c in cases().values() if c.quick and c.name.split()[0] == function]
    if not backend.has_cudas_pow:
        chosen = [c for c in chosen if in_one_dtype(c.name)] or chosen[:1]
    assert not list(differing(backend, put, chosen))


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_bits(backend, put, function):
    chosen = (c for c in cases().values() if c.name.split()[0] == function)
    assert not list(islice(differing(backend, put, chosen), 5))  # a fault often changes all


def test_every_operation_has_cases_and_every_case_is_recorded():
    run = {name for function in FUNCTIONS for name in operations_of(function)}
    assert run == set(OPERATIONS)
    assert {name for name in gradkit.__all__ if operations_of(name)} == set(FUNCTIONS)
    assert golden.recorded().keys() == cases().keys()

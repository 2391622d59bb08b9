"""The bits of every operation are those in ``golden.json``, on every device that runs kernels."""

import re
from itertools import islice

import pytest

import gradkit
from gradkit._calls.backend import OPERATIONS, operations_of
from tests import golden

CASES = {case.name: case for case in golden.cases()}
FUNCTIONS = sorted({name.split()[0] for name in CASES})


@pytest.fixture(scope="module")
def put(backend):
    """What puts an array on a device whose grids are those of the recorded hashes."""
    if backend.on_host:
        pytest.skip("the CPU backends add in other orders; test_compiled.py compares their bits")
    with backend.sized(**golden.DEVICE) as put:
        yield put


def differing(backend, put, cases):
    """The names of the cases whose bits are not those recorded."""
    recorded = golden.recorded()
    for case in cases:
        if backend.has_cudas_pow or not golden.depends_on_pow(case.name):
            found = [None if a is None else backend.asnumpy(a) for a in case.call(put)]
            if golden.digest(found) != recorded[case.name]:
                yield case.name


def in_one_dtype(name):
    """Whether a case is of float32 alone or a few arrays, or of what 16-bit dtypes alone have."""
    return not re.search("float16|float64|120 arrays", name) or "at random" in name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_few_bits(backend, put, function):
    """Every kernel in every dtype, or in one; ``python -m tests.golden`` records bits anew."""
    cases = [c for c in CASES.values() if c.quick and c.name.split()[0] == function]
    if not backend.has_cudas_pow:
        cases = [c for c in cases if in_one_dtype(c.name)] or cases[:1]
    assert not list(differing(backend, put, cases))


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_bits(backend, put, function):
    cases = (c for c in CASES.values() if c.name.split()[0] == function)
    assert not list(islice(differing(backend, put, cases), 5))  # a fault often changes all


def test_every_operation_has_cases_and_every_case_is_recorded():
    run = {name for function in FUNCTIONS for name in operations_of(function)}
    assert run == set(OPERATIONS)
    assert {name for name in gradkit.__all__ if operations_of(name)} == set(FUNCTIONS)
    assert golden.recorded().keys() == CASES.keys()

"""The bits of every operation are those in ``golden.json``, on every device that runs kernels."""

import pytest

import gradkit
from gradkit._backend import Operations, names_in, operations_of
from tests import golden

CASES = dict(golden.cases())
FUNCTIONS = sorted({name.split()[0] for name in CASES})


@pytest.fixture(scope="module")
def put(backend):
    """What puts an array on a device whose grids are those of the recorded hashes."""
    if backend.on_host:
        pytest.skip("the CPU backend's bits depend on BLAS")
    with backend.sized(**golden.DEVICE) as put:
        yield put


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bits(backend, put, function):
    """One line says which differ; ``python -m tests.golden`` records them anew."""
    recorded = golden.recorded()
    chosen = [name for name in CASES if name.split()[0] == function]
    if not backend.has_cudas_pow:
        chosen = [name for name in chosen if not golden.depends_on_pow(name)]
    differ = [
        n for n in chosen if golden.digest(map(backend.asnumpy, CASES[n](put))) != recorded[n]
    ]
    assert not differ


def test_every_operation_has_cases_and_every_case_is_recorded():
    run = {name for function in FUNCTIONS for name in operations_of(function)}
    assert run == set(names_in(Operations))
    assert {name for name in gradkit.__all__ if operations_of(name)} == set(FUNCTIONS)
    assert golden.recorded().keys() == CASES.keys()

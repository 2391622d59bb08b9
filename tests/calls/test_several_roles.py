"""One array as several arguments, and the result over it: the bits that an own result has."""

import numpy as np
import pytest

from tests.operations import DATA, FLOAT32, OPERATIONS, drawn, leaves, of
from tests.tolerances import assert_all_same_bits

# One pack, odd rows, and rows and runs that are read twice.
SHAPES = {"rows": [(5, 64), (3, 33), (2, 20_001)]}
IMAGES = [(6, 6, 7), (2, 6, 3001)]
CASES = [
    (operation.name, place, own, other)
    for operation in of("rows", "channels", "groups")
    for place, result in enumerate(operation.record.results)
    for own in result.may_be
    for other in operation.arrays
    if own in operation.arrays and other != own
    if operation.kind(own) == DATA == operation.kind(other)
]


def lying(backend, host, gap):
    """Rows of longer rows."""
    room = np.full((*host.shape[:-1], host.shape[-1] + gap), np.nan, host.dtype)
    room[..., : host.shape[-1]] = host
    return backend.asarray(room[..., : host.shape[-1]])


@pytest.mark.guarantee("Aliasing")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("types", "gap"), [(FLOAT32, 3), (("bfloat16", "float32", "bfloat16"), 0)], ids=str
)
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "place", "own", "other"), CASES)
def test_a_result_over_what_is_two_arguments(backend, name, place, own, other, types, gap, long):
    operation = OPERATIONS[name]
    *short, longest = SHAPES.get(operation.family, IMAGES)
    for shape in (*short, longest) if long or backend.on_host else short:
        given = operation.arguments(lambda *spec: backend.asarray(drawn(*spec)), types, shape)
        given[own] = lying(backend, drawn(own, shape, types[0]), gap)
        given[other] = given[own][...]  # an array of its own, on the same memory
        expected = [backend.asnumpy(a) for a in leaves(operation.function(**given))]
        out = [None] * len(expected)
        out[place] = given[own]
        found = [*leaves(operation.function(**given, out=tuple(out)))]
        assert found[place] is out[place]
        assert_all_same_bits(found, expected, backend)

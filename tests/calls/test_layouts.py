"""Norms' arrays in any layout, as several arguments, and results over them: the bits of copies."""

from itertools import product

import numpy as np
import pytest

from tests.layouts import LAYOUTS
from tests.operations import DATA, FLOAT32, OPERATIONS, drawn, leaves, of
from tests.tolerances import assert_all_same_bits

NORMS = of("rows", "channels", "groups")
# One pack, odd rows, and rows and runs that are read twice.
SHAPES = {"rows": [(5, 64), (3, 33), (2, 20_001)]}
IMAGES = [(6, 6, 7), (2, 6, 3001)]
LONG = pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])


def kinds_of(backend, operation, layout):
    """Combinations of dtypes: other ones for each layout, on the host a third of all."""
    every = operation.types
    start = list(OPERATIONS).index(operation.name) + sorted(LAYOUTS).index(layout)
    return every[start % 3 :: 3] if backend.on_host else [every[start % len(every)]]


# Of norms of channels the order of sums follows from the layout of data.
IN_ANY_LAYOUT = [
    (operation.name, variant)
    for operation in NORMS
    for variant in ("", *operation.variants)
    if "running" not in variant
]


@pytest.mark.guarantee("Strided rows")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("name", "variant"), IN_ANY_LAYOUT)
def test_no_layout_changes_a_bit(backend, name, variant, layout):
    """Of one array or all, of arguments or results, nor what lies between elements."""
    operation, lay = OPERATIONS[name], LAYOUTS[layout]
    rows, shape = operation.family == "rows", (3, 54, 4, 10) if backend.on_host else (4, 6, 5, 2)
    laid = {label for label in operation.arrays if rows or operation.kind(label) != DATA}

    def arguments(types, some=()):
        def make(label, *spec):
            return backend.asarray((lay if label in some else LAYOUTS["C"])(drawn(label, *spec)))

        return operation.arguments(make, types, shape, axis=2 if rows else 1, variant=variant)

    for types in kinds_of(backend, operation, layout):
        plain = operation.function(**arguments(types))
        expected = {k: backend.asnumpy(a) for k, a in enumerate(leaves(plain)) if a is not None}
        hosts = {k: lay(np.full_like(a, np.nan)) for k, a in expected.items()}
        out = {k: backend.asarray(host) for k, host in hosts.items()}
        outs = [{k: array} for k, array in out.items()] + [out]
        ways = [(laid, own) for own in outs] + [({label}, {}) for label in sorted(laid)]
        for some, own in ways:
            into = tuple(map(own.get, range(len(operation.results))))
            found = operation.function(**arguments(types, some), out=into if own else None)
            found = {k: a for k, a in enumerate(leaves(found)) if a is not None}
            assert_all_same_bits(found.values(), expected.values(), backend)
            assert all(found[k] is array for k, array in own.items())
        for k, host in hosts.items():
            untouched = backend.asarray(host)
            backend.assign(untouched, expected[k])
            assert backend.memory(out[k]) == backend.memory(untouched)


# Each way in which results may take the places of arguments.
OVER = [
    (operation.name, places)
    for operation in NORMS
    for places in product(*((None, *result.may_be) for result in operation.record.results))
    if len(taken := [place for place in places if place]) == len({*taken}) > 0
]


@pytest.mark.guarantee("Aliasing")
@pytest.mark.sampled(7)
@LONG
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("name", "places"), OVER)
def test_results_over_arguments(backend, name, places, layout, long):
    """The bits of results that lie alike elsewhere."""
    operation, lay = OPERATIONS[name], LAYOUTS[layout]
    variant = "with ds" if "ds" in places else ""
    host = backend.on_host and layout in ("C", "padded")
    *short, longest = SHAPES.get(operation.family, IMAGES)
    for types in kinds_of(backend, operation, layout):
        for shape in (*short, longest) if long or host else short:
            hosts = {}

            def make(label, *spec, hosts=hosts):
                hosts[label] = lay(drawn(label, *spec))
                return backend.asarray(hosts[label])

            given = operation.arguments(make, types, shape, variant=variant)
            apart = [place and backend.asarray(hosts[place]) for place in places]
            plain = leaves(operation.function(**given, out=tuple(apart)))
            expected = [backend.asnumpy(a) for a in plain]
            out = tuple(place and given[place] for place in places)
            found = [*leaves(operation.function(**given, out=out))]
            assert all(b is None or a is b for a, b in zip(found, out, strict=True))
            assert_all_same_bits(found, expected, backend)


SEVERAL = [
    (operation.name, place, own, other)
    for operation in NORMS
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
@LONG
@pytest.mark.parametrize(("name", "place", "own", "other"), SEVERAL)
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

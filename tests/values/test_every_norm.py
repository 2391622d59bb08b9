"""All norms and their gradients, out of one table: no elements, no scale, nothing finite."""

import numpy as np
import pytest

from tests.layouts import LAYOUTS
from tests.operations import DATA, FLOAT32, GROUPS, OPERATIONS, drawn, leaves, of, on
from tests.tolerances import assert_all_same_bits, assert_same_bits

NORMS = [operation.name for operation in of("rows", "channels", "groups")]
EMPTY = [(0, 6), (5, 0), (0, 0), (2, 0, 3), (0, 6, 2), (2, 6, 0), (3, 6, 0, 4)]


def given_to(backend, name, types, shape, axis=None, lay=np.copy, **changes):
    """Arguments by name, some of which are others, or none."""
    make = on(lambda host: backend.asarray(lay(host)))
    return OPERATIONS[name].arguments(make, types, shape, axis=axis) | changes


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_no_elements(backend, name, affine):
    """Means are 0, variances too, and so are gradients of parameters."""
    operation = OPERATIONS[name]
    absent = {} if affine else dict.fromkeys(operation.optional)
    eps = {"eps": 0.25} if "eps" in operation.parameters else {}
    rows = operation.family == "rows"
    for shape, axis in ((each, k) for each in EMPTY for k in range(len(each)) if rows or k == 1):
        given = given_to(backend, name, FLOAT32, shape, axis, **absent, **eps)
        found = dict(zip(operation.results, leaves(operation.function(**given)), strict=True))
        for label in ("dscale", "dbias")[: 0 if affine else 2]:
            assert found.pop(label, None) is None
        for label, array in found.items():
            assert array.shape == operation.shape(label, shape, axis)
            expected = 2 if label == "inv_std" else 0
            np.testing.assert_array_equal(backend.asnumpy(array), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("name", [name for name in NORMS if "scale" in OPERATIONS[name].optional])
def test_no_scale_is_a_scale_of_ones(backend, name, kind):
    operation = OPERATIONS[name]
    types = operation.types[kind]
    for shape in ((9, 66, 2), (3, 6, 1025)):
        given = given_to(backend, name, types, shape)
        given |= dict.fromkeys(operation.optional)
        plain = [*leaves(operation.function(**given))]
        host = backend.asnumpy(given_to(backend, name, types, shape)["scale"])
        given["scale"] = backend.asarray(np.ones_like(host))
        with_ones = [*leaves(operation.function(**given))]
        kinds = map(operation.kind, operation.results)
        data = [k for k, kind in enumerate(kinds) if kind == DATA]
        assert_all_same_bits([plain[k] for k in data], [with_ones[k] for k in data], backend)
        sums = zip(operation.results, plain, strict=True)
        assert not any(array is not None for label, array in sums if label in ("dscale", "dbias"))


ROWS, IMAGES = [(9, 33), (5, 8200)], [(5, 6, 9), (5, 6, 146)]


def mixed_with(operation, place, shape):
    """Data whose statistics depend on the element at a place, and those statistics."""
    masks = data, statistics = [np.zeros(operation.shape(n, shape), bool) for n in ("x", "mean")]
    sample, channel = place[:2]
    if operation.family == "rows":
        data[sample] = statistics[sample] = True
    elif operation.family == "channels":
        data[:, channel] = statistics[channel] = True
    else:
        group, size = channel * GROUPS // shape[1], shape[1] // GROUPS
        data[sample, group * size : (group + 1) * size] = statistics[sample, group] = True
    return masks


@pytest.mark.guarantee("Independent")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [0, 1, 2, 6])  # data of each dtype
@pytest.mark.parametrize("layout", ["C", "rolled"])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_not_finite_stays_where_it_counts(backend, name, layout, kind, value):
    """Other rows, groups and channels keep their bits; sums over rows have it in one column."""
    operation = OPERATIONS[name]
    types, lay = operation.types[kind], LAYOUTS[layout]
    shapes = ROWS if operation.family == "rows" else IMAGES
    if kind == 0 and shapes is ROWS:  # rows that are read twice
        shapes = [*ROWS, (5, 40_001) if backend.on_host else (5, 140_000)]
    for shape in (each for each in shapes if np.prod(each) <= 4 * backend.max_elements):
        plain = given_to(backend, name, types, shape, lay=lay)
        before = [backend.asnumpy(a) for a in leaves(operation.function(**plain))]
        place = (3, 2, 7)[: len(shape)]
        masks = dict(zip(("data", "statistic"), mixed_with(operation, place, shape), strict=True))
        for own in (own for own in operation.arrays if operation.kind(own) == DATA):
            host = drawn(own, shape, types[0])
            host[place] = value
            spoilt = plain | {own: backend.asarray(lay(host))}
            found = [backend.asnumpy(a) for a in leaves(operation.function(**spoilt))]
            whole = np.isnan(value) and own != "gate" and "inference" not in name
            for label, array, fine in zip(operation.results, found, before, strict=True):
                finite = np.isfinite(array.astype(np.float64))
                if (mask := masks.get(operation.kind(label).shape)) is not None:
                    assert_same_bits(array[~mask], fine[~mask])
                    assert not (whole and label not in ("s", "dgate", "x") and finite[mask].any())
                else:
                    seen = own == "dy" or label == "dscale"
                    assert finite.tolist() == [k != place[1] or not seen for k in range(shape[1])]

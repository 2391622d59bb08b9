"""Running averages of parameters: values, both ends, and what is refused."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gradkit
from gradkit._dtypes import FLOATS
from tests import strategies as draw_
from tests.tolerances import DTYPES, assert_same_numbers, assert_within, below_normal, elementwise

PAIRS = [(average, param) for average in DTYPES for param in FLOATS[average].addends]
decays = st.floats(0, 1) | st.sampled_from((0.25, 0.499, 0.5, 0.9, 0.9999, 2**-1074))


def host(values, dtype):
    return np.asarray(values, DTYPES[dtype])


@given(data=st.data(), pair=st.sampled_from(PAIRS), decay=decays)
def test_averages_move_by_a_part_of_the_way(backend, data, pair, decay):
    """In any layouts; nothing beside the averages' elements is written."""
    shape = data.draw(draw_.shapes(backend.max_elements // 4))
    old, new = (data.draw(draw_.arrays(shape, name)) for name in pair)
    averages, params = [backend.asarray(old)], [backend.asarray(new)]
    before = backend.memory(params[0])
    assert gradkit.ema_update(averages, params, decay) is averages
    ends = [np.asarray(each, np.longdouble) for each in (old, new)]
    ref = ends[0] + (ends[1] - ends[0]) * (1 - np.longdouble(decay))
    bound = elementwise("moved", np.maximum(*map(np.abs, ends)), ref, pair[0])
    assert_within(backend.asnumpy(averages[0]), ref, bound + below_normal("moved", pair[0]))
    fresh = backend.asarray(old)
    backend.assign(fresh, averages[0])
    assert backend.memory(averages[0]) == backend.memory(fresh)
    assert backend.memory(params[0]) == before


@pytest.mark.guarantee("A running average")
@example(decay=0.3, own=None)
@given(decay=decays, own=st.sampled_from((None, "float32")))
def test_each_backend_has_numpys_bits(backend, decay, own):
    """The number may lie on the device too."""
    pairs = [(draw_.values((67,), a, 1), draw_.values((67,), p, 2)) for a, p in PAIRS]
    expected = [np.array(old) for old, _ in pairs]
    number = decay if own is None else backend.asarray(np.array(decay, own))
    with gradkit.use_cpu_backend("numpy"):
        said = decay if own is None else float(np.float32(decay))
        gradkit.ema_update(expected, [new for _, new in pairs], said)
    averages = [backend.asarray(old) for old, _ in pairs]
    gradkit.ema_update(averages, [backend.asarray(new) for _, new in pairs], number)
    for found, wanted in zip(averages, expected, strict=True):
        np.testing.assert_array_equal(backend.asnumpy(found), wanted)


@pytest.mark.guarantee("A running average")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("average", "param"), PAIRS)
def test_both_ends_are_exact(backend, average, param, own):
    """1 keeps every bit, of NaN too, and 0 copies what it can read, whatever was there."""
    put = lambda number: backend.asarray(np.array(number)) if own else number  # noqa: E731
    before = host([math.nan, math.inf, -0.0, 1.5, 2.0], average)
    new = host([1.0, 2.0, 3.0, -0.0, math.nan], param)
    averages = [backend.asarray(before)]
    gradkit.ema_update(averages, [backend.asarray(new)], put(1.0))
    assert backend.asnumpy(averages[0]).tobytes() == before.tobytes()
    gradkit.ema_update(averages, [backend.asarray(new)], put(0.0))
    assert_same_numbers(backend.asnumpy(averages[0]), new.astype(before.dtype))


@pytest.mark.guarantee("A running average")
@given(decay=decays)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_average_that_has_arrived_stays(backend, dtype, decay):
    new = draw_.values((97,), dtype, 3)
    averages = [backend.asarray(new)]
    for params in ([backend.asarray(new)], averages):  # or the very same array
        gradkit.ema_update(averages, params, decay)
        np.testing.assert_array_equal(backend.asnumpy(averages[0]), new)


@pytest.mark.guarantee("A running average")
@pytest.mark.parametrize("decay", [0.25, 0.75])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_difference_does_not_overflow(backend, dtype, decay):
    largest = float(ml_dtypes.finfo(dtype).max)
    averages = [backend.asarray(host([-largest, largest, math.inf], dtype))]
    gradkit.ema_update(averages, [backend.asarray(host([largest, -largest, 1], dtype))], decay)
    ref = largest * (1 - decay) - largest * decay
    bound = elementwise("moved", largest, ref, dtype)
    assert_within(backend.asnumpy(averages[0]), np.array([ref, -ref, math.inf]), bound)


def test_a_decay_among_the_averages_is_read_first(backend):
    """Whichever is written first, all are moved by the number that was there."""
    averages = [backend.asarray(np.full(3, 0.5)), backend.asarray(np.full(70_000, 0.5))]
    gradkit.ema_update(
        averages, [backend.asarray(np.ones(a.shape)) for a in averages], averages[0][0]
    )
    for average in averages:
        np.testing.assert_array_equal(backend.asnumpy(average), np.full(average.shape, 0.75))


def test_dicts_in_any_order(backend):
    on = lambda value: backend.asarray(np.full(2, value))  # noqa: E731
    averages = {"a": on(0.0), "b": [None, on(8.0)]}
    assert gradkit.ema_update(averages, {"b": [None, on(0.0)], "a": on(4.0)}, 0.5) is averages
    np.testing.assert_array_equal(backend.asnumpy(averages["a"]), [2, 2])
    np.testing.assert_array_equal(backend.asnumpy(averages["b"][1]), [4, 4])

"""States that ranks on devices exchange, and their joining: the operations alone."""

import math

import numpy as np
import pytest

from gradkit import _numpy
from gradkit._arrays import backend_of
from gradkit._backend import Views
from gradkit._calls.lists import JoinRanks, NormParts, RankState
from tests.layouts import LAYOUTS
from tests.ranks import INF, NAN, f


def numbers_of(scale, max_norm):
    """The number that stands for a call's numbers in a state, by the NumPy backend."""
    state = np.empty(6)
    _numpy.rank_state(
        RankState(grads=[], norm_type=2.0, digest=0.0, state=state, scale=scale, max_norm=max_norm)
    )
    return state[2]


def joined(backend, states, scale, max_norm, noted, *, fresh):
    """The norm, the flag, the faults and the factors after the states of all ranks."""
    given = states, np.array(8.0), np.array(0.25), noted, np.zeros(3)
    rows, norm, flag, faults, factors = map(backend.asarray, given)
    numbers = {"digest": 7.0, "norm_type": 2.0, "scale": scale, "max_norm": max_norm}
    outs = {"norm": norm, "found_inf": flag, "faults": faults, "factors": factors}
    backend_of(rows).join_ranks(JoinRanks(states=rows, fresh=fresh, **numbers, **outs))
    return map(backend.asnumpy, (norm, flag, faults, factors))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([(0, 7), (0, 7), (0, 7)], [0, 0, 0]),
        ([(0, 7), (1, 0), (0, 7)], [0, 1, 0]),
        ([(0, 7), (NAN, 7), (0, 9)], [0, 1, 2]),
        ([(0, 9), (0, 9), (1, 9)], [2, 2, 1]),
        ([(0, 7), (0, 7, -0.25), (0, 9, 0.5)], [0, 3, 2]),
    ],
)
def test_states_are_joined_alike_on_every_backend(backend, faults, expected, fresh):
    """A fault that is already noted stays as it is. The states have gaps between them."""
    states = np.full((3, 9), NAN)[:, :6]
    for k, (status, digest, *scale) in enumerate(faults):
        numbers = numbers_of(*scale or [-0.5], 2.0)
        states[k] = status, digest, numbers, 2.0 * k * k, 0, 3
    limit, noted = backend.asarray(np.array(2.0)), np.array([0, 0, 5.0])
    norm, flag, note, factors = joined(backend, states, -0.5, limit, noted, fresh=fresh)
    np.testing.assert_array_equal(note, [*expected[:2], 5])
    if any(expected):
        assert (math.isnan(norm) if fresh else norm == 8, flag) == (True, 0.25)
        np.testing.assert_array_equal(factors, [0, 1, INF])
    else:
        assert (norm, flag) == (pytest.approx(0.5 * 3 * math.sqrt(10)), 0)
        np.testing.assert_array_equal(factors, [norm, -0.5, 2])


@pytest.mark.parametrize("copies", [None, [1, 2]])
@pytest.mark.parametrize("scale", [-0.5, "array"])
def test_a_state_is_status_digest_numbers_and_sums(backend, scale, copies):
    grads = Views([backend.asarray(f(1, 2)), backend.asarray(f(2))])
    by = backend.asarray(np.array(-0.5)) if scale == "array" else scale
    state, parts = (backend.asarray(np.full(shape, 9.0)) for shape in (6, (1, 3)))
    own = backend_of(state)
    own.rank_state(
        RankState(grads=grads, norm_type=2.0, digest=3.25e9, state=state, scale=by, copies=copies)
    )
    own.norm_parts(NormParts(grads=grads, norm_type=2.0, parts=parts, copies=copies))
    values = backend.asnumpy(state)
    np.testing.assert_array_equal(values[:3], [0, 3.25e9, numbers_of(-0.5, INF)])
    assert values[3:].tobytes() == backend.asnumpy(parts).tobytes()
    hi, lo, unit = values[3:]
    assert (hi + lo) * unit**2 == pytest.approx(9 if copies is None else 7)


@pytest.mark.parametrize("ranks", [4, 9])
@pytest.mark.parametrize("at", ["C", "misaligned"])
def test_many_ranks(backend, ranks, at):
    """Numbers may lie at any address, and a fault leaves the result as it was."""
    units = 2.0 ** (np.arange(ranks) % 3)
    states = np.array([[0, 7, numbers_of(0.5, 2.0), 4.0, 0, unit] for unit in units])

    def number(value):
        return backend.asarray(LAYOUTS[at](np.array(value)))

    for digest, fresh in ((7, False), (8, False), (8, True)):
        note, factors = backend.asarray(np.zeros(ranks)), backend.asarray(np.zeros(3))
        rows, out = backend.asarray(states), number(8.0)
        backend_of(rows).join_ranks(
            JoinRanks(
                states=rows,
                digest=float(digest),
                norm_type=2.0,
                norm=out,
                found_inf=None,
                scale=number(0.5),
                max_norm=number(2.0),
                fresh=fresh,
                faults=note,
                factors=factors,
            )
        )
        norm = math.sqrt((units**2).sum())
        agree = digest == 7
        assert backend.asnumpy(note).any() != agree
        wanted = norm if agree else math.nan if fresh else 8.0
        np.testing.assert_allclose(backend.asnumpy(out), wanted, rtol=2.0**-50)
        np.testing.assert_array_equal(
            backend.asnumpy(factors)[1:], (0.5, 2.0) if agree else (1.0, INF)
        )
    state = backend.asarray(np.full(6, 9.0))
    grads = Views([backend.asarray(f(1, 2))])
    backend_of(state).rank_state(
        RankState(
            grads=grads,
            norm_type=2.0,
            digest=3.0,
            state=state,
            scale=number(-0.5),
            max_norm=number(2.0),
        )
    )
    np.testing.assert_array_equal(backend.asnumpy(state)[:3], [0, 3, numbers_of(-0.5, 2.0)])


VALUES = [0.0, 1.0, -1.0, np.nextafter(1, 2), 5e-324, 1e-6, 1e300, INF, -INF, NAN]


def test_numbers_are_told_apart_alike_on_every_backend(backend):
    """-0 is 0 and every NaN is one, wherever they lie."""
    found = {}
    for scale in VALUES:
        for limit in VALUES:
            state = backend.asarray(np.zeros(6))
            numbers = {"scale": backend.asarray(np.array(scale)), "max_norm": limit}
            call = RankState(grads=Views([]), norm_type=2.0, digest=0.0, state=state, **numbers)
            backend_of(state).rank_state(call)
            found[scale, limit] = backend.asnumpy(state)[2]
            assert found[scale, limit] == numbers_of(scale, limit) < 2**53
    assert len({*found.values()}) == len(VALUES) ** 2
    assert numbers_of(-0.0, -NAN) == found[0.0, NAN]
    other = np.array(np.uint64(0xFFF8000000000001)).view(np.float64)
    assert numbers_of(other, 1.0) == found[NAN, 1.0]


def test_every_nan_is_one(backend):
    """A rank's may come of another operation: it has another sign, or other bits."""
    others = np.array([-NAN, np.array(0x7FF0000000000123, np.uint64).view(np.float64)])
    for nan in (NAN, *others):
        state, scale = backend.asarray(np.zeros(6)), backend.asarray(np.array(nan))
        backend_of(state).rank_state(
            RankState(
                grads=Views([]), norm_type=2.0, digest=0.0, state=state, scale=scale, max_norm=1.0
            )
        )
        assert backend.asnumpy(state)[2] == numbers_of(NAN, 1.0)


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_what_one_rank_has_found_all_are_told(backend, place):
    states = np.array([[0, 7, numbers_of(1.0, 2.0), 4.0, 0, 1]] * 3)
    if place is not None:
        states[place, 3] = INF
    _, found, *_ = joined(backend, states, 1.0, 2.0, np.zeros(3), fresh=True)
    assert found == (place is not None)

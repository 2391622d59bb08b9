"""What ranks on devices tell each other, and how that is joined: the operations alone."""

import math

import numpy as np
import pytest

from gradkit._arrays import backend_of
from gradkit._backend import Views
from gradkit._calls.lists import JoinRanks, NormParts, RankState
from tests.layouts import LAYOUTS
from tests.ranks import INF, NAN, f


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([(0, 7), (0, 7), (0, 7)], [0, 0, 0]),
        ([(0, 7), (1, 0), (0, 7)], [0, 1, 0]),
        ([(0, 7), (NAN, 7), (0, 9)], [0, 1, 2]),
        ([(0, 9), (0, 9), (1, 9)], [2, 2, 1]),
    ],
)
def test_states_are_joined_alike_on_every_backend(backend, faults, expected, fresh):
    """A fault that is already noted stays as it is. The states have gaps between them."""
    states = np.full((3, 9), NAN)[:, :6]
    states[...] = [[*pair, 0.5, 2.0 * k * k, 0, 3] for k, pair in enumerate(faults)]
    noted = np.array([0, 0, 5.0])
    arrays = map(backend.asarray, (states, np.array(8.0), np.array(0.25), noted, np.zeros(3)))
    rows, out, found, note, factors = arrays
    backend_of(rows).join_ranks(
        JoinRanks(
            states=rows,
            digest=7.0,
            norm_type=2.0,
            norm=out,
            found_inf=found,
            scale=-0.5,
            max_norm=backend.asarray(np.array(2.0)),
            fresh=fresh,
            faults=note,
            factors=factors,
        )
    )
    norm, flag, note, factors = map(backend.asnumpy, (out, found, note, factors))
    np.testing.assert_array_equal(note, [*expected[:2], 5])
    if any(expected):
        assert (math.isnan(norm) if fresh else norm == 8, flag) == (True, 0.25)
        np.testing.assert_array_equal(factors, [0, 1, INF])
    else:
        assert (norm, flag) == (pytest.approx(0.5 * 3 * math.sqrt(10)), 0)
        np.testing.assert_array_equal(factors, [norm, -0.5, 2])


@pytest.mark.parametrize("copies", [None, [1, 2]])
@pytest.mark.parametrize("scale", [-0.5, "array"])
def test_a_state_is_status_digest_scale_and_sums(backend, scale, copies):
    grads = Views([backend.asarray(f(1, 2)), backend.asarray(f(2))])
    by = backend.asarray(np.array(-0.5)) if scale == "array" else scale
    state, parts = (backend.asarray(np.full(shape, 9.0)) for shape in (6, (1, 3)))
    own = backend_of(state)
    own.rank_state(
        RankState(grads=grads, norm_type=2.0, digest=3.25e9, state=state, scale=by, copies=copies)
    )
    own.norm_parts(NormParts(grads=grads, norm_type=2.0, parts=parts, copies=copies))
    values = backend.asnumpy(state)
    np.testing.assert_array_equal(values[:3], [0, 3.25e9, 0.5])
    assert values[3:].tobytes() == backend.asnumpy(parts).tobytes()
    hi, lo, unit = values[3:]
    assert (hi + lo) * unit**2 == pytest.approx(9 if copies is None else 7)


@pytest.mark.parametrize("ranks", [4, 9])
@pytest.mark.parametrize("at", ["C", "misaligned"])
def test_many_ranks_whose_scales_differ(backend, ranks, at):
    """Numbers may lie at any address, and a fault leaves the result as it was."""
    scales = 2.0 ** (np.arange(ranks) % 3)
    states = np.array([[0, 7, scale, 4.0, 0, 1] for scale in scales])

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
        norm = 2 * math.sqrt((scales**2).sum())
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
            grads=grads, norm_type=2.0, digest=3.0, state=state, scale=number(-0.5), copies=None
        )
    )
    np.testing.assert_array_equal(backend.asnumpy(state)[:3], [0, 3, 0.5])

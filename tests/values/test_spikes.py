"""The spike guard: running statistics of a norm, and the limit that they set."""

import copy
import json
import math
import pickle

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import tolerances
from tests.calls.test_fuzz import Capsule
from tests.ranks import results
from tests.tolerances import assert_same_bits

NAN, INF = math.nan, math.inf
LEAST = 2.0**-1074
DEFAULTS = {"decay": 0.97, "threshold": 2.5, "warmup": 25, "on_spike": "clip"}

magnitudes = st.one_of(
    st.floats(0, 1e300),
    st.floats(-300, 300).map(lambda exponent: 10.0**exponent),
    st.sampled_from((0.0, LEAST, 1e-320, 1.0, 1e300)),
)
rules = st.fixed_dictionaries(
    {
        "decay": st.sampled_from((0.97, 0.5, 0.01, 0.9999)),
        "threshold": st.sampled_from((2.5, 0.0, 0.1, 7.0)),
        "warmup": st.integers(1, 6),
        "on_spike": st.sampled_from(("clip", "skip")),
    }
)


@st.composite
def runs(draw):
    """Norms near one another with spikes, drops and what is not finite among them."""
    level = draw(magnitudes)
    near = st.floats(0.5, 2).map(lambda factor: level * factor)
    odd = st.one_of(magnitudes, st.sampled_from((NAN, INF, level, level * 1e5)))
    return draw(st.lists(st.one_of(near, near, odd), min_size=1, max_size=20))


def exact_limit(state, norm, *, threshold, warmup, decay, on_spike):  # noqa: ARG001
    """Limit that a norm is clipped to, or skipped above, by the paper's formula, exactly."""
    count, mean, std = map(mpmath.mpf, state)
    if count < warmup or std == 0:
        return mpmath.inf
    score = (mpmath.mpf(norm) - mean) / std
    spike = on_spike == "clip" and math.isfinite(norm) and score > threshold
    return mean + std * (threshold**2 / score if spike else threshold)


def exact_statistics(state, entering, *, threshold, warmup, decay, on_spike):  # noqa: ARG001
    """The state after a norm: of equal weights at first, then the paper's moving averages."""
    count, mean, std = map(mpmath.mpf, state)
    x, decay = mpmath.mpf(entering), mpmath.mpf(decay)
    if count < warmup:
        total, squares = count * mean + x, count * (std**2 + mean**2) + x**2
        count += 1
        return count, total / count, mpmath.sqrt(abs(squares / count - (total / count) ** 2))
    following = decay * mean + (1 - decay) * x
    variance = decay * std**2 + (1 - decay) * (x - following) ** 2
    return count + 1, following, mpmath.sqrt(variance)


def assert_near(found, exact, size):
    with mpmath.workprec(4000):
        if mpmath.isinf(exact):
            assert found == INF
        elif exact > tolerances.LARGEST_FLOAT64:
            assert found >= 0.99 * tolerances.LARGEST_FLOAT64
        else:
            assert abs(mpmath.mpf(found) - exact) <= tolerances.guarded(float(size)), found


def follow(backend, norms, rule):
    """(state before, norm, state after, max_norm) of each step, as Python floats."""
    state = gradkit.spike_guard_init(backend.asarray(np.ones(2, np.float32)))
    for norm in norms:
        before = backend.asnumpy(state)
        state, limit = gradkit.spike_guard_update(state, backend.asarray(np.array(norm)), **rule)
        assert (limit.dtype, limit.shape) == (np.float64, ())
        assert (state.dtype, state.shape) == (np.float64, (3,))
        yield before.tolist(), norm, backend.asnumpy(state).tolist(), float(backend.asnumpy(limit))


def after(backend, norms, **rule):
    """The state and the limit after a run."""
    *_, (_, _, state, limit) = follow(backend, norms, DEFAULTS | rule)
    return state, limit


@pytest.mark.guarantee("A spike guard")
@given(norms=runs(), rule=rules)
def test_each_step_is_the_formula(backend, norms, rule):
    for before, norm, state, limit in follow(backend, norms, rule):
        with mpmath.workprec(4000):
            exact = exact_limit(before, norm, **rule)
            assert_near(limit, exact, exact)
            if not math.isfinite(norm):
                assert state == before
                continue
            entering = min(norm, limit)  # as it was clipped
            count, mean, std = exact_statistics(before, entering, **rule)
            assert state[0] == count
            assert_near(state[1], mean, max(before[1], entering))
            assert_near(state[2], std, std)


@pytest.mark.guarantee("A spike guard")
@given(norms=runs(), rule=rules)
def test_every_backend_has_the_same_bits(backend, norms, rule):
    state = gradkit.spike_guard_init()
    for _, norm, found, found_limit in follow(backend, norms, rule):
        state, limit = gradkit.spike_guard_update(state, norm, **rule)
        assert_same_bits(np.array(found), state)
        assert_same_bits(np.array(found_limit), limit)


@given(norms=runs(), rule=rules, power=st.integers(-40, 40))
def test_another_unit_changes_nothing_else(backend, norms, rule, power):
    """Norms times a power of two: so do mean, deviation and limit, without a rounding."""
    moderate = [norm if 1e-9 < norm < 1e9 or not math.isfinite(norm) else 3.0 for norm in norms]
    # The lowest unit leaves room for the digits of a deviation of 1e-40 of its mean.
    scaled = [norm * 2.0 ** (20 * power) for norm in moderate]
    pairs = zip(follow(backend, moderate, rule), follow(backend, scaled, rule), strict=True)
    for (_, _, state, limit), (_, _, other, other_limit) in pairs:
        if 0 < state[2] < 1e-40:
            return
        assert other == [state[0], *(x * 2.0 ** (20 * power) for x in state[1:])]
        assert other_limit == limit * 2.0 ** (20 * power)


def test_a_guard_that_has_seen_nothing(backend):
    assert after(backend, [4.0]) == ([1.0, 4.0, 0.0], INF)
    assert after(backend, [NAN]) == ([0.0, 0.0, 0.0], INF)
    assert after(backend, [0.0, 0.0, 0.0], warmup=1) == ([3.0, 0.0, 0.0], INF)


@pytest.mark.parametrize("norm", [0.0, LEAST, 0.1, 1 / 3, 1e300])
def test_equal_norms_have_no_deviation_and_nothing_is_clipped(backend, norm):
    for _, _, state, limit in follow(backend, [norm] * 40, DEFAULTS | {"warmup": 3}):
        assert state[1:] == [norm, 0.0]
        assert limit == INF
    state, limit = after(backend, [norm] * 40 + [norm + 1.0], warmup=3)
    assert limit == INF
    assert (state[2] > 0) == (norm + 1.0 != norm)


# Mean 10 and standard deviation 1.
CALM = [9.0, 11.0]


@pytest.mark.guarantee("A spike guard")
@pytest.mark.parametrize("norm", [NAN, INF, -INF, -1.0, -LEAST])
@pytest.mark.parametrize("calm", [CALM, [*CALM, 9.5]], ids=["collecting", "judging"])
def test_what_is_no_norm_never_enters(backend, norm, calm):
    if norm < 0 and backend.on_host:
        with pytest.raises(ValueError, match=f"norm must be at least 0, not {norm}"):
            after(backend, [norm])
        return
    before, _ = after(backend, calm, warmup=3)
    _, usual = after(backend, [*calm, 1.0], warmup=3)
    state, limit = after(backend, [*calm, norm], warmup=3)
    assert_same_bits(np.array(state), np.array(before))
    assert limit == usual


@pytest.mark.guarantee("A spike guard")
@pytest.mark.parametrize("scale", [1e300, 1e-300, 1e-308])
def test_norms_whose_squares_leave_the_range(backend, scale):
    usual, limit = after(backend, [9.0, 11.0, 10.5, 30.0], warmup=2)
    norms = [9.0 * scale, 11.0 * scale, 10.5 * scale, 30.0 * scale]
    found, found_limit = after(backend, norms, warmup=2)
    assert found[1] / scale == pytest.approx(usual[1], rel=1e-13)
    assert found[2] / scale == pytest.approx(usual[2], rel=1e-13)
    assert found_limit / scale == pytest.approx(limit, rel=1e-13)


def test_a_limit_beyond_float64_clips_nothing(backend):
    state, limit = after(backend, [0.0, 1.7e308, 1.7e308], warmup=2, threshold=5.0)
    assert limit == INF
    assert all(map(math.isfinite, state))


@pytest.mark.parametrize(("level", "first", "last"), [(1.5, range(20, 30), 20), (2.0, [100], 1000)])
def test_a_lasting_rise_is_followed_unless_it_is_a_large_one(level, first, last):
    """A rise by five deviations, and by ten, as docs/guide.md describes them."""
    rng = np.random.default_rng(0)
    norms = [*rng.normal(1, 0.1, 200), *rng.normal(level, 0.1, 2000)]
    guard = gradkit.SpikeGuard()
    clipped = [norm > float(guard.update(norm)) for norm in norms]
    assert sum(clipped[200:300]) in first
    assert (sum(clipped[-1000:]) == 1000) == (last == 1000)
    assert sum(clipped[-1000:]) <= last


# Arrays in and out


def test_out(backend):
    host = np.array([30.0, 2.0, 0.5])
    expected, expected_limit = gradkit.spike_guard_update(host, 9.0)
    state = backend.asarray(host)
    room, limit = backend.asarray(np.zeros(6))[::2], backend.asarray(np.zeros(()))
    found = gradkit.spike_guard_update(state, 9.0, out=(room, limit))
    assert found[0] is room
    assert found[1] is limit
    assert_same_bits(backend.asnumpy(room), expected)
    assert_same_bits(backend.asnumpy(limit), expected_limit)
    for own in (state, backend.asarray(np.repeat(host, 2)[::2])):
        following, limit = gradkit.spike_guard_update(own, 9.0, out=(own, None))
        assert following is own
        assert_same_bits(backend.asnumpy(own), expected)
        assert_same_bits(backend.asnumpy(limit), expected_limit)


def test_outputs_that_share_memory(backend):
    state = backend.asarray(np.arange(6.0))
    before = backend.memory(state)
    for out, message in (
        ((state[1:4], None), r"out\[0\] shares memory with state without being state itself"),
        ((None, state[0, ...]), r"out\[1\] shares memory with state"),
        ((state[3:], state[4, ...]), r"out\[0\] and out\[1\] share memory"),
    ):
        with pytest.raises(ValueError, match=message):
            gradkit.spike_guard_update(state[:3], 9.0, out=out)
        assert backend.memory(state) == before
    following, _ = gradkit.spike_guard_update(state[:3], 9.0, out=(state[:3], None))  # all of it
    assert backend.asnumpy(following).tolist() == backend.asnumpy(state).tolist()[:3]


@pytest.mark.parametrize("dtype", sorted(tolerances.DTYPES))
def test_norms_of_any_dtype(backend, dtype):
    state = backend.asarray(np.array([30.0, 2.0, 0.5]))
    norm = backend.asarray(np.array(9.0, tolerances.DTYPES[dtype]))
    for given_norm in (norm, 9, np.float32(9), np.array(9.0)):
        following, limit = gradkit.spike_guard_update(state, given_norm)
        expected, expected_limit = gradkit.spike_guard_update(np.array([30.0, 2.0, 0.5]), 9.0)
        assert_same_bits(backend.asnumpy(following), expected)
        assert_same_bits(backend.asnumpy(limit), expected_limit)


def test_a_spike_is_clipped_and_nothing_else_is(backend):
    guard = gradkit.SpikeGuard(warmup=4)
    for norm, spike in [(9, 0), (11, 0), (10, 0), (10, 0), (1000, 1), (10.5, 0), (9, 0), (90, 1)]:
        grads = backend.asarray(np.array([0.6, 0.8]) * norm)
        before = backend.memory(grads)
        total = gradkit.grad_norm(grads)
        limit = guard.update(total)
        gradkit.clip_grads_with_norm(grads, total, limit)
        assert (backend.memory(grads) != before) == spike
        assert float(gradkit.grad_norm(grads)) <= 12


@pytest.mark.guarantee("A spike guard")
def test_ranks_decide_alike(backend):
    """Each rank holds a part of the gradients; one spikes on one rank alone."""
    contents = [([3.0 + k % 2], [4.0 * (1 + 100 * (k == 7))]) for k in range(10)]

    def work(group):
        guard, found = gradkit.SpikeGuard(warmup=4), []
        for parts in contents:
            grads = [backend.asarray(np.array(parts[group.rank]))]
            norm = gradkit.grad_norm(grads, group=group)
            limit = guard.update(norm)
            found.append((float(norm), float(limit)))
        return found, guard.state_dict()

    first, second = results(work, 2)
    assert first == second
    assert [norm > limit for norm, limit in first[0]] == [k == 7 for k in range(10)]


# The class


def test_the_class_holds_the_state_of_the_functions(backend):
    rule = {"decay": 0.5, "threshold": 1.0, "warmup": 2}
    guard, norms = gradkit.SpikeGuard(**rule), [1.0, 3.0, 9.0, NAN, 2.5, 1e3]
    for _, norm, state, limit in follow(backend, norms, rule):
        assert float(backend.asnumpy(guard.update(backend.asarray(np.array(norm))))) == limit
        found = guard.state_dict()
        assert [found["count"], found["mean"], found["std"]] == state
    assert type(found["count"]) is int
    assert type(found["mean"]) is type(found["std"]) is float


def test_the_class_writes_its_state_in_place(backend):
    """A captured step finds it where it was."""
    guard = gradkit.SpikeGuard()
    norm = backend.asarray(np.array(3.0))
    guard.update(norm)
    state = guard._state
    assert type(state) is type(norm)
    guard.update(norm)
    guard.update(4.0)  # a number of the host's meets a state anywhere
    assert guard._state is state
    assert guard.state_dict()["count"] == 3


@pytest.mark.parametrize("through", ["json", "pickle", "deepcopy"])
def test_a_checkpoint_goes_on_with_the_same_bits(backend, through):
    rng = np.random.default_rng(3)
    first, second = (
        [backend.asarray(np.array(norm)) for norm in rng.normal(1, 0.1, 9)] for _ in range(2)
    )
    guard = gradkit.SpikeGuard(warmup=4)
    for norm in first:
        guard.update(norm)
    if through == "deepcopy":
        again = copy.deepcopy(guard)
    else:
        codec = {"json": json, "pickle": pickle}[through]
        again = gradkit.SpikeGuard(warmup=4)
        again.load_state_dict(codec.loads(codec.dumps(guard.state_dict())))
    assert again.state_dict() == guard.state_dict()
    for norm in second:
        assert float(again.update(norm)) == float(guard.update(norm))
    assert again.state_dict() == guard.state_dict()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            None,
            ValueError,
            "mapping of count, mean, std, decay, threshold, warmup, on_spike, not None",
        ),
        ({"count": 1, "mean": 2.0}, ValueError, "state_dict must be a mapping of count, mean, std"),
        ({"std": "1"}, TypeError, "std in state_dict must be a real number, not str"),
        ({"mean": NAN}, ValueError, "mean in state_dict must be at least 0, not nan"),
        ({"mean": INF}, ValueError, "mean in state_dict must be finite, not inf"),
        ({"count": -1}, ValueError, "count in state_dict must be at least 0, not -1"),
        ({"count": 2.5}, ValueError, "count in state_dict must be a whole number, not 2.5"),
        ({"more": 1}, ValueError, "state_dict must be a mapping of count, mean, std"),
        ({"decay": 0.5}, ValueError, "decay in state_dict is 0.5, and the guard's is 0.97; make"),
        ({"threshold": "2"}, TypeError, "threshold in state_dict must be a real number, not str"),
        ({"warmup": 3}, ValueError, "warmup in state_dict is 3, and the guard's is 25; make a"),
        (
            {"on_spike": "skip"},
            ValueError,
            "on_spike in state_dict is skip, and the guard's is clip",
        ),
        ({"count": [1], "std": [1, 1]}, ValueError, "must be of as many norms"),
    ],
)
def test_a_checkpoint_that_is_none(wrong, error, message):
    guard = gradkit.SpikeGuard()
    guard.update(3.0)
    before = guard.state_dict()
    changed = wrong if wrong is None or wrong.keys() == {"count", "mean"} else before | wrong
    with pytest.raises(error, match=message):
        guard.load_state_dict(changed)
    assert guard.state_dict() == before


def test_a_norm_that_cannot_be_read_leaves_the_guard_as_it_was():
    guard = gradkit.SpikeGuard()
    with pytest.raises(TypeError, match="norm cannot be read through DLPack: no memory"):
        guard.update(Capsule())
    assert guard.state_dict() == gradkit.SpikeGuard().state_dict()


def test_statistics_alone_go_on_with_other_settings():
    guard = gradkit.SpikeGuard(decay=0.5)
    statistics = {"count": 3, "mean": 2.0, "std": 0.5}
    guard.load_state_dict(statistics)
    settings = {"decay": 0.5, "threshold": 2.5, "warmup": 25, "on_spike": "clip"}
    assert guard.state_dict() == statistics | settings
    assert repr(guard) == "SpikeGuard(decay=0.5, threshold=2.5, warmup=25, on_spike='clip')"


def test_an_update_that_fails_leaves_the_guard_as_it_was(backend):
    guard = gradkit.SpikeGuard()
    guard.update(backend.asarray(np.array(3.0)))
    before = guard.state_dict()
    for wrong, error in (
        (-1.0, ValueError),
        ("1", TypeError),
        (np.ones(2), (TypeError, ValueError)),
    ):
        with pytest.raises(error, match="norm"):
            guard.update(wrong)
    assert guard.state_dict() == before


@pytest.mark.parametrize(
    ("label", "wrong"), [("decay", 1.0), ("warmup", 0), ("threshold", INF), ("on_spike", "drop")]
)
def test_the_class_refuses_what_the_function_does(label, wrong):
    with pytest.raises(ValueError, match=f"^{label} must be .*, not {wrong!r}$|finite, not inf"):
        gradkit.SpikeGuard(**{label: wrong})


def test_a_rise_that_lasts_is_accepted_in_the_end_if_spikes_are_skipped(backend):
    """Clipped close to the mean, it would be a spike for ever, and no step would be taken again."""
    guard, rng = gradkit.SpikeGuard(on_spike="skip"), np.random.default_rng(0)
    levels = [1.0] * 100 + [1000.0] * 200
    taken = []
    for level in levels:
        norm = backend.asarray(np.array(level * rng.normal(1, 0.1)))
        taken.append(bool(gradkit.step_verdict(norm, limit=guard.update(norm))))
    assert not any(taken[100:150])
    assert all(taken[270:])


# Several norms, each by its own history


@pytest.mark.parametrize("on_spike", ["clip", "skip"])
@pytest.mark.parametrize("count", [0, 1, 5, 600])
def test_many_norms_are_judged_as_one_by_one(backend, count, on_spike):
    """To the bit, NaN among them; states may be written in place."""
    rule = {"warmup": 3, "on_spike": on_spike}
    steps = np.random.default_rng(count).lognormal(0, 1, (8, count))
    steps[4, ::2] *= 100
    steps[5, 1::3] = NAN
    like = backend.asarray(np.ones(1, np.float16))
    state = gradkit.spike_guard_init(like, count=count)
    assert (type(state), state.shape) == (type(like), (count, 3))
    alone = {k: gradkit.spike_guard_init(like) for k in (0, 1, count - 1) if 0 <= k < count}
    for step in steps:
        norms = backend.asarray(step)
        same, limits = gradkit.spike_guard_update(state, norms, **rule, out=(state, None))
        assert same is state
        assert limits.shape == (count,)
        for k, own in alone.items():
            alone[k], limit = gradkit.spike_guard_update(own, backend.asarray(step[k]), **rule)
            assert_same_bits(backend.asnumpy(limits)[k], backend.asnumpy(limit))
            assert_same_bits(backend.asnumpy(state)[k], backend.asnumpy(alone[k]))


def test_a_guard_of_each_gradient_clips_the_one_that_spikes(backend):
    rng, guard = np.random.default_rng(0), gradkit.SpikeGuard(warmup=5)
    for step in range(12):
        hosts = [rng.normal(size=n) * size for n, size in ((400, 1.0), (300, 1e-3))]
        if step == 11:
            hosts[1] *= 50
        grads = [backend.asarray(host) for host in hosts]
        norms = gradkit.per_tensor_norms(grads, flat=True)
        limits = guard.update(norms)
        gradkit.clip_grad_block_norm(grads, limits)
    assert_same_bits(backend.asnumpy(grads[0]), hosts[0])
    assert np.linalg.norm(backend.asnumpy(grads[1])) < 0.05 * np.linalg.norm(hosts[1])
    again = gradkit.SpikeGuard(warmup=5)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert guard.state_dict()["count"] == again.state_dict()["count"] == [12, 12]
    assert_same_bits(*(backend.asnumpy(g.update(norms)) for g in (guard, again)))


def test_a_vector_of_one_norm_is_one_in_a_checkpoint_too(backend):
    guard, again = gradkit.SpikeGuard(), gradkit.SpikeGuard()
    guard.update(backend.asarray(np.ones(1)))
    again.load_state_dict(guard.state_dict())
    assert again.update(backend.asarray(np.ones(1))).shape == (1,)
    assert again.state_dict()["count"] == [2]

"""Running statistics: PyTorch's momentum and unbiased variance."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from tests import oracles, steps, tolerances
from tests.layouts import LAYOUTS
from tests.problems import BATCH_TYPES, make, problems
from tests.ranks import results
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_within

TYPES = pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)
NAMES = "running_mean", "running_var"
MOMENTA = st.sampled_from((0.0, 0.1, 0.5, 1.0))


def before(p, dtype):
    """Statistics to move from."""
    rng = np.random.default_rng(3)
    return rng.standard_normal(p.lead).astype(dtype), rng.uniform(0, 2, p.lead).astype(dtype)


def moved(backend, p, hosts, **options):
    """Running statistics after a forward pass, and its own results."""
    running = dict(zip(NAMES, map(backend.asarray, hosts), strict=True))
    if "16" in p.statistics and "out" not in options:
        vectors = (np.empty_like(a) for a in (p.mean, p.inv_std))
        options["out"] = (None, *map(backend.asarray, vectors))
    given = p.on(backend, "x", "scale", "bias")
    found = gradkit.batch_norm(*given, eps=p.eps, **p.where, **running, **options)
    return [backend.asnumpy(a) for a in running.values()], found


def check(backend, p, hosts, found, momentum, *, exchanged=0.0):
    """Both within the bounds of the batch's own, and a few roundings in float64."""
    x, forward = oracles.wide(p.rows(p.x)), p.forward()
    n, weight = x.shape[1], oracles.WIDE(momentum)
    batch = forward.mean, ((x - forward.mean[:, None]) ** 2).sum(axis=1) / (n - 1)
    sizes = forward.mean_size, batch[1]
    depth = min(backend.depth, n)
    for got, old, new, size in zip(found, hosts, batch, sizes, strict=True):
        assert got.dtype == old.dtype
        if momentum == 0:
            assert_same_bits(got, old)
            continue
        ref = (1 - weight) * oracles.wide(old) + weight * new
        bound = 2 * momentum * tolerances.averaged("mean", size, new, depth, p.x.dtype)
        bound = bound + momentum * exchanged * (np.abs(new) + np.abs(forward.mean) ** 2)
        bound = bound + tolerances.combined(np.abs(oracles.wide(old)) + np.abs(new), 1)
        bound = (
            bound + tolerances.below_normal("mean", p.x.dtype) + tolerances.rounded(ref, got.dtype)
        )
        assert_within(got, ref, bound)


@pytest.mark.guarantee("Running statistics")
@given(data=st.data(), momentum=MOMENTA, dtype=st.sampled_from(sorted(DTYPES)))
def test_any_batch(backend, data, momentum, dtype):
    p = data.draw(problems(backend.max_elements // 16, batch=True))
    count = p.rows(p.x).shape[1]
    if count == 1:
        return  # an error: the unbiased variance needs two
    hosts = before(p, DTYPES[dtype])
    found, results_ = moved(backend, p, hosts, momentum=momentum)
    if count == 0:
        assert_all_same_bits(found, hosts)
    elif np.isfinite(p.x.astype(np.float64)).all():
        check(backend, p, hosts, found, momentum)
    p.check_forward(backend, *results_)


@TYPES
def test_what_else_comes_out_does_not_change(backend, types):
    for shape in ((6, 3, 5), (3, 8, 16)):
        p = make(shape, types, axis=1, batch=True)
        hosts = before(p, DTYPES[types[1]])
        found, with_running = moved(backend, p, hosts, momentum=0.25)
        check(backend, p, hosts, found, 0.25)
        statistics = (np.empty_like(a) for a in (p.mean, p.inv_std))
        out = (None, *map(backend.asarray, statistics))
        plain = gradkit.batch_norm(*p.on(backend, "x", "scale", "bias"), eps=p.eps, out=out)
        assert_all_same_bits(with_running, plain, backend)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_they_are_written_where_they_lie(backend, layout):
    p = make((4, 3, 5), axis=1, batch=True)
    hosts = before(p, np.float32)
    ref, _ = moved(backend, p, hosts)
    laid = [LAYOUTS[layout](host.copy()) for host in hosts]
    running = [backend.asarray(host) for host in laid]
    gradkit.batch_norm(backend.asarray(p.x), **dict(zip(NAMES, running, strict=True)))
    for array, host, expected in zip(running, laid, ref, strict=True):
        host[...] = expected
        assert backend.memory(array) == backend.memory(backend.asarray(host))


def test_a_variance_that_cannot_be_had_from_inv_std(backend):
    """1 / inv_std**2 - eps is negative for a constant channel, and off by 1e-4 of a small one."""
    p = make((300, 2), axis=1, batch=True, eps=3e-4)
    p.x[:, 0] = 0.1
    p.x[:, 1] *= np.float32(1e-4)
    p.__post_init__()
    (_, var), _ = moved(backend, p, (np.zeros(2, "f4"), np.zeros(2, "f4")), momentum=1.0)
    exact = oracles.wide(p.x[:, 1]).var(ddof=1)
    assert var[0] == 0
    assert abs(var[1] - exact) <= 8 * tolerances.UNIT["float32"] * exact


@pytest.mark.guarantee("Running statistics")
def test_a_weight_of_one_or_zero_leaves_the_rest_out(backend):
    """NaN and infinities too: a first batch may move what was never filled."""
    p = make((4, 3), axis=1, batch=True)
    nothing = np.array([np.nan, np.inf, -np.inf], np.float32)
    (mean, var), _ = moved(backend, p, (nothing, nothing), momentum=1.0)
    fresh, _ = moved(backend, p, (np.zeros(3, "f4"), np.zeros(3, "f4")), momentum=1.0)
    assert_same_bits(mean, fresh[0])
    assert_same_bits(var, fresh[1])
    p.x[1, 1] = np.nan
    hosts = before(p, np.float32)
    assert_all_same_bits(moved(backend, p, hosts, momentum=0.0)[0], hosts)
    given = [backend.asarray(a) for a in (*hosts, *[nothing.astype(float)] * 2)]
    fresh = steps.update_running_statistics(*given, 4.0, momentum=0.0)  # not in place
    assert_all_same_bits([backend.asnumpy(a) for a in fresh], hosts)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_its_channel_alone(backend, bad):
    p = make((4, 3), axis=1, batch=True)
    hosts = before(p, np.float32)
    fine, _ = moved(backend, p, hosts)
    p.x[1, 1] = bad
    for got, ref in zip(moved(backend, p, hosts)[0], fine, strict=True):
        assert not np.isfinite(got[1])
        assert_same_bits(got[[0, 2]], ref[[0, 2]])


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2), (4, 3, 0), (4, 0)], ids=str)
def test_a_batch_without_elements_moves_nothing(backend, shape):
    p = make(shape, axis=1, batch=True)
    hosts = before(p, np.float32)
    for momentum in (0.1, 1.0):
        assert_all_same_bits(moved(backend, p, hosts, momentum=momentum)[0], hosts)


# Over ranks


@pytest.mark.guarantee("Running statistics")
@pytest.mark.parametrize("types", [BATCH_TYPES[0], BATCH_TYPES[1], BATCH_TYPES[6]], ids="-".join)
@pytest.mark.parametrize("cuts", [(2, 4), (1, 1), (0, 5)], ids=str)
def test_ranks_move_as_the_whole_batch_does(backend, types, cuts):
    p = make((6, 3, 5), types, axis=1, batch=True)
    parts, hosts = np.split(p.x, cuts), before(p, DTYPES[types[1]])
    running = [[backend.asarray(host) for host in hosts] for _ in parts]

    def work(group):
        x = backend.asarray(parts[group.rank])
        own = dict(zip(NAMES, running[group.rank], strict=True))
        gradkit.batch_norm(x, group=group, momentum=0.25, **own)

    results(work, len(parts))
    found = [[backend.asnumpy(a) for a in own] for own in running]
    check(backend, p, hosts, found[0], 0.25, exchanged=tolerances.exchanged(len(parts)))
    for other in found[1:]:
        assert_all_same_bits(other, found[0])


@pytest.mark.guarantee("Running statistics")
def test_one_element_on_all_ranks_together(backend):
    held = [np.ones((n, 2), np.float32) for n in (1, 0)]
    running = [[backend.asarray(np.full(2, 7.0)) for _ in NAMES] for _ in held]

    def work(group):
        own = dict(zip(NAMES, running[group.rank], strict=True))
        with pytest.raises(ValueError, match="one element per channel on all ranks together; a "):
            gradkit.batch_norm(backend.asarray(held[group.rank]), group=group, **own)

    results(work, 2)
    assert all((backend.asnumpy(a) == 7).all() for own in running for a in own)
    # One on each of two ranks is enough, although neither alone has a variance.
    held[1] = held[0] * 3

    def enough(group):
        own = dict(zip(NAMES, running[group.rank], strict=True))
        gradkit.batch_norm(backend.asarray(held[group.rank]), group=group, momentum=1.0, **own)

    results(enough, 2)
    for own in running:
        assert [backend.asnumpy(a).tolist() for a in own] == [[2, 2], [2, 2]]


# The step by itself


@pytest.mark.guarantee("Running statistics")
@given(
    data=st.data(),
    dtype=st.sampled_from(sorted(DTYPES)),
    momentum=st.floats(0, 1),
    count=st.integers(2, 1 << 40),
)
def test_the_step_is_exact_but_for_roundings(backend, data, dtype, momentum, count):
    numbers = st.floats(-1e3, 1e3, allow_subnormal=False)
    size = data.draw(st.integers(1, 5))
    hosts = [np.array(data.draw(st.lists(numbers, min_size=size, max_size=size))) for _ in range(4)]
    hosts[:2] = [host.astype(DTYPES[dtype]) for host in hosts[:2]]
    given = [backend.asarray(host) for host in hosts]
    found = steps.update_running_statistics(*given, float(count), momentum=momentum)
    weights = Fraction(1), Fraction(count, count - 1)
    for got, old, new, unbiased in zip(found, hosts[:2], hosts[2:], weights, strict=True):
        got, old = backend.asnumpy(got), old.astype(np.float64)
        exact = np.array(
            [
                float(
                    (1 - Fraction(momentum)) * Fraction(a)
                    + Fraction(momentum) * Fraction(b) * unbiased
                )
                for a, b in zip(old.tolist(), new.tolist(), strict=True)
            ]
        )
        bound = tolerances.combined(np.abs(old) + 2 * np.abs(new), 1)
        assert_within(got, exact, bound + tolerances.rounded(exact, got.dtype))


@pytest.mark.parametrize("momentum", [0.5, 1.0])
def test_an_unbiased_variance_near_the_largest_number(backend, momentum):
    """No product on the way overflows if the result does not."""
    given = [backend.asarray(np.full(1, value)) for value in (2.0, 4.0, 0.0, 1.2e308)]
    _, found = steps.update_running_statistics(*given, 4.0, momentum=momentum)
    expected = momentum * 1.2e308 * (4 / 3)
    np.testing.assert_allclose(backend.asnumpy(found), expected, rtol=1e-15)
    if backend.on_host:
        running = given[:2]
        names = dict(zip(NAMES, running, strict=True))
        x = backend.asarray(np.array([[1.2e308**0.5], [-(1.2e308**0.5)]] * 2))
        gradkit.batch_norm(x, **names, momentum=momentum)
        np.testing.assert_allclose(backend.asnumpy(running[1]), expected, rtol=1e-14)


def test_what_float32_takes_for_a_tie_of_bfloat16(backend):
    """The step is rounded once, from float64."""
    ones = backend.asarray(np.ones(3, DTYPES["bfloat16"]))
    batch = 1 + np.array([1, 1 + 2.0**-30, 1 - 2.0**-30]) * 2.0**-7
    mean, var = map(backend.asarray, (batch, batch / 2))
    found = steps.update_running_statistics(ones, ones, mean, var, 2.0, momentum=0.5)
    for moved in found:
        values = backend.asnumpy(moved).astype(np.float64)
        np.testing.assert_array_equal(values, [1, 1 + 2.0**-7, 1])

"""``exact=True``: a norm is rounded once, whatever the cuts, the order and the ranks."""

import math
import sys
from decimal import Context, Decimal
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit import _host
from gradkit._calls.lists import DIGITS, ExactSums
from gradkit._open.gradients import Gradients
from gradkit._ranks import exact_norms, ownership
from gradkit.distributed import shards_of
from tests.meshes import Layout, plain
from tests.ranks import Counting, results, together

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def drawn(seed, dtype, size=3000):
    """Of any magnitude that the dtype has, subnormal numbers and zeros among them."""
    rng = np.random.default_rng(seed)
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    spread = rng.choice([0.01, 0.3, 1.0])  # of all exponents
    values = rng.integers(0, 1 << 8 * bits.itemsize, size, bits).view(dtype)
    narrow = (rng.standard_normal(size) * rng.choice([1e-6, 1.0])).astype(dtype)
    values = np.where(rng.random(size) < spread, values, narrow)
    with np.errstate(invalid="ignore"):  # of ml_dtypes
        return np.where(np.isfinite(values), values, 0).astype(dtype)


def correctly_rounded(arrays, order, scale=1):
    """By 900 digits, which hold every sum of squares."""
    total = sum(Fraction(float(x)) ** order for a in arrays for x in np.abs(a).reshape(-1))
    total *= abs(Fraction(scale)) ** order
    if order == 1:
        return float(total)
    context = Context(prec=900)
    exact = context.divide(Decimal(total.numerator), Decimal(total.denominator))
    return float(context.sqrt(exact))


@pytest.mark.guarantee("With `exact=True`")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_rounded_once(backend, dtype, order):
    for seed in range(4):
        grad = drawn(seed, DTYPES[dtype])
        expected = correctly_rounded([grad], order)
        there = backend.asarray(grad)
        assert float(gradkit.grad_norm([there], order, exact=True)) == expected
        few = gradkit.grad_norm([there[:1], there[1:1]], order, exact=True)
        assert float(few) == abs(float(grad[0]))


@pytest.mark.guarantee("With `exact=True`")
@given(st.data(), st.integers(0, 2**32), st.sampled_from([1, 2]))
def test_no_cut_and_no_order_changes_a_bit(backend, data, seed, order):
    rng = np.random.default_rng(seed)
    whole = drawn(seed, np.float32, 700)
    cuts = st.lists(st.integers(0, 700), max_size=8).map(sorted)
    pieces = np.split(whole, data.draw(cuts))
    rng.shuffle(pieces)
    pieces[0] = np.repeat(pieces[0], 2)[::2]  # with gaps
    norms = {
        float(gradkit.grad_norm([backend.asarray(grad) for grad in grads], order, exact=True))
        for grads in (pieces, [whole.reshape(7, 100).T])
    }
    assert norms == {correctly_rounded([whole], order)}


def rounded(values):
    return np.asarray(values, np.float32)


@pytest.mark.guarantee("With `exact=True`")
@given(st.builds(Layout, st.integers(0, 2**32)), st.sampled_from([1, 2]))
def test_any_layout_has_the_bits_of_one_process(layout, order):
    def work(group):
        shards = layout.shards(group, rounded)
        return float(gradkit.grad_norm(shards, order, group=group, exact=True))

    wholes = [rounded(whole) for whole in layout.wholes()]
    assert {*results(work, layout.size)} == {float(gradkit.grad_norm(wholes, order, exact=True))}


def test_many_elements_and_threads(backend):
    """More than a chunk, a piece and a thread has; their sum is known."""
    hosts = [np.full(300_001, 2.0**-60, np.float32), np.full((3, 70_000), 3.0, np.float16)]
    grads = [backend.asarray(host) for host in hosts]
    total = Fraction(300_001, 2**60) + 630_000
    assert float(gradkit.grad_norm(grads, 1, exact=True)) == float(total)


@pytest.mark.parametrize(
    "values", [(1, 2**-20, 2**-40), (1, 2**-60, 2**-70), (1, 2.0**-149, 2.0**-75)]
)
@pytest.mark.parametrize("order", [1, 2])
def test_terms_of_one_chunk_that_are_far_apart(backend, values, order):
    """They need two totals, four, or each its own place."""
    grad = np.array([v * (1 + 2**-10) if v > 1e-40 else v for v in values], np.float32)
    sums = np.zeros((1, DIGITS + 1))
    held = Gradients([backend.asarray(grad)])
    call = ExactSums(grads=held.views, norm_type=order, rows=[0], sums=sums)
    with held.on_stream():
        held.backend.exact_sums(call)
    whole = sum(int(d) << 32 * k for k, d in enumerate(sums[0, :DIGITS]))
    assert whole == sum(Fraction(float(v)) ** order for v in grad) * 2**320


@pytest.mark.parametrize("order", [1, 2])
def test_the_largest_sums_fit(backend, order):
    host = np.full(5000, np.finfo(np.float32).max, np.float32)
    grads = [backend.asarray(host)]
    expected = correctly_rounded([host], order)
    assert float(gradkit.grad_norm(grads, order, exact=True)) == expected
    assert float(gradkit.grad_norm(grads, order, scale=1e300, exact=True)) == math.inf


@pytest.mark.parametrize("bad", [[np.inf], [np.nan], [-np.inf, np.nan]])
@pytest.mark.parametrize("order", [1, 2])
def test_what_is_not_finite(backend, bad, order):
    hosts = [np.array([1.0, *bad, 2.0], np.float32), np.ones(3, np.float16)]
    grads = [backend.asarray(host) for host in hosts]
    flag = backend.asarray(np.array(False))
    norm = gradkit.grad_norm(grads, order, found_inf=flag, exact=True)
    np.testing.assert_equal(float(norm), float(gradkit.grad_norm(grads, order)))
    assert flag
    gradkit.grad_norm(grads[1:], order, found_inf=flag, exact=True)
    assert not flag
    with pytest.raises(gradkit.NonFiniteNormError):
        gradkit.clip_grad_norm(grads, 1.0, order, nonfinite="raise", exact=True)


@pytest.mark.parametrize("order", [1, 2])
def test_scales_are_exact_too(backend, order):
    host = drawn(3, np.float32)
    grad = backend.asarray(host)
    for scale in (0.1, -3.0, 0.0, 1e-300):
        norm = gradkit.grad_norm(grad, order, scale=scale, exact=True)
        assert float(norm) == correctly_rounded([host], order, scale)
    assert gradkit.grad_norm([], order, exact=True) == 0
    assert float(gradkit.grad_norm([grad[:0]], order, exact=True)) == 0


def test_ranks_may_have_copies():
    grads = [drawn(seed, np.float32, 50) for seed in range(3)]

    def work(group):
        own = [grads[group.rank], np.float32([7.0])]
        options = {"group": group, "replicas": [1, 3], "exact": True}
        return float(gradkit.grad_norm(own, scale=0.1, **options))

    squares = (sum(Fraction(float(x)) ** 2 for x in g) + Fraction(49, 3) for g in grads)
    total = sum(squares) * Fraction(0.1) ** 2
    context = Context(prec=900)
    square = context.divide(Decimal(total.numerator), Decimal(total.denominator))
    assert results(work, 3) == [float(context.sqrt(square))] * 3


def test_clipping_takes_the_exact_norm(backend):
    host = drawn(5, np.float32)
    grad, expected = backend.asarray(host), backend.asarray(host)
    norm = gradkit.grad_norm(grad, exact=True)
    limit = float(norm) / 3
    gradkit.clip_grads_with_norm(expected, norm, max_norm=limit)
    clipped, again = gradkit.clip_by_global_norm(grad, limit, exact=True)
    clipped_norm = gradkit.clip_grad_norm(grad, limit, exact=True)
    assert float(again) == float(norm) == float(clipped_norm)
    for found in (clipped, grad):
        np.testing.assert_array_equal(backend.asnumpy(found), backend.asnumpy(expected))
    assert float(gradkit.grad_norm(backend.asarray(np.array([3.0, -4.0])), np.inf, exact=True)) == 4


def test_an_error_on_one_rank_is_one_on_all():
    def work(group):
        dtype = np.float64 if group.rank else np.float32
        gradkit.grad_norm([np.ones(1, dtype)], group=group, exact=True)

    errors = together(work, 2)
    assert isinstance(errors[0], gradkit.RankError)
    assert isinstance(errors[1], TypeError)


@pytest.mark.parametrize("places", [0, 100])
def test_a_root_beside_the_middle_of_two_floats(places):
    """The smallest rest decides to which side it is rounded."""
    states = np.zeros((1, DIGITS + 2))  # common multiple, digits, what is not finite
    states[0, 0] = 1
    middle = 2**53 + 1 << places
    unit = 1 << 320 if places else 1
    for rest, rounded_to in ((0, 2.0**53), (unit, 2.0**53 + 2), (-unit, 2.0**53)):
        expected = math.ldexp(rounded_to, places)
        whole = (middle * middle << 320) + rest
        states[0, 1:-1] = [whole >> 32 * k & 0xFFFFFFFF for k in range(DIGITS)]
        assert exact_norms.norm_of(states, 2, 1.0) == (expected, 0)


def test_a_scale_on_the_device_may_be_infinite():
    """As one of PyTorch's on the CPU, which nobody has looked at."""
    states = np.zeros((2, DIGITS + 2))
    states[:, :2] = [[1, 0], [1, 5]]
    assert exact_norms.norm_of(states, 2, np.inf) == (np.inf, 0)
    assert np.isnan(exact_norms.norm_of(states, 1, np.nan)[0])


class Adding(Counting):
    """A group that also adds up, and remembers how much."""

    def __init__(self, group):
        super().__init__(group)
        self.added = []

    def allreduce(self, state):
        self.added.append(state.size)
        return self._group.allreduce(state)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("adds", [True, False])
def test_sums_are_added_on_the_way_if_a_group_can(adds, order):
    """To the same bits; then only heads are gathered, which grow with the ranks."""
    size = 9
    grads = [drawn(seed, np.float32, 50 + seed) for seed in range(size)]
    groups = list(map(Adding if adds else Counting, gradkit.distributed.threads(size)))

    def work(group):
        own = [grads[group.rank], np.float32([7.0])]
        replicas = [1, 3 if group.rank < 3 else 2]
        options = {"scale": 0.1, "group": group, "replicas": replicas, "exact": True}
        return float(gradkit.grad_norm(own, order, **options))

    terms = [Fraction(float(abs(x))) ** order for grad in grads for x in grad]
    total = (sum(terms) + (1 + 3) * 7**order) * Fraction(0.1) ** order
    context = Context(prec=900)
    square = context.divide(Decimal(total.numerator), Decimal(total.denominator))
    expected = float(total) if order == 1 else float(context.sqrt(square))
    assert results(work, size, groups=groups) == [expected] * size
    assert [group.sent for group in groups] == [[6] if adds else [6, 25]] * size
    assert not adds or [group.added for group in groups] == [[25]] * size


def test_ranks_without_one_multiple_of_all_their_copies():
    """Each rank's own is below 2**53; then rows travel."""
    heads = np.array([[2.0**31 - 1], [2.0**29 - 3]])
    group = SimpleNamespace(adds=True, rows=lambda digits: np.stack([digits, digits]))
    own = exact_norms.Own(5 << 320, 2**31 - 1, 0.0)
    rows = exact_norms.exchanged(own, heads, group)
    expected = float((Fraction(5, 2**31 - 1) + Fraction(5, 2**29 - 3)) / 2)
    assert exact_norms.norm_of(rows, 1, 0.5) == (expected, 0)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_on_one_rank(bad):
    def work(group):
        own = np.float32([bad if group.rank else 1.0, -np.inf])
        return float(gradkit.grad_norm(own, group=group, exact=True))

    np.testing.assert_equal(results(work, 2), [bad] * 2)


def test_a_group_must_answer_with_a_number_for_each():
    class Wrong:
        rank, size = 0, 2

        def allgather(self, state):
            return np.stack([state, state])

        def allreduce(self, state):
            return state[1:]

    with pytest.raises(ValueError, match=r"what group.allreduce returned has shape \(24,\)"):
        gradkit.grad_norm(np.ones(2, np.float32), group=Wrong(), exact=True)


def test_a_rank_that_does_not_remember():
    def work(group):
        def shards():
            return shards_of({"w": plain(np.float32([3.0]))}, group=group, plain="copies")

        shards()
        if group.rank:
            ownership._cache.clear()
        return float(gradkit.grad_norm(shards(), group=group, exact=True))

    assert results(work, 2) == [3.0, 3.0]


def test_threads_have_sums_of_their_own():
    grads = [drawn(k, np.float32, 70_000 if k % 2 else 100) for k in range(40)]
    many = [np.array([2.0**-k, 1.0], np.float32) for k in range(30)] * 300
    before, norms = gradkit.get_num_threads(), []
    try:
        for threads in (1, 4, 4, 4):
            gradkit.set_num_threads(threads)
            norms.append(
                [
                    float(gradkit.grad_norm(each, order, exact=True))
                    for each in (grads, many)
                    for order in (1, 2)
                ]
            )
    finally:
        gradkit.set_num_threads(before)
    assert norms == [norms[0]] * 4


def test_gradients_and_sums_are_let_go():
    grad, sums = np.ones(100, np.float32), np.zeros((1, DIGITS + 1))
    call = ExactSums(grads=[grad], rows=[0], norm_type=2, sums=sums)
    before = sys.getrefcount(grad), sys.getrefcount(sums)
    for _ in range(3):
        gradkit.grad_norm([grad], exact=True)
        _host.backend().exact_sums(call)
    assert (sys.getrefcount(grad), sys.getrefcount(sums)) == before

"""Batch norm over ranks, threads of one process here; and the steps that it is made of.

What must come out is what the whole batch gives.
"""

import math
import threading
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit import _host, distributed
from tests import oracles, steps, tolerances
from tests.layouts import LAYOUTS
from tests.problems import BATCH_TYPES, make, problems
from tests.ranks import Counting, results, together
from tests.tolerances import DTYPES, assert_all_same_bits, assert_within

NAN = math.nan
TYPES = pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)


class Parts:
    """A problem whose batch is shared out among ranks, along an axis that is not the channels'."""

    def __init__(self, backend, problem, cuts):
        self.backend, self.whole = backend, problem
        channels = problem.axis % problem.x.ndim
        self.along = 1 if channels == 0 else 0
        length = problem.x.shape[self.along]
        ends = [0, *sorted(min(cut, length) for cut in cuts), length]
        self.places = [
            (slice(None),) * self.along + (slice(start, end),) for start, end in pairwise(ends)
        ]

    @property
    def size(self):
        return len(self.places)

    def of(self, name, rank):
        """A rank's part of an array, or all of it if it has one number per channel."""
        array = getattr(self.whole, name)
        if array is None or name not in ("x", "dy"):
            return None if array is None else self.backend.asarray(array)
        return self.backend.asarray(array[self.places[rank]])

    def arguments(self, rank, *names):
        return [self.of(name, rank) for name in names]

    def forward(self, group, **options):
        rank = group.rank if group else 0
        if "16" in self.whole.statistics and "out" not in options:
            vectors = (np.empty_like(a) for a in (self.whole.mean, self.whole.inv_std))
            options["out"] = (None, *map(self.backend.asarray, vectors))
        return gradkit.batch_norm(
            *self.arguments(rank, "x", "scale", "bias"),
            **{"group": group, "eps": self.whole.eps, **self.whole.where, **options},
        )

    def gradient(self, group, **options):
        rank = group.rank if group else 0
        return gradkit.batch_norm_grad(
            *self.arguments(rank, "dy", "x", "scale", "mean", "inv_std"),
            **{"group": group, **self.whole.where, **options},
        )

    def joined(self, arrays):
        """The whole of what every rank has a part of."""
        host = np.concatenate(list(map(self.backend.asnumpy, arrays)), axis=self.along)
        return self.backend.asarray(host)

    def check_forward(self, found):
        ys, means, inv_stds = zip(*found, strict=True)
        for statistics in (means, inv_stds):
            assert len(bits(self.backend, statistics)) == 1
        exchanged = tolerances.exchanged(self.size)
        self.whole.check_forward(
            self.backend, self.joined(ys), means[0], inv_stds[0], exchanged=exchanged
        )

    def check_gradient(self, found):
        """With dscale and dbias of a rank's own, of the bits that its part gives alone."""
        dxs, *own = zip(*found, strict=True)
        self.whole.check_gradients(self.backend, self.joined(dxs), None)
        for rank in range(self.size):
            given = self.arguments(rank, "dy", "x", "scale", "mean", "inv_std")
            _, *alone = gradkit.batch_norm_grad(*given, **self.whole.where, engine="native")
            for each, expected in zip(own, alone, strict=True):
                assert bits(self.backend, [each[rank]]) == bits(self.backend, [expected])


def bits(backend, arrays):
    return {None if a is None else backend.asnumpy(a).tobytes() for a in arrays}


def check(backend, problem, cuts):
    parts = Parts(backend, problem, cuts)
    parts.check_forward(results(parts.forward, parts.size))
    parts.check_gradient(results(parts.gradient, parts.size))


@pytest.mark.guarantee("Batch norm over ranks")
@given(data=st.data())
def test_any_split_of_any_batch(backend, data):
    p = data.draw(problems(backend.max_elements // 8, batch=True))
    check(backend, p, data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))


@pytest.mark.guarantee("Batch norm over ranks")
@pytest.mark.sampled(9)
@TYPES
@pytest.mark.parametrize("cuts", [(1,), (8, 8), (0, 20), (3, 9, 9, 14, 20)], ids=str)
@pytest.mark.parametrize("layout", ["channels first", "channels last", "one per pixel", "rolled"])
def test_uneven_and_empty_ranks(backend, layout, cuts, types):
    shape = {"channels last": (20, 3, 5, 7), "one per pixel": (20, 7)}.get(layout, (20, 7, 3, 5))
    p = make(shape, types, -1 if layout == "channels last" else 1, batch=True)
    if layout == "rolled":
        p.x, p.dy = LAYOUTS["rolled"](p.x), LAYOUTS["rolled"](p.dy)
    check(backend, p, cuts)


@TYPES
def test_one_element_a_channel_on_each_rank(backend, types):
    """One element is refused of one rank alone, and of all together."""
    for size, others in ((1, 0), (0, 1), (0, 0)):
        whole, on_rank = np.ones((max(size, others), 5)), (size, others)

        def work(group, whole=whole, on_rank=on_rank):
            return gradkit.batch_norm(backend.asarray(whole[: on_rank[group.rank]]), group=group)

        for found in together(work, 2):
            assert isinstance(found, ValueError) == bool(len(whole)), found
    check(backend, make((2, 5), types, 1, batch=True), (1,))
    check(backend, make((3, 5, 1, 1), types, 1, batch=True), (0, 1, 2))


@pytest.mark.sampled(3)
@TYPES
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 5), (4, 3, 0)], ids=str)
def test_no_rank_has_elements(backend, types, shape):
    """As without a group: mean 0, variance 0, and gradients of nothing."""
    p = make(shape, types, 1, batch=True, eps=0.25)
    parts = Parts(backend, p, (1, 2))
    found = results(parts.forward, parts.size)
    for _, mean, inv_std in found:
        assert backend.asnumpy(mean).astype("f4").tolist() == [0] * 3
        assert backend.asnumpy(inv_std).astype("f4").tolist() == [2] * 3
    parts.check_forward(found)
    for dx, dscale, dbias in results(parts.gradient, parts.size):
        assert dx.size == 0
        assert not backend.asnumpy(dscale).any()
        assert not backend.asnumpy(dbias).any()


def test_no_channels(backend):
    x = backend.asarray(np.ones((4, 0), np.float32))
    for y, mean, inv_std in results(lambda g: gradkit.batch_norm(x, group=g), 2):
        assert (y.shape, mean.shape, inv_std.shape) == ((4, 0), (0,), (0,))


def test_dtypes_may_differ(backend):
    """Empty ones too: what travels is float64 whatever x is."""
    hosts = [
        np.full((2, 1), 1.0, DTYPES["float16"]),
        np.zeros((0, 1), DTYPES["bfloat16"]),
        np.full((4, 1), 2.5, DTYPES["bfloat16"]),
        np.zeros((0, 1), DTYPES["float64"]),
        np.full((6, 1), 3.0, DTYPES["float32"]),
    ]
    held = list(map(backend.asarray, hosts))
    found = results(lambda g: gradkit.batch_norm(held[g.rank], eps=0.0, group=g), 5)
    for (y, mean, inv_std), x in zip(found, hosts, strict=True):
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert backend.asnumpy(mean).tolist() == [2.5]
        assert backend.asnumpy(inv_std).astype("f4").tolist() == [np.float32(1 / math.sqrt(0.5))]


@pytest.mark.parametrize("offset", [4096.0, -1e5])
def test_a_mean_of_many_deviations(backend, offset):
    """E[x^2] - E[x]^2 has no digit left of this variance in float32."""
    p = make((400, 3), axis=1, batch=True)
    p.x = (p.x + np.float32(offset)).astype(np.float32)
    p.__post_init__()
    check(backend, p, (100, 110, 333))


@pytest.mark.parametrize(
    ("types", "factor"),
    [
        (BATCH_TYPES[0], 1e37),
        (BATCH_TYPES[0], 1e-30),
        (BATCH_TYPES[1], 1e150),
        (BATCH_TYPES[1], 1e-150),
        (BATCH_TYPES[4], 1e4),
        (BATCH_TYPES[6], 1e37),
    ],
    ids=str,
)
def test_squares_outside_the_range(backend, types, factor):
    p = make((60, 3), types, 1, batch=True, eps=0.0)
    p.x = (p.x.astype(np.float64) * factor).astype(p.x.dtype)
    parts = Parts(backend, p, (20, 21))
    parts.check_forward(results(parts.forward, 3))


def test_equal_parts_have_no_variance_between_them(backend):
    """Not even a rounding: 1 / sqrt(0) is infinite."""
    x = backend.asarray(np.full((3, 2), 0.1, np.float64))
    for _, mean, inv_std in results(lambda g: gradkit.batch_norm(x, eps=0.0, group=g), 3):
        assert backend.asnumpy(mean).tolist() == [0.1, 0.1]
        assert np.isinf(backend.asnumpy(inv_std)).all()


@pytest.mark.guarantee("Batch norm over ranks")
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_what_is_not_finite_on_one_rank_reaches_all(backend, rank, bad):
    p = make((9, 3), axis=1, batch=True)
    p.x[3 * rank + 1, 1] = p.dy[3 * rank + 1, 1] = bad
    parts = Parts(backend, p, (3, 6))
    for arrays in (*results(parts.forward, 3), *results(parts.gradient, 3)):
        finite = np.isfinite(backend.asnumpy(arrays[0]))
        assert not finite[:, 1].any()
        assert finite[:, [0, 2]].all()


def test_infinities_of_both_signs_are_nan(backend):
    """Their sum is, and NumPy has nothing to warn of."""
    x, ones = np.ones((2, 1)), backend.asarray(np.ones(1))
    held = [backend.asarray(sign * np.array([[math.inf], [1.0]])) for sign in (1, -1)]
    given_ = backend.asarray(x), None, ones, ones
    for dx, *_ in results(lambda g: gradkit.batch_norm_grad(held[g.rank], *given_, group=g), 2):
        assert np.isnan(backend.asnumpy(dx)).all()


@pytest.mark.parametrize("rows", [70_000, 35_001])
def test_counts_above_sixteen_bits(backend, rows):
    """float16 has no number of 70000 elements, and int16 none of 35001."""
    held = [
        backend.asarray(np.full((n, 1), v, np.float16)) for n, v in ((rows, 1.0), (2 * rows, 4.0))
    ]

    def work(group):
        _, mean, inv_std = gradkit.batch_norm(held[group.rank], eps=0.0, group=group)
        dy = backend.asarray(np.full(held[group.rank].shape, 3.0 * group.rank, np.float16))
        dx, *_ = gradkit.batch_norm_grad(dy, held[group.rank], None, mean, inv_std, group=group)
        return *map(backend.asnumpy, (mean, inv_std)), backend.asnumpy(dx)

    for mean, inv_std, dx in results(work, 2):
        assert mean.tolist() == [3.0]
        assert inv_std.tolist() == [np.float32(math.sqrt(0.5))]
        # As dy is a linear function of x, nothing is left.
        bound = tolerances.elementwise("dx", 8.0, 0.0, DTYPES["float16"])
        assert_within(dx, np.zeros(dx.shape), bound)


# A group


def test_a_pass_exchanges_two_numbers_a_channel_and_a_count(backend):
    """Beside the header, once there is room; so does an empty rank, and one that only receives."""
    parts = Parts(backend, make((6, 5, 2), axis=1, batch=True), (0, 4))
    groups = [Counting(g) for g in distributed.threads(3)]
    results(parts.forward, 3, groups=groups)
    results(parts.gradient, 3, groups=groups)
    assert [g.sent for g in groups] == [[6, 11, 13]] * 3


class Silent:
    """A group of one, in which nobody is spoken to."""

    rank, size = 0, 1

    def allgather(self, _):
        raise AssertionError("a collective")


@TYPES
def test_a_group_of_one_is_no_group(backend, types):
    parts = Parts(backend, make((9, 3, 4), types, 1, batch=True), ())
    for work in (parts.forward, parts.gradient):
        assert_all_same_bits(work(Silent()), work(None), backend)


def test_results_go_where_out_says(backend):
    """``y`` over ``x`` and ``dx`` over ``dy``, with the bits of new arrays."""
    p = make((10, 4, 3), axis=1, batch=True)
    parts = Parts(backend, p, (3,))
    found = results(parts.forward, 2), results(parts.gradient, 2)

    def work(group):
        given = dict(zip("xsb", parts.arguments(group.rank, "x", "scale", "bias"), strict=True))
        vectors = [backend.asarray(np.zeros((4, 3), np.float32)[:, 1]) for _ in range(4)]
        out = given["x"], *vectors[:2]
        forward = gradkit.batch_norm(*given.values(), group=group, out=out, eps=p.eps)
        dy, *rest = parts.arguments(group.rank, "dy", "x", "scale", "mean", "inv_std")
        gradient = gradkit.batch_norm_grad(dy, *rest, group=group, out=(dy, *vectors[2:]))
        assert forward[0] is given["x"]
        assert gradient[0] is dy
        assert gradient[1] is vectors[2]
        return forward, gradient

    for rank, passes in enumerate(results(work, 2)):
        for arrays, fresh in zip(passes, found, strict=True):
            assert_all_same_bits(arrays, fresh[rank], backend)


def test_last_engine_is_ours():
    x = np.ones((2, 3))
    seen = results(lambda g: (gradkit.batch_norm(x, group=g), gradkit.last_engine())[1], 2)
    assert seen == ["native", "native"]


@pytest.mark.parametrize("engine", ["cudnn", "cudnn-persistent"])
def test_cudnn_computes_for_no_group(backend, engine):
    x, ones = (backend.asarray(np.ones(n, np.float32)) for n in ((2, 3), 3))
    for call in (
        lambda g: gradkit.batch_norm(x, engine=engine, group=g),
        lambda g: gradkit.batch_norm_grad(x, x, None, ones, ones, engine=engine, group=g),
    ):
        for error in together(call, 2):
            assert f"engine='{engine}' does not support group" in str(error)


# One rank in trouble


TROUBLES = {
    "a dtype": ({"x": np.arange(6).reshape(2, 3)}, TypeError),
    "no array": ({"x": "x"}, TypeError),
    "one dimension": ({"x": np.ones(3, np.float32)}, ValueError),
    "an axis": ({"channel_axis": 2}, ValueError),
    "a scale's shape": ({"scale": np.ones(4, np.float32)}, ValueError),
    "an engine": ({"engine": "cudnn"}, ValueError),
    "out of one": ({"out": (None,)}, TypeError),
}


@pytest.mark.guarantee("A rank that fails")
@pytest.mark.parametrize("trouble", [*TROUBLES, "an eps"])
def test_an_error_on_one_rank_ends_the_call_on_all(trouble):
    wrong, error = TROUBLES.get(trouble, ({"eps": -1.0}, ValueError))
    x, scale, y = (np.full((2, 3), v, np.float32) for v in (2.0, 1.0, 7.0))
    mean, inv_std = (np.full(3, 7.0, np.float32) for _ in range(2))

    def forward(group):
        out = (y, mean, inv_std) if group.rank else None
        given = {"x": x, "scale": scale[0], "out": out, "group": group}
        gradkit.batch_norm(**(given | ({} if group.rank else wrong)))

    def backward(group):
        statistics = {"mean": scale[0], "inv_std": scale[0]}
        out = (y, mean, inv_std) if group.rank else None
        given = {"dy": x + 1, "x": x, "scale": scale[0], "out": out, "group": group, **statistics}
        gradkit.batch_norm_grad(**(given | ({} if group.rank else wrong)))

    for work in (forward,) if trouble == "an eps" else (forward, backward):
        found = together(work, 3)
        assert isinstance(found[0], error), found[0]
        for other in found[1:]:
            assert isinstance(other, gradkit.RankError)
            assert other.ranks.keys() == {0}
        for array in (y, mean, inv_std):
            assert (array == 7.0).all()


@pytest.mark.guarantee("A rank that fails")
@pytest.mark.parametrize("step", ["batch_norm_stats", "batch_norm_grad_sums"])
def test_memory_that_runs_out_on_one_rank_ends_the_call_on_all(monkeypatch, step):
    own = getattr(_host.backend(), step)

    def failing(*arguments):
        own(*arguments)
        if threading.current_thread().name.endswith("_1"):
            raise MemoryError("no room")

    monkeypatch.setattr(_host.backend(), step, failing)
    x, ones = np.ones((2, 3)), np.ones(3)
    held = [np.full((2, 3), 7.0), *(np.full(3, 7.0) for _ in range(2))]

    def work(group):
        out = tuple(held) if group.rank == 0 else None
        if step == "batch_norm_stats":
            gradkit.batch_norm(x, group=group, out=out)
        else:
            gradkit.batch_norm_grad(x, x, ones, ones, ones, group=group, out=out)

    found = together(work, 2)
    assert sorted(type(e).__name__ for e in found) == ["MemoryError", "RankError"]
    assert all((array == 7.0).all() for array in held)


def forward_with(group, x, **options):
    return gradkit.batch_norm(x, group=group, **options)


def test_ranks_that_differ_are_told(backend):
    """In their channels, in eps, and in what they call."""
    x, other = (backend.asarray(np.ones((2, n), np.float32)) for n in (3, 4))
    ones = backend.asarray(np.ones(3, np.float32))
    calls = [
        lambda g: forward_with(g, x if g.rank else other),
        lambda g: forward_with(g, x, eps=1e-5 * (1 + g.rank)),
        lambda g: (
            forward_with(g, x)
            if g.rank
            else gradkit.batch_norm_grad(x, x, None, ones, ones, group=g)
        ),
    ]
    for call in calls:
        for error in together(call, 2):
            assert isinstance(error, gradkit.RankError)
            assert "different calls" in str(error)
    error = together(calls[1], 2)[0]
    assert error.ranks[0].startswith("batch_norm(eps=1e-05, momentum=0.1) of 3 channels")


# The steps by themselves


def test_stats_are_those_of_numpy(backend):
    """The biased variance, and nothing of an eps."""
    p = make((40, 3, 7), BATCH_TYPES[1], 1, batch=True)
    mean, var = steps.batch_norm_stats(backend.asarray(p.x))
    x = oracles.wide(p.x)
    for kind, got, ref in (("mean", mean, x.mean((0, 2))), ("inv_std", var, x.var((0, 2)))):
        bound = tolerances.averaged(kind, x.var((0, 2)), ref, backend.depth, p.x.dtype)
        assert_within(backend.asnumpy(got), ref, bound, kind)


MEANS = st.floats(-1e308, 1e308) | st.floats(-1e150, 1e150) | st.floats(4095, 4097)
VARIANCES = st.floats(0, 1e308) | st.floats(0, 4)
RANKS = st.lists(st.tuples(MEANS, VARIANCES, st.integers(0, 1 << 20)), min_size=1, max_size=6)


def together_exactly(rows):
    """Mean and variance of all ranks, and the sizes that their errors are measured in."""
    rows = [tuple(map(Fraction, row)) for row in rows if row[2]]
    count = sum(n for *_, n in rows)
    mean = sum(n * m for m, _, n in rows) / count
    var = sum(n * (v + (m - mean) ** 2) for m, v, n in rows) / count
    largest = max(abs(m) for m, *_ in rows)
    return mean, var, largest


@pytest.mark.guarantee("Batch norm over ranks")
@given(rows=RANKS)
def test_combined_stats_are_exact_but_for_roundings(backend, rows):
    """Against rational numbers; the mean's own rounding moves the variance by its square."""
    means, variances, counts = (np.array(a, float) for a in zip(*rows, strict=True))
    given_ = means[:, None], variances[:, None], counts
    found = steps.combine_stats(*map(backend.asarray, given_))
    mean, var, count = (float(backend.asnumpy(a).reshape(())) for a in found)
    assert count == counts.sum()
    if not count:
        assert (mean, var) == (0, 0)
        return
    exact, spread, largest = together_exactly(rows)
    bound = tolerances.combined(float(largest), len(rows))
    assert abs(Fraction(mean) - exact) <= Fraction(bound)
    if spread > 1.7e308:
        return
    allowed = tolerances.combined(float(spread), len(rows))
    allowed = Fraction(allowed) + Fraction(bound) ** 2
    assert abs(Fraction(var) - spread) <= allowed


def test_ranks_without_elements_are_ignored_whatever_they_say(backend):
    means = np.array([[NAN, 1e308], [1.0, 2.0], [math.inf, NAN], [3.0, 2.0]])
    variances = np.array([[NAN, 1.0], [0.25, 0.5], [-1.0, NAN], [0.25, 0.5]])
    counts = np.array([0.0, 3.0, 0.0, 1.0])
    found = steps.combine_stats(*map(backend.asarray, (means, variances, counts)))
    mean, var, count = map(backend.asnumpy, found)
    assert mean.tolist() == [1.5, 2.0]
    assert var.tolist() == [1.0, 0.5]
    assert count == 4
    nobody = steps.combine_stats(*map(backend.asarray, (means, variances, counts * 0)))
    for total in nobody:
        assert not backend.asnumpy(total).any()


@pytest.mark.parametrize("count", range(2, 12))
def test_equal_means_give_just_that_mean(backend, count):
    """And no variance between them, though weights such as 1/3 are rounded."""
    values = np.array([0.1, -1e300, 5e-324, 4096.1])
    rows = np.tile(values, (count, 1)), np.zeros((count, 4)), np.arange(1.0, count + 1) ** 2
    mean, var, _ = steps.combine_stats(*map(backend.asarray, rows))
    assert backend.asnumpy(mean).tolist() == values.tolist()
    assert not backend.asnumpy(var).any()


def test_means_at_both_ends_of_the_range(backend):
    """Their difference is no float64; their variance is none either."""
    means = np.array([[1.5e308], [-1.5e308], [1.5e308], [1.5e308]])
    rows = means, np.zeros((4, 1)), np.ones(4)
    mean, var, _ = steps.combine_stats(*map(backend.asarray, rows))
    assert backend.asnumpy(mean).tolist() == [0.75e308]
    assert backend.asnumpy(var).tolist() == [math.inf]


def test_rows_may_be_parts_of_what_ranks_sent(backend):
    """Of 2 C + 1 numbers each, as a collective returns them."""
    sent = backend.asarray(np.array([[1.0, 2.0, 0.25, 0.5, 3.0], [3.0, 2.0, 0.25, 0.5, 1.0]]))
    found = steps.combine_stats(sent[:, :2], sent[:, 2:4], sent[:, 4])
    assert [backend.asnumpy(a).tolist() for a in found] == [[1.5, 2.0], [1.0, 0.5], 4.0]


def test_no_ranks_to_combine(backend):
    given_ = np.ones((0, 3)), np.ones((0, 3)), np.ones(0)
    for total in steps.combine_stats(*map(backend.asarray, given_)):
        assert not backend.asnumpy(total).any()


@pytest.mark.parametrize("channels", [1, 129, 3000])
def test_stats_of_many_ranks_and_channels(backend, channels):
    rng = np.random.default_rng(7)
    means, variances = rng.standard_normal((50, channels)), rng.random((50, channels))
    counts = rng.integers(0, 9, 50).astype(float)
    mean, var, _ = steps.combine_stats(*map(backend.asarray, (means, variances, counts)))
    means, variances = oracles.wide(means), oracles.wide(variances)
    expected = np.average(means, 0, counts)
    spread = np.average(variances + (means - expected) ** 2, 0, counts)
    largest = float(np.abs(means).max())
    assert_within(backend.asnumpy(mean), expected, tolerances.combined(largest, 50))
    assert_within(backend.asnumpy(var), spread, tolerances.combined(spread, 50))


@TYPES
def test_sums_are_those_of_the_oracle(backend, types):
    p = make((30, 3, 9), types, 1, batch=True)
    ref = p.gradients()
    given_ = p.on(backend, "dy", "x", "mean", "inv_std")
    for name, total in zip(("dscale", "dbias"), steps.batch_norm_grad_sums(*given_), strict=True):
        size, expected = getattr(ref, f"{name}_size"), getattr(ref, name)
        bound = tolerances.summed(size, expected, backend.depth, DTYPES["float64"], p.x.dtype)
        assert_within(backend.asnumpy(total), expected, bound, name)

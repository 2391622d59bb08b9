"""``grad_stats``: five statistics of each gradient by name, here and over ranks."""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._ranks import named_rows
from tests import oracles, tolerances
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.ranks import INF, NAN, Counting, f, results, together
from tests.tolerances import DTYPES, assert_same_bits

LARGE = {"float16": 6e4, "bfloat16": 3e38, "float32": 3e38, "float64": 1.7e308}


def mean_of(values):
    """The mean, and that of magnitudes: exact for finite numbers."""
    if not values.size:
        return 0.0, 0.0
    if not np.isfinite(values).all():
        with np.errstate(all="ignore"):
            return float(values[~np.isfinite(values)].sum()), math.inf
    exact = [Fraction(value) for value in values.tolist()]
    count = len(exact)
    return float(sum(exact) / count), float(sum(map(abs, exact)) / count)


@lru_cache(maxsize=1)  # the next layout's is the same
def exact_of(values):
    """The norm, the mean and that of magnitudes, of the bytes of float64 numbers."""
    values = np.frombuffer(values)
    return oracles.norm([values]), *mean_of(values)


def check(backend, found, hosts):
    """A row of statistics for the elements of some arrays together."""
    norm, largest, mean, zeros, nonfinite = map(float, found)
    every = [np.asarray(host).astype(np.float64).reshape(-1) for host in hosts]
    values = np.concatenate([np.zeros(0), *every])
    runs = any(host.dtype.itemsize < 8 for host in hosts)
    bound = tolerances.norm(2, backend.run_errors, runs=runs)
    exact, expected, size = exact_of(values.tobytes())
    assert oracles.off_by(norm, INF if exact > tolerances.LARGEST_FLOAT64 else exact) <= bound
    np.testing.assert_equal(largest, np.abs(values).max(initial=0.0))
    if math.isfinite(size):
        assert abs(mean - expected) <= tolerances.grad_mean(size, backend.run_errors)
    else:
        np.testing.assert_equal(mean, expected)
    assert zeros == np.count_nonzero(values == 0)
    assert nonfinite == np.count_nonzero(~np.isfinite(values))


def on(backend, hosts):
    return {name: None if h is None else backend.asarray(h) for name, h in hosts.items()}


def with_values(host, values, rng):
    """The same array with some elements replaced."""
    if host.size:
        for value in values:
            host[tuple(rng.integers(0, n) for n in host.shape)] = value
    return host


SPECIAL = st.sampled_from((0.0, -0.0, NAN, INF, -INF, 2.0**-24, 5e-324, "large", "-large"))


@given(st.data())
def test_any_list(backend, data):
    """Dtypes and layouts mixed, NaN and infinities, zeros of both signs, what nearly overflows."""
    hosts = data.draw(draw_.gradient_lists(backend.max_elements))
    rng = np.random.default_rng(data.draw(draw_.seeds))
    for host in hosts:
        large = LARGE[host.dtype.name]
        special = data.draw(st.lists(SPECIAL, max_size=5))
        special = [{"large": large, "-large": -large}.get(each, each) for each in special]
        if host.flags.writeable:
            with np.errstate(all="ignore"):
                with_values(host, special, rng)
    stats = gradkit.grad_stats([backend.asarray(host) for host in hosts])
    assert list(stats) == [str(k) for k in range(len(hosts))]
    for row, host in zip(stats.values(), hosts, strict=True):
        check(backend, row, [host])


@pytest.mark.parametrize("count", [1, 3, 90, 91, 200])
def test_norms_have_the_bits_of_per_tensor_norms(backend, count):
    names = sorted(DTYPES)
    hosts = [
        draw_.values((k % 5 + 1, 700 * (k == 1) + k % 11), names[k % 4], k) for k in range(count)
    ]
    grads = list(map(backend.asarray, hosts))
    stats = gradkit.grad_stats(grads)
    norms = gradkit.per_tensor_norms(grads, flat=True)
    assert_same_bits(backend.asnumpy(stats.norm), backend.asnumpy(norms))
    largest = gradkit.per_tensor_norms(grads, np.inf, flat=True)
    assert_same_bits(backend.asnumpy(stats.max), backend.asnumpy(largest))
    for row, host in zip(stats.values(), hosts, strict=True):
        check(backend, row, [host])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DTYPES)
def test_long_arrays_and_every_layout(backend, name):
    """More chunks than a block has threads, or pieces than one; and a mean that nearly cancels."""
    size = min(backend.max_elements, 70_000)
    host = draw_.values((size // 10, 10), name, 3, "offset")
    host[::2] *= -1
    host[0, :3] = 0
    for layout in LAYOUTS.values():
        made = layout(host)
        check(backend, gradkit.grad_stats([backend.asarray(made)])["0"], [made])


@pytest.mark.parametrize("name", DTYPES)
def test_sums_that_would_overflow(backend, name):
    large = DTYPES[name].type(LARGE[name])
    host = np.full(5000, large, DTYPES[name])
    stats = gradkit.grad_stats([backend.asarray(host), backend.asarray(-host[:7])])
    for row, each in zip(stats.values(), (host, -host[:7]), strict=True):
        check(backend, row, [each])
    host[3000:] = -large
    host[7] = -INF
    check(backend, gradkit.grad_stats([backend.asarray(host)])["0"], [host])


@pytest.mark.parametrize(
    ("name", "power"), [("float64", 1013), ("float32", 120), ("bfloat16", 120)]
)
def test_a_sum_overflows_though_no_element_is_near_the_largest(backend, name, power):
    host = np.full(5000, 2.0**power, DTYPES[name])
    check(backend, gradkit.grad_stats([backend.asarray(host)])["0"], [host])


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_too_small_for_flushing_is_no_zero(backend, name):
    host = np.full(200, tolerances.smallest(DTYPES[name]), DTYPES[name])
    host[::3] = 0
    host[1] *= -1
    check(backend, gradkit.grad_stats([backend.asarray(host)])["0"], [host])


def test_the_mean_of_subnormal_numbers(backend):
    host = np.full(200, 2.0**-1070)
    assert float(gradkit.grad_stats([backend.asarray(host)])["0"].mean) == 2.0**-1070


def test_a_total_of_zero_may_have_lost_something(backend):
    """A large number hides small ones on the way: compensation has them."""
    lane = np.zeros(192)  # what one lane of a warp has; all others have nothing
    lane[[2, 66, 130]] = 1, 2.0**-60, -1
    for host, mean in ((np.array([1e16, 1.0, -1e16, 1.0]), 0.5), (lane, 2.0**-60 / 192)):
        assert float(gradkit.grad_stats([backend.asarray(host)])["0"].mean) == mean


def test_a_mapping_by_name(backend):
    hosts = {"w": f(3.0, -4.0, 0.0), "unused": None, "layers": None}
    grads = on(backend, hosts) | {"layers": [backend.asarray(f(2.0)), (backend.asarray(f()), None)]}
    stats = gradkit.grad_stats(grads)
    assert isinstance(stats, Mapping)
    assert stats.names == tuple(stats) == ("w", "layers.0", "layers.1.0")
    assert stats.names == tuple(gradkit.names_of(grads))
    assert repr(stats) == "GradStats(w, layers.0, layers.1.0)"
    row = stats["w"]
    assert [float(each) for each in row] == [5.0, 4.0, pytest.approx(-1 / 3), 1.0, 0.0]
    assert all(each.shape == () and each.dtype == np.float64 for each in row)
    for k, column in enumerate(gradkit.GradStat._fields):
        vector = backend.asnumpy(getattr(stats, column))
        assert vector.tolist() == [float(each[k]) for each in stats.values()]
    assert stats.as_dict()["layers.0"] == {
        "norm": 2.0, "max": 2.0, "mean": 2.0, "zeros": 0, "nonfinite": 0
    }  # fmt: skip
    assert type(stats.as_dict()["w"]["zeros"]) is int
    assert stats.as_dict()["layers.1.0"] == dict.fromkeys(gradkit.GradStat._fields, 0)
    with pytest.raises(KeyError):
        stats["unused"]


def test_nothing_and_one(backend):
    for nothing in ([], {}, None, [None]):
        stats = gradkit.grad_stats(nothing)
        assert (len(stats), stats.table.shape, stats.as_dict()) == (0, (0, 5), {})
    assert gradkit.grad_stats(backend.asarray(f(-3.0))).as_dict()["grads"]["max"] == 3.0


def test_out(backend):
    grads = [backend.asarray(f(3.0, 4.0)), backend.asarray(f(NAN))]
    expected = backend.asnumpy(gradkit.grad_stats(grads).table)
    for layout in LAYOUTS.values():
        out = backend.asarray(layout(np.full((2, 5), 7.0)))
        if getattr(out.flags, "writeable", True) and out.size:
            stats = gradkit.grad_stats(grads, out=out)
            assert stats.table is out
            assert_same_bits(backend.asnumpy(out), expected)
    for wrong in (np.zeros((5, 2)), np.zeros((2, 5), np.float32), np.zeros(10)):
        with pytest.raises((TypeError, ValueError), match=r"^out "):
            gradkit.grad_stats(grads, out=backend.asarray(wrong))
    room = backend.asarray(np.arange(20.0))
    with pytest.raises(ValueError, match="out shares memory with"):
        gradkit.grad_stats([room[:3], room[15:]], out=room[:10].reshape(2, 5))


def test_keys_that_are_no_text_are_named_by_it():
    assert gradkit.grad_stats({1: f(1.0), "a": f(2.0)}).names == ("1", "a")
    assert gradkit.grad_stats({"": f(1.0), "a": f(2.0)}).names == ("grads", "a")


def test_names_that_are_one():
    with pytest.raises(ValueError, match=r"grads has two gradients named 'a\.b'"):
        gradkit.grad_stats({"a.b": f(1.0), "a": {"b": f(2.0)}})
    with pytest.raises(TypeError, match=r"grads\[1\] is an int; expected an array"):
        gradkit.grad_stats([f(1.0), 3])


# Over ranks


@pytest.fixture(autouse=True)
def _forget():
    """Forget the names that ranks exchanged in other tests."""
    named_rows._cache.clear()


ORDERS = ["ab", "ba", "b", "ab"]
HELD = (  # on three ranks: a tensor in parts, one on each of two, what is empty, and nothing
    {"shared": f(3.0, 0.0), "first": f(NAN, 1.0), "empty": f()},
    {},
    {"last": f(-1.0), "shared": f(-4.0), "empty": f(0.0)},
)


@pytest.mark.sampled(2)
def test_ranks_may_hold_other_names(backend):
    held = [on(backend, part) for part in HELD]
    found = results(lambda g: gradkit.grad_stats(held[g.rank], group=g), 3)
    tables = {np.asarray(backend.asnumpy(stats.table)).tobytes() for stats in found}
    assert len(tables) == 1
    assert {stats.names for stats in found} == {("shared", "first", "empty", "last")}
    for name, row in found[0].items():
        check(backend, row, [part[name] for part in HELD if name in part])


def test_names_come_in_the_order_of_each_call(backend):
    """It may differ from the order in which ranks told each other their names."""
    values = {"a": f(1.0, 1.0), "b": f(2.0, 2.0)}

    def steps(group):
        orders = [on(backend, {name: values[name] for name in order}) for order in ORDERS]
        return [gradkit.grad_stats(grads, group=group) for grads in orders]

    for found in results(steps, 2):
        assert ["".join(stats.names) for stats in found] == ORDERS
        for stats in found:
            wanted = [2.0 * values[name][0] for name in stats.names]
            assert backend.asnumpy(stats.norm).tolist() == wanted


def test_infinities_of_both_signs_on_different_ranks(backend):
    parts = [{"w": f(INF, 1.0)}, {"w": f(-INF)}]
    held = [on(backend, part) for part in parts]
    found = results(lambda g: gradkit.grad_stats(held[g.rank], group=g), 2)
    assert [np.isnan(float(stats["w"].mean)) for stats in found] == [True, True]
    assert [float(stats["w"].nonfinite) for stats in found] == [2.0, 2.0]


def drawn_parts(draw, ranks):
    """Of each rank its gradients, and of each name how many ranks hold a copy."""
    held, copies = [{} for _ in range(ranks)], [{} for _ in range(ranks)]
    for name in draw(
        st.lists(st.sampled_from(("a", "b.c", "", "d\n", "\ud800é", "7")), unique=True)
    ):
        kind = draw(st.sampled_from(("parts", "copies", "one")))
        values = draw_.values(
            (draw(st.integers(0, 40)),), draw(draw_.names), draw(draw_.seeds), "ties"
        )
        chosen = draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
        pieces = np.array_split(values, len(chosen))
        for rank, piece in zip(chosen, pieces, strict=True):
            own = {"parts": piece, "copies": values, "one": values}[kind]
            if kind != "one" or rank == chosen[0]:
                held[rank][name] = own
                copies[rank][name] = len(chosen) if kind == "copies" else 1
    return held, copies


@given(data=st.data(), ranks=st.integers(1, 4))
def test_statistics_are_those_of_the_whole(data, ranks):
    """In parts, copies or alone; by names of any characters."""
    held, copies = drawn_parts(data.draw, ranks)
    order = {name: None for part in held for name in gradkit.names_of(part)}

    def run(group):
        own, counts = held[group.rank], copies[group.rank]
        return gradkit.grad_stats(own, group=group, replicas=counts)

    found = results(run, ranks)
    assert {stats.names for stats in found} == {tuple(order)}
    for key, row in zip(dict.fromkeys(chain(*held)), found[-1].values(), strict=True):
        parts = [(p[key], c[key]) for p, c in zip(held, copies, strict=True) if key in p]
        whole = [parts[0][0]] if parts[0][1] > 1 else [part for part, _ in parts]
        check(Host, row, whole)


def test_counts_of_copies_are_whole():
    """A sixth of 1, six times, is less than 1."""
    grads = [np.array([0.0, np.nan])]
    found = results(lambda group: gradkit.grad_stats(grads, group=group, replicas=6), 6)
    assert [stats.table[0, 3:].tolist() for stats in found] == [[1, 1]] * 6


@pytest.mark.parametrize("name", DTYPES)
def test_counts_of_many(backend, name):
    values = [0, np.nan, -np.inf]
    grads = [backend.asarray(np.full(70_000, value, DTYPES[name])) for value in values]
    counts = backend.asnumpy(gradkit.grad_stats(grads).table)[:, 3:]
    assert counts.tolist() == [[70_000, 0], [0, 70_000], [0, 70_000]]


class Host:
    """A stand-in for a backend with the bounds of NumPy's errors, whatever ran."""

    run_errors = tolerances.PAIRS


def test_names_travel_once():
    """And again if some rank has a new one, not if one is missing, which then is in no result."""
    groups = [Counting(group) for group in gradkit.distributed.threads(2)]

    def run(*names):
        held = [dict.fromkeys(own, f(2.0)) for own in names]
        before = len(groups[0].sent)
        found = results(lambda g: gradkit.grad_stats(held[g.rank], group=g), 2, groups=groups)
        assert found[0].names == found[1].names
        return found[0].names, len(groups[0].sent) - before

    first = run("ab", "bc")
    assert first == (("a", "b", "c"), 1 + 2 + 2)
    assert run("ab", "bc") == (("a", "b", "c"), 1)
    assert run("a", "bc") == (("a", "b", "c"), 1)
    assert run("a", "b") == (("a", "b"), 1)
    assert run("ad", "bc") == (("a", "d", "b", "c"), 5)
    assert run("ab", "bc") == (("a", "b", "c"), 4)  # the ranks remember other unions
    assert run("ab", "bc")[1] == 1
    assert run("", "") == ((), 1)


def test_what_is_wrong_on_one_rank_is_an_error_on_all():
    bad = {"grads": np.ones(3, int)}, {"out": np.zeros((1, 5))}, {"replicas": 4}
    for changes in bad:
        kinds = together(
            lambda g, changes=changes: gradkit.grad_stats(
                **{"grads": [f(1.0)], "group": g} | (changes if g.rank == 1 else {})
            ),
            3,
        )
        assert [type(each) for each in kinds] == [
            gradkit.RankError,
            TypeError if "grads" in changes else ValueError,
            gradkit.RankError,
        ]
    other = together(
        lambda g: (gradkit.per_tensor_norms if g.rank else gradkit.grad_stats)([f(1.0)], group=g), 2
    )
    assert all("different calls" in str(error) for error in other)


def test_parts_of_shards_have_one_name():
    """Several on a rank, as a JAX array may have; only their dict is known to be parts."""
    each = [
        gradkit.distributed.ShardedGrads({"w": parts, "b": [f(2.0)]}, {"w": 1, "b": [2]})
        for parts in ([f(3.0), f(0.0, -4.0)], [f(5.0)])
    ]
    # So ranks know of these names, and of one part of each.
    few = gradkit.distributed.ShardedGrads({"w": [f(1.0)], "b": [f(2.0)]}, {"w": 1, "b": [2]})
    results(lambda g: gradkit.grad_stats(few, group=g), 2)
    found = results(lambda g: gradkit.grad_stats(each[g.rank], group=g), 2)
    named_rows._cache.clear()
    found += results(lambda g: gradkit.grad_stats(each[1 - g.rank], group=g), 2)
    for stats in found:
        assert stats.names == ("w", "b")
        check(Host, stats["w"], [f(3.0, 0.0, -4.0), f(5.0)])
        check(Host, stats["b"], [f(2.0)])
    (group,) = gradkit.distributed.threads(1)
    alone = gradkit.distributed.ShardedGrads({"w": [f(3.0), f(4.0)]}, {"w": 1})
    assert float(gradkit.grad_stats(alone, group=group)["w"].norm) == 5.0
    with pytest.raises(ValueError, match="pass group"):
        gradkit.grad_stats(each[0])


def test_ranks_that_find_out_what_they_hold():
    """By the names that all ranks use; copies count once."""

    def run(group):
        grads = {"tied": f(3.0, 4.0), f"layer{group.rank}": f(1.0 + group.rank)}
        named = {name: SimpleNamespace(grad=grad) for name, grad in grads.items()}
        plain = {"tied": "copies", f"layer{group.rank}": "own"}
        names = {"tied": "head"}
        kept = gradkit.distributed.shards_of(named, group=group, plain=plain, names=names)
        return [gradkit.grad_stats(kept, group=group) for _ in range(2)]

    for first, again in results(run, 2):
        assert first.names == again.names == ("head", "layer0", "layer1")
        assert [float(n) for n in again.norm] == [float(n) for n in first.norm] == [5.0, 1.0, 2.0]

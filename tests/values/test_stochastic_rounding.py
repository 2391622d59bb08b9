"""Sums that are rounded up or down at random, so that none is lost on average."""

import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from testbed.emulator import EmulatedDevice
from tests import strategies as draw_
from tests.devices.emulated import emulated_backend, on_device
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits
from tests.values.test_accumulate_grads import norm_of
from tests.values.test_accumulation import assert_rest_untouched

HALVES = ("float16", "bfloat16")
PAIRS = [*itertools.product(HALVES, DTYPES)]
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
WORD = 1 << 64


def mixed(state):
    """SplitMix64, as its authors have it."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return state ^ (state >> 31)


def chance(seed, counter):
    """A number from 0 to 1, with the random bits of an element."""
    return Fraction(mixed((mixed(seed) + (counter + 1) * 0x9E3779B97F4A7C15) % WORD) >> 32, 1 << 32)


def neighbours(value, name):
    """The numbers on both sides of a finite one, towards 0 first, as if exponents had no end."""
    digits, least = {"float16": (10, -14), "bfloat16": (7, -126)}[name]
    size = abs(Fraction(value))
    if not size:
        return Fraction(0), Fraction(1)
    exponent = max(math.frexp(abs(value))[1] - 1, least)
    unit = Fraction(2) ** (exponent - digits)
    inner = size // unit * unit
    return inner, inner + unit


def rounded(value, name, seed, counter):
    """Round a sum in float64, by rational numbers."""
    if not math.isfinite(value):
        return value if math.isinf(value) else math.nan  # without a sign
    inner, outer = neighbours(value, name)
    share = (abs(Fraction(value)) - inner) / (outer - inner)
    share = Fraction(math.floor(share * 2**32 + Fraction(1, 2)), 2**32)
    size = outer if chance(seed, counter) < share else inner
    return math.copysign(float(size) if size <= LARGEST[name] else math.inf, value)


def sums(buffer, grad, scale, *, overwrite=False):
    with np.errstate(all="ignore"):
        term = np.asarray(grad, np.float64) * scale
        return term if overwrite else np.asarray(buffer, np.float64) + term


def at_random(buffers, grads, **options):
    return gradkit.accumulate_grads(buffers, grads, rounding="stochastic", **options)


def test_the_bits_are_those_of_splitmix64():
    """Its first numbers from state 0, as published."""
    first = [0xE220A839, 0x6E789E6A, 0x06C45D18, 0xF88BB8A8]
    assert [chance(0, k) for k in range(4)] == [Fraction(bits, 1 << 32) for bits in first]


@pytest.mark.parametrize(("into", "addend"), PAIRS)
@pytest.mark.parametrize(("scale", "overwrite"), [(1.0, False), (0.3, True)])
def test_each_becomes_a_neighbour_by_its_bits(backend, into, addend, scale, overwrite):
    """Also numbers below the smallest normal one, at the largest one and beyond."""
    least, most = {"float16": (-9, 5), "bfloat16": (-41, 38.6)}[into]
    rng = np.random.default_rng(3)

    def drawn(name):
        sizes = 10.0 ** rng.uniform(least, most, 301)
        with np.errstate(over="ignore"):
            return (rng.choice([-1, 1], 301) * sizes).astype(DTYPES[name])

    hosts, grads = [drawn(into)], [drawn(addend)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, LARGEST[into], -LARGEST[into], 1.0]
    hosts[0][:8] = special
    grads[0][:8] = [-0.0, -0.0, 1.0, np.inf, 1.0, hosts[0][5], hosts[0][6], 0.0]
    buffers = [backend.asarray(host) for host in hosts]
    options = {"scale": scale, "overwrite": overwrite, "seed": 12345, "offsets": 77}
    placed = [backend.asarray(grad) for grad in grads]
    assert at_random(buffers, placed, casting="same_kind", **options) is buffers
    totals = sums(hosts[0], grads[0], scale, overwrite=overwrite)
    expected = [rounded(float(t), into, 12345, 77 + k) for k, t in enumerate(totals)]
    assert_same_bits(backend.asnumpy(buffers[0]), np.array(expected).astype(DTYPES[into]))
    assert {True, False} == {abs(e) > abs(t) for e, t in zip(expected, totals, strict=True)}


@given(data=st.data(), seed=st.integers(0, WORD - 1), overwrite=st.booleans())
def test_indices_are_in_c_order_in_every_layout(backend, data, seed, overwrite):
    """Lists count on from one array to the next; nothing beside elements is written."""
    types = data.draw(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3))
    shapes = [data.draw(draw_.shapes(backend.max_elements // 48)) for _ in types]
    draws = [
        [data.draw(draw_.arrays(shape, name, st.just("normal"))) for name in pair]
        for shape, pair in zip(shapes, types, strict=True)
    ]
    buffers, grads = ([backend.asarray(h) for h in each] for each in zip(*draws, strict=True))
    start = data.draw(st.sampled_from((0, 2**63 - 2**40)))
    options = {"scale": 0.3, "overwrite": overwrite, "offsets": start, "casting": "same_kind"}
    at_random(buffers, grads, seed=seed, **options)
    for buffer, (host, grad), (into, _) in zip(buffers, draws, types, strict=True):
        totals = sums(host, grad, 0.3, overwrite=overwrite).ravel()
        some = {*range(min(5, host.size)), *range(max(0, host.size - 5), host.size)}
        found = backend.asnumpy(buffer).ravel()
        for k in some:
            wanted = rounded(float(totals[k]), into, seed, start + k)
            assert_same_bits(found[k], np.asarray(wanted, found.dtype))
        assert_rest_untouched(backend, buffer, host)
        start += host.size


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("size", [1.0, 3e-7])
def test_the_mean_is_the_sum(backend, name, size):
    """To four standard deviations of the mean of so many, and as often up as is due."""
    count, unit = 4000, {"float16": 2.0**-10, "bfloat16": 2.0**-7}[name]
    if size < 1:
        unit = {"float16": 2.0**-24, "bfloat16": 2.0**-29}[name]  # float16: below the normal ones
    start = float(np.asarray(size).astype(DTYPES[name]))
    for share in (0.25, 0.01, 0.7):
        host = np.full(count, start, DTYPES[name])
        total = start + share * unit
        buffer = [backend.asarray(host)]
        grad = [backend.asarray(np.full(count, share * unit))]
        at_random(buffer, grad, seed=9, casting="same_kind")
        found = np.asarray(backend.asnumpy(buffer[0]), np.float64)
        up = found > total
        assert set(found) == {start, start + unit}
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(up.mean() - share) < 4 * deviation
        assert abs(found.mean() - total) < 4 * deviation * unit


def test_where_it_goes_up_is_spread_evenly(backend):
    """Of runs of 1024 elements, and of pairs of neighbours: chi-squared is below its 0.9999."""
    runs, length = 16, 1024
    buffer = [backend.asarray(np.ones(runs * length, DTYPES["bfloat16"]))]
    at_random(
        buffer, [backend.asarray(np.full(runs * length, 2.0**-8))], seed=4, casting="same_kind"
    )
    up = np.asarray(backend.asnumpy(buffer[0]), np.float64) > 1
    counts = up.reshape(runs, length).sum(axis=1)
    assert ((counts - length / 2) ** 2 / (length / 4)).sum() < 44.3  # 16 degrees of freedom
    pairs = np.bincount(up[::2] * 2 + up[1::2], minlength=4)
    due = runs * length / 8
    assert ((pairs - due) ** 2 / due).sum() < 21.2  # 3 degrees
    assert 0.45 < (up[:-1] == up[1:]).mean() < 0.55


@pytest.mark.parametrize("name", HALVES)
def test_many_small_gradients_are_not_lost(backend, name):
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[name]
    alone, buffer = ([backend.asarray(np.ones(500, DTYPES[name]))] for _ in range(2))
    grad = [backend.asarray(np.full(500, unit / 8).astype(DTYPES[name]))]
    for step in range(80):
        gradkit.accumulate_grads(alone, grad)
        at_random(buffer, grad, seed=step)
    exact = 1 + 10 * unit
    assert (backend.asnumpy(alone[0]) == 1).all()
    found = np.asarray(backend.asnumpy(buffer[0]), np.float64)
    assert abs(found.mean() - exact) < 4 * unit * math.sqrt(80 / 8 * 7 / 8 / 500)


@pytest.mark.parametrize("name", HALVES)
def test_what_can_be_held_stays(backend, name):
    host = draw_.values((300,), name, 1)
    for seed in range(3):
        buffer = [backend.asarray(host)]
        at_random(buffer, [backend.asarray(np.zeros(300, host.dtype))], seed=seed)
        assert_same_bits(backend.asnumpy(buffer[0]), host + host.dtype.type(0))
        at_random(buffer, [backend.asarray(host)], seed=seed, overwrite=True)
        assert_same_bits(backend.asnumpy(buffer[0]), host)


def test_seeds(backend):
    """The same seed gives the same bits, in an array on the device too; others give others."""
    host, grad = draw_.values((300,), "bfloat16", 1), draw_.values((300,), "bfloat16", 2)

    def found(seed, **options):
        buffer = [backend.asarray(host)]
        at_random(buffer, [backend.asarray(grad)], seed=seed, scale=0.3, **options)
        return backend.asnumpy(buffer[0])

    on = lambda value, dtype: backend.asarray(np.array(value, dtype))  # noqa: E731
    first = found(5)
    for same in (np.int32(5), on(5, np.int64), on(5, np.uint64)):
        assert_same_bits(found(same), first)
    assert_same_bits(found(on(WORD - 1, np.uint64)), found(WORD - 1))
    for other in (4, 6, 5 + 2**32):
        assert 50 < (found(other) != first).sum() < 200
    assert (found(5, offsets=1) != first).any()
    assert_same_bits(found(5, do_update=False), host)


def test_parts_with_their_offsets_are_the_whole(backend):
    """As ranks hold them, in any order and in several calls."""
    host, grad = draw_.values((60, 5), "float16", 1), draw_.values((60, 5), "float16", 2)
    whole = [backend.asarray(host)]
    at_random(whole, [backend.asarray(grad)], seed=3, scale=0.3, offsets=1000)
    rows = [slice(20, 60), slice(0, 20)]
    parts = {str(k): backend.asarray(host[own]) for k, own in enumerate(rows)}
    grads = {str(k): backend.asarray(grad[own]) for k, own in enumerate(rows)}
    offsets = {"0": 1000 + 20 * 5, "1": 1000}
    at_random(parts, grads, seed=3, scale=0.3, offsets=offsets)
    for k, own in enumerate(rows):
        assert_same_bits(backend.asnumpy(parts[str(k)]), backend.asnumpy(whole[0])[own])


@pytest.mark.parametrize(
    "move",
    [partial(at_random, scale=0.3), partial(gradkit.sgd_update, lr=0.3, rounding="stochastic")],
    ids=["sum", "step"],
)
def test_an_array_longer_than_a_cpu_rounds_at_once(backend, move):
    """Counters go on from one block of it to the next: a list of its parts has the same bits."""
    if not backend.on_host:
        pytest.skip("of CPU backends")
    whole, grads = (draw_.values((3, 20_000), "float16", seed) for seed in (1, 2))
    parts = whole.copy()
    move([whole], [grads], seed=5)
    runs = [slice(start, start + 10_000) for start in range(0, 60_000, 10_000)]
    move(*([array.reshape(-1)[run] for run in runs] for array in (parts, grads)), seed=5)
    assert_same_bits(whole, parts)


@pytest.mark.parametrize("count", [46, 200])
def test_long_lists_of_two_dtypes(backend, count):
    hosts = [draw_.values((k % 5 + 1, 7), HALVES[k % 2], k) for k in range(count)]
    grads = [draw_.values(host.shape, HALVES[k % 2], k + 5) for k, host in enumerate(hosts)]
    buffers, norm = [backend.asarray(h) for h in hosts], backend.asarray(np.array(7.0))
    at_random(buffers, [backend.asarray(g) for g in grads], seed=1, scale=0.3, norm_out=norm)
    assert_same_bits(backend.asnumpy(norm), norm_of(backend, buffers))
    start = 0
    for buffer, host, grad in zip(buffers, hosts, grads, strict=True):
        single = backend.asarray(host)
        at_random(single, backend.asarray(grad), seed=1, scale=0.3, offsets=start)
        assert_same_bits(backend.asnumpy(buffer), backend.asnumpy(single))
        start += host.size


@pytest.mark.emulated
def test_captured_lists_and_seeds(monkeypatch):
    """A long list, with its offsets, is uploaded in another way."""
    hosts = [[draw_.values((k % 3 + 1, 4), "float16", k + n) for k in range(100)] for n in (0, 7)]
    found = []
    for capturing in (False, True):
        monkeypatch.setattr(EmulatedDevice, "capturing", lambda _, now=capturing: now)
        on = partial(on_device, backend=emulated_backend())
        buffers, grads = ([on(h.copy()) for h in each] for each in hosts)
        at_random(buffers, grads, seed=on(np.array(8)), scale=0.3)
        found.append(buffers)
    assert_all_same_bits(*found)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    """So many elements that compiled code shares them out."""
    before = gradkit.get_num_threads()
    host = draw_.values((300_000,), "bfloat16", 1)
    with gradkit.use_cpu_backend("numpy"):
        expected = at_random([host.copy()], [host], seed=2, scale=0.3)[0]
    try:
        gradkit.set_num_threads(threads)
        found = at_random([host.copy()], [host], seed=2, scale=0.3)[0]
    finally:
        gradkit.set_num_threads(before)
    assert_same_bits(found, expected)

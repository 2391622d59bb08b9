"""Lists cut over ranks on the host, over ranks on devices, or over devices of one process.

Wherever the parts lie, what comes of them is what comes of the whole list.
"""

import math
from itertools import chain, zip_longest

import numpy as np
import pytest

import gradkit
from tests import oracles, tolerances
from tests.backends import BACKENDS
from tests.device_ranks import DeviceRanks
from tests.problems import one_or_each
from tests.ranks import INF, NAN, ORDERS, bits, f, flat, results
from tests.several_devices import Devices


class OnThreads:
    """Ranks whose numbers travel in host memory, on any backend."""

    on_host = False

    def __init__(self, backend):
        self.put = lambda _, host: backend.asarray(np.asarray(host))
        self.host, self.memory = backend.asnumpy, backend.memory
        self.on_host = backend.on_host

    def run(self, work, parts):
        """``work(rank, grads, options)`` on each rank."""
        held = [[None if g is None else self.put(k, g) for g in p] for k, p in enumerate(parts)]
        return results(lambda g: work(g.rank, held[g.rank], {"group": g}), len(parts))


class OnDevices(OnThreads):
    """Ranks with a device each, whose numbers stay there."""

    def __init__(self):
        self.host, self.memory = np.array, lambda array: array.tobytes()

    def run(self, work, parts):
        with pytest.MonkeyPatch.context() as patch:
            ranks = DeviceRanks(patch, len(parts))
            self.put, held = ranks.put, ranks.over(parts)
            return ranks.results(lambda g: work(g.rank, held[g.rank], {"group": g}))


class InOneProcess(OnDevices):
    """One rank, whose list takes turns among devices."""

    def run(self, work, parts):
        devices = Devices(len(parts))
        turns = zip_longest(*([(k, g) for g in part] for k, part in enumerate(parts)))
        pairs = [pair for turn in turns for pair in turn if pair and pair[1] is not None]
        self.put = lambda _, host: devices.put(pairs[0][0] if pairs else 0, host)
        found = [work(0, devices.over(*zip(*pairs, strict=True)) if pairs else [], {})]
        assert devices.settled()
        return found


HOSTS = [pytest.param(b, marks=b.marks, id=f"ranks on {b.name}") for b in BACKENDS]
DEVICES = [pytest.param(k, marks=pytest.mark.emulated) for k in (OnDevices, InOneProcess)]
over_ranks = pytest.mark.parametrize("place", [*HOSTS, DEVICES[0]], indirect=True, scope="module")


@pytest.fixture(scope="module", params=[*HOSTS, *DEVICES])
def place(request):
    """Place that the parts of lists lie at."""
    if isinstance(request.param, type):
        yield request.param()
    else:
        with request.param.active():
            yield OnThreads(request.param)


CONTENTS = {
    "even": ([f(1, 2), f(3)], [f(-4)], [f(5, 6, 7)]),
    "one holds nothing": ([f(3)], [], [f(4)]),
    "one holds everything": ([], [f(3, 4), f(12)], []),
    "nobody holds anything": ([], [None], []),
    "all zero": ([f(0)], [f(0, -0.0)], []),
    "squares overflow": ([f(3e200)], [f(4e200)], [f(1e-200)]),
    "squares underflow": ([f(3 * 2.0**-1000)], [f(4 * 2.0**-1000)], []),
    "only largest sees it": ([f(1e-300)], [f(1e300)], [f(1.0)]),
    "narrow dtypes": (
        [np.full(9, 3, np.float16)],
        [np.full((2, 2), -2, np.float32)],
        [f(0.5)],
    ),
    "NaN on one": ([f(1)], [f(NAN, 2)], [f(3)]),
    "infinity on one": ([f(1)], [], [f(-INF)]),
    "NaN beside infinity": ([f(INF)], [f(NAN)], []),
    "NaN beside nothing": ([f(NAN)], [], []),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
def test_norm(place, contents, order):
    def work(_, grads, options):
        return float(gradkit.grad_norm(grads, order, **options))

    norms = place.run(work, contents)
    expected = oracles.norm(flat(contents), order)
    assert oracles.off_by(norms[0], expected) <= tolerances.over_ranks(order)
    assert len(bits(norms)) == 1


@pytest.mark.guarantee("Over ranks", "Over several devices")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("order", [1, 2, INF])
@pytest.mark.parametrize("power", [-560, -300, 600])
def test_bits_do_not_depend_on_the_number_of_parts(place, order, size, power):
    """A rank's own sums are exact here: those of small integers are, of any magnitude."""
    for seed in range(2):
        rows = np.random.default_rng(seed).integers(-1000, 1000, (12, 100)) * 2.0**power
        alone = gradkit.grad_norm(list(rows), order)

        def work(_, grads, options):
            one, back = (gradkit.grad_norm(g, order, **options) for g in (grads, grads[::-1]))
            assert bits([place.host(one)]) == bits([place.host(back)])
            return place.host(one)

        assert bits(place.run(work, [list(rows[k::size]) for k in range(size)])) == bits([alone])


@pytest.mark.guarantee("Over ranks", "Over several devices")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_in_one_part_reaches_all(place, bad, rank, order):
    parts = [[f(4.0)], [f(-1.0, 2.0)], [], [f(2.0)]]
    parts[rank] = [*parts[rank], f(bad)]

    def work(rank, grads, options):
        found = place.put(rank, np.zeros((1,), bool))
        norm = gradkit.grad_norm(grads, order, found_inf=found, **options)
        gradkit.clip_grad_norm(grads, 1.0, order, nonfinite="zero", **options)
        return float(norm), bool(place.host(found)[0]), b"".join(map(place.memory, grads))

    for norm, found, left in place.run(work, parts):
        np.testing.assert_equal(norm, bad)
        assert found
        assert not any(left)


def test_found_inf_is_about_elements(place):
    """The norm of finite gradients that overflows is no element that is infinite."""

    def work(rank, grads, options):
        found = place.put(rank, np.ones((1,) if rank else (), np.float32))
        norm = gradkit.grad_norm(grads, 1, found_inf=found, **options)
        half = float(gradkit.grad_norm(grads, scale=0.5, **options))
        assert half == pytest.approx(1.5e308 / math.sqrt(2))
        return float(norm), float(place.host(found).reshape(()))

    assert set(place.run(work, [[f(1.5e308)], [f(1.5e308)]])) == {(INF, 0.0)}


@pytest.mark.parametrize("order", ORDERS)
def test_scales_at_the_ends_of_the_range(place, order):
    def work(_, grads, options):
        return float(gradkit.grad_norm(grads, order, scale=1e-305, **options))

    expected = pytest.approx(oracles.norm([f(3e-5), f(4e-5)], order), rel=1e-14, abs=0)
    assert {norm == expected for norm in place.run(work, [[f(3e300)], [f(4e300)]])} == {True}


@pytest.mark.sampled(3)
@over_ranks
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [-0.5, NAN, INF])
def test_a_scale_in_an_array(place, value, order):
    """On a device it may be not finite, which reaches all; a rank without gradients has it too."""
    if place.on_host and not math.isfinite(value):
        value = 3.0
    parts = [[f(0.0)], [f(4.0, 3.0)], []]

    def work(rank, grads, options):
        by = place.put(rank, value)
        return float(gradkit.grad_norm(grads, order, scale=by, **options))

    norms = place.run(work, parts)
    if math.isfinite(value):
        whole = oracles.norm([value * g for part in parts for g in part], order)
        assert norms == [pytest.approx(float(whole), rel=1e-14)] * len(parts)
    else:
        assert len(bits(norms)) == 1
        assert not math.isfinite(norms[0])


@over_ranks
@pytest.mark.parametrize("order", ORDERS)
def test_each_tensor(place, order):
    shards = [[f(3), f(1, 2)], [f(-4), f(NAN)], [f(0), f(7)]]

    def work(_, grads, options):
        return place.host(gradkit.per_tensor_norms(grads, order, flat=True, **options))

    found = place.run(work, shards)
    assert len(bits(found)) == 1
    expected = oracles.norm([part[0] for part in shards], order)
    assert oracles.off_by(found[0][0], expected) <= tolerances.over_ranks(order)
    assert math.isnan(found[0][1])


@pytest.mark.guarantee("Over ranks")
@over_ranks
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_replicated_gradients_count_once(place, order, per_tensor):
    """On a mesh of two by two: ``shared`` is on all ranks, ``rows`` on pairs, ``own`` on one."""
    rng = np.random.default_rng(3)
    shared, rows, own = rng.standard_normal(7), rng.standard_normal((2, 5)), rng.random((4, 3))

    def work(_, grads, options):
        tree = {"shared": grads[0], "pairs": tuple(grads[1:])}
        options["replicas"] = {"shared": 4, "pairs": [2, 1]}
        return place.host(one_or_each(tree, order, each=per_tensor, **options))

    found = place.run(work, [[shared, rows[k // 2], own[k]] for k in range(4)])
    assert len(bits(found)) == 1
    every = [[shared], list(rows), list(own)]
    wanted = [oracles.norm(g, order) for g in (every if per_tensor else [[*chain(*every)]])]
    for got, expected in zip(found[0].reshape(-1), wanted, strict=True):
        assert oracles.off_by(got, expected) <= tolerances.over_ranks(order) + 2.0**-50


@pytest.mark.parametrize("clip", ["in place", "functional"])
def test_clipping(place, clip):
    contents = [[f(3, 0)], [], [f(4)]]

    def work(_, grads, options):
        if clip == "in place":
            norm, clipped = gradkit.clip_grad_norm(grads, 2.5, scale=2.0, **options), grads
        else:
            clipped, norm = gradkit.clip_by_global_norm(grads, 2.5, scale=2.0, **options)
        return float(norm), [place.host(g).tolist() for g in clipped]

    found = place.run(work, contents)
    assert {norm for norm, _ in found} == {10.0}
    assert [g for _, clipped in found for g in clipped] == [[1.5, 0], [2]]


@pytest.mark.guarantee("NaN stays NaN")
@over_ranks
def test_every_rank_raises_and_names_its_own(place):
    def work(rank, grads, options):
        out = place.put(rank, 7.0)
        before = [place.memory(a) for a in (*grads, out)]
        with pytest.raises(gradkit.NonFiniteNormError) as caught:
            gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise", out=out, **options)
        assert [place.memory(a) for a in (*grads, out)] == before
        return caught.value.names

    assert place.run(work, [[f(1)], [f(NAN)], [f(3)]]) == [(), ("grads[0]",), ()]

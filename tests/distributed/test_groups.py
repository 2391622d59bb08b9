"""``group`` and ``replicas``: norms and clipping over ranks, here threads of one process."""

import pickle
import re
import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit import _host, distributed
from gradkit._cuda.launch.kernels import source_of
from gradkit._ranks import norms
from tests import oracles
from tests.devices.emulated import emulated_backend, on_device
from tests.ranks import INF, NAN, ORDERS, Counting, bits, f, flat, results, together
from tests.tolerances import DTYPES


def over(backend, parts):
    """Put each rank's gradients on the backend."""
    return [[None if g is None else backend.asarray(g) for g in part] for part in parts]


VALUES = st.floats(-1e307, 1e307)


@pytest.mark.guarantee("Over ranks")
@given(
    values=st.lists(VALUES, max_size=30),
    cuts=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    order=st.sampled_from(ORDERS),
)
def test_any_split_of_any_list_gives_the_norm_of_all(values, cuts, order):
    """To the last bit for p = 1, 2 and infinity: sums travel exactly."""
    ends = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    parts = [f(*values[a:b]) for a, b in pairwise(ends)]
    norms = results(lambda g: float(gradkit.grad_norm(parts[g.rank], order, group=g)), 6)
    assert len(bits(norms)) == 1
    expected = oracles.norm([f(*values)], order)
    units = 4 if order in (1, 2, INF) else 64
    assert oracles.off_by(norms[0], expected) <= units * 2.0**-53
    if order in (1, 2, INF):
        assert norms[0] == pytest.approx(float(gradkit.grad_norm(f(*values), order)), rel=5e-16)


def test_what_rounding_took_from_sums_counts(backend):
    """The squares add up to 1 + 3/2 ulp, of which each rank's own sum rounds some away."""

    def long(value):  # so much that its sum is taken by itself
        return np.pad([value], (0, 1 << 14))

    small = [long(2.0**-27), long(2.0**-27)]
    held = over(backend, [[long(1.0), *small], small, small])
    norms = results(lambda g: float(gradkit.grad_norm(held[g.rank], group=g)), 3)
    assert norms == [1 + 2.0**-52] * 3


def test_replicas_may_be_one_number(backend):
    held = over(backend, [[f(3.0, 4.0)]] * 3)
    norms = results(lambda g: float(gradkit.grad_norm(held[g.rank], group=g, replicas=3)), 3)
    assert norms == [pytest.approx(5.0, rel=1e-15)] * 3


@pytest.mark.guarantee("Gradients that are not clipped")
def test_some_are_clipped_and_some_count_over_ranks(backend):
    """Each rank chooses among its own; copies count once."""
    held = over(backend, [[f(3.0), f(7.0)], [f(4.0), f(12.0)], [f(NAN), f(12.0)]])
    counts = [[True, False], [True, True], [False, True]]

    def work(group):
        own = held[group.rank]
        replicas = [1, 2 if group.rank else 1]
        options = {"group": group, "replicas": replicas, "clip": [False, True]}
        return float(gradkit.clip_grad_norm(own, 1.3, count=counts[group.rank], **options))

    assert results(work, 3) == [13.0] * 3
    left = [[backend.asnumpy(g).tolist() for g in own] for own in held]
    np.testing.assert_allclose([own[0] for own in left], [[3], [4], [NAN]])
    np.testing.assert_allclose([own[1] for own in left], [[0.7], [1.2], [1.2]], rtol=1e-15)


@pytest.mark.parametrize(("order", "norm"), [(1, 3.5), (2, 2.5), (INF, 2.0)])
@pytest.mark.parametrize("by", [-0.5, 0.0])
def test_a_scale_may_be_in_an_array_on_one_rank(backend, order, norm, by):
    held = over(backend, [[f(3.0)], [f(4.0)]])

    def work(group):
        scale = backend.asarray(np.array(by)) if group.rank else by
        return float(gradkit.grad_norm(held[group.rank], order, scale=scale, group=group))

    assert results(work, 2) == [norm if by else 0.0] * 2


def test_dtypes_may_differ(backend):
    parts = [np.full(3, 2.0, DTYPES[name]) for name in ("float16", "bfloat16", "float64")]
    held = over(backend, [[part] for part in parts])
    assert results(lambda g: float(gradkit.grad_norm(held[g.rank], group=g)), 3) == [6.0] * 3


@pytest.mark.guarantee("Over ranks")
def test_a_group_of_one_is_no_group(backend):
    """No collective, and the bits of no group."""

    class Silent:
        rank, size = 0, 1

        def allgather(self, _):
            raise AssertionError("a collective")

    grads = [backend.asarray(f(1, -2)), backend.asarray(f(3))]
    for order in ORDERS:
        alone = gradkit.grad_norm(grads, order)
        found = gradkit.grad_norm(grads, order, group=Silent())
        assert bits([backend.asnumpy(found)]) == bits([backend.asnumpy(alone)])


def test_a_norm_is_one_collective_of_six_numbers(backend):
    """So are norms of many, once ranks have room for them: as long as that costs little."""
    held = over(backend, [[f(3)], [f(4)]])
    groups = [Counting(g) for g in distributed.threads(2)]
    results(lambda g: gradkit.clip_grad_norm(held[g.rank], 1.0, group=g), 2, groups=groups)
    assert [g.sent for g in groups] == [[6], [6]]
    for count in (5, 5, 4, 683, 683, 682, 682):
        results(
            lambda g, k=count: gradkit.per_tensor_norms(held[g.rank] * k, flat=True, group=g),
            2,
            groups=groups,
        )
    small, large = [6, 15, 17, 17], [17, 2049, 17, 2049, 17, 2046, 2048]
    assert groups[0].sent[1:] == small + large


def test_groups_of_one_connection_remember_the_same():
    """As long as it lives: another may come to lie at its address."""

    class Wire:
        pass

    def sent(wires):
        groups = [Counting(group) for group in distributed.threads(2)]
        for group, wire in zip(groups, wires, strict=True):
            group.wire = wire
        results(
            lambda g: gradkit.per_tensor_norms([f(1)] * 5, flat=True, group=g), 2, groups=groups
        )
        return groups[0].sent

    for _ in range(3):
        wires = [Wire(), Wire()]
        assert (sent(wires), sent(wires)) == ([6, 15], [17])
        del wires


# One rank in trouble


def fails_on_one(backend, call, error, match, size=3):
    """``call(group, grads, out)`` fails on rank 1: so it does on all, and no byte changes."""
    held = over(backend, [[f(3, 4), f(5)]] * size)
    outs = [backend.asarray(np.array(7.0)) for _ in range(size)]

    def memory():
        return [backend.memory(a) for a in (*flat(held), *outs)]

    before = memory()
    found = together(lambda g: call(g, held[g.rank], outs[g.rank]), size)
    assert memory() == before
    assert isinstance(found[1], error), found[1]
    for other in (found[0], *found[2:]):
        assert isinstance(other, gradkit.RankError)
        assert other.ranks.keys() == {1}
        with pytest.raises(gradkit.RankError, match=match):
            raise other


TROUBLES = {
    "a bad number": ({"max_norm": -1.0}, ValueError, "max_norm must be"),
    "a bad dtype": ({"grads": np.arange(3)}, TypeError, "dtype"),
    "no array": ({"grads": ["x"]}, TypeError, "expected an array"),
    "a bad policy": ({"nonfinite": "never"}, ValueError, "nonfinite must be"),
    "too many replicas": ({"replicas": 4}, ValueError, "group's size is 3"),
    "replicas of nothing": ({"replicas": [1]}, ValueError, "replicas has 1 item"),
    "no replicas": ({"replicas": 0}, ValueError, "is 0"),
    "half a replica": ({"replicas": 1.5}, TypeError, "must be an integer"),
    "out of a wrong shape": ({"out": np.zeros(3)}, (ValueError, TypeError), r"out (has|is a)"),
}


@pytest.mark.guarantee("Over ranks")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_bad_argument_on_one_rank_ends_the_call_on_all(backend, trouble):
    wrong, error, match = TROUBLES[trouble]

    def call(group, grads, out):
        arguments = {"grads": grads, "max_norm": 1.0, "out": out, "group": group}
        if group.rank == 1:
            arguments |= wrong
        gradkit.clip_grad_norm(**arguments)

    fails_on_one(backend, call, error, match)


class Interrupted:
    """Gradients that a rank is interrupted while it makes."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        raise self.error


@pytest.mark.guarantee("Over ranks")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room"), SystemExit(3)])
def test_an_interrupt_on_one_rank_ends_the_call_on_all(backend, error):
    def call(group, grads, out):
        if group.rank == 1:
            grads = Interrupted(error)
        gradkit.clip_grad_norm(grads, 1.0, group=group, out=out)

    fails_on_one(backend, call, type(error), type(error).__name__)


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("é" * 500), "ValueError: é"),
        (ValueError("_" + "é" * 500), "ValueError: _é"),  # cut between the bytes of a letter
        (ValueError("a name with \udc80"), r"ValueError: a name with \?$"),
        (MuteError(), "MuteError"),
    ],
    ids=["long", "long, odd", "no text", "mute"],
)
def test_whatever_an_error_says_the_others_hear_of_it(error, said):
    def work(group):
        return gradkit.grad_norm(Interrupted(error) if group.rank else f(1), group=group)

    told, own = together(work, 2)
    assert own is error
    assert not hasattr(own, "__notes__")
    assert re.match(said, told.ranks[1])
    assert len(told.ranks[1].encode()) <= 240


def test_memory_that_runs_out_on_one_rank_ends_the_call_on_all(monkeypatch):
    """While the rank adds up its own gradients."""
    backend = _host.backend()
    own = backend.norm_parts

    def norm_parts(grads, *args, **kwargs):
        if threading.current_thread().name.endswith("_1"):
            raise MemoryError("no room")
        own(grads, *args, **kwargs)

    monkeypatch.setattr(backend, "norm_parts", norm_parts)
    held = [f(3, 4) for _ in range(2)]
    found = together(lambda g: gradkit.clip_grad_norm(held[g.rank], 1.0, group=g), 2)
    assert sorted(type(e).__name__ for e in found) == ["MemoryError", "RankError"]
    assert [part.tolist() for part in held] == [[3, 4], [3, 4]]


def test_what_clips_is_made_ready_before_the_ranks_meet(monkeypatch):
    """So that what fails there is an error on all of them."""
    norms.compile_for.cache_clear()
    groups, asked = distributed.threads(2), []
    monkeypatch.setattr(_host.backend(), "warmup", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(groups[0], "allgather", lambda _: pytest.fail(f"{asked} by now"))
    with pytest.raises(pytest.fail.Exception, match="'clip_by_norm'"):
        gradkit.clip_grad_norm(f(3), 1.0, group=groups[0])


@pytest.mark.emulated
@pytest.mark.parametrize("file", ["norm", "clip_by_norm"])
def test_what_does_not_compile_on_one_rank_ends_the_call_on_all(monkeypatch, file):
    """Kernels that clip are compiled before the ranks meet: nobody has clipped by then."""
    devices = [emulated_backend(multiprocessors=1) for _ in range(2)]
    held = [[on_device(d.device.xp.asarray(f(3, 4)), d)] for d in devices]
    compile_ = devices[1].device.compile

    def refuse(source, options):
        if source == source_of(file):
            raise ValueError("the compiler is out of order")
        return compile_(source, options)

    monkeypatch.setattr(devices[1].device, "compile", refuse)
    found = together(lambda g: gradkit.clip_grad_norm(held[g.rank], 1.0, group=g), 2)
    assert isinstance(found[0], gradkit.RankError)
    assert "kernels/" + file in found[0].ranks[1]
    assert isinstance(found[1], gradkit.KernelError)
    for rank, device in enumerate(devices):
        assert device.device.xp.asnumpy(held[rank][0]).tolist() == [3, 4]


def test_ranks_that_make_different_calls_are_told(backend):
    held = over(backend, [[f(3, 4)]] * 3)

    def work(group):
        if group.rank == 2:
            return gradkit.per_tensor_norms(held[2], flat=True, group=group)
        return gradkit.clip_grad_norm(held[group.rank], 1.0, group=group)

    before = [backend.memory(part[0]) for part in held]
    for error in together(work, 3):
        assert isinstance(error, gradkit.RankError)
        assert "different calls" in str(error)
        assert error.ranks[0].startswith("clip_grad_norm(norm_type=2.0, eps=1e-06, max_norm=1.0)")
        assert error.ranks[2].startswith("per_tensor_norms(norm_type=2.0)")
    assert [backend.memory(part[0]) for part in held] == before


@pytest.mark.parametrize("orders", [(2, 1), (2, 2.5)])
def test_ranks_that_differ_in_p_are_told(orders):
    found = together(lambda g: gradkit.grad_norm(f(1), orders[g.rank], group=g), 2)
    assert {type(error) for error in found} == {gradkit.RankError}


def test_ranks_that_differ_in_their_number_of_norms_are_told():
    def work(group):
        return gradkit.per_tensor_norms([f(1)] * (1 + group.rank), flat=True, group=group)

    found = together(work, 2)
    assert [type(error) for error in found] == [gradkit.RankError] * 2
    assert "6 numbers a rank" in str(found[0])


@pytest.mark.parametrize(
    "of_ranks",
    [({"a": f(1)}, {"b": f(1)}), ({"a": None, "b": f(1)}, {"a": f(1), "b": None})],
)
def test_ranks_that_differ_in_the_gradients_of_their_norms_are_told(of_ranks):
    def work(group):
        return gradkit.per_tensor_norms(of_ranks[group.rank], flat=True, group=group)

    for error in together(work, 2):
        assert isinstance(error, gradkit.RankError)
        assert [said.partition(" of ")[2][:10] for said in error.ranks.values()] in (
            ["grads['a']", "grads['b']"],
            ["grads['b']", "grads['a']"],
        )


def test_ranks_that_differ_in_what_happens_without_a_finite_norm_are_told():
    policies = "zero", "propagate"

    def work(group):
        return gradkit.clip_grad_norm(f(NAN), 1, nonfinite=policies[group.rank], group=group)

    for error in together(work, 2):
        assert isinstance(error, gradkit.RankError)
        assert "eps=1e-06, nonfinite='zero', max_norm=1.0)" in error.ranks[0]
        assert "nonfinite" not in error.ranks[1]


def test_after_an_error_the_group_goes_on(backend):
    held = over(backend, [[f(3)], [f(4)]])
    groups = distributed.threads(2)

    def work(group):
        order = 0 if group.rank else 2
        with pytest.raises((ValueError, gradkit.RankError)):
            gradkit.grad_norm(held[group.rank], order, group=group)
        return float(gradkit.grad_norm(held[group.rank], group=group))

    assert results(work, 2, groups=groups) == [5.0, 5.0]


# Groups themselves


def test_ranks_that_do_not_come_are_named():
    """Rank 2 comes when rank 0 waits no longer."""
    groups = distributed.threads(3, timeout=0.01)
    rescue = threading.Timer(20, groups[0]._board._barrier.abort)  # from a wait without an end
    rescue.start()
    for rank, absent in ((0, [1, 2]), (2, [1])):
        with pytest.raises(gradkit.RankError) as caught:
            gradkit.grad_norm(f(1), group=groups[rank])
        assert caught.value.ranks == dict.fromkeys(absent, "did not come")
        names = " and ".join(f"rank {k}" for k in absent)
        assert str(caught.value).startswith(f"timed out waiting for {names}; rank 1: did not come")
    assert rescue.is_alive()
    rescue.cancel()


def test_a_group_that_cannot_tell_the_others_says_so():
    class Broken:
        rank, size = 0, 2

        def allgather(self, _):
            raise OSError("the network is down")

    with pytest.raises(ValueError, match="max_norm") as caught:
        gradkit.clip_grad_norm(f(1), -1.0, group=Broken())
    assert caught.value.__notes__ == [
        "The other ranks could not be told of it: the network is down"
    ]
    with pytest.raises(OSError, match="network"):
        gradkit.clip_grad_norm(f(1), 1.0, group=Broken())


@pytest.mark.parametrize("group", [3, "world", object(), max])
def test_what_is_no_group(group):
    with pytest.raises(TypeError, match=r"group is a \w+ without rank; pass what"):
        gradkit.grad_norm(f(1), group=group)


def test_a_group_must_answer_with_a_row_for_each_rank():
    class Short:
        rank, size = 0, 2

        def allgather(self, state):
            return state[None]

    with pytest.raises(ValueError, match=r"what group.allgather returned has shape \(1, 6\)"):
        gradkit.grad_norm(f(1), group=Short())


def test_what_threads_takes():
    for size in (2.0, "2", True):
        with pytest.raises(TypeError, match="size must be an integer"):
            distributed.threads(size)
    with pytest.raises(ValueError, match="size must be at least 1, not 0"):
        distributed.threads(0)
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        distributed.threads(2, timeout="1")
    for seconds in (0, -1, NAN):
        with pytest.raises(ValueError, match="timeout must be above 0"):
            distributed.threads(2, timeout=seconds)
    groups = distributed.threads(np.int64(3), timeout=INF)
    assert [(g.rank, g.size) for g in groups] == [(0, 3), (1, 3), (2, 3)]
    rows = together(lambda g: g.allgather(np.array([float(g.rank)])), 3, groups=groups)
    assert all(row.tolist() == [[0], [1], [2]] for row in rows)


class Communicator(SimpleNamespace):
    """A stand-in for mpi4py's communicators; the null one is false."""

    def __bool__(self):
        return self.there


def communicator(*, there=True, inter=False):
    return Communicator(
        there=there,
        Is_inter=lambda: inter,
        Get_rank=lambda: 1,
        Get_size=lambda: 3,
        Allgather=None,
    )


def test_what_from_mpi_takes():
    group = distributed.from_mpi(communicator())
    assert (group.rank, group.size) == (1, 3)
    for wrong in (None, 3, "world"):
        with pytest.raises(TypeError, match=r"comm is a \w+; pass a communicator of mpi4py"):
            distributed.from_mpi(wrong)
    with pytest.raises(ValueError, match="comm is the null communicator"):
        distributed.from_mpi(communicator(there=False))
    with pytest.raises(ValueError, match=r"comm is an intercommunicator.*Merge"):
        distributed.from_mpi(communicator(inter=True))


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_library_that_is_not_there(monkeypatch, name):
    import sys

    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError, match=f"from_{name} needs {name}, which this program has not"):
        getattr(distributed, f"from_{name}")()


def test_rank_error_travels_between_processes():
    error = gradkit.RankError("ranks differ", {k: f"call {k}" for k in range(9)})
    again = pickle.loads(pickle.dumps(error))
    assert (again.ranks, str(again)) == (error.ranks, str(error))
    assert str(error).endswith("rank 3: call 3; and 5 more ranks")

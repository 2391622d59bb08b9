"""Groups whose numbers stay in device memory: emulated devices, and NCCL by stubs."""

import math
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import gradkit
from gradkit import distributed
from gradkit._cuda import CudaBackend
from gradkit._cuda.dry_run import DryDevice
from gradkit._cuda.launch import kernels
from gradkit._ranks import device as groups_device
from gradkit.distributed import shards_of
from tests import oracles
from tests.cuda.test_traffic import in_tables
from tests.device_ranks import DeviceRanks, NCCLBackend, NcclCommunicator, StubTorch, Wire
from tests.devices.emulated import DeviceArray
from tests.distributed.test_groups import TROUBLES, Interrupted
from tests.meshes import plain
from tests.package.test_contract import close_doors, refuse
from tests.problems import one_or_each
from tests.ranks import INF, NAN, ORDERS, bits, f, flat, results
from tests.tolerances import DTYPES

pytestmark = pytest.mark.emulated


@pytest.fixture
def of(monkeypatch):
    """Return a maker of groups: ``of(3)``."""
    return lambda size, kind="nccl": DeviceRanks(monkeypatch, size, kind)


KINDS = ["nccl", "cupyx", "nccl4py", "torch"]


# Norms and clipping


@pytest.mark.parametrize("kind", KINDS)
def test_every_communicator_clips_over_its_ranks(of, kind):
    """The second rank holds nothing."""
    ranks = of(3, kind)
    contents = [[f(3, 0)], [], [f(4)]]
    held = ranks.over(contents)

    def work(group):
        norm = gradkit.clip_grad_norm(held[group.rank], 2.5, scale=2.0, group=group)
        group.check()
        assert (group.size, group.on_device) == (3, True)
        return norm

    norms = ranks.results(work)
    assert [type(norm) for norm in norms] == [DeviceArray] * 3
    assert [float(norm) for norm in norms] == [10.0] * 3
    assert [norm.backend for norm in norms] == ranks.backends
    assert [backend.device.waits for backend in ranks.backends] == [1] * 3
    assert [[g.tolist() for g in part] for part in held] == [[[1.5, 0]], [], [[2]]]
    assert ranks.wire.sent == [[6]] * 3


def test_a_process_group_works_on_the_gradients_stream(of):
    """The stream is not PyTorch's own: the communicator asserts which one it is."""
    ranks = of(2, "torch")
    held = ranks.over([[f(3)], [f(4)]])

    def work(group):
        with ranks.torch.stream(0):
            return float(gradkit.grad_norm(held[group.rank], group=group))

    assert ranks.results(work) == [5, 5]


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_group_of_one_is_no_group(of, order):
    ranks = of(1)
    [held] = ranks.over([[f(1, -2), f(3)]])
    alone = gradkit.grad_norm(held, order)
    found = gradkit.grad_norm(held, order, group=ranks.groups[0])
    assert bits([alone]) == bits([found])
    assert ranks.wire.sent == [[]]


def test_each_tensor_over_devices_takes_two_collectives(of):
    ranks = of(2, "nccl4py")
    held = ranks.over([[f(3), f(1, 2)] * 3, [f(-4), f(NAN)] * 3])

    def work(group):
        return np.array(gradkit.per_tensor_norms(held[group.rank], flat=True, group=group))

    found = ranks.results(work)
    assert len(bits(found)) == 1
    np.testing.assert_array_equal(found[0], [5, NAN] * 3)
    assert ranks.wire.sent == [[6, 18]] * 2


def both_by_rank(ranks):
    """Counts of the numbers that each rank has sent by gloo and by NCCL."""
    return ranks.torch.gloo.sent, ranks.wire.sent


def test_a_process_group_with_both_uses_each_for_what_it_has(of):
    """Hosts agree by gloo and wait for no device; sums travel by NCCL."""
    ranks = of(3, "both")
    held = ranks.over([[f(3, 0)], [f(0)], [f(4)]])
    found = [ranks.put(rank, np.array(7.0)) for rank in range(3)]

    def work(group):
        options = {"scale": 2.0, "found_inf": found[group.rank], "group": group}
        return gradkit.clip_grad_norm(held[group.rank], 2.5, **options)

    norms = ranks.results(work)
    assert [(type(norm), float(norm)) for norm in norms] == [(DeviceArray, 10.0)] * 3
    assert [[g.tolist() for g in part] for part in held] == [[[1.5, 0]], [[0]], [[2]]]
    assert [flag.tolist() for flag in found] == [0.0] * 3
    assert both_by_rank(ranks) == ([[6]] * 3, [[6]] * 3)
    assert [backend.device.waits for backend in ranks.backends] == [0] * 3


@pytest.mark.parametrize("options", [{}, {"nonfinite": "raise"}, {"exact": True}])
def test_with_both_what_is_not_on_devices_travels_in_host_memory(of, options):
    """A rank whose gradients are offloaded, and one that has none."""
    ranks = of(3, "both")
    held = [[ranks.put(0, np.float32([3.0]))], [np.float32([4.0])], []]

    def work(group):
        return float(gradkit.clip_grad_norm(held[group.rank], 2.5, group=group, **options))

    assert ranks.results(work) == [5.0] * 3
    assert [g.tolist() for part in held for g in part] == [[1.5], [2.0]]
    assert both_by_rank(ranks)[1] == [[]] * 3


def test_with_both_ranks_that_remember_different_things(of):
    """Rank 0 holds the same in both models, and was told of the second one last."""
    ranks = of(2, "both")

    def work(group):
        def grads(other):
            name = "b" if group.rank and other else "a"
            own = {name: plain(np.float32([3.0]))}
            return shards_of(own, group=group, plain="copies")

        return [float(gradkit.grad_norm(grads(other), 1, group=group)) for other in (0, 1, 0, 1)]

    assert ranks.results(work) == [[3.0, 6.0, 3.0, 6.0]] * 2


def test_with_both_an_error_is_told_to_all_at_once(of):
    ranks = of(2, "both")
    held = ranks.over([[f(3)], [f(4)]])

    def work(group):
        order = 0 if group.rank else 2
        return gradkit.clip_grad_norm(held[group.rank], 1.0, order, group=group)

    first, second = ranks.together(work)
    assert isinstance(first, gradkit.RankError)
    assert isinstance(second, ValueError)
    assert [[g.tolist() for g in part] for part in held] == [[[3.0]], [[4.0]]]
    assert ranks.wire.sent == [[], []]


def test_with_both_a_device_that_fails_once_all_have_agreed(of, monkeypatch):
    ranks = of(2, "both")
    held = ranks.over([[f(3)], [f(4)]])

    def fail(*_):
        raise MemoryError("none left")

    monkeypatch.setattr(ranks.backends[1], "rank_state", fail)

    def work(group):
        try:
            return float(gradkit.clip_grad_norm(held[group.rank], 1.0, group=group))
        finally:
            if not group.rank:
                with pytest.raises(gradkit.RankError, match="rank 1: failed"):
                    group.check()

    first, second = ranks.together(work)
    assert math.isnan(first)
    assert isinstance(second, MemoryError)
    assert [[g.tolist() for g in part] for part in held] == [[[3.0]], [[4.0]]]


@pytest.mark.guarantee("With `exact=True`")
@pytest.mark.parametrize("kind", ["cupyx", "torch"])
def test_an_exact_norm_over_devices_is_that_of_one_process(of, kind):
    """Both groups send as many numbers; PyTorch's adds them up."""
    whole = np.random.default_rng(1).standard_normal(2000).astype(np.float32)
    one = float(gradkit.grad_norm(whole, exact=True))
    ranks = of(3, kind)
    held = ranks.over([[whole[:7], whole[900:]], [], [whole[7:900]]])

    def work(group):
        norm = gradkit.clip_grad_norm(held[group.rank], one / 2, group=group, exact=True)
        return type(norm), float(norm)

    assert ranks.results(work) == [(DeviceArray, one)] * 3
    assert ranks.wire.sent == [[6, 25]] * 3
    expected = whole.copy()
    gradkit.clip_grad_norm(expected, one / 2, exact=True)
    first, last = held[0]
    np.testing.assert_array_equal(np.concatenate([first, held[2][0], last]), expected)


@pytest.mark.parametrize("limit", ["number", "array"])
@pytest.mark.parametrize("scale", ["number", "array"])
@pytest.mark.parametrize("clip", ["in place", "functional"])
def test_clipping_over_devices(of, clip, scale, limit):
    """With the bits of clipping by the norm of all."""
    rng = np.random.default_rng(1)
    contents = [[rng.standard_normal(40).astype(DTYPES[name])] for name in DTYPES]
    contents[1] = []
    ranks = of(4)
    held, before = ranks.over(contents), ranks.over(contents)

    def work(group):
        rank, own = group.rank, held[group.rank]
        by = ranks.put(rank, -0.25) if scale == "array" and rank != 2 else -0.25
        most = ranks.put(rank, np.float32(2.5)) if limit == "array" and rank != 1 else 2.5
        if clip == "in place":
            norm, found = gradkit.clip_grad_norm(own, most, scale=by, group=group), own
        else:
            found, norm = gradkit.clip_by_global_norm(own, most, scale=by, group=group)
        return norm, found

    answers = ranks.results(work)
    scaled = [-0.25 * np.float64(part[0]) for part in contents if part]
    assert oracles.off_by(float(answers[0][0]), oracles.norm(scaled, 2)) <= 2.0**-40
    assert len(bits([norm for norm, _ in answers])) == 1
    for k, (norm, clipped) in enumerate(answers):
        expected = gradkit.clip_grads_with_norm(before[k], norm, 2.5, scale=-0.25)
        assert [g.tobytes() for g in clipped] == [g.tobytes() for g in expected]
        assert len(clipped) == len(contents[k])


def test_a_clip_over_devices_is_two_reads_and_a_write(of):
    """Of the elements; what ranks tell each other are a few numbers."""
    ranks = of(2)
    parts = [[np.ones(size, np.float32)] for size in (90_001, 70_000)]
    held = ranks.over(parts)
    ranks.results(
        lambda group: gradkit.clip_grad_norm(held[group.rank], 1.0, group=group, scale=0.5)
    )
    for own, (grad,) in zip(ranks.backends, parts, strict=True):
        assert in_tables(own.device) == (2 * grad.nbytes, grad.nbytes)


def test_raise_returns_the_norm_of_what_is_finite(of):
    ranks = of(2)
    held = ranks.over([[f(3)], [f(4)]])

    def work(group):
        out = ranks.put(group.rank, 7.0)
        gradkit.clip_grad_norm(held[group.rank], 1.0, nonfinite="raise", group=group, out=out)
        return float(out)

    assert ranks.results(work) == [5.0, 5.0]
    assert [part[0].tolist() for part in held] == [[3 * (1 / 5)], [4 * (1 / 5)]]


# The host waits for nothing


def test_nothing_is_read_from_the_device(of, monkeypatch):
    """Neither by gradkit's own door nor by looking at an array."""
    ranks = of(2)
    held = ranks.over([[f(3, 0)], [f(4)]])
    given = [[ranks.put(k, x) for x in (1.0, 0.5, np.float32(1))] for k in range(2)]

    def work(group):
        out, scale, found = given[group.rank]
        own = held[group.rank]
        options = {"scale": scale, "group": group, "found_inf": found, "out": out}
        gradkit.grad_norm(own, **options)
        gradkit.clip_by_global_norm(own, scale, scale=scale, group=group, found_inf=found)
        return gradkit.clip_grad_norm(own, scale, **options)

    with monkeypatch.context() as closed:
        closed.setattr(CudaBackend, "read", refuse)
        close_doors(closed)
        norms = ranks.results(work)
    assert [float(norm) for norm in norms] == [2.5, 2.5]
    assert [float(found) for _, _, found in given] == [0, 0]
    assert held[0][0].tolist() == [3 * 0.5 * (0.5 / 2.5), 0]
    assert ranks.wire.sent == [[6, 6, 6]] * 2
    assert [backend.device.waits for backend in ranks.backends] == [0, 0]


# One rank in trouble


def memory(*held):
    return [array.tobytes() for parts in held for array in flat(parts)]


def fails_on_one(ranks, call, error, kept=()):
    """``call(group, grads)`` fails on rank 1: there it raises, elsewhere ``check`` does."""
    held = ranks.over([[f(3, 4), f(5)]] * ranks.size)
    before = memory(held, kept)

    def work(group):
        try:
            call(group, held[group.rank])
        except BaseException as raised:
            group.check()  # says nothing: this rank knows
            return [raised]
        with pytest.raises(gradkit.RankError, match="nothing was written on any rank") as caught:
            group.check()
        group.check()
        return caught.value.ranks

    found = ranks.results(work)
    assert memory(held, kept) == before
    assert isinstance(found[1][0], error)
    said = {1: "failed; its own error says why"}
    assert [found[k] for k in range(ranks.size) if k != 1] == [said] * (ranks.size - 1)
    norms = ranks.results(lambda g: float(gradkit.grad_norm(held[g.rank], group=g)))
    assert norms == [pytest.approx(math.sqrt(50 * ranks.size))] * ranks.size
    return found[1][0]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_bad_argument_on_one_rank_suppresses_all_writes(of, trouble):
    wrong, error, match = TROUBLES[trouble]
    ranks = of(3)
    outs = [[ranks.put(k, 7.0), ranks.put(k, np.float32(0.25))] for k in range(3)]

    def call(group, grads):
        out, found = outs[group.rank]
        arguments = {"grads": grads, "max_norm": 1.0, "out": out, "found_inf": found}
        arguments |= {"scale": 0.5, "group": group}
        if group.rank == 1:
            arguments |= wrong
        gradkit.clip_grad_norm(**arguments)

    raised = fails_on_one(ranks, call, error, outs)
    with pytest.raises(error, match=match):
        raise raised


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room"), SystemExit(3)])
def test_an_interrupt_on_one_rank_suppresses_all_writes(of, error, kind):
    def call(group, grads):
        if group.rank == 1:
            grads = Interrupted(error)
        gradkit.clip_grad_norm(grads, 1.0, group=group)

    fails_on_one(of(3, kind), call, type(error))


@pytest.mark.parametrize("phase", ["empty", "rank_state"])
def test_a_rank_that_fails_on_its_device(of, phase):
    """Out of memory, or while it adds up its own gradients."""
    ranks = of(2)
    broken = ranks.backends[1]

    def fail(*_, **__):
        del broken.__dict__[phase]  # what tells the others of it works again
        raise MemoryError("no room")

    def call(group, grads):
        if group.rank == 1:
            setattr(broken, phase, fail)
        gradkit.clip_grad_norm(grads, 1.0, group=group)

    fails_on_one(ranks, call, MemoryError)


NUMBERS = {
    "numbers": (1.0, 0.5),
    "a scale in an array": (1.0, np.array(-0.5)),
    "a limit in an array": (np.array(0.25), 2.0),
    "a limit that would make NaN": (np.array(-1.0), 1.0),
    "a limit that is NaN": (np.array(NAN), 1.0),
    "a limit of 0": (np.array(0.0), np.array(3.0)),
    "a scale that is not finite": (np.array(1.0), np.array(NAN)),
    "a scale of 0": (1.0, 0.0),
}


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_suppressed_clip_leaves_every_bit(of, numbers, policy):
    """NaN payloads, infinities and negative zeros too, whatever the numbers are."""
    limit, scale = NUMBERS[numbers]
    ranks = of(2)
    odd = np.array([0x7FF8000000000123, 0xFFF0000000000000, 1 << 63, 1, 0x3FF0000000000001])
    odd = odd.astype(np.uint64).view(np.float64)
    own = ranks.put(0, odd)
    half = ranks.put(0, np.linspace(-3, 3, 50).astype(np.float16))
    before = own.tobytes(), half.tobytes()

    def work(group):
        if group.rank == 1:
            with pytest.raises(TypeError):
                gradkit.clip_grad_norm(["x"], 1.0, group=group)
            return None
        most, by = (ranks.put(0, x) if isinstance(x, np.ndarray) else x for x in (limit, scale))
        norm = gradkit.clip_grad_norm([own, half], most, scale=by, nonfinite=policy, group=group)
        return float(norm)

    assert math.isnan(ranks.results(work)[0])
    assert (own.tobytes(), half.tobytes()) == before


def test_a_suppressed_functional_clip_gives_copies(of):
    ranks = of(2)
    grads = [ranks.put(0, f(3, NAN, -0.0))]

    def work(group):
        if group.rank == 1:
            with pytest.raises(ValueError, match="max_norm"):
                gradkit.clip_by_global_norm([], -1.0, group=group)
            return None
        return gradkit.clip_by_global_norm(grads, 1.0, scale=0.5, group=group)

    clipped, norm = ranks.results(work)[0]
    assert clipped[0].tobytes() == grads[0].tobytes()
    assert math.isnan(norm)


def test_found_inf_keeps_its_value(of):
    ranks = of(2)
    flags = [ranks.put(0, value) for value in (np.True_, np.float32(0.25), np.array([3.5]))]

    def work(group):
        for flag in flags:
            if group.rank == 1:
                with pytest.raises(TypeError):
                    gradkit.grad_norm(["x"], group=group)
            else:
                gradkit.grad_norm([ranks.put(0, f(INF))], group=group, found_inf=flag)

    ranks.results(work)
    assert [flag.reshape(()).item() for flag in flags] == [True, 0.25, 3.5]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_make_different_calls_are_told(of, size):
    """One takes another p: each rank names those whose call was not its own."""
    ranks = of(size)
    held = ranks.over([[f(3, 4)]] * size)
    before = memory(held)

    def work(group):
        order = 1 if group.rank == 1 else 2
        gradkit.clip_grad_norm(held[group.rank], 1.0, order, group=group)
        with pytest.raises(gradkit.RankError) as caught:
            group.check()
        return caught.value.ranks

    found = ranks.results(work)
    assert memory(held) == before
    other = "made another call"
    assert found[0] == {1: other}
    assert found[1] == {k: other for k in range(size) if k != 1}


def test_one_norm_and_one_for_each_gradient_are_different_calls(of):
    """The rank that waits learns of it at once, before it sends a number for each."""
    ranks = of(2)
    held = ranks.over([[f(3, 4)] * 2] * 2)

    def work(group):
        if group.rank == 1:
            with pytest.raises(gradkit.RankError, match="rank 0: made another call"):
                gradkit.per_tensor_norms(held[1], flat=True, group=group)
        else:
            gradkit.clip_grad_norm(held[0], 1.0, group=group)
            with pytest.raises(gradkit.RankError, match="rank 1: made another call"):
                group.check()

    ranks.results(work)
    assert ranks.wire.sent == [[6]] * 2
    assert held[0][0].tolist() == [3, 4]


def test_ranks_that_differ_in_their_number_of_norms_are_told(of):
    ranks = of(2)
    held = ranks.over([[f(1)], [f(1), f(2)]])
    found = ranks.together(lambda g: gradkit.per_tensor_norms(held[g.rank], flat=True, group=g))
    assert [type(error) for error in found] == [gradkit.RankError] * 2
    assert ranks.wire.sent == [[6]] * 2


WAITING = [{"nonfinite": "raise", "each": False}, {"each": True}, {"exact": True, "each": False}]


@pytest.mark.parametrize("options", WAITING)
def test_who_waits_is_told_at_once(of, options):
    ranks = of(2)
    held = ranks.over([[np.float32([3, 4])]] * 2)

    def work(group):
        if group.rank == 1:
            return gradkit.grad_norm(held[1], 0, group=group)
        out = ranks.put(0, np.full((1,) if options["each"] else (), 7.0))
        with pytest.raises(gradkit.RankError, match="rank 1: failed; its own error says why"):
            one_or_each(held[0], group=group, out=out, **options)
        group.check()
        return float(out.reshape(()))

    first, second = ranks.together(work)
    assert first == 7.0
    assert isinstance(second, ValueError)


def test_check_names_all_since_the_last(of):
    """Three calls, of which two go wrong; a fault is kept until somebody checks."""
    ranks = of(3)
    held = ranks.over([[f(3)]] * 3)

    def work(group):
        for broken in (1, 2, None):
            order = 0 if group.rank == broken else 2
            try:
                norm = gradkit.grad_norm(held[group.rank], order, group=group)
            except ValueError:
                continue
        assert float(norm) == pytest.approx(math.sqrt(27))
        with pytest.raises(gradkit.RankError) as caught:
            group.check()
        return sorted(caught.value.ranks)

    assert ranks.results(work) == [[1, 2], [2], [1]]


# What a group and its gradients may be


@pytest.mark.parametrize("rank", range(2))
def test_gradients_on_the_host_are_refused(of, rank):
    ranks = of(2)
    held = ranks.over([[f(3)], [f(4)]])
    held[rank] = [f(3)]

    def work(group):
        if group.rank == rank:
            with pytest.raises(ValueError, match=r"grads\[0\] is not on the device of group"):
                gradkit.grad_norm(held[rank], group=group)
        else:
            gradkit.grad_norm(held[group.rank], group=group)
            with pytest.raises(gradkit.RankError):
                group.check()

    ranks.results(work)


def test_ranks_on_threads_with_a_device_each(of):
    """Several devices of one process, and numbers that travel on the host."""
    ranks = of(2)
    held = ranks.over([[f(3, 0)], [f(4)]])
    groups = distributed.threads(2)
    norms = results(lambda g: gradkit.clip_grad_norm(held[g.rank], 1, group=g), 2, groups=groups)
    assert [float(norm) for norm in norms] == [5, 5]
    assert [norm.backend for norm in norms] == ranks.backends
    assert [part[0].tolist() for part in held] == [[3 * (1 / 5), 0], [4 * (1 / 5)]]


@pytest.mark.parametrize("name", ["faults", "check"])
def test_a_device_group_has_more_than_others(of, name):
    class Group:
        rank, size, on_device = 0, 2, True
        allgather = faults = check = None

    delattr(Group, name)
    with pytest.raises(TypeError, match=rf"group is a .*Group without {name}"):
        gradkit.grad_norm([of(2).put(0, f(1))], group=Group())


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        (np.zeros((3, 6)), ValueError, r"what group.allgather returned has shape \(3, 6\)"),
        (np.zeros((2, 6), np.float32), TypeError, "has dtype float32; ranks send float64"),
        ([[0.0] * 6] * 2, TypeError, "what group.allgather returned is a list"),
    ],
)
def test_a_device_group_must_answer_with_a_row_for_each_rank(of, rows, error, match):
    ranks = of(2)
    group = ranks.groups[0]
    answer = ranks.put(0, rows) if isinstance(rows, np.ndarray) else rows
    group.allgather = lambda _: answer
    with pytest.raises(error, match=match):
        gradkit.grad_norm([ranks.put(0, f(1))], group=group)


def test_rows_on_the_host_are_refused(of):
    ranks = of(2)
    ranks.groups[0].allgather = lambda _: np.zeros((2, 6))
    with pytest.raises(ValueError, match=r"group.faults and what group.allgather .* different"):
        gradkit.grad_norm([ranks.put(0, f(1))], group=ranks.groups[0])


@pytest.mark.parametrize("make", [distributed.from_cupyx, distributed.from_nccl])
def test_what_is_no_communicator(make):
    with pytest.raises(TypeError, match=r"is a Communicator|is a Wire"):
        make(Wire(2))


@pytest.mark.parametrize(
    ("config", "device", "kind"),
    [
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),
        ("cuda:nccl", None, "cuda"),
        ("cuda:nccl", "cuda:0", "cuda"),
        ("cuda:nccl", "cpu", "cpu"),
    ],
)
def test_where_the_numbers_of_a_process_group_travel(of, monkeypatch, config, device, kind):
    ranks = of(2)
    torch = StubTorch(ranks.communicators, config)
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch.begin(0, ranks.backends[0])
    group = distributed.from_torch("the group", device=device)
    assert (group.rank, group.size) == (0, 2)
    assert getattr(group, "on_device", False) == (kind == "cuda")


def test_a_process_group_on_another_device_is_refused(of, monkeypatch):
    ranks = of(2)
    torch = StubTorch(ranks.communicators, "xpu:xccl")
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ValueError, match="device must be the CPU or a CUDA device"):
        distributed.from_torch("the group", device="xpu")


# Batch norm, whose ranks look at each other's numbers: it waits for the device


def batches(ranks, sizes):
    """A batch, and the part of it that each rank has on its device."""
    rng = np.random.default_rng(8)
    x, dy = rng.standard_normal((2, sum(sizes), 5, 3)).astype(np.float32)
    ends = np.cumsum(sizes)[:-1]
    pairs = zip(np.split(x, ends), np.split(dy, ends), strict=True)
    return x, dy, [tuple(ranks.put(k, half) for half in pair) for k, pair in enumerate(pairs)]


def both_passes(ranks, parts, scale):
    """Forward, with running statistics, and gradient of each rank's part."""

    def work(group):
        rank, (x, dy) = group.rank, parts[group.rank]
        own, mean, var = (ranks.put(rank, v) for v in (scale, np.zeros(5), np.ones(5)))
        running = {"running_mean": mean, "running_var": var, "momentum": 0.25}
        y, *saved = gradkit.batch_norm(x, own, own, group=group, **running)
        gradient = gradkit.batch_norm_grad(dy, x, own, *saved, group=group)
        assert {array.backend for array in (y, *saved, *gradient)} == {ranks.backends[rank]}
        return [np.array(array) for array in (y, *saved, mean, var, *gradient)]

    return work


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_over_devices(of, kind):
    """With the bits of ranks whose numbers travel in host memory; one rank has no elements."""
    ranks = of(3, kind)
    x, dy, parts = batches(ranks, (7, 0, 4))
    scale = np.linspace(0.5, 2, 5, dtype=np.float32)
    found = ranks.results(both_passes(ranks, parts, scale))
    assert [len(sent) for sent in ranks.wire.sent] == [4] * 3  # a header and sums, twice
    for got, expected in zip(found, results(both_passes(ranks, parts, scale), 3), strict=True):
        assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
    y, mean, inv_std = gradkit.batch_norm(x, scale, scale)
    dx, dscale, dbias = gradkit.batch_norm_grad(dy, x, scale, mean, inv_std)
    ys, means, inv_stds, running, _, dxs, dscales, dbiases = zip(*found, strict=True)
    np.testing.assert_allclose(np.concatenate(ys), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(dxs), dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means, [mean] * 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inv_stds, [inv_std] * 3, rtol=1e-6)
    np.testing.assert_allclose(running, [0.25 * mean] * 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sum(dscales), dscale, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sum(dbiases), dbias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trouble", ["an eps", "another eps", "channels", "a scale's shape"])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_with_a_rank_at_fault_writes_nothing(of, kind, trouble):
    """The others find out in the call: it waits for the device anyway."""
    ranks = of(3, kind)
    _, _, parts = batches(ranks, (2, 3, 4))
    outs = [[ranks.put(k, np.full(part[0].shape, 7, np.float32))] for k, part in enumerate(parts)]
    for k, out in enumerate(outs):
        out += [ranks.put(k, np.full(5, 7, np.float32)) for _ in range(2)]
    wrong = {
        "an eps": {"eps": -1.0},
        "another eps": {"eps": 1e-3},
        "channels": {"channel_axis": 2, "out": None},
        "a scale's shape": {"scale": ranks.put(1, np.ones(4, np.float32))},
    }[trouble]
    before = memory(*outs)

    def work(group):
        given = {"x": parts[group.rank][0], "out": tuple(outs[group.rank]), "group": group}
        gradkit.batch_norm(**given | (wrong if group.rank == 1 else {}))

    found = ranks.together(work)
    differs = trouble in ("another eps", "channels")
    assert type(found[1]) is (gradkit.RankError if differs else ValueError)
    for error in (found[0], found[2]):
        assert isinstance(error, gradkit.RankError)
        assert error.ranks.keys() == {1}
    assert memory(*outs) == before


# Graphs


def test_a_replay_computes_anew(of, monkeypatch):
    """All that a call queues, once more, over other gradients, limits and scales."""
    ranks = of(2)
    held = ranks.over([[f(3, 0)], [f(4)]])
    numbers = [[ranks.put(k, x) for x in (100.0, 1.0, 0.0)] for k in range(2)]
    queued = [[], []]
    launch, gather = kernels.Launch.__call__, NcclCommunicator.allGather
    write = np.ndarray.__setitem__

    def remember(of, *args):
        if not isinstance(of.kernel.device, DryDevice):
            queued[of.kernel.device.number].append(lambda: launch(of, *args))
        launch(of, *args)

    def copy(target, key, source):
        queued[target.backend.device.number].append(lambda: write(target, key, source))
        write(target, key, source)

    def connect(communicator, *args):
        queued[communicator.rank_id()].append(lambda: gather(communicator, *args))
        gather(communicator, *args)

    def work(group):
        limit, scale, out = numbers[group.rank]
        gradkit.clip_grad_norm(held[group.rank], limit, scale=scale, group=group, out=out)
        return float(out)

    with monkeypatch.context() as recording:
        for backend in ranks.backends:
            recording.setattr(backend.device, "capturing", lambda: True)
        recording.setattr(kernels.Launch, "__call__", remember)
        recording.setattr(NcclCommunicator, "allGather", connect)
        recording.setattr(DeviceArray, "__setitem__", copy, raising=False)
        assert ranks.results(work) == [5, 5]
    for rank, (grads, new) in enumerate(zip(held, (f(6, 0), f(8)), strict=True)):
        grads[0][...] = new
        limit, scale, _ = numbers[rank]
        limit[...], scale[...] = 2.5, 0.5

    def replay(group):
        for step in queued[group.rank]:
            step()
        group.check()
        return float(numbers[group.rank][2])

    assert ranks.results(replay) == [5, 5]
    assert [part[0].tolist() for part in held] == [[1.5, 0], [2]]
    assert len(queued[0]) == len(queued[1]) == 8


@pytest.mark.parametrize("maker", ["from_nccl", "from_cupyx", "from_torch"])
def test_the_code_of_the_page_runs(of, maker):
    """docs/distributed.md's loop over NCCL, by each of the groups that it names."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"^```py\n(group = .*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in block.splitlines() if f"distributed.{maker}(" in line]
    lines += block.splitlines()[3:]
    ranks = of(2, "torch")
    held = ranks.over([[f(3, 0)], [f(4)]])

    def work(group):
        communicator = ranks.communicators[group.rank]
        names = {
            "gradkit": gradkit,
            "communicator": communicator,
            "backend": NCCLBackend(communicator),
            "process_group": "the group",
            "batches": [held[group.rank]],
            "backward": list,
            "params": None,
            "update": lambda _, grads: [grad.tolist() for grad in grads],
        }
        exec("\n".join(lines).replace("    update(", "    found = update("), names)
        return names["found"]

    assert len(lines) == 1 + len(block.splitlines()) - 3
    clipped = ranks.results(work)
    assert clipped == [[pytest.approx([0.6, 0])], [pytest.approx([0.8])]]
    assert ranks.wire.sent == [[6]] * 2


def test_faults_are_noted_on_the_ranks_own_device(monkeypatch):
    """That device need not be current when the group is made."""
    current, made = [0], []

    class Elsewhere:
        device = property(lambda self: self)

        @contextmanager
        def active(self):
            current[0] = 1
            yield
            current[0] = 0

        def empty(self, shape, dtype):
            made.append((current[0], shape))
            return np.empty(shape, dtype)

    monkeypatch.setattr(groups_device, "backend_on", lambda _: Elsewhere())
    groups_device.DeviceRanks(0, 2, 1)
    assert made == [(1, (2,))]

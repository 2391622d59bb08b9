"""``shards_of`` with a group: ranks find out who holds what, whatever the layout.

Real DTensors, JAX arrays and MPI ranks are in tests/processes; here is what looks like them.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradkit
from gradkit._ranks import ownership
from gradkit.distributed import check_copies, shards_of
from tests import oracles, tolerances
from tests.meshes import Layout, Mesh, Shard, dtensor, plain
from tests.ranks import results, together
from tests.tolerances import DTYPES

UNIT = tolerances.UNIT["float64"]


@pytest.fixture(autouse=True)
def _nothing_known():
    ownership._cache.clear()


@pytest.mark.guarantee("Whatever the layout")
@given(st.builds(Layout, st.integers(0, 2**32)), st.sampled_from([1, 2, np.inf]))
def test_any_layout_has_the_norm_of_the_uncut_model(layout, order):
    def work(group):
        found = []
        for _ in range(2):  # the second time ranks remember
            shards = layout.shards(group)
            found.append(float(gradkit.grad_norm(shards, order, group=group)))
        check_copies(shards, group)
        return found

    norms = results(work, layout.size)
    expected = oracles.norm([w for w in layout.wholes() if w.size], order)
    assert len({norm for pair in norms for norm in pair}) == 1
    assert oracles.off_by(norms[0][0], expected) <= 8 * UNIT


def counted(group):
    """The collectives of a group, counted."""
    allgather, calls = group.allgather, []

    def counting(state):
        assert (state.dtype, state.ndim) == (np.float64, 1)
        calls.append(len(state))
        return allgather(state)

    group.allgather = counting
    return calls


def model(rank, size=4):
    whole = np.arange(1.0, 13).reshape(6, 2)
    mesh = Mesh(np.arange(size), rank)
    return {"w": dtensor(whole, mesh, Shard(0)), "b": dtensor(whole, mesh, Shard())}


EXACT = np.sqrt(2 * (np.arange(1.0, 13) ** 2).sum())


def test_what_ranks_found_out_is_remembered():
    def work(group):
        calls = counted(group)
        for _ in range(3):
            grads = shards_of(model(group.rank), group=group)
            assert grads.replicas == {"w": 1, "b": 4}
            before = len(calls)
            norm = gradkit.clip_grad_norm(grads, EXACT / 2, group=group)
            assert calls[before:] == [6]
            assert norm == pytest.approx(EXACT, rel=1e-15)
        return len(calls)

    once = results(work, 4)
    assert once == [once[0]] * 4
    assert 3 < once[0] <= 8


@pytest.mark.guarantee("Whatever the layout")
@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("each", [False, True])
def test_one_that_does_not_remember_makes_all_find_out_again(who, each):
    def work(group):
        shards_of(model(group.rank), group=group)
        if group.rank == who:
            for key in [key for key in ownership._cache if key[1] == (who, 4)]:
                del ownership._cache[key]
        grads = shards_of(model(group.rank), group=group)
        norm = gradkit.per_tensor_norms if each else gradkit.grad_norm
        again = [norm(grads, group=group), norm(grads, group=group)]
        return str(again), float(gradkit.clip_grad_norm(grads, 1.0, group=group))

    found = results(work, 4)
    assert len(set(found)) == 1
    assert found[0][1] == pytest.approx(EXACT, rel=1e-15)


def test_ranks_that_remember_different_things_find_out_again():
    """Rank 0 holds the same in both models, and was told of the second one last."""

    def work(group):
        def grads(other):
            whole = np.full(2, 3.0)
            named = {"a": whole} if group.rank == 0 else {"b" if other else "a": whole}
            parameters = {name: plain(array) for name, array in named.items()}
            return shards_of(parameters, group=group, plain="copies")

        return [float(gradkit.grad_norm(grads(other), 1, group=group)) for other in (0, 1, 0, 1)]

    assert results(work, 2) == [[6.0, 12.0, 6.0, 12.0]] * 2


def test_ranks_without_parameters_take_part():
    def work(group):
        parameters = {"w": plain(np.array([3.0]))} if group.rank == 1 else {}
        grads = shards_of(parameters, group=group, plain="copies")
        return float(gradkit.grad_norm(grads, group=group))

    assert results(work, 3) == [3.0] * 3


def test_a_norm_of_some_gradients_counts_their_copies_once():
    """And all are clipped."""

    def work(group):
        grads = shards_of(model(group.rank), group=group)
        norm = gradkit.clip_grad_norm(grads, 1.0, group=group, count={"w": False, "b": True})
        return float(norm), float(gradkit.grad_norm(grads, group=group))

    for norm, clipped in results(work, 4):
        assert norm == pytest.approx(EXACT / 2**0.5, rel=1e-15)
        assert clipped == pytest.approx(2**0.5, rel=1e-12)


def test_ranks_leave_out_gradients_of_their_own():
    def work(group):
        own = f"own{group.rank}"
        parameters = {"b": plain(np.array([3.0])), own: plain(np.array([4.0]))}
        grads = shards_of(parameters, group=group, plain={"b": "copies", own: "own"})
        counted = {"b": True, own: False}
        return float(gradkit.clip_grad_norm(grads, 1.0, group=group, count=counted))

    assert results(work, 2) == [3.0] * 2


def test_what_plain_tensors_are():
    def norm(group, kind):
        grads = shards_of({"w": plain(np.array([3.0]))}, group=group, plain=kind)
        return float(gradkit.grad_norm(grads, 1, group=group))

    def work(group):
        return [
            norm(group, kind) for kind in ("copies", "own", 1, {"w": "own"}, lambda *_: "copies")
        ]

    assert results(work, 2) == [[3.0, 6.0, 6.0, 6.0, 3.0]] * 2


def test_a_gradient_that_is_none_keeps_its_part_of_the_whole():
    """The parameter's placement says who holds what, not the gradient."""

    def work(group):
        whole, mesh = np.array([3.0, 4.0]), Mesh([0, 1], group.rank)
        has = group.rank == 0
        grads = shards_of({"w": dtensor(whole, mesh, Shard(0), grad=has)}, group=group)
        assert grads.replicas == ({"w": 1} if has else {})
        return float(gradkit.grad_norm(grads, group=group))

    assert results(work, 2) == [3.0, 3.0]


def failing(parameters_of, size=2, **options):
    """Return the errors of all ranks; a rank that fails must not let one wait."""

    def work(group):
        shards_of(parameters_of(group.rank), group=group, **options)

    found = together(work, size)
    assert all(isinstance(error, BaseException) for error in found), found
    assert not ownership._cache
    return found


def test_undecided_tensors_are_listed():
    own, other = failing(
        lambda rank: {"w": plain(np.ones(1)), "b": plain(np.ones(1))} if not rank else {}
    )
    assert isinstance(own, ValueError)
    assert str(own).startswith("'w', 'b' are plain arrays")
    assert isinstance(other, gradkit.RankError)
    assert [*other.ranks] == [0]


WHOLE = np.arange(8.0).reshape(4, 2)


@pytest.mark.guarantee("Whatever the layout")
@pytest.mark.parametrize(
    ("ranks", "placements"),
    [
        ([0], [Shard(0)]),  # half of it is nowhere
        ([0, 1], [Shard(0), Shard(1)]),  # a quarter of it twice, and one nowhere
        ([0, 1], [Shard(0), Shard()]),
    ],
)  # fmt: skip
def test_parts_that_do_not_tile_are_named(ranks, placements):
    def parameters(rank):
        if rank not in ranks:
            return {}
        return {"w": dtensor(WHOLE, Mesh([0, 1], rank), placements[rank % len(placements)])}

    for error in failing(parameters):
        assert isinstance(error, gradkit.RankError)
        assert [*error.ranks] == ranks
        assert all(text.startswith("w[") for text in error.ranks.values())
    assert error.ranks[0] == "w[0:2, 0:2] of (4, 2)"


def test_one_name_for_different_shapes_is_named():
    def parameters(rank):
        return {"w": plain(np.ones(2 + rank))}

    errors = failing(parameters, plain="copies")
    assert [error.ranks for error in errors] == [{0: "w[0:2] of (2,)", 1: "w[0:3] of (3,)"}] * 2


def test_positions_on_different_meshes_are_no_names():
    """Stages count their layers from 0 each: the same position is another tensor."""

    def parameters(rank):
        return [dtensor(WHOLE, Mesh([rank], rank), Shard())]

    errors = failing(parameters)
    assert "on ranks (0,)" in errors[0].ranks[0]
    (own, other) = failing(lambda rank: [plain(WHOLE)] if rank else [], plain="copies")
    assert str(other) == "the copies at position 0 have no name; pass named parameters"
    assert isinstance(own, gradkit.RankError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": {"w": "x", "b": "x"}, "plain": "own"}, "names gives 'x' to 'w' and 'b'"),
        ({"plain": 2}, "plain is 2 for 'w'"),
        ({"plain": True}, "plain is True for 'w'"),
        (
            {"names": lambda name, _: 1 if name == "w" else "1", "plain": "own"},
            "names gives '1' to 'w' and 'b'",
        ),
        ({"plain": {"w": "own"}}, "'b' are plain arrays"),
    ],
)
def test_bad_arguments_end_on_all_ranks(options, message):
    for error in failing(lambda _: {"w": plain(WHOLE), "b": plain(WHOLE)}, **options):
        assert type(error) is ValueError
        assert message in str(error)


@pytest.mark.parametrize(
    ("count", "said"), [(8, "'w7' are plain"), (9, "'w7' and 1 more are plain")]
)
def test_eight_of_those_that_nothing_decides_are_named(count, said):
    for error in failing(lambda _: {f"w{k}": plain(WHOLE) for k in range(count)}):
        assert said in str(error)


def test_a_gradient_of_one_rank_may_be_left_out_there():
    """Others do not know of it."""

    def clipped(group):
        named = {"tied": plain(np.ones(2)), f"layer{group.rank}": plain(np.ones(7))}
        kept = shards_of(named, group=group, plain="copies")
        norm = gradkit.clip_grad_norm(kept, 2.0, clip=lambda name, _: name == "tied", group=group)
        return float(norm), *(p.grad[0] for p in named.values())

    assert results(clipped, 2) == [(4.0, 0.5, 1.0)] * 2


def test_names_need_a_group():
    with pytest.raises(ValueError, match="names is for ranks"):
        shards_of({}, names={})
    with pytest.raises(ValueError, match="plain is a number of ranks"):
        shards_of({"w": plain(WHOLE)}, plain="copies")


def test_a_local_shape_that_placements_contradict():
    def parameters(rank):
        parameter = dtensor(WHOLE, Mesh([0, 1], rank), Shard(0))
        parameter.grad.to_local = lambda: np.ones((3, 2))
        return {"w": parameter}

    for error in failing(parameters):
        assert "'w' is a DTensor whose local shape is (3, 2); its placements say [2, 2]" in str(
            error
        )


def test_an_unknown_placement_is_named():
    class Odd:
        is_replicate = is_partial = staticmethod(lambda: False)

    def parameters(rank):
        placed = {"shape": (2,), "device_mesh": Mesh([0, 1], rank), "placements": (Odd(),)}
        return {"w": SimpleNamespace(grad=SimpleNamespace(to_local=lambda: WHOLE, **placed))}

    for error in failing(parameters):
        assert "the gradient of 'w' is a DTensor with the placement" in str(error)


def test_the_norm_is_of_the_group_that_found_out():
    others = gradkit.distributed.threads(3, timeout=0.1)

    def work(group):
        grads = shards_of(model(group.rank, 2), group=group)
        with pytest.raises(ValueError, match="group is not the one that was passed to shards_of"):
            gradkit.grad_norm(grads, group=others[group.rank])
        with pytest.raises(ValueError, match="two results of shards_of"):
            gradkit.grad_norm([grads, grads], group=group)
        with pytest.raises(ValueError, match="pass group"):
            gradkit.grad_norm(grads)

    results(work, 2)


def test_a_rank_that_does_another_call_meanwhile_is_told():
    def work(group):
        if group.rank:
            gradkit.grad_norm([np.ones(1)], group=group)
        else:
            shards_of({}, group=group)

    for error in together(work, 3):
        assert isinstance(error, gradkit.RankError)
        assert "different calls" in str(error)
        assert error.ranks[0].startswith("shards_of")


def checked(work, size):
    """Return each rank's message if copies differ, or nothing; all ranks raise the same error."""
    found = together(work, size)
    assert len({str(error) for error in found}) == 1, found
    if found[0] is None:
        return {}
    assert all(isinstance(error, gradkit.RankError) for error in found), found
    return found[0].ranks


def changed(rank, who, name, index, value):
    """The model with one element changed on one rank."""
    parameters = model(rank)
    if rank == who:
        parameters[name].grad.to_local()[index] = value
    return parameters


@pytest.mark.parametrize(
    ("name", "index", "value", "differs"),
    [
        ("b", (0, 0), 1.0, False),  # as it was
        ("b", (5, 1), np.nextafter(12.0, 13), True),
        ("b", (5, 1), np.nan, True),
        ("w", (0, 0), 7.0, False),  # of which there are no copies
    ],
)
def test_copies_that_differ_are_named(name, index, value, differs):
    def work(group):
        grads = shards_of(changed(group.rank, 2, name, index, value), group=group)
        check_copies(grads, group)

    alike = {
        r: f"b is as on ranks {', '.join(str(o) for o in (0, 1, 3) if o != r)}" for r in (0, 1, 3)
    }
    assert checked(work, 4) == (alike | {2: "b is as on no other rank"} if differs else {})


def test_a_copy_that_is_missing_or_of_another_sign_of_zero():
    def work(group):
        whole, mesh = np.zeros(2), Mesh([0, 1], group.rank)
        parameters = {"w": dtensor(whole, mesh, Shard(), grad=group.rank == 0)}
        check_copies(shards_of(parameters, group=group), group)

    def signs(group):
        zero = -0.0 if group.rank else 0.0
        check_copies([np.array(zero), np.ones(2)], group)

    assert checked(work, 2) == {0: "w is as on no other rank", 1: "w is None"}

    def own(group):
        parameters = {"expert": plain(np.full(2, 1.0 + group.rank)), "b": plain(np.ones(3))}
        kinds = {"expert": "own", "b": "copies"}
        grads = shards_of(parameters, group=group, plain=kinds)
        check_copies(grads, group)

    assert checked(own, 2) == {}
    assert checked(signs, 2) == dict.fromkeys((0, 1), "grads[0] is as on no other rank")


def test_copies_of_other_dtypes_and_nothing_at_all():
    halves = np.zeros(2, np.float16)
    for other in (np.zeros(2), halves.view(np.uint16).view(DTYPES["bfloat16"]), halves[None]):

        def work(group, other=other):
            check_copies({"w": other if group.rank else halves}, group)

        assert checked(work, 2).keys() == {0, 1}

    def empty(group):
        check_copies([np.zeros((group.rank, 0))], group)

    assert checked(empty, 2) == checked(lambda group: check_copies([], group), 2) == {}
    assert checked(lambda group: check_copies([np.ones(3)], group), 1) == {}


def test_copies_of_a_layout_that_one_rank_has_forgotten():
    def work(group):
        shards_of(model(group.rank), group=group)
        if group.rank == 1:
            for key in [key for key in ownership._cache if key[1] == (1, 4)]:
                del ownership._cache[key]
        check_copies(shards_of(model(group.rank), group=group), group)

    assert checked(work, 4) == {}


def test_copies_need_to_be_known():
    def work(group):
        with pytest.raises(ValueError, match="pass what shards_of returns with a group"):
            check_copies(shards_of(model(0, 1)), group)
        with pytest.raises(ValueError, match="in no other container"):
            check_copies([shards_of(model(0, 1), group=group)], group)

    results(work, 1)

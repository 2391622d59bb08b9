"""``shards_of``: which parts of sharded gradients a rank has, and how often each counts.

The real DTensors and JAX arrays are in tests/interop; here is what looks like them.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit.distributed import ShardedGrads, shards_of
from tests.meshes import Mesh, Shard, dtensor, plain
from tests.ranks import results


def placed(*kinds, shape=(2, 3)):
    """A parameter on a mesh of ranks, of which this is the first."""
    shape = shape[: len(kinds)]
    return dtensor(np.ones(6), Mesh(np.arange(math.prod(shape)).reshape(shape), 0), *kinds)


CUT, COPY = Shard(0), Shard()
ONE = placed(CUT)


@pytest.mark.parametrize(
    ("kinds", "count"),
    [((CUT,), 1), ((COPY,), 2), ((COPY, CUT), 2), ((CUT, COPY), 3), ((COPY, COPY), 6)],
)
def test_placements_say_how_many_copies_there_are(kinds, count):
    given = placed(*kinds)
    grads = shards_of({"w": given})
    assert grads.keys() == {"w"}
    assert grads["w"] is given.grad.to_local()
    assert grads.replicas == {"w": count}


def test_names_and_what_has_no_gradient():
    made = [("a.w", ONE), ("a.b", plain(None))]
    assert [*shards_of(iter(made))] == [*shards_of(dict(made))] == ["a.w"]
    assert [*shards_of(p for _, p in made)] == [0]
    nested = {"a": dict(made), "b": [placed(CUT)]}
    assert [*shards_of(nested)] == ["a.a.w", "b.0"]
    assert shards_of([]) == {}
    main = SimpleNamespace(main_grad=ONE.grad)
    assert [*shards_of([main], attr="main_grad")] == [0]


def test_no_gradient_is_lost_to_another_of_its_name():
    for twice in ([("w", ONE), ("w", plain(None))], {"a.b": ONE, "a": {"b": ONE}}):
        with pytest.raises(ValueError, match=r"parameters has two parameters named '(w|a\.b)'"):
            shards_of(twice)


def test_a_part_that_is_still_on_its_way_is_waited_for():
    given, arrived = placed(CUT), np.ones(2)
    given.grad.to_local = lambda: SimpleNamespace(wait=lambda: arrived)
    assert shards_of([given])[0] is arrived


def test_partial_sums_are_refused():
    partial = Shard()
    partial.is_partial = lambda: True
    with pytest.raises(ValueError, match=r"gradient of 'w' is a DTensor of partial sums.*redistri"):
        shards_of({"w": placed(CUT, partial)})


def test_plain_gradients_need_a_number():
    with pytest.raises(ValueError, match=r"gradient of 'w' is a plain array.*pass plain=1"):
        shards_of({"w": plain(np.ones(2))})
    assert shards_of({"w": plain(np.ones(2))}, plain=4).replicas == {"w": 4}


def test_what_holds_no_gradient_is_named():
    with pytest.raises(TypeError, match=r"parameter 'w' is a float, which has no .grad"):
        shards_of({"w": 1.0})


def mesh_of_two_by_two(rank):
    """Rows over the first axis of the mesh, a copy on the second; a bias on all four."""
    whole, mesh = np.arange(8.0).reshape(4, 2) + 1, Mesh(np.arange(4).reshape(2, 2), rank)
    return {
        "w": dtensor(whole, mesh, CUT, COPY),
        "b": dtensor(np.full(3, 2.0), mesh, COPY, COPY),
    }


EXACT = np.sqrt((np.arange(1, 9) ** 2).sum() + 12.0)


def test_norms_take_them_with_their_replicas():
    def work(group):
        grads = shards_of(mesh_of_two_by_two(group.rank))
        norm = gradkit.clip_grad_norm(grads, EXACT / 2, group=group)
        return float(norm), grads

    for norm, grads in results(work, 4):
        assert norm == pytest.approx(EXACT, rel=1e-15)
        np.testing.assert_allclose(grads["b"], 1.0, rtol=1e-15)


def test_what_the_caller_says_of_replicas_goes_first():
    def work(group):
        grads = shards_of(mesh_of_two_by_two(group.rank))
        return float(gradkit.grad_norm(grads, group=group, replicas={"w": 2, "b": 1}))

    assert results(work, 4) == [pytest.approx(np.sqrt(EXACT**2 + 36), rel=1e-15)] * 4


def test_replicas_can_be_changed_for_tied_weights():
    def work(group):
        grads = ShardedGrads(
            {"tied": np.array([3.0]), "own": np.array([1.0])}, {"tied": 1, "own": 1}
        )
        grads.replicas["tied"] = 2
        return float(gradkit.grad_norm(grads, 1, group=group))

    assert results(work, 2) == [5.0, 5.0]


@pytest.mark.parametrize(
    "call",
    [
        gradkit.grad_norm,
        lambda g: gradkit.clip_grad_norm(g, 1.0),
        lambda g: gradkit.clip_by_global_norm(g, 1.0),
        gradkit.per_tensor_norms,
        lambda g: gradkit.clip_grad_norm([{"encoder": g}], 1.0),
        lambda g: gradkit.clip_grad_block_norm(g, 1.0),
        lambda g: gradkit.clip_by_block_norm(g, 1.0),
        lambda g: gradkit.clip_grad_adaptive(g, g),
        lambda g: gradkit.clip_by_adaptive_norm(g, g),
        lambda g: gradkit.accumulate_grads(g, {"w": np.ones(1)}, norm_out=np.zeros(())),
        lambda g: gradkit.accumulate_grads({"w": np.ones(1)}, g, norm_out=np.zeros(())),
    ],
)
def test_no_function_takes_a_part_for_a_whole(call):
    """Without a group the norm would be that of this rank alone."""
    grads = ShardedGrads({"w": np.array([3.0])}, {"w": 1})
    with pytest.raises(ValueError, match=r"are this rank's parts of gradients; "):
        call(grads)
    assert grads["w"].tolist() == [3.0]


def test_parts_inside_of_other_containers_count_as_often():
    def work(group):
        shards = ShardedGrads({"w": np.array([3.0])}, {"w": 4})
        return float(gradkit.grad_norm([{"encoder": shards}, np.array([2.0])], group=group))

    assert results(work, 4) == [5.0] * 4


def test_clipped_parts_are_parts():
    def work(group):
        grads = shards_of(mesh_of_two_by_two(group.rank))
        clipped, _ = gradkit.clip_by_global_norm(grads, EXACT / 2, group=group)
        assert clipped.replicas == grads.replicas
        return float(gradkit.grad_norm(clipped, group=group))

    assert results(work, 4) == [pytest.approx(EXACT / 2, rel=1e-15)] * 4


def test_they_are_a_dict_to_all_other_functions():
    grads = ShardedGrads({"w": np.array([3.0])}, {"w": 1})
    gradkit.scale_grads(grads, 2.0)
    assert gradkit.names_of(grads) == ["w"]
    assert grads["w"].tolist() == [6.0]

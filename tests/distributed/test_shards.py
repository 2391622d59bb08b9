"""``shards_of``: which parts of sharded gradients a rank has, and how often each counts.

The real DTensors and JAX arrays are in tests/interop; here is what looks like them.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit.distributed import ShardedGrads, shards_of
from tests.ranks import results


class Placement:
    """Shard, Replicate or Partial, as torch.distributed.tensor has them."""

    def __init__(self, kind):
        self.kind = kind

    def is_replicate(self):
        return self.kind == "replicate"

    def is_partial(self):
        return self.kind == "partial"


def dtensor(local, mesh, *kinds):
    return SimpleNamespace(
        device_mesh=SimpleNamespace(shape=mesh),
        placements=tuple(map(Placement, kinds)),
        to_local=lambda: local,
    )


def parameter(grad):
    return SimpleNamespace(grad=grad)


PLACED = {
    ("shard",): 1,
    ("replicate",): 2,
    ("replicate", "shard"): 2,
    ("shard", "replicate"): 3,
    ("replicate", "replicate"): 6,
}


@pytest.mark.parametrize(("kinds", "count"), PLACED.items(), ids=map(" ".join, PLACED))
def test_placements_say_how_many_copies_there_are(kinds, count):
    local = np.ones(3)
    grads = shards_of({"w": parameter(dtensor(local, (2, 3)[: len(kinds)], *kinds))})
    assert grads.keys() == {"w"}
    assert grads["w"] is local
    assert grads.replicas == {"w": count}


def test_names_and_what_has_no_gradient():
    made = [("a.w", parameter(dtensor(np.ones(2), (2,), "shard"))), ("a.b", parameter(None))]
    assert [*shards_of(iter(made))] == [*shards_of(dict(made))] == ["a.w"]
    assert [*shards_of(p for _, p in made)] == [0]
    nested = {"a": dict(made), "b": [parameter(dtensor(np.ones(2), (2,), "shard"))]}
    assert [*shards_of(nested)] == ["a.a.w", "b.0"]
    assert shards_of([]) == {}
    main = SimpleNamespace(main_grad=dtensor(np.ones(1), (2,), "shard"))
    assert [*shards_of([main], attr="main_grad")] == [0]


def test_no_gradient_is_lost_to_another_of_its_name():
    one = parameter(dtensor(np.ones(1), (2,), "shard"))
    for twice in ([("w", one), ("w", parameter(None))], {"a.b": one, "a": {"b": one}}):
        with pytest.raises(ValueError, match=r"parameters has two parameters named '(w|a\.b)'"):
            shards_of(twice)


def test_a_part_that_is_still_on_its_way_is_waited_for():
    arrived = np.ones(2)
    grads = shards_of([parameter(dtensor(SimpleNamespace(wait=lambda: arrived), (2,), "shard"))])
    assert grads[0] is arrived


def test_partial_sums_are_refused():
    grad = dtensor(np.ones(2), (2, 2), "shard", "partial")
    with pytest.raises(ValueError, match=r"gradient of 'w' is a DTensor of partial sums.*redistri"):
        shards_of({"w": parameter(grad)})


def test_plain_gradients_need_a_number():
    with pytest.raises(ValueError, match=r"gradient of 'w' is a plain array.*pass plain=1"):
        shards_of({"w": parameter(np.ones(2))})
    assert shards_of({"w": parameter(np.ones(2))}, plain=4).replicas == {"w": 4}


def test_what_holds_no_gradient_is_named():
    with pytest.raises(TypeError, match=r"parameter 'w' is a float, which has no .grad"):
        shards_of({"w": 1.0})


def mesh_of_two_by_two(rank):
    """Rows over the first axis of the mesh, a copy on the second; a bias on all four."""
    whole = np.arange(8.0).reshape(4, 2) + 1
    rows = whole[2 * (rank // 2) :][:2].copy()
    return {
        "w": parameter(dtensor(rows, (2, 2), "shard", "replicate")),
        "b": parameter(dtensor(np.full(3, 2.0), (2, 2), "replicate", "replicate")),
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
        lambda g: gradkit.grad_norm(g),
        lambda g: gradkit.clip_grad_norm(g, 1.0),
        lambda g: gradkit.clip_by_global_norm(g, 1.0),
    ],
)
def test_parts_are_no_whole(call):
    """Without a group the norm would be that of this rank alone."""
    grads = ShardedGrads({"w": np.array([3.0])}, {"w": 1})
    with pytest.raises(ValueError, match="grads are this rank's parts of gradients; pass group"):
        call(grads)
    assert grads["w"].tolist() == [3.0]


@pytest.mark.parametrize(
    "call",
    [
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

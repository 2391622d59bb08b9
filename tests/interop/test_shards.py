"""``shards_of`` on PyTorch's own DTensors and on JAX arrays that lie on several devices."""

from types import SimpleNamespace

import pytest

import gradkit
from gradkit._ranks.torch import added_up
from gradkit.distributed import shards_of

from .libraries import framework

torch = framework("torch")


@pytest.fixture
def mesh():
    """Two by three ranks, of which this process plays rank 4; collectives do nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    yield init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    torch.distributed.destroy_process_group()


def test_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def grad(*placements):
        return SimpleNamespace(grad=DTensor.from_local(torch.ones(2, 2), mesh, placements))

    placed = {
        "one": (Shard(0), Shard(1)),
        "two": (Replicate(), Shard(0)),
        "three": (Shard(0), Replicate()),
        "six": (Replicate(), Replicate()),
    }
    grads = shards_of({name: grad(*placements) for name, placements in placed.items()})
    assert grads.replicas == {"one": 1, "two": 2, "three": 3, "six": 6}
    gradkit.scale_grads(grads, 2.0)
    assert all(part.eq(2).all() for part in grads.values())
    with pytest.raises(ValueError, match="gradient of 'w' is a DTensor of partial sums"):
        shards_of({"w": grad(Partial(), Shard(0))})


def test_means_of_partial_sums_are_of_the_ranks_that_add_them_up(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def grad(*placements):
        return DTensor.from_local(torch.full((2, 2), 12.0), mesh, placements)

    grads = {
        "sums": grad(Partial(), Partial()),
        "means of three": grad(Replicate(), Partial("avg")),
        "means of six": grad(Partial("avg"), Partial("avg")),
        "whole": grad(Replicate(), Replicate()),
    }
    totals = {name: total.to_local()[0, 0].item() for name, total in added_up(grads).items()}
    assert totals == {"sums": 12, "means of three": 4, "means of six": 2}  # nobody adds anything


def test_parts_are_the_gradients_own_memory(mesh):
    from torch.distributed.tensor import DTensor, Shard

    local = torch.ones(4)
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh["shard"], [Shard(0)]))
    weight.grad = DTensor.from_local(local, mesh["shard"], [Shard(0)])
    grads = shards_of({"weight": weight})
    gradkit.zero_grad(grads)
    assert weight.grad.to_local().eq(0).all()
    with pytest.raises(TypeError, match=r"is a DTensor.*shards_of"):
        gradkit.grad_norm([weight.grad])


def test_gradients_themselves(mesh):
    from torch.distributed.tensor import DTensor, Shard

    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    grad = DTensor.from_local(torch.ones(4), mesh["shard"], [Shard(0)])
    assert [*shards_of({"w": grad, "frozen": frozen})] == ["w"]
    assert [*shards_of([torch.ones(3)], plain=2).replicas.values()] == [2]
    assert gradkit.grads_of([frozen]) == []
    for wrong in (gradkit.grads_of, lambda grads: gradkit.named_grads_of({"w": grads[0]})):
        with pytest.raises(TypeError, match="holds tensors that take no gradients"):
            wrong([torch.ones(3)])


PROGRAM = """
import jax, numpy as np, gradkit
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"), axis_types=(kind,) * 2)
    whole = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    grads = {
        "split": jax.device_put(whole, NamedSharding(mesh, P("a", None))),
        "both": jax.device_put(whole, NamedSharding(mesh, P("a", "b"))),
        "copies": jax.device_put(whole, NamedSharding(mesh, P())),
    }
    parts = gradkit.distributed.shards_of(grads)
    print({name: (len(part), parts.replicas[name]) for name, part in parts.items()})
    group = gradkit.distributed.threads(1)[0]
    print(float(gradkit.grad_norm(parts, group=group)) / float(np.sqrt(3 * (whole**2).sum())))
"""


def test_jax_arrays_on_four_devices(run_alone):
    framework("jax")
    flags = "--xla_force_host_platform_device_count=4"
    parts, ratio, *explicit = run_alone(PROGRAM, XLA_FLAGS=flags, JAX_PLATFORMS="cpu").splitlines()
    assert parts == str({"split": (2, [1, 1]), "both": (4, [1] * 4), "copies": (1, [1])})
    assert float(ratio) == pytest.approx(1, rel=1e-7)
    assert explicit == [parts, ratio]

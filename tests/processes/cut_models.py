"""Checks of models that are cut over ranks: each has the norm of the uncut model."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit.distributed import check_copies, from_torch, shards_of
from tests import oracles, tolerances
from tests.meshes import Layout
from tests.processes.norms import bits

ROOT = Path(__file__).parents[2]
UNIT = tolerances.UNIT["float64"]


def layouts(place):
    """Drawn at random: pipeline, data, expert and tensor parallelism, tied weights."""
    found = []
    for seed in range(12):
        layout = Layout((place.size, seed), place.size)
        shards = layout.shards(place.group, place.array)
        check_copies(shards, place.group)
        norm = gradkit.grad_norm(shards, group=place.group)
        shards = layout.shards(place.group, np.float32)
        exact = gradkit.grad_norm(shards, group=place.group, exact=True)
        found.append((float(norm), float(exact), list(layout.wholes())))
    for norm, exact, wholes in found:
        assert oracles.off_by(norm, oracles.norm([w for w in wholes if w.size])) <= 8 * UNIT
        of_one = gradkit.grad_norm([np.float32(whole) for whole in wholes], exact=True)
        assert exact == float(of_one)
    return bits(*(each[0] for each in found), *(each[1] for each in found))


def a_gap(place):
    """A part that no rank holds is an error on all, which names the ranks with the others."""
    with pytest.raises(gradkit.RankError) as caught:
        gradkit.grad_norm(shards_of(_halves(place), group=place.group), group=place.group)
    assert caught.value.ranks == {0: "w[0:1, 0:2] of (2, 2)"}


def _halves(place):
    from tests.meshes import Mesh, Shard, dtensor

    parameter = dtensor(np.ones((2, 2)), Mesh([0, place.size], place.rank), Shard(0))
    return {"w": parameter} if place.rank == 0 else {}


# With PyTorch's own DTensors, on four ranks.


def dtensors(_place):
    """On the mesh, its rows and its columns; uneven, empty on some ranks; plain tensors beside."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import gradkit.torch as ours

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    norms = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        wholes, named = [], {}
        for k in range(8):
            whole = torch.tensor(rng.integers(-8, 9, rng.integers(0, 8, 2)) / 8)
            chosen = [mesh, mesh["dp"], mesh["tp"], None][k % 4]
            parameter = torch.nn.Parameter(torch.zeros_like(whole))
            parameter.grad = whole.clone()
            if chosen is not None:
                kinds = [Replicate(), Shard(0), Shard(1)]
                placements = [kinds[i] for i in rng.integers(0, 3, chosen.ndim)]
                zeros = distribute_tensor(torch.zeros_like(whole), chosen, placements)
                parameter = torch.nn.Parameter(zeros)
                parameter.grad = distribute_tensor(whole.clone(), chosen, placements)
            named[f"w{k}"] = parameter
            wholes.append(whole.numpy())
        group = from_torch()
        norm = ours.clip_grad_norm_(named.items(), 0.5, group=group, plain="copies")
        expected = oracles.norm([w for w in wholes if w.size])
        assert oracles.off_by(norm, expected) <= 8 * UNIT
        for parameter, whole in zip(named.values(), wholes, strict=True):
            full = getattr(parameter.grad, "full_tensor", lambda p=parameter: p.grad)()
            np.testing.assert_allclose(full, whole * (0.5 / float(norm)), rtol=1e-12)
        norms.append(float(norm))
    return bits(*norms)


class _Trained:
    """A model of two layers behind a norm, trained for some steps."""

    def __init__(self, cut=lambda model: model):
        import torch

        torch.manual_seed(7)
        layers = [torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6)]
        self.model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Sequential(*layers))
        self.model = cut(self.model)
        self.norms = []

    def train(self, x, **options):
        import torch

        import gradkit.torch as ours

        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        for _ in range(3):
            (self.model(x) - x).square().mean().backward()
            given = self.model.named_parameters() if options else self.model.parameters()
            self.norms.append(float(ours.clip_grad_norm_(given, 0.1, **options)))
            optimizer.step()
            optimizer.zero_grad()
        weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters()]
        return self.norms, [weight.detach() for weight in weights]


def _as_one_process(cut, share, **options):
    import torch

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    norms, weights = _Trained(cut).train(x[share], group=from_torch(), **options)
    expected_norms, expected = _Trained().train(x)
    assert norms[0] > 0.1  # so that it clips
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    return bits(*norms)


def two_dimensions(place):
    """Tensor parallelism, then ``fully_shard``: parameters on the mesh, norms on a slice of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def cut(model):
        parallelize_module(model[1], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    return _as_one_process(cut, slice(place.rank // 2, None, 2))


def hybrid_sharding(place):
    """``fully_shard`` on a mesh of two dimensions: shards, and copies of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def cut(model):
        fully_shard(model[1], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return _as_one_process(cut, slice(place.rank, None, 4))


def data_parallelism(place):
    """DDP's gradients are plain tensors, and every rank has a copy."""
    from torch.nn.parallel import DistributedDataParallel

    share = slice(place.rank, None, 4)
    return _as_one_process(DistributedDataParallel, share, plain="copies")


PAGE = (ROOT / "docs" / "parallelism.md").read_text()


def the_page(place):
    """The code of docs/parallelism.md, in order: DTensors, then Megatron-LM's plain tensors.

    Two stages of two ranks count their layers from 0. Each rank has its own expert and its own
    slice of a linear layer, and all have a copy of the tied weight.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    stage = place.rank // 2
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE, re.M | re.S)
    tied = ["output_layer.weight", "embedding.word_embeddings.weight"][stage == 0]
    values = {"norm": 1.0 + stage, "experts.0.w": 3.0 + place.rank, tied: 10.0, "linear": 20.0}
    given = {name: _parameter(torch.tensor([value])) for name, value in values.items()}
    given["linear"].tensor_model_parallel = True
    given["unused"] = _parameter(None)

    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(1.0, 7)
    placed = torch.nn.Parameter(distribute_tensor(torch.zeros(6), mesh, [Shard(0)]))
    placed.grad = distribute_tensor(whole, mesh, [Shard(0)])
    model = torch.nn.ParameterDict({"w": placed})
    ranks = {"pp_rank": stage, "ep_rank": place.rank % 2, "tp_rank": place.rank % 2}
    scope = {"gradkit": gradkit, "model": model, "max_norm": 1.0, "model_parts": [model], **ranks}
    norms = []
    for number, block in enumerate(blocks):
        if number == 2:
            scope["model"] = SimpleNamespace(named_parameters=given.items)
            scope["named"] = given.items()
        elif number == 3:
            scope["plain"] = lambda name, _: "own" if "experts" in name else "copies"
        exec(block, scope)
        norms.append(float(scope["norm"]))
    squares = [1, 4, 9, 16, 25, 36, 100, *[400] * 4]
    expected = [91**0.5, 1.0, sum(squares) ** 0.5, 1.0, 1.0, 1.0]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    assert [scope["plain"](name, None) for name in ("experts.0", "norm")] == ["own", "copies"]
    return bits(*norms)


def _parameter(grad):
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = grad
    return parameter


def without_names(_place):
    """On a mesh of all ranks positions are enough; on slices an error names the first."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    import gradkit.torch as ours

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def parameter(chosen):
        placements = [Replicate()] * chosen.ndim
        made = torch.nn.Parameter(distribute_tensor(torch.zeros(1), chosen, placements))
        made.grad = distribute_tensor(torch.tensor([3.0]), chosen, placements)
        return made

    norm = ours.clip_grad_norm_([parameter(mesh)], 1.0, group=from_torch())
    assert float(norm) == 3.0
    with pytest.raises(gradkit.RankError, match=r"rank 0: 0\[0:1\] of \(1,\) on ranks \(0, 2\)"):
        ours.clip_grad_norm_([parameter(mesh["dp"])], 1.0, group=from_torch())


CHECKS = {"models cut at random": layouts, "a part that is missing": a_gap}
OF_TORCH = {
    "DTensors on slices of a mesh": dtensors,
    "tensor parallelism and fully_shard": two_dimensions,
    "hybrid sharding": hybrid_sharding,
    "DDP with a group": data_parallelism,
    "the page on parallelism": the_page,
    "DTensors without names": without_names,
}

"""Checks of ``gradkit.torch`` on DTensors that several processes hold."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

from gradkit.distributed import from_torch
from tests.processes.norms import bits

SHAPES = ((5, 3), (4,), (1, 2))  # rows that ranks share unevenly; one rank has none of some


def clipping(place):
    """On a mesh of one dimension and of two, in which copies count once."""
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (place.size,))
    square = init_device_mesh("cpu", (2, place.size // 2), mesh_dim_names=("copies", "parts"))
    return "".join(_clipped(mesh) for mesh in (line, square))


def _clipped(mesh):
    import torch
    from torch.distributed.tensor import Replicate, Shard

    import gradkit.torch as ours

    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    rng = np.random.default_rng(5)
    grads = [torch.tensor(rng.integers(-8, 9, shape) / 8) for shape in SHAPES]
    expected = float(sum((grad**2).sum() for grad in grads)) ** 0.5

    def given():
        return [_parameter(grad, mesh, placements) for grad in grads]

    parameters = given()
    norm = ours.clip_grad_norm_(parameters, 0.5)
    assert abs(float(norm) - expected) <= 1e-12 * expected
    whole = [p.grad.full_tensor() for p in parameters]
    torch.testing.assert_close(whole, [grad * (0.5 / expected) for grad in grads])

    stats = ours.grad_stats(dict(zip("abc", given(), strict=True)).items())
    assert stats.names == ("a", "b", "c")
    norms = [float(grad.norm()) for grad in grads]
    np.testing.assert_allclose(stats.norm, norms, rtol=1e-12)
    assert stats.zeros.tolist() == [int((grad == 0).sum()) for grad in grads]
    named = list(zip("abc", given(), strict=True))
    again = ours.grad_stats(named, group=from_torch())
    assert (again.names, again.table.tolist()) == (stats.names, stats.table.tolist())

    parameters = given()
    total = ours.get_total_norm([p.grad for p in parameters])
    ours.clip_grads_with_norm_(parameters, 0.5, total)
    assert all(torch.equal(p.grad.full_tensor(), w) for p, w in zip(parameters, whole, strict=True))

    accumulator = ours.GradAccumulator(parameters := given())
    accumulator.add()
    for parameter, again in zip(parameters, given(), strict=True):
        parameter.grad = again.grad
    twice = accumulator.finish(0.5)
    assert float(twice) == 2 * float(norm)
    return bits(*(float(n) for n in (norm, total, twice)))


def _parameter(grad, mesh, placements):
    import torch
    from torch.distributed.tensor import distribute_tensor

    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements))
    parameter.grad = distribute_tensor(grad, mesh, placements)
    return parameter


def partial_sums(place):
    """Beside others, with a group and without, in the norm of PyTorch; they stay partial sums."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    import gradkit.torch as ours

    mesh = init_device_mesh("cpu", (place.size,))
    rng = np.random.default_rng(place.rank)

    kinds = {"a": Partial(), "b": Replicate(), "c": Partial("avg"), "d": Partial()}

    def given():
        found = {}
        for name, kind in kinds.items():
            dtype = torch.float32 if name == "d" else torch.float64
            own = torch.tensor(rng.integers(-8, 9, (3, 2)) / 8, dtype=dtype)
            own = torch.ones_like(own) if name == "b" else own
            zeros = DTensor.from_local(torch.zeros_like(own), mesh, [Replicate()])
            found[name] = torch.nn.Parameter(zeros)
            found[name].grad = DTensor.from_local(own, mesh, [kind])
        rows = torch.full((place.size, 2), 0.5, dtype=torch.float64)
        return found | {"e": _parameter(rows, mesh, [Shard(0)])}

    norms = []
    for options in ({}, {"group": from_torch()}, {"scale": 0.5, "eps_mode": "add"}):
        named, scale, eps = given(), options.get("scale", 1.0), 1e-6 * ("eps_mode" in options)
        grads = [p.grad for p in named.values()]
        before = [scale * grad.full_tensor() for grad in grads]
        expected = float(sum((g.double() ** 2).sum() for g in before)) ** 0.5
        total = ours.get_total_norm(grads, scale=scale)
        norm = ours.clip_grad_norm_(named.items() if options else [*named.values()], 0.5, **options)
        for found in (norm, total):
            assert abs(float(found) - expected) <= 1e-12 * expected
        for name, grad, whole in zip(named, grads, before, strict=True):
            assert grad.placements[0].is_partial() == (name in "acd")
            near = 1e-6 if name == "d" else 1e-12
            clipped = whole * (0.5 / (expected + eps))
            torch.testing.assert_close(grad.full_tensor(), clipped, rtol=near, atol=near)
        ours.clip_grads_with_norm_(named.values(), 0.25, total_norm=torch.tensor(0.5))
        assert abs(float(ours.get_total_norm(grads)) - 0.25) < 1e-6
        norms.append(float(norm))
    named = given()
    named["a"].grad.to_local()[0, 0] = np.inf
    ours.clip_grad_norm_(named.values(), 0.5, nonfinite="zero")
    assert not any(p.grad.full_tensor().any() for p in named.values())
    with pytest.raises(ValueError, match="clip does not go with DTensors of partial sums"):
        ours.clip_grad_norm_(given().items(), 0.5, clip=lambda *_: True)
    return bits(*norms)


def sharded_training(place):
    """``replace_norms``, then checkpointing and ``fully_shard``: steps are those of one process."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    import gradkit.torch as ours

    def trained(x, *, shard):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), *map(_block, range(2)))
        ours.replace_norms(model)
        if shard:
            for name in ("1", "2"):
                model.set_submodule(name, fully_shard(checkpoint_wrapper(model[int(name)])))
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        norms = []
        for _ in range(4):
            (model(x) - x.mean(-1, keepdim=True)).square().mean().backward()
            norms.append(float(ours.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms, [p.full_tensor() if shard else p for p in model.parameters()]

    batch = torch.randn(4 * place.size, 3, 6, generator=torch.Generator().manual_seed(3))
    norms, weights = trained(batch[place.rank :: place.size], shard=True)
    expected_norms, expected = trained(batch, shard=False)
    assert norms[0] > 0.1  # so that it clips
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    return bits(*norms, *(weight.detach().double().numpy() for weight in weights))


def parallel_training(place):
    """The page's recipe for DDP: the weights of one process with the whole batch."""
    import torch

    page = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
    section = page[page.index("## DistributedDataParallel") :]
    names = {}
    exec(re.search(r"^```py\n(.*?)^```", section, re.M | re.S)[1], names)

    def trained(rank, size):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), *map(_block, range(2)))
        generator = torch.Generator().manual_seed(3)
        batches = [torch.randn(2, 4 * place.size, 8, generator=generator) for _ in range(4)]
        names["train"](model, [(x[rank::size, :6], y[rank::size]) for x, y in batches])
        return list(model.parameters())

    weights = trained(place.rank, place.size)
    names["DistributedDataParallel"] = lambda model: model
    torch.testing.assert_close(weights, trained(0, 1), rtol=1e-4, atol=1e-6)
    return bits(*(weight.detach().double().numpy() for weight in weights))


def accumulation_under_ddp(place):
    """Whichever passes ``no_sync`` leaves out, steps are those of one process with the whole batch.

    Ranks have other numbers of micro-batches where none of these meets the others.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import gradkit.torch as ours

    x = torch.randn(12 * place.size, 6, generator=torch.Generator().manual_seed(3))

    def trained(parts, synced, wrap, scale):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        model.append(torch.nn.Linear(2, 1))  # which nothing needs
        wrapped = wrap(model)
        accumulator = ours.GradAccumulator(wrapped)
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=1.0), []
        for own in parts:
            for k, rows in enumerate(own):
                quiet = contextlib.nullcontext() if k in synced else wrapped.no_sync()
                with quiet:
                    wrapped(rows)[0].square().sum().backward()
                accumulator.add()
            assert all(p.grad is None for p in model.parameters())
            norms.append(float(accumulator.finish(0.5, scale=scale / len(x))))
            assert model[-1].weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        return torch.tensor(norms), list(model.parameters())

    class Model(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, rows):
            return self.layers[:3](rows), None

        no_sync = staticmethod(contextlib.nullcontext)

    inside = DistributedDataParallel(torch.nn.Linear(2, 1))
    for given in (inside.parameters(), inside.module) if place.size > 1 else ():
        with pytest.raises(ValueError, match="DistributedDataParallel module; pass that module"):
            ours.GradAccumulator(given)
    ours.GradAccumulator(torch.nn.Linear(2, 1).parameters())
    expected = trained([[x]] * 3, (), Model, 1)
    assert expected[0][0] > 0.5  # so that it clips
    found = []
    for synced in ((), (0,), (2,), (0, 1, 2)):
        own = x[place.rank :: place.size].split([1, 8, 3])
        if not synced and place.rank == 1:
            own = [torch.cat(own)]

        def wrap(model):
            return DistributedDataParallel(Model(model), find_unused_parameters=True)

        found.append(trained([own] * 3, synced, wrap, place.size))
        torch.testing.assert_close(found[-1], expected, rtol=1e-4, atol=1e-6)
    return "".join(bits(*(w.detach().numpy() for w in weights)) for _, weights in found)


def accumulation_in_halves(place):
    """Of the ranks, beside parameters that are used on one, ignored or frozen."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import gradkit.torch as ours

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("all", "one", "ignored", "frozen"):
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))
            self.frozen.requires_grad_(False)
            self.frozen.grad = own.clone()

        def forward(self):
            used = self.all + self.ignored + (self.one if place.rank == 1 else 0)
            return (used * own).sum()

    first, own = place.rank // 2 * 2, torch.full((2,), place.rank + 1.0)
    pairs = [torch.distributed.new_group([k, k + 1]) for k in range(0, place.size, 2)]
    model = Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored"])
    options = {"process_group": pairs[first // 2], "find_unused_parameters": True}
    wrapped = DistributedDataParallel(model, **options)
    accumulator = ours.GradAccumulator(wrapped)
    with wrapped.no_sync():
        wrapped().backward()
    accumulator.finish()
    assert (model.one.grad is None) == (first > 0)
    assert model.one.grad is None or (model.one.grad == 1).all()
    assert (model.all.grad == first + 1.5).all()
    assert all((p.grad == place.rank + 1).all() for p in (model.ignored, model.frozen))
    return ""


def _block(_):
    from torch import nn

    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.RMSNorm(8))

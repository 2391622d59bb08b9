"""Checks of ``gradkit.torch`` on DTensors that several processes hold."""

import numpy as np

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

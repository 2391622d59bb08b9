"""Checks of batch norm: each runs on every rank, and returns what all must have alike."""

import numpy as np

import gradkit
from tests.processes.norms import bits

EPS = 1e-5
ROWS, CHANNELS = 37, 5
OFF = 1e-9  # of values about 1, where the mean of float64 data is 4096


def batch(place):
    """A batch with a large mean, the gradient of its output, and which rows are this rank's."""
    rng = np.random.default_rng(11)
    x = 4096 + rng.standard_normal((ROWS, CHANNELS))
    dy, scale = rng.standard_normal(x.shape), rng.standard_normal(CHANNELS)
    cuts = np.sort(rng.integers(0, ROWS + 1, place.size - 1))
    cuts[len(cuts) // 2 :] = ROWS  # some ranks have no rows
    ends = [0, *cuts.tolist(), ROWS]
    return x, dy, scale, slice(ends[place.rank], ends[place.rank + 1])


def forward_and_backward(place):
    x, dy, scale, own = batch(place)
    y, mean, inv_std = gradkit.batch_norm(x[own], scale, scale, eps=EPS, group=place.group)
    dx, dscale, dbias = gradkit.batch_norm_grad(
        dy[own], x[own], scale, mean, inv_std, group=place.group
    )
    whole = gradkit.batch_norm(x, scale, scale, eps=EPS)
    of_whole = gradkit.batch_norm_grad(dy, x, scale, *whole[1:])
    np.testing.assert_allclose(y, whole[0][own], rtol=0, atol=OFF)
    np.testing.assert_allclose(dx, of_whole[0][own], rtol=0, atol=OFF)
    for gradient, expected in ((dscale, of_whole[1]), (dbias, of_whole[2])):
        total = gradient.copy()
        place.add_up(total)
        np.testing.assert_allclose(total, expected, rtol=0, atol=100 * OFF)
    return bits(mean, inv_std)


def own_arrays(place):
    """The library's own arrays, JAX's in float32."""
    x, _, _, own = batch(place)
    y, mean, inv_std = gradkit.batch_norm(place.array(x[own] - 4096), eps=EPS, group=place.group)
    whole = gradkit.batch_norm(x - 4096, eps=EPS)
    assert type(y) is type(place.array(x))
    np.testing.assert_allclose(np.asarray(y), whole[0][own], rtol=0, atol=1e-5)
    return bits(mean, inv_std)


def other_channels(place):
    """Ranks that do not fit together are told, and write nothing."""
    if place.size == 1:
        return ""
    x = np.ones((3, 4 + place.rank % 2))
    y = np.full_like(x, 7)
    try:
        gradkit.batch_norm(x, out=(y, None, None), group=place.group)
    except gradkit.RankError as error:
        assert (y == 7).all()
        return str(error)
    raise AssertionError("nobody noticed")


def modules(place):
    """``gradkit.torch``'s, on this rank's rows: the weights' gradients add up to the batch's."""
    import torch

    import gradkit.torch as ours

    x, dy, _, own = batch(place)
    found = []
    for rows, group in ((slice(None), None), (own, place.group)):
        module = ours.BatchNorm1d(CHANNELS, dtype=torch.float64, group=group)
        part = torch.tensor(x[rows], requires_grad=True)
        y = module(part)
        y.backward(torch.tensor(dy[rows]))
        found.append((module, y.detach().numpy(), part.grad.numpy()))
    (whole, *expected), (module, *results) = found
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted[own], rtol=0, atol=OFF)
    for name in ("weight", "bias"):
        total = getattr(module, name).grad.numpy().copy()
        place.add_up(total)
        np.testing.assert_allclose(total, getattr(whole, name).grad, rtol=0, atol=100 * OFF)
    np.testing.assert_allclose(module.running_var, whole.running_var, rtol=1e-12)
    return bits(module.running_mean.numpy(), module.running_var.numpy())


CHECKS = {
    "batch norm": forward_and_backward,
    "batch norm on own arrays": own_arrays,
    "batch norm of other channels": other_channels,
}

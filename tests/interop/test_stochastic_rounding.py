"""Sums that are rounded at random, in tensors of every framework that may be written."""

import numpy as np
import pytest

import gradkit


def test_the_bits_are_those_of_numpy(mutable):
    if "float16" not in mutable.dtypes:
        pytest.skip("no 16-bit floats")
    hosts = [np.linspace(low, 1, 35).astype(np.float16).reshape(5, 7) for low in (-2, -3)]
    buffer, grad = (mutable.make(host.copy()) for host in hosts)
    seed = mutable.make(np.array(3, np.int64))
    options = {"scale": 0.3, "rounding": "stochastic", "offsets": {"w": 12}}
    found = gradkit.accumulate_grads({"w": buffer}, {"w": grad}, seed=seed, **options)
    assert found["w"] is buffer
    gradkit.accumulate_grads({"w": hosts[0]}, {"w": hosts[1]}, seed=3, **options)
    np.testing.assert_array_equal(mutable.read(buffer), hosts[0])


def test_bfloat16_beside_the_bits_that_torch_would_cut(torch):
    """A sum becomes a neighbour, and on average itself."""
    buffer, grad = torch.ones(20_000, dtype=torch.bfloat16), torch.full((20_000,), 2.0**-9)
    gradkit.accumulate_grads(
        [buffer], [grad.bfloat16()], rounding="stochastic", seed=torch.tensor(11)
    )
    assert set(buffer.tolist()) == {1, 1 + 2.0**-7}
    assert abs(float((buffer > 1).double().mean()) - 0.25) < 4 * (0.25 * 0.75 / 20_000) ** 0.5


def test_a_seed_may_be_unsigned(torch):
    buffers = [[torch.linspace(0, 1, 9, dtype=torch.float16)] for _ in range(2)]
    for own, dtype in zip(buffers, (torch.int64, torch.uint64), strict=True):
        seed = torch.tensor(5, dtype=dtype)
        gradkit.accumulate_grads(own, own, scale=0.3, rounding="stochastic", seed=seed)
    assert torch.equal(buffers[0][0], buffers[1][0])

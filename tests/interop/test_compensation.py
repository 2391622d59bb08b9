"""Sums that keep what rounding drops, in tensors of every framework that may be written."""

import numpy as np
import pytest

import gradkit


def test_the_bits_are_those_of_numpy(mutable):
    hosts = [np.linspace(low, 1, 35, dtype=np.float32).reshape(5, 7) for low in (-2, -1e-8, -3)]
    buffer, kept, grad = (mutable.make(host.copy()) for host in hosts)
    found = gradkit.accumulate_grads(
        {"w": buffer}, {"w": grad}, scale=0.3, compensation={"w": kept}
    )
    assert found["w"] is buffer
    gradkit.accumulate_grad(buffer, grad, compensation=kept)
    for scale in (0.3, 1.0):
        gradkit.accumulate_grads([hosts[0]], [hosts[2]], scale=scale, compensation=[hosts[1]])
    assert hosts[1].any()
    np.testing.assert_array_equal(mutable.read(buffer), hosts[0])
    np.testing.assert_array_equal(mutable.read(kept), hosts[1])


def test_gradients_of_bfloat16_parameters(torch):
    """``.grad`` is the sum: what an optimiser reads is rounded once."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    weight.grad, kept = (torch.zeros_like(weight).detach() for _ in range(2))
    for _ in range(300):
        grad = torch.ones(4, dtype=torch.bfloat16)
        gradkit.accumulate_grads([weight.grad], [grad], compensation=[kept])
    assert (weight.grad == 300).all()


def test_what_is_never_written_is_refused(immutable):
    given = [immutable.make(np.ones(3, np.float32)) for _ in range(3)]
    with pytest.raises(TypeError, match=r"buffers\[0\] is a .* array, whose memory is never"):
        gradkit.accumulate_grads(given[:1], given[1:2], compensation=given[2:])

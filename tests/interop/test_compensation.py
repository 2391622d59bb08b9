"""Sums that keep what rounding drops, as the gradients of PyTorch's parameters."""

import gradkit


def test_gradients_of_bfloat16_parameters(torch):
    """``.grad`` is the sum: what an optimiser reads is rounded once."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    weight.grad, kept = (torch.zeros_like(weight).detach() for _ in range(2))
    for _ in range(300):
        grad = torch.ones(4, dtype=torch.bfloat16)
        gradkit.accumulate_grads([weight.grad], [grad], compensation=[kept])
    assert (weight.grad == 300).all()

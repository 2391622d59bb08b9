"""The gradient noise scale by norms of micro-batches in tensors."""

import numpy as np

import gradkit


def test_norms_of_micro_batches_in_tensors(torch):
    small, buffer = torch.zeros(2, dtype=torch.float64), [torch.zeros(3)]
    for k, value in enumerate((1.0, 3.0)):
        micro = [torch.full((3,), value)]
        gradkit.accumulate_grads(buffer, micro, scale=0.5, grad_norm_out=small[k])
    scale, _ = gradkit.noise_scale(small, 4.0, gradkit.grad_norm(buffer), 8)
    np.testing.assert_allclose(small, np.sqrt([3.0, 27.0]))
    np.testing.assert_allclose(float(scale), (15 - 12) * 8 / (2 * 12 - 15))

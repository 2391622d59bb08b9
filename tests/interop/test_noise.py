"""The gradient noise scale on tensors of every framework."""

import numpy as np

import gradkit


def test_results_are_of_the_callers_type(lib):
    close = 0 if lib.norm_dtype == "float64" else 1e-6
    state = known = None
    for level in (1.0, 2.0):
        small, big = np.array([3.0, 5.0]) * level, np.array(3.5)
        given = [lib.make(host.astype(lib.norm_dtype)) for host in (small, big)]
        scale, state = gradkit.noise_scale(given[0], [3, 5], given[1], 8, state=state)
        ref, known = gradkit.noise_scale(small, [3, 5], 3.5, 8, state=known)
        for found, exact in ((scale, ref), (state, known)):
            assert isinstance(found, lib.kind)
            assert lib.dtype(found) == lib.norm_dtype
            np.testing.assert_allclose(lib.read(found), exact, rtol=close)
        number, _ = gradkit.noise_scale(given[0], 4.0, 3.5, 8)
        assert lib.device(number) == lib.device(given[0])


def test_norms_of_micro_batches_in_tensors(torch):
    small, buffer = torch.zeros(2, dtype=torch.float64), [torch.zeros(3)]
    for k, value in enumerate((1.0, 3.0)):
        micro = [torch.full((3,), value)]
        gradkit.accumulate_grads(buffer, micro, scale=0.5, grad_norm_out=small[k])
    scale, _ = gradkit.noise_scale(small, 4.0, gradkit.grad_norm(buffer), 8)
    np.testing.assert_allclose(small, np.sqrt([3.0, 27.0]))
    np.testing.assert_allclose(float(scale), (15 - 12) * 8 / (2 * 12 - 15))

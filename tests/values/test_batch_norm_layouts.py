"""Batch norm is the same whatever mixture of memory layouts its arrays have."""

import numpy as np
import pytest

import gradkit
from tests.layouts import LAYOUTS


@pytest.mark.parametrize("shape", [(3, 3, 5), (2, 3, 5), (3, 3), (3, 3, 3, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_may_differ(shape, layout):
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, *shape))
    for axis in range(len(shape)):
        _, mean, inv_std = gradkit.batch_norm(x, channel_axis=axis)
        want, _, _ = gradkit.batch_norm_grad(dy, x, None, mean, inv_std, channel_axis=axis)
        other = LAYOUTS[layout](x)
        got, _, _ = gradkit.batch_norm_grad(dy, other, None, mean, inv_std, channel_axis=axis)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)

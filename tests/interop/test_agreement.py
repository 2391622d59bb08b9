"""Agreement with what the frameworks compute themselves, on drawn input.

Values are eighths between -8 and 8 and the epsilon of a norm is 0.1, so that no row is
ill-conditioned: then the two sides may differ by rounding alone, ``TOLERANCE`` (about 1e4
units of the dtype, which covers sums of up to 200 terms of up to 1000).
"""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradkit

from .libraries import framework

EPS = 0.1
TOLERANCE = {"float64": 1e-11, "float32": 5e-3}
quick = settings(deadline=None, max_examples=25)

eighths = st.integers(-64, 64).map(lambda n: n / 8)


def arrays(shape, dtype):
    return hnp.arrays(dtype, shape, elements=eighths)


@st.composite
def gradients(draw):
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    return draw(st.lists(shapes.flatmap(lambda s: arrays(s, "float32")), min_size=1, max_size=5))


@st.composite
def problems(draw, *, channels):
    """x, scale, bias and dy of (rows, columns), or of (batch, channels, *)."""
    dtype = draw(st.sampled_from(["float32", "float64"]))
    shape = tuple(draw(st.lists(st.integers(2, 7), min_size=2, max_size=4)))
    width = (shape[1],) if channels else shape[-1:]
    positive = hnp.arrays(dtype, width, elements=st.integers(4, 32).map(lambda n: n / 8))
    drawn = arrays(shape, dtype), positive, arrays(width, dtype), arrays(shape, dtype)
    return tuple(map(draw, drawn))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm", "group_norm"])
@quick
@given(data=st.data())
def test_norms_agree_with_pytorch(name, data):
    """Both passes; images channels first, and last by their strides; RMS norm has no bias."""
    torch = framework("torch")
    channels = name in ("batch_norm", "group_norm")
    *values, dy = map(torch.tensor, data.draw(problems(channels=channels)))
    x, *parameters = leaves = [v.requires_grad_() for v in values[: 2 if "rms" in name else 3]]
    theirs, ours = getattr(torch.nn.functional, name), partial(getattr(gradkit, name), eps=EPS)
    if name == "batch_norm":
        expected = theirs(x, None, None, *parameters, training=True, eps=EPS)
    else:
        sizes = [n for n in range(1, x.shape[1] + 1) if x.shape[1] % n == 0]
        how = data.draw(st.sampled_from(sizes)) if channels else x.shape[-1:]
        expected = theirs(x, how, *parameters, eps=EPS)
        ours = partial(ours, num_groups=how) if channels else ours
    wanted = (expected.detach(), *torch.autograd.grad(expected, leaves, dy))
    x = x.detach()
    if channels and data.draw(st.booleans()):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    named = dict(zip(("scale", "bias"), parameters, strict=False))
    y, *statistics = ours(x, **named)
    found = y, *getattr(gradkit, f"{name}_grad")(dy, x, parameters[0], *statistics)
    close = TOLERANCE[str(dy.dtype).removeprefix("torch.")]
    for label, got, want in zip(("y", "dx", "dscale", "dbias"), found, wanted, strict=False):
        torch.testing.assert_close(got, want, rtol=close, atol=close, msg=label)


@quick
@given(gradients(), st.floats(0.01, 100))
def test_global_norm_clipping_agrees_with_tensorflow(values, max_norm):
    tf = framework("tensorflow")
    grads = [tf.constant(v) for v in values]
    expected, expected_norm = tf.clip_by_global_norm(grads, max_norm)
    clipped, norm = gradkit.clip_by_global_norm(grads, max_norm)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)
    for got, want in zip(clipped, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-30)

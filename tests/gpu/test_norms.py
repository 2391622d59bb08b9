"""Norms on a GPU: graphs that replay while others use the memory pool."""

import numpy as np
import pytest

import gradkit
from tests.backends import has_gpu
from tests.tolerances import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no CUDA device"),
]

NAMES = ("dy", "x", "scale", "bias")


def arrays(width, seed):
    """Rows that cannot be read where they lie, so that copies of them are made."""
    import cupy

    rng = np.random.default_rng(seed)
    shapes = ((65, 2 * width), (65, 2 * width), (2 * width,), (2 * width,))
    drawn = (cupy.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return {name: array[..., ::2] for name, array in zip(NAMES, drawn, strict=True)}


def step(dy, x, scale, bias):
    """Forward and back through each norm; all results."""
    y, mean, inv_std = gradkit.layer_norm(x, scale, bias)
    gradients = gradkit.layer_norm_grad(dy, x, scale, mean, inv_std)
    rms = gradkit.rms_norm(x, scale)
    batch = gradkit.batch_norm(x, scale, bias, engine="native")
    return (
        *(y, mean, inv_std, *gradients, *rms, *batch),
        *gradkit.rms_norm_grad(dy, x, scale, rms[1]),
        *gradkit.add_rms_norm(x, dy, scale, scale_offset=1.0),
        *gradkit.layer_norm_grad(dy, x, scale, mean, inv_std, ds=x, scale_offset=1.0),
        *gradkit.batch_norm_grad(dy, x, scale, *batch[1:], engine="native"),
    )


@pytest.mark.guarantee("Captured")
@pytest.mark.parametrize("width", [36, 1025, 20000])
def test_captured_norms_replay_on_new_values(width):
    import cupy

    given = arrays(width, 0)
    step(**given)  # compiles, and fills the pool
    cupy.cuda.get_current_stream().synchronize()  # for which the next stream would not wait
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        found = step(**given)
        graph = stream.end_capture()
        for seed in (1, 2):
            fresh = arrays(width, seed)
            wanted = step(**fresh)  # out of the same pool as the graph's memory
            kept = [array.copy() for array in wanted]
            for name in NAMES:
                given[name][...] = fresh[name]
            graph.launch(stream)
            stream.synchronize()
            for got, array, before in zip(found, wanted, kept, strict=True):
                assert_same_bits(got.get(), before.get())
                assert_same_bits(array.get(), before.get())

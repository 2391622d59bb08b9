"""At most 16 MiB of working memory beyond the outputs, whatever the size of the input."""

import tracemalloc

import numpy as np
import pytest

import gradkit
from gradkit._numpy import scratch, threads
from gradkit._numpy.blocks import even_step
from tests.tolerances import DTYPES, WORKING_MEMORY

SIZE = 3 << 21  # elements: a copy in float32 is 24 MiB, in float16 it is 12
SHAPES = {
    "one long row": (1, SIZE),
    "long rows": (8, SIZE // 8),
    "widest tiles": (SIZE >> 14, 1 << 14),
    "many rows": (SIZE // 4, 4),
    "rows of one": (SIZE, 1),
    "neither": (2048, 4096),
    "many channels": (2, SIZE // 2, 1),
    "images": (8, 64, 128, 128),
    "small images": (60, 896, 16, 8),  # as many channels as are spread
}
LAYOUTS = {
    "C": lambda shape, dtype: np.ones(shape, dtype),
    "Fortran": lambda shape, dtype: np.ones(shape[::-1], dtype).T,
    "stepped": lambda shape, dtype: np.ones((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2],
}


@pytest.fixture(autouse=True)
def _four_threads():
    """Each has scratch of its own, whatever this machine has."""
    before = threads.workers()
    threads.use_workers(4)
    yield
    threads.use_workers(before)


def working_memory(call):
    """The most memory that a call allocates beyond what it returns, scratch that it keeps too."""
    scratch._spare.clear()
    tracemalloc.start()
    try:
        results = call()
        kept, peak = tracemalloc.get_traced_memory()
        del results
        return peak - (kept - tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


def test_the_measure_itself():
    """A copy is seen; what is returned is not."""
    assert working_memory(lambda: np.ones(SIZE)[:1].copy()) >= 8 * SIZE
    assert working_memory(lambda: np.ones(SIZE)) < 1 << 16


@pytest.mark.parametrize(
    ("name", "layout"),
    [("float32", "C"), ("float16", "C"), ("float64", "Fortran"), ("float16", "stepped")],
)
def test_lists(name, layout):
    make = LAYOUTS[layout]
    grads = [make((64, 1 << 16), DTYPES[name]) for _ in range(2)]
    other = make((64, 1 << 16), DTYPES[name])
    for call in (
        lambda: gradkit.grad_norm(grads),
        lambda: gradkit.grad_norm(grads, 1),
        lambda: gradkit.grad_norm(grads[:1], 3.5),
        lambda: gradkit.grad_norm(grads, np.inf),
        lambda: gradkit.clip_grad_norm(grads, 0.5),
        lambda: gradkit.clip_by_global_norm(grads, 0.5),
        lambda: gradkit.scale_grads(grads, 0.5),
        lambda: gradkit.clip_grad_value(grads, 0.25),
        lambda: gradkit.accumulate_grad(grads[0], other),
        lambda: gradkit.accumulate_grad(grads[0], other, scale=0.5),
        lambda: gradkit.accumulate_grad(grads[0], other[:1]),
        lambda: gradkit.accumulate_grad_v2(grads[0], other, overwrite=True),
        lambda: gradkit.zero_grad(grads),
    ):
        assert working_memory(call) <= WORKING_MEMORY


@pytest.mark.sampled(31)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("float32", "C"), ("float16", "stepped"), ("float64", "Fortran")],
)
def test_norms(shape, name, layout):
    x = LAYOUTS[layout](shape, DTYPES[name])
    wide = np.float64 if name == "float64" else np.float32
    scale, mean = np.ones(shape[1:], x.dtype), np.zeros(shape[0], wide)
    inv_std = mean + 1
    calls = [
        lambda: gradkit.layer_norm(x, scale, scale, axis=1),
        lambda: gradkit.layer_norm_grad(x, x, scale, mean, inv_std, axis=1),
        lambda: gradkit.invertible_layer_norm_grad(x, x, scale, scale, inv_std, axis=1),
        lambda: gradkit.layer_norm_inverse(x, scale, scale, mean, inv_std, axis=1),
        lambda: gradkit.rms_norm(x, scale, axis=1),
        lambda: gradkit.rms_norm_grad(x, x, scale, inv_std, axis=1),
        lambda: gradkit.add_rms_norm(x, x, scale, axis=1, scale_offset=1.0),
        lambda: gradkit.rms_norm_grad(x, x, scale, inv_std, axis=1, ds=x, scale_offset=1.0),
    ]
    channels = np.ones(shape[1], x.dtype), np.zeros(shape[1], wide), np.ones(shape[1], wide)
    calls += [
        lambda: gradkit.batch_norm(x, channels[0], channels[0]),
        lambda: gradkit.batch_norm_grad(x, x, *channels),
        lambda: gradkit.batch_norm_inference(x, channels[0], *channels),
        lambda: gradkit.batch_norm_inference_grad(x, x, *channels),
    ]
    groups = shape[1] // min(shape[1], 4)
    group = np.zeros((shape[0], groups), wide), np.ones((shape[0], groups), wide)
    calls += [
        lambda: gradkit.group_norm(x, groups, channels[0], channels[0]),
        lambda: gradkit.group_norm_grad(x, x, channels[0], *group),
    ]
    for call in calls:
        assert working_memory(call) <= WORKING_MEMORY


def test_batch_norm_with_channels_first():
    x = np.ones((SIZE // 4, 2, 2), np.float32)
    channels = np.ones(len(x), x.dtype)
    vectors, wide = (channels, channels), (np.ones(len(x)), np.ones(len(x)))
    for call in (
        lambda: gradkit.batch_norm(x, channels, channels, channel_axis=0),
        lambda: gradkit.batch_norm_grad(x, x, channels, channels, channels, channel_axis=0),
        lambda: gradkit.batch_norm_inference(x, channels, None, *vectors, channel_axis=0),
        lambda: gradkit.batch_norm_inference_grad(x, x, channels, *vectors, channel_axis=0),
        lambda: gradkit.batch_norm_inference_grad(x, x, None, *vectors, channel_axis=0),
        lambda: gradkit.batch_norm_stats(x, channel_axis=0),
        lambda: gradkit.batch_norm_apply(x, channels, None, *wide, channel_axis=0),
        lambda: gradkit.batch_norm_grad_sums(x, x, channels, channels, channel_axis=0),
        lambda: gradkit.batch_norm_grad_apply(x, x, None, *vectors, *wide, 4, channel_axis=0),
    ):
        assert working_memory(call) <= WORKING_MEMORY


def test_statistics_of_many_ranks():
    rows = np.ones((64, SIZE // 64))
    assert working_memory(lambda: gradkit.combine_stats(rows, rows, rows[:, 0])) <= WORKING_MEMORY


@pytest.mark.parametrize("most", [1, 7, 8, 9, 100, 1023])
def test_no_piece_has_more_rows_than_its_scratch_holds(most):
    assert all(1 <= even_step(length, most) <= most for length in range(1, 3000))
    assert even_step(3000, most) > most // 8

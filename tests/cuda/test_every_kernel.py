"""Every kernel on each of its code paths, a few launches each: what compute-sanitizer watches.

The tools slow a kernel down a hundredfold, so that the rest of the suite is too long for them.
Shapes are chosen to reach scalar and vector accesses, several rows a block, rows that are read
once and twice, both memory orders of batch norm, and lists in and beyond the parameter block.
"""

import math

import numpy as np
import pytest

import gradkit
from tests import steps
from tests.operations import ROW_NORMS, check_norm, norm, problem
from tests.problems import BATCH_TYPES, LAYER_TYPES, every_other, make, make_groups
from tests.tolerances import DTYPES

ROWS = [(9, 5), (37, 64), (3, 1024), (2, 2049), (2, 12292)]
IMAGES = [(33, 3), (5, 4, 3, 7), (2, 16, 8, 8)]
joined = "-".join


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("shape", "types"), every_other(ROWS, LAYER_TYPES), ids=str)
def test_row_norms(backend, shape, types):
    for name in ROW_NORMS:
        check_norm(backend, problem(name, shape, types), name)
    norm(backend, make(shape, types), "layer_norm_inverse")


@pytest.mark.sampled(11)
@pytest.mark.parametrize("gap", [1, 16], ids=["single", "packs"])
@pytest.mark.parametrize(("shape", "types"), every_other(ROWS, LAYER_TYPES), ids=str)
def test_row_norms_of_sums_at_strides(backend, shape, types, gap):
    p = make(shape, types, centred=False)

    def lie(host):
        room = np.full((shape[0], shape[1] + gap), np.nan, host.dtype)
        room[:, : shape[1]] = host
        return backend.asarray(room[:, : shape[1]])

    x, dy, nothing = lie(p.x), lie(p.dy), lie(np.zeros_like(p.x))
    scale, inv_std = p.on(backend, "scale", "inv_std")
    y, _, found = gradkit.add_rms_norm(x, nothing, scale, eps=p.eps)
    p.check_forward(backend, y, None, found)
    p.check_gradients(backend, *gradkit.rms_norm_grad(dy, x, scale, inv_std, ds=nothing))
    p.check_gradients(backend, *gradkit.rms_norm_grad(dy, x, scale, inv_std))
    y, found = gradkit.rms_norm(x, scale, eps=p.eps)
    p.check_forward(backend, y, None, found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("types", BATCH_TYPES, ids=joined)
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_batch_norm(backend, shape, types, last):
    if last:
        shape = (shape[0], *shape[2:], shape[1])
    p = make(shape, types, axis=-1 if last else 1, batch=True)
    x, dy, scale, bias = p.on(backend, "x", "dy", "scale", "bias")
    statistics = p.on(backend, "mean", "inv_std")
    out = None, *(backend.asarray(np.empty_like(a)) for a in (p.mean, p.inv_std))
    p.check_forward(backend, *gradkit.batch_norm(x, scale, bias, eps=p.eps, out=out, **p.where))
    p.check_gradients(backend, *gradkit.batch_norm_grad(dy, x, scale, *statistics, **p.where))
    running = [backend.asarray(np.zeros_like(p.mean)) for _ in range(2)]
    options = dict(zip(("running_mean", "running_var"), running, strict=True)) | {"momentum": 1.0}
    gradkit.batch_norm(x, scale, bias, eps=p.eps, out=out, **options, **p.where)
    running[1][...] *= 1 - 1 / (p.x.size // p.mean.size)
    y = gradkit.batch_norm_inference(x, scale, bias, *running, eps=p.eps, **p.where)
    gradients = gradkit.batch_norm_inference_grad(dy, x, scale, *running, eps=p.eps, **p.where)
    assert all(np.isfinite(backend.asnumpy(a)).all() for a in (y, *gradients))
    mean, var = steps.batch_norm_stats(x, **p.where)
    count = float(p.x.size // p.mean.size)
    own = backend.asarray(np.array([count]))
    mean, var, _ = steps.combine_stats(mean[None], var[None], own)
    known = x, scale, bias, mean, var
    p.check_forward(backend, *steps.batch_norm_apply(*known, eps=p.eps, out=out, **p.where))
    sums = steps.batch_norm_grad_sums(dy, x, *statistics, **p.where)
    dx = steps.batch_norm_grad_apply(dy, x, scale, *statistics, *sums, count, **p.where)
    p.check_gradients(backend, dx, None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
@pytest.mark.parametrize("shape", [(33, 6), (5, 4, 3, 7), (2, 16, 8, 8), (2, 64, 7, 7)], ids=str)
def test_group_norm(backend, shape, types, last):
    if last:
        shape = (shape[0], *shape[2:], shape[1])
    p = make_groups(shape, 2, types, axis=-1 if last else 1)
    x, dy, scale, bias = p.on(backend, "x", "dy", "scale", "bias")
    statistics = p.on(backend, "mean", "inv_std")
    p.check_forward(backend, *gradkit.group_norm(x, 2, scale, bias, **p.where))
    p.check_gradients(backend, *gradkit.group_norm_grad(dy, x, scale, *statistics, **p.where))


@pytest.mark.parametrize("count", [4, 200])
def test_lists(backend, count):
    rng = np.random.default_rng(count)
    shapes = [(k % 7 + 1, 3 * k % 50 + 1) for k in range(count)] + [(3, 2000)]
    hosts = [
        rng.standard_normal((m, 2 * n)).astype(list(DTYPES.values())[k % 4])
        for k, (m, n) in enumerate(shapes)
    ]
    grads = [backend.asarray(h)[:, :: 1 + (k % 3 == 0)] for k, h in enumerate(hosts)]
    expected = [h[:, :: 1 + (k % 3 == 0)].astype(np.float64) for k, h in enumerate(hosts)]
    flat = np.abs(np.concatenate(expected, axis=None))
    for order in (1, 2, 3.5, math.inf):
        norm = float(backend.asnumpy(gradkit.grad_norm(grads, order)))
        assert norm == pytest.approx(np.linalg.norm(flat, order), rel=1e-6)
        gradkit.per_tensor_norms(grads, order, flat=True)
    clipped, norm = gradkit.clip_by_global_norm(grads, 1.0)
    gradkit.clip_coefficient(norm, 1.0)
    gradkit.clip_grad_value(clipped, 0.01)
    gradkit.clip_grad_norm(grads, 1.0)
    assert float(backend.asnumpy(gradkit.grad_norm(grads))) == pytest.approx(1, rel=1e-2)
    gradkit.scale_grads(grads, 0.5)
    gradkit.zero_grad(grads)
    assert not any(backend.asnumpy(grad).any() for grad in grads)


def test_spike_guard(backend):
    state = gradkit.spike_guard_init(backend.asarray(np.ones(1)))
    for number, limits in [(9, math.inf), (11, math.inf), (math.nan, 12.5), (15, 11.25), (9, None)]:
        value = backend.asarray(np.array(float(number)))
        state, limit = gradkit.spike_guard_update(state, value, warmup=2)
        assert limits in (None, float(backend.asnumpy(limit)))
    assert backend.asnumpy(state)[0] == 4


@pytest.mark.parametrize("into", sorted(DTYPES))
@pytest.mark.parametrize("addend", sorted(DTYPES))
def test_accumulate(backend, into, addend):
    buffer = backend.asarray(np.ones((67, 33), DTYPES[into]))
    row = backend.asarray(np.full(33, 2.0, DTYPES[addend]))
    whole = backend.asarray(np.full((67, 33), 3.0, DTYPES[addend]))
    gradkit.accumulate_grad(buffer, row, scale=0.5, casting="same_kind")
    gradkit.accumulate_grad_v2(buffer, whole, casting="same_kind")
    np.testing.assert_array_equal(backend.asnumpy(buffer).astype(np.float64), 5.0)
    gradkit.accumulate_grad_v2(buffer, whole, overwrite=True, casting="same_kind")
    np.testing.assert_array_equal(backend.asnumpy(buffer).astype(np.float64), 3.0)

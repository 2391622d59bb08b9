"""Parts of the kernels that a shape or a missing argument reaches in one dtype or width alone.

A report of what ran of the compiled kernels (tests/ptx/unreached.py) named them.
"""

import numpy as np
import pytest

import gradkit
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.problems import BATCH_TYPES, LAYER_TYPES, make
from tests.tolerances import DTYPES, assert_same_bits

pytestmark = pytest.mark.slow

joined = "-".join


@pytest.mark.parametrize("columns", [1501, 1504])
@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
def test_row_norms_without_parameters(backend, types, columns):
    """Of a thread's several elements, or several packs, without scale, without bias, or both."""
    for present in ((), ("scale",), ("bias",)):
        p = make((2, columns), types)
        p.scale, p.bias = (getattr(p, k) if k in present else None for k in ("scale", "bias"))
        given = [None if a is None else backend.asarray(a) for a in (p.x, p.scale, p.bias)]
        p.check_forward(backend, *gradkit.layer_norm(*given, eps=p.eps))


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("channels", [15, 16])
@pytest.mark.parametrize("types", BATCH_TYPES, ids=joined)
def test_batch_norm_without_parameters(backend, types, channels, last):
    shape = (3, 17, channels) if last else (3, channels, 15 + channels)
    for present in ((), ("scale",), ("bias",)):
        p = make(shape, types, axis=-1 if last else 1, batch=True)
        p.scale, p.bias = (getattr(p, k) if k in present else None for k in ("scale", "bias"))
        given = [None if a is None else backend.asarray(a) for a in (p.x, p.scale, p.bias)]
        out = None, *(backend.asarray(np.empty_like(a)) for a in (p.mean, p.inv_std))
        p.check_forward(backend, *gradkit.batch_norm(*given, eps=p.eps, out=out, **p.where))


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
def test_distances_that_overflow_in_either_order_of_memory(backend, last):
    """Float64 elements of both signs near the edge: their mean is finite."""
    column = np.zeros(16_400)
    column[[0, 1 << 14]] = np.finfo(np.float64).max * np.array([0.75, -0.75])  # one thread has both
    host = np.repeat(column[:, None], 3, axis=1) if last else np.repeat(column[None], 3, axis=0)
    with np.errstate(all="ignore"):
        _, mean, _ = gradkit.batch_norm(backend.asarray(host), channel_axis=1 if last else 0)
    np.testing.assert_array_equal(backend.asnumpy(mean), 0)


@pytest.mark.parametrize("columns", [16_400, 16_401])
@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
def test_wide_rows_that_one_block_takes(backend, types, columns):
    """More rows than blocks, so that each thread has several of a column's elements in flight."""
    p = make((7, columns), types)
    arrays = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    p.check_gradients(backend, *gradkit.layer_norm_grad(*arrays))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_uploaded_lists_of_many_dimensions(backend, name):
    """Strides that cannot be merged, in a list that the parameter block does not hold."""
    odd = draw_.values((3,) * 6, name, 1)[(slice(None, None, 2),) * 6]
    grads = [backend.asarray(odd), *(backend.asarray(odd[0, 0, 0, 0, 0]) for _ in range(95))]
    exact = odd.astype(np.float64)
    for change, expected in (
        (lambda: gradkit.scale_grads(grads, 0.5), exact / 2),
        (lambda: gradkit.clip_grads_with_norm(grads, 4.0, 2.0), exact / 4),
        (lambda: gradkit.clip_grad_value(grads, 0.125), np.clip(exact / 4, -0.125, 0.125)),
        (lambda: gradkit.accumulate_grads(grads, grads), 2 * np.clip(exact / 4, -0.125, 0.125)),
        (lambda: gradkit.zero_grad(grads), exact * 0),
    ):
        change()
        np.testing.assert_array_equal(backend.asnumpy(grads[0]).astype(np.float64), expected)


@pytest.mark.parametrize("order", [1, 2, np.inf])
def test_one_gradient_of_many_chunks(backend, order):
    """So many that a thread joins several partial results at once."""
    count = min(600_000, backend.max_elements * 40)
    host = np.tile(np.float32([1, -2, 0.5]), count // 3)
    norms = gradkit.grad_norm([backend.asarray(host)], order, per_tensor=True)
    exact = np.linalg.norm(host.astype(np.float64), order)
    assert float(backend.asnumpy(norms)[0]) == pytest.approx(exact, rel=2.0**-23)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numbers_at_any_address(backend, name):
    grads = [backend.asarray(np.ones(5, DTYPES[name]))]
    for value in (0.5, 1.0):
        gradkit.scale_grads(grads, backend.asarray(LAYOUTS["misaligned"](np.array(value))))
    np.testing.assert_array_equal(backend.asnumpy(grads[0]).astype(np.float64), 0.5)

    def odd(value):
        return backend.asarray(LAYOUTS["misaligned"](np.array(value)))

    grads = [backend.asarray(np.full(4, 2.0, DTYPES[name]))]
    coefficient = gradkit.clip_coefficient(odd(4.0), odd(1.0))
    assert float(backend.asnumpy(coefficient)) == 0.25
    gradkit.clip_grads_with_norm(grads, odd(4.0), odd(2.0), scale=odd(2.0))
    np.testing.assert_array_equal(backend.asnumpy(grads[0]).astype(np.float64), 2.0)
    gradkit.clip_grad_block_norm(grads, odd(2.0))
    np.testing.assert_array_equal(backend.asnumpy(grads[0]).astype(np.float64), 1.0)
    norm = odd(7.0)
    gradkit.accumulate_grads(grads, grads, scale=odd(1.0), norm_out=norm)
    assert float(backend.asnumpy(norm)) == 4.0


@pytest.mark.parametrize("into", sorted(DTYPES))
@pytest.mark.parametrize("addend", sorted(DTYPES))
def test_runs_that_are_never_aligned_together(backend, into, addend):
    """Single elements throughout, so many that a loop over them is unrolled."""
    host = draw_.values((1500,), addend, 3)
    grad = backend.asarray(host)
    for scale in (None, 0.5):
        buffer = backend.asarray(np.zeros(1501, DTYPES[into]))[1:]
        gradkit.accumulate_grad(buffer, grad, scale=scale, casting="same_kind")
    gradkit.accumulate_grad_v2(buffer, grad, overwrite=True, casting="same_kind")
    with np.errstate(all="ignore"):
        assert_same_bits(backend.asnumpy(buffer), host.astype(DTYPES[into]))

"""Parts of the kernels that a shape or a missing argument reaches in one dtype or width alone.

A report of what ran of the compiled kernels (tests/ptx/unreached.py) named them.
"""

import math

import numpy as np
import pytest

import gradkit
from gradkit._arrays import backend_of
from gradkit._backend import Views
from gradkit._calls.lists import NormParts
from gradkit._dtypes import FLOATS
from tests import oracles
from tests import strategies as draw_
from tests.layouts import LAYOUTS
from tests.problems import BATCH_TYPES, LAYER_TYPES, make, make_groups, one_or_each
from tests.tolerances import DTYPES, assert_same_bits
from tests.values import test_batch_norm_inference, test_statistics

pytestmark = pytest.mark.slow

joined = "-".join


@pytest.mark.parametrize("columns", [1501, 1504])
@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
def test_row_norms_without_parameters(backend, types, columns):
    """Of a thread's several elements, or several packs, without a bias, or with neither."""
    for present in ((), ("scale",)):
        p = make((2, columns), types)
        p.scale, p.bias = (getattr(p, k) if k in present else None for k in ("scale", "bias"))
        given = [None if a is None else backend.asarray(a) for a in (p.x, p.scale, p.bias)]
        p.check_forward(backend, *gradkit.layer_norm(*given, eps=p.eps))


@pytest.mark.parametrize("columns", [31, 65, 1501, 1504])
@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
def test_gradients_of_row_norms_without_parameters(backend, types, columns):
    p = make((5, columns), types, affine=False)
    dy, x, mean, inv_std = p.on(backend, "dy", "x", "mean", "inv_std")
    dx, *sums = gradkit.layer_norm_grad(dy, x, None, mean, inv_std)
    p.check_gradients(backend, dx, *sums)
    y = p.xhat.reshape(p.x.shape).astype(p.x.dtype)
    dx, *sums = gradkit.invertible_layer_norm_grad(dy, backend.asarray(y), None, None, inv_std)
    p.check_gradients(backend, dx, *sums, xhat=oracles.wide(y))


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("channels", [15, 16])
@pytest.mark.parametrize("types", BATCH_TYPES, ids=joined)
def test_batch_norm_without_parameters(backend, types, channels, last):
    shape = (3, 17, channels) if last else (3, channels, 15 + channels)
    for present in ((), ("scale",)):
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
    np.testing.assert_allclose(backend.asnumpy(mean), 0, atol=1e290)  # of 1.3e308 / 16,400


@pytest.mark.parametrize("channels", [6, 7])
def test_distances_that_overflow_in_a_group(backend, channels):
    """As above, in channels-last images of one sample."""
    host = np.zeros((1, 4100, channels))
    host[0, [0, 4096]] = np.finfo(np.float64).max * np.array([[0.75], [-0.75]])
    with np.errstate(all="ignore"):
        _, mean, _ = gradkit.group_norm(backend.asarray(host), 1, channel_axis=2)
    np.testing.assert_allclose(backend.asnumpy(mean), 0, atol=1e290)


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
    clipped, (norm, *_) = gradkit.clip_by_block_norm(grads, 0.25)
    assert float(backend.asnumpy(norm)) == pytest.approx(np.linalg.norm(exact), rel=2.0**-22)
    rounding = 1e-7 if name in ("float32", "float64") else 0.01
    wanted = 0.25 * exact / np.linalg.norm(exact)
    values = backend.asnumpy(clipped[0]).astype(np.float64)
    np.testing.assert_allclose(values, wanted, rtol=rounding, atol=rounding / 1000)
    for change, expected in (
        (lambda: gradkit.scale_grads(grads, 0.5), exact / 2),
        (lambda: gradkit.clip_grads_with_norm(grads, 4.0, max_norm=2.0), exact / 4),
        (lambda: gradkit.clip_grad_value(grads, 0.125), np.clip(exact / 4, -0.125, 0.125)),
        (lambda: gradkit.accumulate_grads(grads, grads), 2 * np.clip(exact / 4, -0.125, 0.125)),
        (lambda: gradkit.zero_grad(grads), exact * 0),
    ):
        change()
        np.testing.assert_array_equal(backend.asnumpy(grads[0]).astype(np.float64), expected)


@pytest.mark.parametrize("order", [1, 2, 3.5, np.inf])
def test_one_gradient_of_many_chunks(backend, order):
    """So many that a thread joins several partial results at once."""
    count = min(600_000, backend.max_elements * 40)
    dtype = np.float32 if order in (1, 2) else np.float64
    host = np.tile(dtype([1, -2, 0.5]), count // 3)
    exact = np.linalg.norm(host.astype(np.float64), order)
    for each in (True, False):
        found = one_or_each([backend.asarray(host)], order, each=each)
        norm = backend.asnumpy(found).reshape(-1)[0]
        assert float(norm) == pytest.approx(exact, rel=2.0**-23)


def test_statistics_of_one_gradient_of_many_chunks(backend):
    """So many that every warp joins several partial results."""
    host = np.zeros(min(600_000, backend.max_elements * 40), np.float32)
    host[::1009] = np.arange(1, 1 + len(host[::1009]))
    test_statistics.check(backend, gradkit.grad_stats([backend.asarray(host)])["0"], [host])


def test_tiny_numbers_are_added_up_as_exactly_as_others(backend):
    """The rounding errors of their sums in float32 are subnormal."""
    host = np.random.default_rng(0).uniform(2.0**-113, 2.0**-111, 4099).astype(np.float32)
    norm = gradkit.grad_norm([backend.asarray(host)], 1)
    assert float(backend.asnumpy(norm)) == pytest.approx(math.fsum(host), rel=2.0**-40, abs=0)


@pytest.mark.parametrize("order", [1, 2, 3.5, np.inf])
def test_thousands_of_gradients(backend, order):
    """So many that a thread joins several blocks' partial results, for a norm and for its parts."""
    pair = backend.asarray(np.float32([3, -4]))
    count = 7000 if order in (1, 2) else 25_000
    grads = [pair] * count
    exact = 4 if order == np.inf else (count * (3.0**order + 4.0**order)) ** (1 / order)
    norm = gradkit.grad_norm(grads, order)
    assert float(backend.asnumpy(norm)) == pytest.approx(exact, rel=2.0**-40)
    parts = backend.asarray(np.full((1, 3), 9.0))
    backend_of(parts).norm_parts(
        NormParts(grads=Views(grads), norm_type=order, parts=parts, copies=None)
    )
    hi, lo, unit = backend.asnumpy(parts)[0]
    wanted = exact if order == np.inf else exact**order
    assert (hi + lo) * (1 if order == np.inf else unit**order) == pytest.approx(
        wanted, rel=2.0**-40
    )


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
    norm = gradkit.grad_norm(grads, scale=odd(3.0))
    assert float(backend.asnumpy(norm)) == 6.0
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
    for overwrite in (False, True):
        gradkit.accumulate_grad_v2(buffer, grad, overwrite=overwrite, casting="same_kind")
    with np.errstate(all="ignore"):
        assert_same_bits(backend.asnumpy(buffer), host.astype(DTYPES[into]))


LONG = 30, 50  # more elements than a warp takes in the turns between two rests
HALF_A_UNIT = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # of 1: a power of 1/2
SINGLE = "misaligned", "stepped", "offset"  # layouts that no wide access can reach


@pytest.mark.parametrize("layout", SINGLE)
@pytest.mark.parametrize("count", [1, 95], ids=["inline", "uploaded"])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_long_runs_of_single_elements(backend, name, count, layout):
    host = draw_.values(LONG, name, 5)

    def grads():
        others = (backend.asarray(LAYOUTS[layout](host[:2, :2])) for _ in range(count - 1))
        return [backend.asarray(LAYOUTS[layout](host)), *others]

    exact = host.astype(np.float64)
    for change, expected in (
        (lambda own: gradkit.scale_grads(own, 0.5), exact / 2),
        (lambda own: gradkit.clip_grad_value(own, 0.25), np.clip(exact, -0.25, 0.25)),
        (lambda own: gradkit.zero_grad(own), exact * 0),
    ):
        own = grads()
        change(own)
        np.testing.assert_array_equal(backend.asnumpy(own[0]), expected.astype(host.dtype))
    for p in (1, 2, 3.5, np.inf):
        norm = gradkit.per_tensor_norms(grads(), p, flat=True)[0]
        wanted = np.linalg.norm(exact.reshape(-1), p)
        assert float(backend.asnumpy(norm)) == pytest.approx(wanted, rel=2.0**-22)
        for axis in (0, -1):
            _, (norms, *_) = gradkit.clip_by_block_norm(grads(), 0.7, p, axis=axis)
            wanted = np.linalg.norm(exact, p, axis=axis)
            np.testing.assert_allclose(backend.asnumpy(norms), wanted, rtol=2.0**-22)
    beside = np.where(np.arange(LONG[0])[:, None] == 0, 2, np.clip(exact, -1, 1)).astype(host.dtype)
    for change in (  # by a factor that leaves many products just beside a tie
        lambda own: gradkit.scale_grads(own, 1.5 + 2.0**-40),
        lambda own: gradkit.clip_grad_block_norm(own, 1.5 + 2.0**-40, np.inf, axis=-1),
    ):
        own, plain = ([backend.asarray(LAYOUTS[k](beside))] for k in (layout, "C"))
        change(own)
        change(plain)
        assert_same_bits(*(backend.asnumpy(arrays[0]) for arrays in (own, plain)))
    own, norm = grads(), backend.asarray(np.zeros(()))
    gradkit.accumulate_grads(own, grads(), scale=0.3, norm_out=norm)
    with np.errstate(all="ignore"):
        gradkit.accumulate_grads([host], [host.copy()], scale=0.3)
    assert_same_bits(backend.asnumpy(own[0]), host)


@pytest.mark.parametrize("layout", [*SINGLE, "C"])
@pytest.mark.parametrize(
    ("into", "addend"), [(into, a) for into, kind in FLOATS.items() for a in kind.addends], ids=str
)
def test_sums_with_their_norm_in_long_runs(backend, into, addend, layout):
    """Overwritten by copies and products; sums; scaled ones half way between two numbers."""
    host = draw_.values(LONG, addend, 5)
    halves = np.full(LONG, 2.0 ** -HALF_A_UNIT[into], DTYPES[addend])
    for scale, overwrite, grad in (
        (1.0, True, host),
        (0.3, True, host),
        (1.0, False, host),
        (0.0, False, host),
        (1 + 2.0**-40, False, halves),
    ):
        buffer, options = np.ones(LONG, DTYPES[into]), {"scale": scale, "overwrite": overwrite}
        own, given = (backend.asarray(LAYOUTS[layout](a)) for a in (buffer, grad))
        norm = backend.asarray(np.zeros(()))
        gradkit.accumulate_grads([own], [given], norm_out=norm, **options)
        gradkit.accumulate_grads([buffer], [grad], **options)
        assert_same_bits(backend.asnumpy(own), buffer)
        wanted = np.linalg.norm(buffer.astype(np.float64))
        assert float(backend.asnumpy(norm)) == pytest.approx(wanted, rel=2.0**-22)
        made = backend.asarray(LAYOUTS[layout](np.ones(LONG, DTYPES[into])))
        gradkit.accumulate_grad_v2(made, given, overwrite=overwrite)
    kept, norm = backend.asarray(LAYOUTS[layout](buffer)), backend.asarray(np.zeros(()))
    never = backend.asarray(np.array(False))
    gradkit.accumulate_grads([kept], [given], do_update=never, norm_out=norm)
    assert_same_bits(backend.asnumpy(kept), buffer)
    assert float(backend.asnumpy(norm)) == pytest.approx(wanted, rel=2.0**-22)


@pytest.mark.parametrize(
    ("shape", "axis"), [((40, 2, 808), 1), ((41, 2, 809), 1), ((6000, 8), -1), ((6001, 7), -1)]
)
@pytest.mark.parametrize("types", BATCH_TYPES, ids=joined)
def test_channels_of_several_packs_in_flight(backend, types, shape, axis):
    """More of a channel than all threads take at once."""
    p = make(shape, types, axis=axis, batch=True)
    given = p.on(backend, "x", "scale", "bias")
    out = None, *(backend.asarray(np.empty_like(a)) for a in (p.mean, p.inv_std))
    p.check_forward(backend, *gradkit.batch_norm(*given, eps=p.eps, out=out, **p.where))
    p = test_batch_norm_inference.known(p)
    y = test_batch_norm_inference.forward(backend, p)
    test_batch_norm_inference.check_forward(backend, p, y)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 2, 40_000), 1), ((1, 2, 40_001), 1), ((1, 9000, 8), 2), ((1, 9001, 7), 2)],
)
@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
def test_groups_of_several_packs_in_flight(backend, types, shape, axis):
    p = make_groups(shape, 1, types, axis)
    given = p.on(backend, "x", "scale", "bias")
    p.check_forward(backend, *gradkit.group_norm(given[0], 1, *given[1:], eps=p.eps, **p.where))
    arrays = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    p.check_gradients(backend, *gradkit.group_norm_grad(*arrays, **p.where))


@pytest.mark.parametrize("types", LAYER_TYPES, ids=joined)
def test_wide_rows_that_three_strides_lead_to(backend, types):
    """Of which one block takes several."""
    p = make((9, 16_400), types)
    rows = {name: _on_a_grid(getattr(p, name)) for name in ("dy", "x")}
    arrays = [backend.asarray(rows[name]) for name in ("dy", "x")]
    statistics = [backend.asarray(getattr(p, name).reshape(3, 3)) for name in ("mean", "inv_std")]
    scale = backend.asarray(p.scale)
    dx, *sums = gradkit.layer_norm_grad(*arrays, scale, *statistics)
    p.check_gradients(backend, backend.asarray(backend.asnumpy(dx).reshape(p.x.shape)), *sums)


def _on_a_grid(host):
    """Rows as (3, 3, columns), with other rows between."""
    room = np.zeros((3, 5, 2, host.shape[1]), host.dtype)
    room[:, :3, 0] = host.reshape(3, 3, -1)
    return room[:, :3, 0]

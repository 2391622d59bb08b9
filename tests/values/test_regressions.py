"""Bugs that the systems of this field have had, each by the name of where it was reported."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit._open import trees
from tests import oracles, tolerances
from tests.operations import check_norm
from tests.problems import LAYER_TYPES, make
from tests.tolerances import DTYPES, assert_all_same_bits, assert_same_bits, assert_within

INF, NAN = math.inf, math.nan


def norm_of(backend, grads, *rest, **options):
    return float(backend.asnumpy(gradkit.grad_norm(grads, *rest, **options)))


def layer_gradients(backend, p):
    check_norm(backend, p, "layer_norm", "layer_norm_grad")


def batch_gradients(backend, p):
    check_norm(backend, p, "batch_norm", "batch_norm_grad")


# Grids and buffers


@pytest.mark.parametrize("rows", [65_535, 65_536, 65_537])
def test_apex_411_onnxruntime_28724_more_rows_than_a_grid_has_blocks(backend, rows):
    """A grid's second dimension ends at 65,535."""
    p = make((rows, 2))
    layer_gradients(backend, p)


@pytest.mark.parametrize("shape", [(4099, 8, 2), (9001, 3), (2050, 2, 2, 2)])
def test_pytorch_193016_tall_inputs_with_several_normalised_dimensions(backend, shape):
    """The launch counted the last one only."""
    for axis in range(1, len(shape)):
        if np.prod(shape) <= 4 * backend.max_elements:
            layer_gradients(backend, make(shape, axis=axis))


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 7), (2, 1, 3, 2, 3)], ids=len)
def test_flaggems_5392_rank_three_and_more(backend, shape):
    """More leading dimensions than one were not rows."""
    layer_gradients(backend, make(shape))


@pytest.mark.parametrize("rows", [33, 63, 65, 127, 129, 257, 1023])
def test_attorch_18_a_last_partial_block_is_summed(backend, rows):
    """A floor-sized buffer, a ceil-sized grid."""
    layer_gradients(backend, make((rows, 40)))


def test_apex_1184_1798_paddle_56435_one_row_after_another(backend):
    """Scratch was reused before all had read it.

    So in ONNX Runtime's layer-norm gradient, whose row loop has no trailing barrier, and one
    inside a branch. The emulator stops at either, whatever the order of the threads.
    """
    p = make((300, 257))
    p.x *= np.linspace(1, 1000, 300, dtype=np.float32)[:, None]  # neighbours differ
    p.__post_init__()
    arguments = p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    first = gradkit.layer_norm_grad(*arguments)
    p.check_gradients(backend, *first)
    for _ in range(3):
        assert_all_same_bits(gradkit.layer_norm_grad(*arguments), first, backend)


# NaN, infinity, zero


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_onnxruntime_fminf_a_nan_norm_clips(backend, name):
    """``fminf(NaN, 1)`` is 1: gradients with a NaN stayed as large as they were."""
    grads = backend.asarray(np.array([1e3, NAN, 5.0], DTYPES[name]))
    gradkit.clip_grad_norm(grads, 1.0)
    assert np.isnan(backend.asnumpy(grads)).all()
    coefficient = gradkit.clip_coefficient(backend.asarray(np.array(NAN)), 1.0)
    assert math.isnan(float(backend.asnumpy(coefficient)))


def test_pytorch_46849_a_non_finite_norm_can_be_an_error(backend):
    """Silently NaN, with no way to be told."""
    grads = [backend.asarray(np.ones(3)), backend.asarray(np.array([INF]))]
    with pytest.raises(gradkit.NonFiniteNormError, match=r"inf.*grads\[1\]") as caught:
        gradkit.clip_grad_norm(grads, 1.0, nonfinite="raise")
    assert caught.value.names == ("grads[1]",)
    assert_same_bits(backend.asnumpy(grads[0]), np.ones(3))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_optax_1752_max_norm_0_is_no_0_over_0(backend, eps):
    """Zeros, and no NaN from dividing by a norm of 0."""
    for value in (0.0, 2.0):
        grads = backend.asarray(np.full(3, value))
        gradkit.clip_grad_norm(grads, 0.0, eps=eps)
        np.testing.assert_array_equal(backend.asnumpy(grads), 0.0)


def test_tvm_19518_a_maximum_keeps_nan(backend):
    """Comparisons with NaN are all false."""
    for place in range(5):
        host = np.arange(5.0, dtype=np.float32)
        host[place] = NAN
        assert math.isnan(norm_of(backend, backend.asarray(host), INF))
        assert math.isnan(norm_of(backend, backend.asarray(-host), INF))


# Range


def test_mxnet_11403_a_float16_norm_beyond_float16(backend):
    """An infinite norm set gradients to zero."""
    grads = backend.asarray(np.full(100, 6e4, np.float16))
    assert norm_of(backend, grads) == 10 * float(np.float16(6e4))
    gradkit.clip_grad_norm(grads, 1.0)
    expected = np.full(100, 0.1, np.float16)
    tolerances.assert_ulps(backend.asnumpy(grads), expected, tolerances.CLIPPED_ULPS)


@pytest.mark.guarantee("Wide statistics")
@pytest.mark.parametrize("types", [LAYER_TYPES[2], LAYER_TYPES[3]], ids="-".join)
def test_onnxruntime_29034_a_float16_variance(backend, types):
    """Squares beyond 65,504."""
    p = make((5, 64), types)
    p.x = (p.x * np.float16(2000)).astype(np.float16)
    p.__post_init__()
    layer_gradients(backend, p)


@pytest.mark.parametrize("mean", [1e3, 1e4, 1e5])
def test_onnxruntime_28463_a_large_mean_and_a_small_variance(backend, mean):
    """E[x^2] - E[x]^2 cancels."""
    p = make((6, 1000))
    p.x += np.float32(mean)
    p.__post_init__()
    layer_gradients(backend, p)
    p = make((1000, 6), axis=1, batch=True)
    p.x += np.float32(mean)
    p.__post_init__()
    batch_gradients(backend, p)


@pytest.mark.guarantee("Wide statistics")
@pytest.mark.parametrize("types", [LAYER_TYPES[2], LAYER_TYPES[5]], ids="-".join)
def test_liger_kernel_statistics_stay_float32(backend, types):
    """An inv_std stored in 16 bits costs three digits of every gradient."""
    p = make((5, 300), types)
    p.x = (p.x.astype(np.float64) * 1e-3).astype(p.x.dtype)
    _, mean, inv_std = gradkit.layer_norm(*p.on(backend, "x"))
    assert backend.asnumpy(mean).dtype == backend.asnumpy(inv_std).dtype == np.float32
    layer_gradients(backend, p)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0])
def test_paddle_5692_any_epsilon(backend, eps):
    """CuDNN once took none below 1e-5."""
    p = make((40, 3, 5), axis=1, batch=True, eps=eps)
    p.x *= np.float32(1e-4)
    p.__post_init__()
    batch_gradients(backend, p)


# Nothing at all


def test_torchrec_3809_the_largest_of_nothing(backend):
    """A maximum over no elements is an error in most libraries; a norm is 0."""
    empty = backend.asarray(np.zeros((0, 3), np.float32))
    for grads in ([], [None], [empty], [empty, empty[:, :0]]):
        assert norm_of(backend, grads, INF) == 0.0


def test_pytorch_148259_a_generator_is_read_once(backend):
    """The norm used it up, nothing was clipped."""
    held = [backend.asarray(np.array([3.0])), backend.asarray(np.array([4.0]))]
    norm = gradkit.clip_grad_norm((g for g in held), 2.5)
    assert float(backend.asnumpy(norm)) == 5.0
    assert [float(backend.asnumpy(g)[0]) for g in held] == [1.5, 2.0]
    exhausted = iter(held)
    assert len(list(exhausted)) == 2
    assert norm_of(backend, exhausted) == 0.0


def test_a_generator_that_was_read_before_is_refused(backend):
    held = [backend.asarray(np.array([3.0])), backend.asarray(np.array([4.0]))]
    grads, parameters = (g for g in held), (SimpleNamespace(grad=g) for g in held)
    norm = gradkit.grad_norm(grads)
    assert len(gradkit.grads_of(parameters)) == 2
    for call in (
        lambda: gradkit.clip_grads_with_norm(grads, norm, 1.0),
        lambda: gradkit.grad_norm({"layer": grads}),
        lambda: gradkit.accumulate_grads(held, grads),
        lambda: gradkit.grads_of(parameters),
        lambda: gradkit.grads_of([parameters]),
    ):
        with pytest.raises(ValueError, match="read before, and gives nothing more"):
            call()
    assert [float(backend.asnumpy(g)[0]) for g in held] == [3.0, 4.0]


def test_megatron_7338_mixed_dtypes(backend):
    """Each is scaled in its own dtype by one coefficient of them all."""
    host = [np.full(4, k + 1, dtype) for k, dtype in enumerate(DTYPES.values())]
    grads = [backend.asarray(h) for h in host]
    exact = oracles.norm(host)
    assert norm_of(backend, grads) == float(exact)
    gradkit.clip_grad_norm(grads, 1.0)
    for g, h in zip(grads, host, strict=True):
        expected = oracles.clipped(h, float(exact), 1.0)
        tolerances.assert_ulps(backend.asnumpy(g), expected, tolerances.CLIPPED_ULPS)


def test_pytorch_39153_mixed_devices_and_an_empty_list(backend, xp):
    """An empty list has a norm, and arrays that cannot be added up are named."""
    assert norm_of(backend, []) == 0.0
    here = backend.asarray(np.ones(3))
    elsewhere = xp.asarray([3.0])
    for grads in ([here, elsewhere], [elsewhere, here]):
        message = r"grads\[1\] is a .* array and grads\[0\] a .* array"
        with pytest.raises(TypeError, match=message):
            gradkit.clip_grad_norm(grads, 0.5)
    assert_same_bits(backend.asnumpy(here), np.ones(3))
    assert float(elsewhere[0]) in (1.0, 3.0)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0), (2, 0, 3), (0, 0)])
def test_pytorch_189831_batch_norm_of_nothing(backend, shape):
    """Sums over nothing are 0, and every output is written."""
    p = make(shape, axis=1, batch=True)
    dx, dscale, dbias = gradkit.batch_norm_grad(
        *p.on(backend, "dy", "x", "scale", "mean", "inv_std")
    )
    p.check_gradients(backend, dx, dscale, dbias)


# Layouts


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_qkan_26_a_misaligned_view(backend, offset):
    """A vector load needs its alignment; a view that starts an element later has it no more."""
    grads = backend.asarray(np.arange(2200, dtype=np.float32))[offset : 2200 - offset]
    expected = oracles.norm([backend.asnumpy(grads)])
    bound = tolerances.norm(2, backend.run_errors, runs=True)
    assert oracles.off_by(norm_of(backend, grads), expected) <= bound
    before = backend.asnumpy(grads)
    gradkit.scale_grads(grads, 0.5)
    assert_same_bits(backend.asnumpy(grads), before * np.float32(0.5))


@pytest.mark.parametrize("shape", [(40, 65), (3, 4, 65)], ids=str)
def test_pytorch_1866_quack_88_a_gradient_of_stride_0(backend, shape):
    """The gradient of ``y.sum()``."""
    p = make(shape)
    p.dy = np.broadcast_to(np.float32(0.5), shape)
    layer_gradients(backend, p)
    p = make(shape, axis=1, batch=True)
    p.dy = np.broadcast_to(np.float32(0.5), shape)
    batch_gradients(backend, p)


def test_pytorch_64100_layouts_that_differ(backend):
    """Dy channels last, x channels first."""
    p = make((4, 3, 5, 6), axis=1, batch=True)
    p.dy = np.moveaxis(np.moveaxis(p.dy, 1, -1).copy(), -1, 1)
    batch_gradients(backend, p)


@pytest.mark.parametrize("batch", [65_535, 65_536, 131_071])
def test_pytorch_2917_batches_around_cudnns_limits(backend, batch):
    """Grids of 65,535 blocks; cuDNN has taken no more elements a channel than that."""
    batch_gradients(backend, make((batch, 2), axis=1, batch=True))


# Many and large


def test_pytorch_181600_and_others_indices_are_wide(backend):
    """Rows far apart: arrays that span more than 2^31 bytes, without as much memory.

    Products of 32-bit indices: pytorch 181600, TransformerEngine 2918, apex 1825 and 1989,
    flashinfer 3391.
    """
    if not backend.on_host:
        pytest.skip("the kernels' own tests reach further, sparsely")
    room = np.zeros((3, 1 << 29), np.float32)  # pages that nobody touches cost nothing
    x = room[:, :5]
    x[...] = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert oracles.off_by(norm_of(backend, x), oracles.norm([x])) <= tolerances.norm(
        2, {}, runs=False
    )
    y, mean, _ = gradkit.layer_norm(x)
    ref = oracles.forward(np.array(x))
    assert_within(y, ref.y, tolerances.averaged("y", ref.y_size, ref.y, 5, y.dtype))
    np.testing.assert_array_equal(mean, [2, 7, 12])
    gradkit.zero_grad(x)
    assert not x.any()


@pytest.mark.slow
def test_pytorch_181600_and_others_more_elements_than_32_bits_count(backend):
    """Float16 zeros that nobody wrote take no memory."""
    if not backend.on_host:
        pytest.skip("the kernels' own tests reach further, sparsely")
    grads = np.zeros((1 << 31) + 9, np.float16)
    grads[7], grads[-1], grads[1 << 31] = 4, 3, 12
    assert norm_of(backend, grads, 1) == 19.0
    assert norm_of(backend, grads, INF) == 12.0
    assert norm_of(backend, grads[8:], INF) == 12.0


@pytest.mark.parametrize("root", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_million_tensors(backend, root):
    """In one list, each of one element: the list costs more than the arithmetic."""
    if not backend.on_host:
        pytest.skip("too many arrays for this backend")
    flat = np.full(root**2, 2.0, np.float32)
    grads = list(flat.reshape(-1, 1))
    assert float(gradkit.clip_grad_norm(grads, root)) == 2 * root
    assert_same_bits(flat, np.ones_like(flat))


def test_names_of_many_tensors_are_looked_up_in_one_walk(monkeypatch, xp):
    """If every tensor is unusual or at fault, the time still grows only with their number."""
    count, steps = 100, 0
    walk = trees.walk

    def counted(*arguments):
        nonlocal steps
        for leaf in walk(*arguments):
            steps += 1
            yield leaf

    monkeypatch.setattr(trees, "walk", counted)
    calls = (
        lambda g, _: gradkit.zero_grad({**g, "again": g[0]}),
        lambda g, _: gradkit.clip_grad_norm({**g, "x": bad}, 1.0, nonfinite="raise"),
        lambda g, out: gradkit.clip_by_global_norm(g, 1.0, out=(out, None)),
        lambda g, _: gradkit.grad_norm([*g.values(), np.zeros(3, int)]),
        lambda g, _: gradkit.grad_norm([*g.values(), xp.zeros(3)]),
    )
    bad = [np.full(2, math.nan)]
    grads = {k: [np.ones((3, 2)).T] for k in range(count)}  # all names of a flat dict take no walk
    out = {k: [np.ones((2, 3))] for k in range(count)}
    for call in calls:
        steps = 0
        with contextlib.suppress(gradkit.NonFiniteNormError, TypeError, ValueError):
            call(grads, out)
        assert 0 < steps < 20 * count  # a leaf is counted at each depth


@pytest.mark.parametrize(
    "count", [1, 2, 31, 32, 33, 109, 110, 111, 127, 128, 129, 319, 320, 321, 513]
)
def test_lists_at_the_limits_of_a_launch(backend, count):
    """And one array either side."""
    grads = [backend.asarray(np.full(1 + k % 3, 2.0, np.float32)) for k in range(count)]
    size = sum(1 + k % 3 for k in range(count))
    assert norm_of(backend, grads, 1) == 2.0 * size
    gradkit.scale_grads(grads, 0.5)
    assert norm_of(backend, grads, 1) == size
    gradkit.zero_grad(grads)
    assert norm_of(backend, grads, INF) == 0.0

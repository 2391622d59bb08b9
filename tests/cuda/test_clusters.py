"""Wide rows on devices with clusters: each row is read once, by several blocks."""

import numpy as np
import pytest

import gradkit
from gradkit._calls.rows import LayerNormGrad
from gradkit._cuda import CudaBackend
from gradkit._dtypes import dtype_named
from testbed.emulator import IdleDevice, sparse_array
from testbed.emulator.runtime import SCHEDULES
from tests.backends import ARCHITECTURE, kernel_mark
from tests.cuda.test_normalization import Emulated, _check_row_norms, _check_row_variants
from tests.problems import LAYER_TYPES, launch, make
from tests.tolerances import assert_all_same_bits, assert_same_bits
from tests.values.test_samples import Samples

pytestmark = [
    kernel_mark,
    pytest.mark.skipif(0 < ARCHITECTURE < 90, reason="compiled for a GPU without clusters"),
]

BLOCKS = 8  # of a cluster
# (rows, columns): in one chunk and several, whole packs and single elements, ragged; beyond what a
# cluster holds for its gradient.
SHAPES = [
    (3, 8200),
    (2, 8201),
    (2, 12288),
    (1, 16392),
    (2, 20004),
    (1, 32776),
    (1, 40961),
    (1, 65544),
]


def device(**options):
    return Emulated(**{"clusters": True, "multiprocessors": BLOCKS} | options)


CASES = [*zip(SHAPES, LAYER_TYPES, strict=True)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("shape", "types"), CASES, ids=str)
def test_row_norms(shape, types):
    _check_row_norms(device(), shape, types)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("shape", "types"), [c for c in CASES if c[0][1] < 1 << 16], ids=str)
def test_row_variants(shape, types):
    _check_row_variants(device(), shape, types, gap=1 + 15 * (sum(shape) % 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_give_the_same_bits(schedule):
    p, two_clusters = make((3, 8200), LAYER_TYPES[5]), {"multiprocessors": 2 * BLOCKS}
    expected = device(**two_clusters).layer_norm_grad(p)
    found = device(**two_clusters, schedule=schedule, seed=4).layer_norm_grad(p)
    assert_all_same_bits(found, expected)
    p.check_gradients(device(), *found)


def one_row(p, row):
    """A problem of one of a problem's rows."""
    alone = make((1, p.x.shape[1]), tuple(str(a.dtype) for a in (p.x, p.inv_std, p.scale)))
    alone.__dict__ |= vars(p) | {name: getattr(p, name)[row : row + 1] for name in ("dy", "x")}
    alone.mean, alone.inv_std = p.mean[row : row + 1], p.inv_std[row : row + 1]
    return alone


@pytest.mark.guarantee("Batch-invariant")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[5]], ids="-".join)
def test_a_row_does_not_depend_on_the_others(types):
    """Nor on the device's size, and nothing leaves a row that is not finite."""
    p = make((4, 8200), types)
    p.dy[1, 2], p.dy[2, 4000] = np.nan, np.inf
    with np.errstate(all="ignore"):
        found = device(multiprocessors=1).layer_norm_grad(p)[0]
        assert np.isnan(found[1].astype(np.float64)).all()
        assert not np.isfinite(found[2].astype(np.float64)).any()
        for row in (0, 3):
            alone = device(multiprocessors=99).layer_norm_grad(one_row(p, row))[0]
            assert_same_bits(alone[0], found[row])
    p.dy[1:3] = 0
    p.check_gradients(device(), device(multiprocessors=1).layer_norm_grad(p)[0], None, None)


def test_constant_rows_at_the_top_of_the_range():
    """Beyond the last column, too, ``mean * inv_std`` is infinite."""
    p = make((3, 8200), LAYER_TYPES[5])
    p.x[:] = 2.0**127
    p.__post_init__()
    p.check_gradients(device(), *device().layer_norm_grad(p))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_gradient_with_a_scale_per_sample_and_one_to_add(wanted):
    on, p = device(), Samples((2, 2, 8200)).whole
    given = {name: getattr(p, name) for name in ("dy", "x", "scale", "mean", "inv_std")}
    given |= {"axis": 2, "ds": p.dy[..., ::-1].copy()}
    expected = gradkit.layer_norm_grad(**given)
    outs = on.empty(*(array if k == 0 or wanted else None for k, array in enumerate(expected)))
    launch(on.run, LayerNormGrad, outs, **given)
    assert ("layer_norm_grad_cluster", "ds") in on.device.total_traffic.by_array
    for found, exact in zip(outs, expected, strict=True):
        if found is not None:
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_dx_may_be_dy():
    on, p = device(), make((3, 9000), LAYER_TYPES[5])
    expected = on.layer_norm_grad(p)
    dy = on.device.xp.asarray(p.dy)
    outs = [dy, *on.empty(p.scale, p.scale)]
    launch(on.run, LayerNormGrad, outs, **(vars(p) | {"axis": 1, "dy": dy}))
    assert_all_same_bits(outs, expected)


@pytest.mark.parametrize("width", [12288, pytest.param(20000, marks=pytest.mark.slow), 65536])
def test_wide_rows_are_read_once(width):
    """And a cluster writes one row of partial sums, for all the rows that it has."""
    on, p = device(multiprocessors=3), make((5, width), LAYER_TYPES[5])
    on.layer_norm_grad(p)
    on.layer_norm(p)
    moved = on.device.total_traffic.by_array
    gradient = {name: counts for (kernel, name), counts in moved.items() if "grad" in kernel}
    assert gradient["dy"] == gradient["source"] == (p.x.nbytes, 0)
    assert gradient["dx"] == (0, p.x.nbytes)
    rows, rest = divmod(gradient["partials"][1], 2 * 4 * width)
    assert (rest, moved["column_sums", "partials"][0]) == (0, gradient["partials"][1])
    assert 1 <= rows < 5
    if width == 65536:  # shorter ones are in one block's registers
        assert moved["layer_norm", "x"] == (p.x.nbytes, 0)


class Noting(IdleDevice):
    """An H100 that notes its launches."""

    def __init__(self):
        super().__init__(multiprocessors=132, max_shared_memory=227 << 10, clusters=True)
        self.launched = {}

    def get_function(self, name):
        def note(grid, block, args, shared_mem=0):  # noqa: ARG001
            self.launched[name] = grid, block, args

        return note


@pytest.mark.parametrize(
    ("rows", "width"),
    [(1024, 12288), (1024, 16384), (1024, 20000), (1024, 32768), (2048, 65536)],
)
def test_partial_sums_take_little(rows, width):
    """No more memory than dy and x, on as many multiprocessors as there are clusters for."""
    gpu, bf16, f32 = Noting(), dtype_named("bfloat16"), np.dtype("f4")
    x, row, column = np.empty((rows, width), bf16), np.empty(rows, f32), np.empty(width, bf16)
    known = {"dy": x, "x": x, "scale": column, "mean": row, "inv_std": row}
    launch(CudaBackend(gpu), LayerNormGrad, [x, column, column], **known)
    grid, block, args = gpu.launched["layer_norm_grad_cluster"]
    partials = max((a for a in args if isinstance(a, np.ndarray) and a.dtype == f32), key=np.size)
    assert partials.nbytes <= 2 * x.nbytes
    # No more clusters than run at once in parts of such sizes, and few fewer.
    held = 512 // block[0]
    together = sum(part * held // BLOCKS for part in (14, 16, 16, 16, 16, 18, 18, 18))
    assert grid[0] % BLOCKS == 0
    assert together - 2 <= grid[0] // BLOCKS <= together
    assert BLOCKS * block[0] * 16 >= width


def test_more_elements_than_32_bits_can_count():
    """The last rows of arrays that are mostly not there, each of a cluster of its own."""
    width, some = 8200, 2
    rows = (1 << 32) // width + 1 + some
    p = make((some, width), ("float16", "float32", "float32"), seed=5, affine=False)
    on = device(multiprocessors=BLOCKS * rows)
    dy, x, ds, out = (sparse_array((rows, width), np.float16) for _ in range(4))
    mean, inv_std = (sparse_array((rows,), np.float32) for _ in range(2))
    given = ((dy, p.dy), (x, p.x), (ds, p.x), (mean, p.mean), (inv_std, p.inv_std))
    for whole, part in given:
        whole[-some:] = part
    last, known = range(-BLOCKS * some, 0), {"mean": mean, "inv_std": inv_std}
    with on.device.only_blocks(last):
        launch(on.run, LayerNormGrad, [out, None, None], dy=dy, x=x, **known)
        p.check_gradients(on, np.array(out[-some:]), None)
        alone = np.array(out[-some:], np.float32)
        launch(on.run, LayerNormGrad, [out, None, None], dy=dy, x=x, ds=ds, **known)
    added = alone + p.x.astype(np.float32)
    np.testing.assert_allclose(np.array(out[-some:], np.float32), added, rtol=2e-3, atol=2e-3)
    assert ("layer_norm_grad_cluster", "ds") in on.device.total_traffic.by_array

"""Numbers of blocks: as many as the device holds of a compiled kernel; of sums, as an H100 does."""

import itertools
import math

import numpy as np
import pytest

from gradkit._calls.channels import (
    BatchNorm,
    BatchNormGrad,
    BatchNormInference,
    BatchNormInferenceGrad,
    CombineStats,
    GroupNorm,
    GroupNormGrad,
)
from gradkit._calls.rows import (
    GatedRmsNormGrad,
    InvertibleLayerNormGrad,
    LayerNorm,
    LayerNormGrad,
    LayerNormInverse,
    RmsNormGrad,
)
from gradkit._cuda import CudaBackend, row_gradient
from gradkit._cuda.dry_run import DryDevice
from gradkit._cuda.launch.grids import chunks_of, column_block, row_threads, shares_of
from gradkit._cuda.row_forward import _ForwardLaunches as ForwardLaunches
from gradkit._cuda.row_gradient import LAYER, RMS, GradientLaunches
from gradkit._dtypes import accumulation_name, dtype_named
from testbed.emulator import EmulatedDevice, IdleDevice
from tests.problems import LAYER_TYPES, launch

pytestmark = pytest.mark.cuda


class CountingDevice(EmulatedDevice):
    """Holds as many blocks of a kernel as it is told to, and remembers grids."""

    def __init__(self, held):
        super().__init__(multiprocessors=5, max_shared_memory=200_000)
        self.held, self.grids, self.asked = held, {}, {}

    def compile(self, *_):
        return self

    def get_function(self, name):
        def launch(grid, block, *_, shared_mem=0):
            self.grids[name] = grid[:2]
            about = self.asked.get(name)
            assert about is None or about == (math.prod(block), shared_mem)

        launch.name = name
        return launch

    def resident(self, kernel, threads, shared_mem):
        self.asked[kernel.name] = threads, shared_mem
        return self.held


@pytest.mark.parametrize("held", [1, 3])
def test_grids_are_as_large_as_what_a_device_holds_of_the_compiled_kernel(held):
    """Blocks of the size and the shared memory that are launched are what it is asked about."""
    device = CountingDevice(held)
    run, whole, ones = CudaBackend(device), 5 * held, device.xp.ones

    def rows(width):
        x, row, column = ones((999, width)), ones(999), ones(width)
        affine, statistics = {"scale": column, "bias": column}, {"mean": row, "inv_std": row}
        launch(run, LayerNorm, [x, row, row], x=x, **affine)
        launch(run, LayerNormInverse, [x], y=x, **affine, **statistics)
        outs = [x, column, column]
        launch(run, LayerNormGrad, outs, dy=x, x=x, scale=column, **statistics)
        return {name: grid[0] for name, grid in device.grids.items()}

    assert rows(2048)["layer_norm"] == whole
    wide = rows(40_000)
    assert wide["row_sums_of_gradient"] == whole
    assert device.grids["layer_norm_inverse"] == (whole, 1)
    x, row, column = ones((2, 40_000)), ones(2), ones(40_000)
    known = {"scale": column, "bias": column, "mean": row, "inv_std": row}
    launch(run, LayerNormInverse, [x], y=x, **known)
    assert device.grids["layer_norm_inverse"] == (2, -(-whole // 2))
    x, channels = ones((64, 3, 640)), ones(3)
    known = dict.fromkeys(("scale", "bias", "mean", "var"), channels)
    launch(run, BatchNormInference, [x], x=x, **known)
    assert device.grids["infer"] == (3, held + 2)


class Noting(IdleDevice):
    """Remembers grids and blocks of kernels that sum over rows, and in how many parts others do."""

    def __init__(self, **options):
        super().__init__(sharing=132, max_shared_memory=227 << 10, **options)
        self.launched = []

    def get_function(self, name):
        def note(grid, block, args, shared_mem=0):  # noqa: ARG001
            free = name in WITHOUT_SUMS
            self.launched.append((name, grid[1:]) if free else (name, grid, block))

        return note


# Each of their results is of a row, a group or an element, which one block computes by itself.
WITHOUT_SUMS = (
    *("layer_norm", "layer_norm_inverse", "row_sums_of_gradient", "gated_rms_norm", "infer"),
    *("held_group_norm", "held_group_gradient", "finish_group_means", "finish_group_moments"),
)
GPUS = [
    {"multiprocessors": count, "resident_threads": held}
    for count, held in itertools.product((2, 46, 108, 132), (1024, 1536, 2048))
]
ROWS = [
    *((8, 64), (128, 4096), (2048, 4096), (8192, 768), (16384, 4096), (8192, 5120), (131072, 128)),
    *(
        (60, 1024),
        (4096, 4097),
        (333, 770),
        (1024, 12288),
        (4096, 16384),
        (2048, 65536),
        (7, 1 << 20),
    ),
]
IMAGES = [
    *((32, 256, 56, 56), (256, 512, 28, 28), (256, 2048, 7, 7), (64, 1024, 14, 14), (3, 8, 5, 7)),
    *((2, 32, 512, 512), (4096, 64, 1, 1)),
]


def of_rows(shape, dtype, types):
    """Calls whose results are sums over rows."""
    x, row = np.empty(shape, dtype), np.empty(shape[0], types)
    column = np.ones(shape[1], dtype)
    known = {"dy": x, "x": x, "y": x, "scale": column, "bias": column, "mean": row, "inv_std": row}
    for kind in (LayerNormGrad, InvertibleLayerNormGrad):
        yield kind, [x, column, column], known
        yield kind, [None, column, column], known | {"wanted": ("dscale", "dbias")}
    yield RmsNormGrad, [x, column], known | {"ds": x}
    for before in (True, False):
        gate = {"gate": x, "activation": "silu", "norm_before_gate": before}
        yield GatedRmsNormGrad, [x, x, column], known | gate
    samples = np.ones((shape[0] // 2, 1, shape[1]), dtype)
    if shape[0] % 2 == 0 and shape[0] < 1000:
        pairs = x.reshape(-1, 2, shape[1])
        rows = {"dy": pairs, "x": pairs, "mean": row.reshape(-1, 2), "inv_std": row.reshape(-1, 2)}
        yield LayerNormGrad, [pairs, samples, samples], rows | {"scale": samples, "axis": 2}


def of_images(shape, dtype, types):
    """Calls whose results are sums over images, with the channels first and last."""
    count, channels = shape[:2]
    column, groups = np.empty(channels, types), np.empty((count, 4), types)
    last = np.empty((count, *shape[2:], channels), dtype)
    for x in (np.empty(shape, dtype), last.transpose(0, 3, 1, 2)):
        known = dict.fromkeys(("scale", "bias", "mean", "inv_std", "var"), column)
        known |= {"x": x, "dy": x, "engine": "native"}
        yield BatchNorm, [x, column, column], known
        yield BatchNormGrad, [x, column, column], known
        yield BatchNormInferenceGrad, [x, column, column], known
        of_groups = {"num_groups": 4} | known
        yield GroupNorm, [x, groups, groups], of_groups
        yield GroupNormGrad, [x, column, column], of_groups | {"mean": groups, "inv_std": groups}


@pytest.mark.guarantee("Any GPU")
@pytest.mark.parametrize(("dtypes", "clusters"), [(LAYER_TYPES[0], True), (LAYER_TYPES[5], False)])
def test_sums_are_divided_alike_on_every_gpu(dtypes, clusters):
    """Whatever number of multiprocessors it has, and of threads that each of them holds."""
    data, statistics, _ = map(dtype_named, dtypes)
    for shapes, calls in ((ROWS, of_rows), (IMAGES, of_images)):
        for shape in shapes:
            for kind, outs, known in calls(shape, data, statistics):
                found = set()
                for gpu in GPUS:
                    device = Noting(clusters=clusters, **gpu)
                    launch(CudaBackend(device), kind, outs, **known)
                    found.add(tuple(device.launched))
                assert len(found) == 1, (kind, shape)


@pytest.mark.parametrize(
    ("tiles", "resident", "most", "shares"),
    [
        (64, 396, 999, 6),  # 12 places are empty: a seventh share would take a second wave
        (256, 396, 999, 3),  # 256 of 396, or 768 of 792
        (256, 396, 2, 1),  # 512 of 792 are fewer
        (300, 264, 999, 4),  # 300 of 528, ..., 1200 of 1320
        (8, 264, 5, 5),
        (9000, 264, 999, 1),
        (0, 264, 999, 264),
    ],
)
def test_blocks_come_in_whole_waves(tiles, resident, most, shares):
    assert shares_of(tiles, resident, most) == shares


def test_few_places_are_empty_whatever_is_shared():
    for resident in (5, 132, 264, 396, 1056):
        for tiles in range(1, 3 * resident):
            blocks = tiles * shares_of(tiles, resident, 1 << 20)
            assert blocks >= 0.85 * -(-blocks // resident) * resident, (tiles, resident)


@pytest.mark.parametrize(("channels", "blocks"), [(0, 1), (1000, 8), (9999, 40)])
def test_each_channel_has_a_thread_as_far_as_blocks_stay_at_work(channels, blocks):
    """And there is a count of all ranks without a channel, too."""
    device = CountingDevice(1)
    row, rows, counts = map(device.xp.ones, (channels, (2, channels), 2))
    known = {"means": rows, "variances": rows, "counts": counts}
    launch(CudaBackend(device), CombineStats, [row, row, device.xp.ones(())], **known)
    assert device.grids["combine_stats"][0] == blocks


def partial_rows(norm, shape, dtype):
    """Rows of partial sums that a gradient of rows has on 132 multiprocessors."""
    device = IdleDevice(multiprocessors=132)
    types = dtype, accumulation_name(dtype), dtype
    launcher = row_gradient.GradientLaunches.of(
        device, types, shape, 1, norm=norm, has_dx=True, has_sums=True
    )
    planes, rows, width = launcher._partial_shape
    assert (planes, width) == (norm.planes, shape[1])
    return rows


@pytest.mark.parametrize("norm", [LAYER, RMS], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_partial_sums_take_no_more_memory_than_what_they_are_sums_of(norm, dtype):
    """Unless they are one row, or no more than a small cache holds."""
    itemsize, wide = (dtype_named(n).itemsize for n in (dtype, accumulation_name(dtype)))
    for rows in (1, 2, 3, 8, 100, 132, 200, 500, 10_000):
        for width in (8, 1000, 4096, 12_288, 16_384, 20_001, 65_536, 1 << 20, 10_000_000):
            count = partial_rows(norm, (rows, width), dtype)
            assert 1 <= count <= rows
            held = norm.planes * count * width * wide
            assert count == 1 or held <= max(2 * rows * width * itemsize, 4 << 20), (rows, width)


def test_how_many_rows_of_partial_sums_there_are():
    """As many as there are blocks, unless they would take more memory than dy and x."""
    for shape, dtype, rows in [
        ((128, 4096), "bfloat16", 128),  # 4 MiB
        ((128, 4104), "bfloat16", 127),
        ((128, 16_384), "bfloat16", 64),
        ((128, 16_384), "float32", 128),
        ((1024, 12_288), "bfloat16", 132),
        ((8, 65_536), "bfloat16", 8),
        ((8, 1 << 20), "bfloat16", 1),
        ((1, 10_000_000), "bfloat16", 1),
        ((1 << 17, 1024), "float32", 264),
    ]:
        assert partial_rows(LAYER, shape, dtype) == rows, (shape, dtype)


@pytest.mark.parametrize(
    ("columns", "planes", "across"),
    [(4224, 1, 32), (4193, 1, 32), (4192, 1, 16), (2112, 2, 32), (1024, 2, 8), (1, 1, 8)],
)
def test_few_columns_are_summed_by_more_blocks(columns, planes, across):
    assert column_block(132, columns, planes) == (across, 1024 // across)


@pytest.mark.parametrize(
    ("rows", "block"),
    [(1, (32, 1)), (4, (32, 1)), (5, (16, 2)), (32, (8, 8)), (264, (8, 128)), (9999, (8, 128))],
)
def test_few_rows_are_summed_by_few_threads(rows, block):
    assert column_block(132, 1, 1, rows) == block


@pytest.mark.parametrize("width", [768, 1280, 3072, 5120, 7168, 10240, 12288])
@pytest.mark.parametrize("data", ["bfloat16", "float32", "float64"])
def test_few_threads_are_without_work(width, data):
    """A third at most, of the packs that all threads of a row hold or come to in turns.

    Two packs a thread are worth more than a fourth of the threads: of 768 columns, on an H200.
    """
    types = data, "float64" if data == "float64" else "float32", data
    device = DryDevice(IdleDevice(max_shared_memory=163 << 10))
    gradient = GradientLaunches.of(
        device, types, (99, width), 1, norm=LAYER, has_dx=True, has_sums=True
    )
    if gradient._row_plan is not None:
        held = gradient._one_visit.block[0] * gradient._row_plan.chunks * gradient.vector
        assert 2 * held <= 3 * width <= 3 * held
    forward = ForwardLaunches.of(device, types, (99, width), 1, centred=True)
    for each, along in ((forward._forward, 1), (forward._inverse, forward._inverse.grid[1])):
        threads, packs = each.block[0] * along, width // forward.vector
        assert threads % 32 == 0
        assert 3 * packs >= 2 * threads * -(-packs // threads)


def test_threads_hold_fewer_packs_if_over_a_third_of_the_most_would_not_exist():
    assert chunks_of(96, 1, 2, 512) == 2  # 768 columns of 16 bits
    assert chunks_of(128, 1, 3, 512) == 3  # two thirds
    assert chunks_of(127, 1, 3, 512) == 1
    assert chunks_of(513, 1, 2, 512) == 2  # more than threads


def test_rows_within_a_warp_have_a_power_of_two_of_threads_and_others_whole_warps():
    """As few as do a row's work in the fewest turns."""
    given = 1, 3, 24, 32, 33, 96, 160, 320, 512, 513, 640, 1025
    expected = [1, 4, 32, 32, 64, 96, 160, 320, 512, 288, 320, 352]
    assert [row_threads(packs, 512) for packs in given] == expected
    assert all(row_threads(packs, 512) <= 512 for packs in range(1, 5000))

"""The kernels of group norm: any schedule, any grid, and what they move."""

import numpy as np
import pytest

from gradkit._calls.channels import GroupNorm, GroupNormGrad
from gradkit._cuda import CudaBackend
from gradkit._cuda.channel_launches import group_launches
from gradkit._cuda.held_groups import HeldGradient, HeldNorm, _block, _threads
from tests.backends import Backend, KernelDevice, kernel_mark
from tests.combinations import Asked
from tests.cuda.test_normalization import SCHEDULES
from tests.cuda.test_traffic import Meter
from tests.problems import LAYER_TYPES, launch, make_groups
from tests.tolerances import assert_all_same_bits

pytestmark = kernel_mark

FORWARD = "column_moments", "finish_group_moments", "normalize_groups"
BACKWARD = (
    "sum_group_gradient",
    "finish_group_means",
    "finish_group_parameters",
    "apply_group_gradient",
)
HELD = "held_group_norm", "held_group_gradient"
ASKED = Asked("group_norm", "group_norm_grad")
nothing_else_is_asked_for = ASKED.fixture
HELD_CASES = [
    ((3, 24, 8, 8), 1, 2),
    ((2, 2, 40, 40), 1, 2),
    ((2, 192, 6), 1, 3),
    ((3, 64, 7, 7), 1, 2),
    ((1, 8, 1601), 1, 1),
]
# (shape, channel axis, groups): packs across groups, several shares, ragged columns, groups of so
# many channels that a thread adds up more than four, and packs across two channels of odd sizes;
# then groups that a block holds: of one channel and of several at once, and of several in a pack.
CASES = [
    ((3, 6, 40), 1, 2),
    ((2, 33, 24), 2, 8),
    ((5, 3, 7), 1, 3),
    ((70, 12), 1, 4),
    ((2, 900, 6), 2, 2),
    ((2, 1101, 3), 1, 1),
    ((3, 24, 7), 1, 8),
    ((2, 8, 5, 5), 1, 1),
    *HELD_CASES,
]


class Device(KernelDevice):
    """Compiles only what is listed: that alone is compiled for every GPU."""

    def compile(self, source, options=()):
        ASKED.note(source, options)
        return super().compile(source, options)


class Emulated(Backend):
    """The launchers on an emulated device, with what the checks need of a backend."""

    depth = 32

    def __init__(self, **options):
        self.device = Device(**options)
        self.run = CudaBackend(self.device)

    def results(self, p):
        """Those of the forward pass, then those of the gradient."""
        outs = [
            self.run.empty(a.shape, a.dtype)
            for a in (p.x, p.mean, p.inv_std, p.x, p.scale, p.scale)
        ]
        given = vars(p) | {"channel_axis": p.axis, "num_groups": p.groups}
        self.forward = launch(self.run, GroupNorm, outs[:3], **given)
        launch(self.run, GroupNormGrad, outs[3:], **given)
        return outs

    def parts(self, p):
        """The gradient's results again, of two calls."""
        dx, dscale, dbias = (self.run.empty(a.shape, a.dtype) for a in (p.x, p.scale, p.scale))
        given = vars(p) | {"channel_axis": p.axis}
        launch(self.run, GroupNormGrad, (dx, None, None), wanted=("dx",), **given)
        weights = "dscale", "dbias"
        launch(self.run, GroupNormGrad, (None, dscale, dbias), wanted=weights, **given)
        return dx, dscale, dbias


@pytest.mark.parametrize(("shape", "axis", "groups"), CASES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_bits(shape, axis, groups, schedule):
    p = make_groups(shape, groups, LAYER_TYPES[3], axis)
    one_block = dict.fromkeys(HELD, 1)  # takes all groups in turn
    device = Emulated(schedule=schedule, seed=3, grid_limit=one_block)
    plain = Emulated()
    assert_all_same_bits(device.results(p), plain.results(p))


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize(("shape", "axis", "groups"), CASES, ids=str)
def test_loops_over_blocks_go_round(shape, axis, groups, limit):
    """Kernels whose result does not hang on their grid, on the smallest."""
    p = make_groups(shape, groups, axis=axis)
    device = Emulated(
        grid_limit=dict.fromkeys((*FORWARD, *BACKWARD, *HELD), limit), multiprocessors=3
    )
    found = device.results(p)
    p.check_forward(device, *found[:3])
    p.check_gradients(device, *found[3:])
    assert_all_same_bits(device.parts(p), found[3:])


@pytest.mark.parametrize(
    ("shape", "axis", "width"),
    [
        *(((70, 12), 1, 4), ((70, 6), 1, 2), ((3, 6, 40), 1, 4), ((2, 33, 24), 2, 4)),
        *(((5, 3, 7), 1, 1), ((5, 12, 7), 1, 4), ((5, 9, 7), 1, 1), ((5, 12, 3), 1, 1)),
        *(((1, 12, 255), 1, 4), ((1, 12, 257), 1, 1), ((5, 12, 6), 1, 2)),
    ],
)
def test_as_much_is_read_at_once_as_divides_rows(shape, axis, width):
    x = np.zeros(shape, np.float32)
    types = ("float32",) * 3
    assert group_launches(Device(), "group_norm", x, axis, 3, types).columns.vector == width


@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
def test_any_number_of_shares(multiprocessors):
    for shape, axis, groups in CASES:
        p = make_groups(shape, groups, axis=axis)
        device = Emulated(multiprocessors=multiprocessors)
        found = device.results(p)
        p.check_forward(device, *found[:3])
        p.check_gradients(device, *found[3:])


@pytest.mark.parametrize("last", [False, True])
def test_passes_over_the_data(last):
    """The forward pass reads x twice, the gradient dy and x too, where they lie."""
    p = make_groups((4, 8, 7, 16) if last else (4, 16, 8, 7), 4, axis=3 if last else 1)
    view = (lambda array: array.transpose(0, 3, 1, 2)) if last else (lambda array: array)
    meter = Meter()
    x, scale, bias = meter.put(p.x, p.scale, p.bias)
    y, mean, inv_std = meter.empty(p.x, p.mean, p.inv_std)
    given = {"x": view(x), "scale": scale, "bias": bias, "num_groups": p.groups}
    launch(meter.run, GroupNorm, [view(y), mean, inv_std], **given)
    moved = meter.moved(*FORWARD)
    assert moved["x"] == (2 * x.nbytes, 0)
    assert moved["y"] == (0, x.nbytes)

    meter = Meter()
    dy, x, scale, mean, inv_std = meter.put(p.dy, p.x, p.scale, p.mean, p.inv_std)
    dx, dscale, dbias = meter.empty(p.x, p.scale, p.scale)
    given = {"dy": view(dy), "x": view(x), "scale": scale, "mean": mean, "inv_std": inv_std}
    launch(meter.run, GroupNormGrad, [view(dx), dscale, dbias], **given)
    moved = meter.moved(*BACKWARD)
    assert moved["dy"] == moved["x"] == (2 * x.nbytes, 0)
    assert moved["dx"] == (0, x.nbytes)
    assert moved["dscale"] == moved["dbias"] == (0, scale.nbytes)


@pytest.mark.parametrize(("shape", "axis", "groups"), HELD_CASES, ids=str)
def test_groups_that_fit_are_read_once(shape, axis, groups):
    p, meter = make_groups(shape, groups, axis=axis), Meter()
    x, scale, bias = meter.put(p.x, p.scale, p.bias)
    y, mean, inv_std = meter.empty(p.x, p.mean, p.inv_std)
    given = {"x": x, "scale": scale, "bias": bias, "num_groups": groups}
    launch(meter.run, GroupNorm, [y, mean, inv_std], **given)
    moved = meter.moved(HELD[0])
    assert moved["x"] == (x.nbytes, 0)
    assert moved["y"] == (0, x.nbytes)

    meter = Meter()
    dy, x, scale, mean, inv_std = meter.put(p.dy, p.x, p.scale, p.mean, p.inv_std)
    dx, dscale, dbias = meter.empty(p.x, p.scale, p.scale)
    given = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}
    launch(meter.run, GroupNormGrad, [dx, dscale, dbias], **given)
    moved = meter.moved(HELD[1], "column_sums")
    assert moved["dy"] == moved["x"] == (x.nbytes, 0)
    assert moved["dx"] == (0, x.nbytes)
    assert moved["first"] == moved["second"] == (0, scale.nbytes)
    launch(meter.run, GroupNormGrad, [dx, None, None], **given)
    assert meter.moved(HELD[1], "column_sums")["dx"] == (0, 2 * x.nbytes)


@pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)
@pytest.mark.parametrize("shape", [(6, 8, 8, 17), (6, 32, 7, 7)], ids=str)
def test_a_sample_alone_has_the_bits_that_it_has_among_others(shape, types):
    p = make_groups(shape, 2, types)
    found = Emulated(multiprocessors=1).results(p)[:3]
    for sample in (0, 5):
        alone = make_groups(shape, 2, types)
        alone.x, alone.dy = p.x[sample : sample + 1], p.dy[sample : sample + 1]
        alone.__post_init__()
        device = Emulated(multiprocessors=132)
        own = device.results(alone)[:3]
        assert isinstance(device.forward, HeldNorm)
        assert_all_same_bits(own, [each[sample : sample + 1] for each in found])


@pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)
@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (2, 32, 7, 7)], ids=str)
def test_y_may_take_the_place_of_x(shape, types):
    p, device = make_groups(shape, 2, types), Emulated(multiprocessors=1)
    apart = device.results(p)[:3]
    over = [p.x.copy(), *(np.empty_like(a) for a in apart[1:])]
    given = vars(p) | {"x": over[0], "channel_axis": 1, "num_groups": 2}
    launch(device.run, GroupNorm, over, **given)
    assert_all_same_bits(over, apart)


@pytest.mark.parametrize(
    ("shape", "axis", "limits", "held"),
    [
        ((2, 8, 64), 1, (227, 227), (True, True)),  # groups of 64 packs
        ((2, 8, 60), 1, (227, 227), (False, False)),  # of 60
        ((2, 2, 131, 1), 1, (227, 227), (False, False)),  # not of whole packs
        ((2, 64, 8), 2, (227, 227), (False, False)),  # channels last
        ((2, 256, 2), 1, (227, 227), (False, True)),  # packs across more than two channels
        ((2, 8, 1440), 1, (25, 47), (True, True)),  # 22.5 KiB of each array, and slots beside them
        ((2, 8, 1440), 1, (24, 46), (False, False)),
    ],
)
def test_what_a_block_holds(shape, axis, limits, held):
    x = np.zeros(shape, np.float32)
    for kind, limit, fits in zip((HeldNorm, HeldGradient), limits, held, strict=True):
        device = Device(max_shared_memory=limit << 10)
        found = kind.of(device, x, axis, 2, ("float32",) * 3)
        assert (found is not None) == fits


@pytest.mark.parametrize(
    ("packs", "threads"),
    [
        *((64, 64), (65, 96), (128, 128), (129, 96)),
        (392, 128),  # 64 channels of 7 x 7
        (1568, 224),  # 16 of 28 x 28: seven turns, none of them with threads at leisure
        (3136, 256),  # 8 of 56 x 56: four blocks on a multiprocessor
        (6272, 416),
        (14336, 512),
    ],
)
def test_the_threads_of_a_block_that_holds_a_group_as_a_row(packs, threads):
    assert _threads(packs) == threads


@pytest.mark.parametrize(
    ("width", "accesses", "packs", "block"),
    [
        (16, 98, 1568, (16, 16)),  # 28 x 28
        (12, 98, 1176, (16, 12)),
        (20, 98, 1960, (16, 10)),  # two rounds of ten, not of sixteen and four
        (8, 392, 3136, (64, 8)),  # 56 x 56
        (2, 1568, 3136, (256, 2)),
        (1, 6272, 6272, (512, 1)),
        (1, 64, 64, (8, 4)),  # whole warps
        (1, 300, 300, (128, 1)),
        (1, 257, 64, (128, 1)),
        (3, 300, 900, (32, 3)),
        (64, 49, 392, (8, 16)),  # 7 x 7
        (400, 2, 100, (1, 128)),
        (64, 1, 64, (1, 64)),
    ],
)
def test_the_threads_of_a_block_that_holds_a_group(width, accesses, packs, block):
    assert _block(width, accesses, packs) == block


def test_several_threads_add_up_the_parts_of_a_group():
    backend = Emulated(multiprocessors=4, max_shared_memory=12 << 10)  # holds no group
    p = make_groups((2, 64, 90), 2)
    backend.results(p)
    plan = backend.forward
    parts = plan.grid[1] * 32
    threads, groups = plan.launched["finish_group_moments"].block[:2]
    assert 32 <= threads <= 2 * parts
    assert threads * groups <= 1024

"""The norm kernels' own tests: paths, grids, schedules, traffic, indices beyond 2^32.

The suite that all backends share covers values, layouts and meaning; here are the shapes that
make each kernel take each of its ways, on devices that make each loop go round.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gradkit._calls.backend import OPERATIONS
from gradkit._calls.channels import (
    BatchNorm,
    BatchNormApply,
    BatchNormGrad,
    BatchNormGradApply,
    BatchNormGradSums,
    BatchNormInference,
    BatchNormInferenceGrad,
    BatchNormStats,
    CombineStats,
    UpdateRunningStatistics,
)
from gradkit._calls.rows import (
    AddLayerNorm,
    AddRmsNorm,
    GatedRmsNorm,
    GatedRmsNormGrad,
    InvertibleLayerNormGrad,
    InvertibleRmsNormGrad,
    LayerNorm,
    LayerNormGrad,
    LayerNormInverse,
    RmsNorm,
    RmsNormGrad,
)
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.kernels import kernel
from testbed.emulator import IdleDevice
from testbed.emulator.memory import sparse_array
from testbed.emulator.runtime import SCHEDULES
from tests import oracles, strategies
from tests.backends import Backend, KernelDevice, kernel_mark
from tests.combinations import ON_GPUS, Asked
from tests.problems import BATCH_TYPES, LAYER_TYPES, Problem, launch, make
from tests.tolerances import DTYPES, assert_all_same_bits
from tests.values import test_batch_norm_inference

pytestmark = kernel_mark

# (rows, columns): one warp and several, one and several rows a block, either side of where
# vectors, chunks, warps, blocks, registers and shared memory end; the longest are read twice.
SHAPES = [
    (1, 1),
    (65, 3),
    (70, 8),
    (33, 31),
    (9, 64),
    (7, 129),
    (19, 264),
    (5, 257),
    (6, 1024),
    (3, 1027),
    (2, 4095),
    (2, 4096),
    (2, 5119),
    (2, 5120),
    (2, 6143),
    (2, 6160),
    (3, 8192),
    (2, 6147),
    (3, 8200),
    (2, 10239),
    (2, 10241),
    (2, 12289),
    (2, 16384),
    (2, 16392),
]
# (shape, channel axis, channels last in memory)
BATCHES = [
    ((70, 3), 1, False),
    ((9, 264), 1, False),
    ((64, 8), 0, False),
    ((5, 3, 7), 1, False),
    ((3, 2, 5, 16), 1, False),
    ((2, 5, 3, 33), 2, False),
    ((2, 3, 9, 8, 8), 1, False),
    ((3, 8, 5, 7), 1, True),
    ((2, 5, 4, 3), 1, True),
    ((2, 6, 1, 1), 1, False),
]
OPERATIONS = [name for name in OPERATIONS if "_norm" in name and "clip" not in name]
# tests/cuda/test_group_norm.py has those of groups.
OPERATIONS = [name for name in OPERATIONS if name not in ("grad_norm", "unit_norms")]
OPERATIONS = [name for name in OPERATIONS if not name.startswith("group_norm")]
OPERATIONS += ["combine_stats", "update_running_statistics"]
ASKED = Asked(*OPERATIONS)
nothing_else_is_asked_for = ASKED.fixture
# Elements in front of the last pack of a row.
PARTS = 32, 2032, 4080, 5104, 6128, 8176, 10224, 12272, 32752, 49136, 65536
# Widths in which a thread has one pack, and of which each number of threads in long rows comes.
EXACT = 161, 322, 644, 1288, 4608, 5376, 8960, 10240, 14336, 16384
# So long that the emulator takes its time.
LONG, RATHER_LONG = (pytest.param(s, marks=pytest.mark.slow) for s in ((3, 16400), (5, 8200)))


class Device(KernelDevice):
    """Compiles only what is listed: that alone is compiled for every GPU."""

    def compile(self, source, options=()):
        ASKED.note(source, options)
        return super().compile(source, options)


class Emulated(Backend):
    """The launchers on an emulated device, with what the checks need of a backend."""

    depth = 32  # the most rows here that one thread adds up; everything else is held in double

    def __init__(self, kind=Device, **options):
        self.device = kind(**options)
        self.run = CudaBackend(self.device)
        self.wanted = None  # results of a gradient

    def empty(self, *likes):
        return [None if a is None else self.run.empty(a.shape, a.dtype) for a in likes]

    def write(self, kind, p, outs, **more):
        """Launch a call of that kind on the arrays of a problem."""
        axes = {"axis": _axis(p), "channel_axis": _axis(p)}
        launch(self.run, kind, outs, **(vars(p) | axes | more))

    def call(self, kind, p, *likes, **more):
        """The results of a call, which are like these arrays."""
        outs = self.empty(*likes)
        if self.wanted and "wanted" in kind.numbers:
            more["wanted"] = tuple(name for name in kind.result_names if name in self.wanted)
            named = zip(kind.result_names, outs, strict=True)
            outs = [out if name in self.wanted else None for name, out in named]
        self.write(kind, p, outs, **more)
        return outs

    def layer_norm_grad(self, p):
        return self.call(LayerNormGrad, p, p.x, p.scale, p.scale)

    def rms_norm_grad(self, p):
        return self.call(RmsNormGrad, p, p.x, p.scale)

    def residual_norm(self, p, residual):
        """The forward pass of a sum: y, s and the statistics."""
        if p.centred:
            return self.call(AddLayerNorm, p, p.x, p.x, p.mean, p.inv_std, residual=residual)
        return self.call(AddRmsNorm, p, p.x, p.x, p.inv_std, residual=residual)

    def gradient_past(self, p, ds):
        """The gradient with one more summand of dx."""
        if p.centred:
            return self.call(LayerNormGrad, p, p.x, p.scale, p.scale, ds=ds)
        return self.call(RmsNormGrad, p, p.x, p.scale, ds=ds)

    def invertible_grad(self, p, y, **more):
        if p.centred:
            return self.call(InvertibleLayerNormGrad, p, p.x, p.scale, p.bias, y=y, **more)
        return self.call(InvertibleRmsNormGrad, p, p.x, p.scale, y=y, **more)

    def gated(self, p, *parts):
        """Both passes of a gated norm; test_gated_norm.py has their values."""
        for before in (True, False):
            gating = {"gate": p.dy, "activation": "silu", "norm_before_gate": before}
            self.write(GatedRmsNorm, p, self.empty(p.x, p.inv_std), **gating)
            likes = {"dx": p.x, "dgate": p.x, "dscale": p.scale}
            for wanted in ([*likes], *parts):
                outs = self.empty(*(likes[name] if name in wanted else None for name in likes))
                self.write(GatedRmsNormGrad, p, outs, **gating, wanted=tuple(wanted))

    def batch_norm_grad(self, p):
        return self.call(BatchNormGrad, p, p.x, p.scale, p.scale)

    def layer_norm(self, p):
        return self.call(LayerNorm, p, p.x, p.mean, p.inv_std)

    def rms_norm(self, p):
        return self.call(RmsNorm, p, p.x, p.inv_std)

    def batch_norm(self, p):
        return self.call(BatchNorm, p, p.x, p.mean, p.inv_std)

    def batch_norm_in_steps(self, p):
        """With statistics that were combined, though of one rank alone."""
        own, whole = (self.run.empty((2, p.mean.size), DTYPES["float64"]) for _ in range(2))
        counts = self.run.as_float64(np.array([p.x.size / p.mean.size]))  # ranks meet on the host
        self.write(BatchNormStats, p, own)
        count = self.run.empty((), DTYPES["float64"])
        ranks = {"means": own[:1], "variances": own[1:], "counts": counts}
        launch(self.run, CombineStats, [*whole, count], **ranks)
        known = {"mean": whole[0], "var": whole[1]}
        return self.call(BatchNormApply, p, p.x, p.mean, p.inv_std, **known)

    def batch_norm_grad_in_steps(self, p):
        sums = self.run.empty((2, p.mean.size), DTYPES["float64"])
        self.write(BatchNormGradSums, p, sums)
        known = {"sum_dy_xhat": sums[0], "sum_dy": sums[1], "count": p.x.size / p.mean.size}
        return self.call(BatchNormGradApply, p, p.x, **known)[0]

    def batch_norm_with_running(self, p):
        """Running statistics that become those of the batch, in each dtype."""
        outs = self.empty(p.x, p.mean, p.inv_std)
        count = p.x.size / p.mean.size
        for dtype in {*DTYPES} if count > 1 else {}:
            own = self.empty(*[p.mean.astype(DTYPES[dtype])] * 2)
            for array in own:
                array[...] = 0
            running = dict(zip(("running_mean", "running_var"), own, strict=True))
            self.write(BatchNorm, p, outs, **running, momentum=1.0)
            other = self.empty(*own)
            for array in other:
                array[...] = 0
            mean, var = self.run.empty((2, p.mean.size), DTYPES["float64"])
            mean[...] = var[...] = 0
            rule = {"mean": mean, "var": var, "count": count, "momentum": 0.0}
            launch(self.run, UpdateRunningStatistics, other, **running, **rule)
            assert_all_same_bits(own, other)
        return outs if count > 1 else self.batch_norm(p)

    def batch_norm_inference(self, p):
        return self.call(BatchNormInference, p, p.x)[0]

    def batch_norm_inference_grad(self, p):
        return self.call(BatchNormInferenceGrad, p, p.x, p.scale, p.scale)

    def inverse(self, p, y):
        return self.call(LayerNormInverse, p, p.x, y=y)[0]


class Asking(Emulated):
    """Asks an idle device once for the kernels of calls whose arrays lie alike."""

    def __init__(self, **options):
        super().__init__(IdleDevice, **options)
        self.asked = set()

    def call(self, kind, p, *likes, **more):
        given = [a for a in (vars(p) | more).values() if isinstance(a, np.ndarray)]
        asked = kind, self.wanted, *((a.dtype, a.shape, a.strides) for a in given)
        if asked not in self.asked:
            super().call(kind, p, *likes, **more)
            if "scale_offset" in kind.fields and all(a.flags.c_contiguous for a in given):
                super().call(kind, p, *likes, scale_offset=1.0, **more)
            self.asked.add(asked)
        return [*likes]


def _axis(p):
    return p.axis % p.x.ndim


def _check_row_norms(device, shape, types):
    p = make(shape, types, seed=shape[1])
    p.check_forward(device, *device.layer_norm(p))
    p.check_gradients(device, *device.layer_norm_grad(p))
    y, xhat = from_output(p)
    p.check_gradients(device, *device.invertible_grad(p, y), xhat=xhat)
    back = device.inverse(p, y)
    assert_close_to_input(p, back)
    p = make(shape, types, seed=shape[1], centred=False)
    y, inv_std = device.rms_norm(p)
    p.check_forward(device, y, None, inv_std)
    p.check_gradients(device, *device.rms_norm_grad(p))
    y, xhat = from_output(p)
    p.check_gradients(device, *device.invertible_grad(p, y), xhat=xhat)
    device.gated(p)


def _at_strides(host, gap):
    """The same rows with a gap after each."""
    room = np.full((host.shape[0], host.shape[1] + gap), np.nan, host.dtype)
    room[:, : host.shape[1]] = host
    return room[:, : host.shape[1]]


def _check_row_variants(device, shape, types, gap):
    """Rows at strides, sums and gradients past a norm: the bits and values of plain calls."""
    for centred in (True, False):
        p = make(shape, types, seed=shape[1], centred=centred)
        other = make(shape, types, seed=99)
        calls = [device.rms_norm, device.rms_norm_grad]
        if centred:
            calls = [device.layer_norm, device.layer_norm_grad]
        calls += [lambda q: device.invertible_grad(q, q.x)]
        q = replace(p, x=_at_strides(p.x, gap), dy=_at_strides(p.dy, 2 * gap))
        for call in calls:
            assert_all_same_bits(call(q), call(p))
        _check_parts(device, calls[1], p)
        nothing = np.zeros_like(p.x)
        y, _, *statistics = device.residual_norm(p, _at_strides(nothing, gap))
        assert_all_same_bits(device.residual_norm(p, nothing), [y, _, *statistics])
        mean = statistics[0] if centred else None
        p.check_forward(device, y, mean, statistics[-1])
        _check_parts(device, lambda q, ds=other.x: device.gradient_past(q, ds), q, ("dx",))
        past = device.gradient_past(q, _at_strides(other.x, gap))
        assert_all_same_bits(past, device.gradient_past(p, other.x))
        p.check_gradients(device, *device.gradient_past(p, nothing))
        if not centred:
            past = device.invertible_grad(replace(q, x=p.x), q.x, ds=_at_strides(other.x, gap))
            assert_all_same_bits(past, device.invertible_grad(p, p.x, ds=other.x))
            y, xhat = from_output(p)
            past = device.invertible_grad(p, y, ds=nothing)
            p.check_gradients(device, *past, xhat=xhat)


def _check_parts(device, call, p, *wanted):
    """Gradients have the same bits whichever others are wanted."""
    every = call(p)
    for device.wanted in wanted or (("dx",), ("dscale", "dbias")):
        for found, expected in zip(call(p), every, strict=True):
            if found is not None:
                assert_all_same_bits([found], [expected])
    device.wanted = None


def _check_batch_norm(device, shape, axis, last, types):
    p = _batch(shape, axis, last, types)
    p.check_forward(device, *device.batch_norm(p))
    p.check_gradients(device, *device.batch_norm_grad(p))
    _check_parts(device, device.batch_norm_grad, p)
    p.check_forward(device, *device.batch_norm_in_steps(p))
    p.check_gradients(device, device.batch_norm_grad_in_steps(p), None)
    p.check_forward(device, *device.batch_norm_with_running(p))
    p = test_batch_norm_inference.known(p)
    test_batch_norm_inference.check_forward(device, p, device.batch_norm_inference(p))
    test_batch_norm_inference.check_gradient(device, p, *device.batch_norm_inference_grad(p))
    _check_parts(device, device.batch_norm_inference_grad, p)


def assert_close_to_input(p, back):
    """Undoing a norm leaves y's rounding, divided by scale and inv_std."""
    u = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
    y = np.abs(p.rows(p.forward().y.reshape(p.x.shape)))
    factor = np.abs(p.per_column(p.scale).astype(float)) * p.inv_std.reshape(-1, 1)
    bound = 16 * u[str(p.x.dtype)] * (y / factor + np.abs(p.rows(p.x).astype(float)) + 1)
    assert np.all(np.abs(p.rows(back).astype(float) - p.rows(p.x).astype(float)) <= bound)


def from_output(p):
    """The norm's output, and the xhat that its rounded values stand for."""
    y = p.forward().y.astype(p.x.dtype).reshape(p.x.shape)
    return y, oracles.unscaled(p.rows(y), p.per_column(p.scale), p.per_column(p.bias))


def _batch(shape, axis, last, types, **options):
    p = make(shape, types, axis, seed=len(shape), batch=True, **options)
    if last:
        for name in ("dy", "x"):
            moved = np.ascontiguousarray(np.moveaxis(getattr(p, name), axis, -1))
            setattr(p, name, np.moveaxis(moved, -1, axis))
    return p


# Values, on every path and in every choice of dtypes

# Two choices of dtypes for each shape. With VARIANTS they run 99 of 100 kernels that four choices
# would, if float16 and bfloat16 count as one.
NORMS = [
    (shape, types)
    for (i, shape), (j, types) in itertools.product(enumerate(SHAPES), enumerate(LAYER_TYPES))
    if (3 * i + j) % 4 == 0
]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("shape", "types"), NORMS, ids=str)
def test_row_norms(shape, types):
    _check_row_norms(Emulated(multiprocessors=1 + shape[0] % 3), shape, types)


# Every shape, and every choice of dtypes.
VARIANTS = [*itertools.product(SHAPES, LAYER_TYPES)][4::5]


@pytest.mark.sampled(19)
@pytest.mark.parametrize(("shape", "types"), VARIANTS, ids=str)
def test_row_variants(shape, types):
    device, single = Emulated(multiprocessors=1 + shape[0] % 3), sum(shape) % 2
    _check_row_variants(device, shape, types, gap=1 if single else 16)


@pytest.mark.parametrize("shape", [(40, 64), RATHER_LONG, LONG], ids=str)
def test_strided_rows_on_the_smallest_grid(shape):
    """Loops over rows and over long rows go round."""
    names = ("layer_norm", "row_sums_of_gradient", "apply_gradient")
    device = Emulated(grid_limit=dict.fromkeys(names, 1), multiprocessors=1)
    _check_row_variants(device, shape, LAYER_TYPES[6], 16)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)
@pytest.mark.parametrize(("shape", "axis", "last"), BATCHES, ids=str)
def test_batch_norm(shape, axis, last, types):
    _check_batch_norm(Emulated(multiprocessors=1 + shape[0] % 3), shape, axis, last, types)


@pytest.mark.parametrize("last", [False, True])
def test_channels_of_many_packs(last):
    """Walks over the ends of runs, and sums that double takes over more than once."""
    device, p = Emulated(multiprocessors=1), _batch((64, 2, 101), 1, last, BATCH_TYPES[0])
    p.check_forward(device, *device.batch_norm(p))
    p.check_gradients(device, *device.batch_norm_grad(p))
    p = test_batch_norm_inference.known(p)
    test_batch_norm_inference.check_forward(device, p, device.batch_norm_inference(p))
    test_batch_norm_inference.check_gradient(device, p, *device.batch_norm_inference_grad(p))


def _zero_statistics(p):
    p.mean, p.inv_std = np.zeros((2, *p.lead), DTYPES[p.statistics])


@pytest.mark.slow
def test_all_that_is_listed_is_asked_for_and_nothing_else(monkeypatch):
    """Rows like those above ask an idle device for all that is compiled for every GPU."""
    # No kernel reads a value: neither oracles nor random numbers are needed.
    monkeypatch.setattr(Problem, "__post_init__", _zero_statistics)
    ones = lambda shape, dtype, *_: np.ones(shape, DTYPES[dtype])  # noqa: E731
    monkeypatch.setattr(strategies, "values", ones)
    for check in ("check_forward", "check_gradients"):
        monkeypatch.setattr(Problem, check, lambda *_, **__: None)
    for check in ("check_forward", "check_gradient"):
        monkeypatch.setattr(test_batch_norm_inference, check, lambda *_, **__: None)
    monkeypatch.setitem(globals(), "assert_close_to_input", lambda *_: None)
    monkeypatch.setitem(globals(), "from_output", lambda p: (p.x, None))
    monkeypatch.setitem(globals(), "assert_all_same_bits", lambda *_: None)
    requested = set()
    # The second GPU takes longer lists; from the third on it is what holds a long row that differs.
    for types, (place, gpu) in itertools.product(LAYER_TYPES, enumerate(ON_GPUS)):
        if place == 1:
            continue
        packs = [pack for pack in (8, 4, 2) if pack * DTYPES[types[0]].itemsize <= 16]
        widths = [*(part + pack for part in PARTS for pack in packs), *EXACT]
        for shape in [*SHAPES, *((2, width) for width in widths)]:
            if place == 0 or shape[1] > 4000:
                requested.update(_asked_of(gpu, shape, types))
    images = [((2, 3, run), 1, False) for run in (60, 34)]
    images += [((2, run, 3), 1, True) for run in (60, 34)]
    images.append(((2, 8, 63), 1, False))
    for (shape, axis, last), types in itertools.product([*BATCHES, *images], BATCH_TYPES):
        carried = ON_GPUS[shape[0] % 2].parameter_bytes
        device = Emulated(IdleDevice, multiprocessors=1 + shape[0] % 3, parameter_bytes=carried)
        _check_batch_norm(device, shape, axis, last, types)
        requested.update(device.device.compiled)
    listed = ASKED.listed
    assert not requested - listed
    assert not listed - requested


def _asked_of(gpu, shape, types):
    """Kernels that norms of rows compile on a GPU: of contiguous rows, and at strides."""
    device = Asking(multiprocessors=1 + shape[0] % 3, **gpu._asdict())
    _check_row_norms(device, shape, types)
    for gap in (1, 16):
        _check_row_variants(device, shape, types, gap)
    p = make(shape, types)
    for rows in (p, replace(p, x=_at_strides(p.x, 1))):
        device.gated(rows, ["dgate", "dscale"])
    return device.device.compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("affine", [False, True])
def test_a_row_that_many_blocks_share(affine):
    device, p = Emulated(multiprocessors=8), make((1, 70_001), affine=affine)
    p.check_gradients(device, *device.layer_norm_grad(p))
    p = make((1, 70_001), affine=affine, centred=False)
    p.check_gradients(device, *device.rms_norm_grad(p))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(7, 3), (5, 257), (3, 8200), (2, 16400)], ids=str)
@pytest.mark.parametrize("missing", ["both", "bias"])
def test_without_scale_or_bias(shape, missing):
    device, p = Emulated(), make(shape)
    p.bias = None
    if missing == "both":
        p.scale = None
    p.check_forward(device, *device.layer_norm(p))
    dx, dscale, _ = device.layer_norm_grad(p)
    p.check_gradients(device, dx, dscale)
    y, xhat = from_output(p)
    dx, dscale, _ = device.invertible_grad(p, y)
    p.check_gradients(device, dx, dscale, xhat=xhat)
    p.bias, p.centred = None, False
    p.__post_init__()
    dx, dscale = device.rms_norm_grad(p)
    p.check_gradients(device, dx, dscale)


# Grids and schedules


@pytest.mark.guarantee("Any schedule")
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "shape", [(65, 3), (19, 264), (6, 1024), (5, 2200), (5, 8200), (3, 16400)], ids=str
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_row_norms_under_every_schedule(shape, schedule):
    device, plain = Emulated(schedule=schedule, seed=3), Emulated()
    p = make(shape)
    y, _ = from_output(p)
    for name, extra in (
        ("layer_norm_grad", ()),
        ("rms_norm_grad", ()),
        ("invertible_grad", (y,)),
        ("layer_norm", ()),
        ("rms_norm", ()),
    ):
        assert_all_same_bits(getattr(device, name)(p, *extra), getattr(plain, name)(p, *extra))


@pytest.mark.guarantee("Any schedule")
@pytest.mark.parametrize(("shape", "axis", "last"), [BATCHES[1], BATCHES[4], BATCHES[7]], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_norm_under_every_schedule(shape, axis, last, schedule):
    device, plain = Emulated(schedule=schedule, seed=3), Emulated()
    p = _batch(shape, axis, last, BATCH_TYPES[3])
    known = test_batch_norm_inference.known(_batch(shape, axis, last, BATCH_TYPES[3]))
    for name, of in (
        ("batch_norm_grad", p),
        ("batch_norm", p),
        ("batch_norm_inference_grad", known),
    ):
        assert_all_same_bits(getattr(device, name)(of), getattr(plain, name)(of))


@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 132])
@pytest.mark.parametrize("rows", [1, 2, 95, 96, 97])
def test_row_counts_around_the_grid(rows, multiprocessors):
    """A row of 40 takes 8 threads, a row of 9000 all of a block's."""
    device = Emulated(multiprocessors=multiprocessors)
    _check_row_norms(device, (rows, 40), LAYER_TYPES[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", [2, 1])
def test_loops_over_blocks_go_round(limit):
    """Kernels whose result does not hang on their grid, on the smallest."""
    names = ("layer_norm", "layer_norm_inverse", "row_sums_of_gradient", "column_sums")
    names += ("apply_channels", "normalize", "finish_channels", "finish_moments")
    names += ("apply_gradient", "sum_channels", "channel_moments")
    device = Emulated(grid_limit=dict.fromkeys(names, limit), multiprocessors=3)
    _check_row_norms(device, (7, 40), LAYER_TYPES[0])
    _check_row_norms(device, (5, 8300), LAYER_TYPES[0])
    _check_row_norms(device, (5, 16500), LAYER_TYPES[0])
    for shape, axis, last in (BATCHES[1], BATCHES[3], ((4, 70, 3, 3), 1, True)):
        p = _batch(shape, axis, last, BATCH_TYPES[0])
        p.check_forward(device, *device.batch_norm(p))
        p.check_gradients(device, *device.batch_norm_grad(p))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)
def test_steps_on_the_smallest_grid(types):
    names = ("finish_moments", "take_stats", "finish_sums", "take_sums")
    device = Emulated(grid_limit=dict.fromkeys(names, 1), multiprocessors=1)
    p = _batch((3, 1001), 1, False, types)
    p.check_forward(device, *device.batch_norm_in_steps(p))
    p.check_gradients(device, device.batch_norm_grad_in_steps(p), None)


# Memory


@pytest.mark.parametrize("shape", [(6, 64), (5, 257), (3, 8200), LONG], ids=str)
def test_results_do_not_depend_on_alignment(shape):
    device, p = Emulated(), make(shape)
    ref = device.layer_norm_grad(p)
    for name in ("dy", "x", "scale", "mean", "inv_std"):
        array = getattr(p, name)
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64 + array.itemsize
        shifted = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        shifted[...] = array
        setattr(p, name, shifted)
        assert_all_same_bits(device.layer_norm_grad(p), ref)


@pytest.mark.parametrize("shape", [(6, 64), (3, 8200), LONG], ids=str)
def test_dx_in_the_place_of_dy(shape):
    device, p = Emulated(schedule="run-ahead"), make(shape)
    ref = device.layer_norm_grad(p)
    dy = p.dy.copy()
    _, dscale, dbias = device.empty(p.x, p.scale, p.scale)
    device.write(LayerNormGrad, p, [dy, dscale, dbias], dy=dy)
    assert_all_same_bits((dy, dscale, dbias), ref)


def test_channels_last_arrays_are_read_where_they_are():
    """Neither layout is copied, and both give the same gradients to a rounding."""
    device = Emulated()
    last = _batch((4, 8, 6, 6), 1, True, BATCH_TYPES[0])
    outs = [np.empty_like(last.x), *device.empty(last.scale, last.scale)]
    device.device.total_traffic.by_array.clear()
    device.write(BatchNormGrad, last, outs)
    last.check_gradients(device, *outs)
    read, _ = device.device.total_traffic.by_array["sum_channels", "x"]
    assert read == last.x.nbytes


@pytest.mark.parametrize("shape", [(16, 1024), (64, 1024), (3, 16384)], ids=str)
def test_rows_are_read_once(shape):
    """The traffic is dy, x and dx, and little else."""
    device = Emulated(multiprocessors=1, clusters=False)
    p = make(shape, LAYER_TYPES[0])
    device.device.total_traffic.by_array.clear()
    device.layer_norm_grad(p)
    moved = device.device.total_traffic.by_array
    assert moved["layer_norm_grad", "dy"][0] == p.dy.nbytes
    assert moved["layer_norm_grad", "source"][0] == p.x.nbytes
    assert moved["layer_norm_grad", "dx"] == (0, p.x.nbytes)


@pytest.mark.parametrize(
    ("width", "data", "roomy", "short"),
    [
        (8200, "float32", 163, 99),
        (8200, "bfloat16", 227, None),  # registers hold scale
        (8201, "bfloat16", 163, 99),
        (4100, "float64", 163, None),  # here too
    ],
)
def test_scale_of_long_rows_is_read_once_if_shared_memory_has_room(width, data, roomy, short):
    """Otherwise for each row, before and after its sums; the results are the same."""
    p = make((3, width), next(types for types in LAYER_TYPES if types[0] == types[2] == data))
    results = []
    for shared, times in ((roomy, 1), (short, 6)):
        if shared:
            room = {"max_shared_memory": shared << 10, "clusters": False}
            device = Emulated(multiprocessors=1, **room)
            results.append([np.array(out) for out in device.layer_norm_grad(p)])
            moved = device.device.total_traffic.by_array
            blocks = moved["layer_norm_grad", "partials"][1] // (2 * width * p.inv_std.itemsize)
            read, _ = moved["layer_norm_grad", "scale"]
            assert read == (blocks if shared == roomy else times) * p.scale.nbytes
    p.check_gradients(device, *results[0])
    assert_all_same_bits(results[-1], results[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(3, 8200), (3, 16384)], ids=str)
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[1]], ids="-".join)
def test_long_rows_where_shared_memory_is_short(shape, types):
    """They are read twice."""
    _check_row_norms(Emulated(max_shared_memory=48 << 10), shape, types)


# Numbers that are hard


@pytest.mark.parametrize("shape", [(5, 40), (5, 8200), (3, 16400)], ids=str)
@pytest.mark.parametrize("types", [LAYER_TYPES[0], LAYER_TYPES[1]], ids="-".join)
def test_an_offset_of_ten_thousand_deviations(shape, types):
    device, p = Emulated(), make(shape, types, kind="offset")
    p.check_forward(device, *device.layer_norm(p))
    p.check_gradients(device, *device.layer_norm_grad(p))


@pytest.mark.parametrize("power", [-48, -50, -58, -64, -66])
def test_squares_of_which_a_float_loses_digits(power):
    """A square below 2^-126 keeps the fewer of its digits, the smaller it is."""
    size = np.float32(1.0861 * 2.0**power)
    x = np.where(np.arange(256) % 2, size, -size).reshape(2, 128)
    device = Emulated()
    outs = device.empty(x, x[:, 0], x[:, 0])
    launch(device.run, LayerNorm, outs, x=x, eps=0.0)
    channels = device.empty(x, x[:, 0], x[:, 0])
    channels[0] = channels[0][None]
    launch(device.run, BatchNorm, channels, x=x[None], eps=0.0)
    for _, mean, inv_std in (outs, channels):
        np.testing.assert_array_equal(mean, 0)
        np.testing.assert_allclose(inv_std * float(size), 1, rtol=2.0**-23)


def test_many_squares_of_which_each_loses_digits():
    """Those of a thread: their sum is a number that a float holds well, and they are not."""
    size = np.float32(1.0861 * 2.0**-66)
    x = np.full((1, 1 << 18), size)
    x[:, ::2] *= -1
    device = Emulated(multiprocessors=1)
    outs = device.empty(x, x[:, 0], x[:, 0])
    launch(device.run, LayerNorm, outs, x=x, eps=0.0)
    assert abs(float(outs[2][0]) * float(size) - 1) <= 2.0**-23


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_channel_among_others_of_other_magnitude(at, size):
    """A thread has four channels at once, of which one needs double."""
    device, p = Emulated(multiprocessors=1), _batch((40, 8, 3), 1, True, BATCH_TYPES[0], eps=0.0)
    p.x[:, at] *= np.float32(size)
    p.__post_init__()
    p.check_forward(device, *device.batch_norm(p))
    p.check_gradients(device, *device.batch_norm_grad(p))


def _far_from_the_first(x):
    x[:, 0] = 1e5


def _one_beyond_squares(x):
    x[:, 9] = 2.0**70


def _one_beside_tiny_ones(x):
    x *= 2.0**-70
    x[:, 200] = 1


def _few_units(x):
    x[:] = 10_000 + np.rint(4 * x) * 2.0**-10


def _zeros_but_one(x):
    x[:] = 0
    x[:, 130] = 2.0**-80


VALUES = [
    _far_from_the_first,
    _one_beyond_squares,
    _one_beside_tiny_ones,
    _few_units,
    _zeros_but_one,
]
# Where a thread's squares go beyond what a float holds, or lose digits.
VALUES += [lambda x, e=e: x.__imul__(2.0**e) for e in (-120, -76, -51, -49, -47, 61, 63, 65, 120)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", [300, 301, 2 * 512 * 4 * 8], ids=["packs", "single", "long"])
@pytest.mark.parametrize("change", VALUES, ids=lambda f: getattr(f, "__name__", "").strip("_<>"))
def test_statistics_that_floats_cannot_add_up(change, columns):
    """Some threads must turn to double, and others must keep the digits that they have."""
    device = Emulated(multiprocessors=1)
    for p in (make((3, columns), eps=0.0), make((3, columns), eps=0.0, centred=False)):
        change(p.x)
        p.__post_init__()
        y, *statistics = device.layer_norm(p) if p.centred else device.rms_norm(p)
        mean, inv_std = statistics if p.centred else (None, *statistics)
        p.check_forward(device, y, mean, inv_std)
    if columns > 301:
        return
    narrow = next(types for types in BATCH_TYPES if types[0] == "bfloat16")
    for last, types in itertools.product((False, True), (BATCH_TYPES[0], narrow)):
        q = _batch((4, 3, columns), 1, last, types, eps=0.0)
        change(q.x[1])
        q.__post_init__()
        q.check_forward(device, *device.batch_norm(q))


@pytest.mark.parametrize("types", [("float64",) * 3, ("float32",) * 3], ids=str)
def test_distances_that_overflow(types):
    """A mean is finite if the sum of x is; the variance is not."""
    device, largest = Emulated(multiprocessors=1), np.finfo(types[0]).max / 2
    for columns in (40, 20_000):
        p = make((2, columns), types, affine=False)
        p.x[:] = np.where(np.arange(columns) % 2, -largest, largest)
        p.x[:, [8, 9]] *= np.array(1.5, types[0])
        for q in (p, replace(p, batch=True, axis=0)):
            _, mean, _ = device.batch_norm(q) if q.batch else device.layer_norm(q)
            np.testing.assert_allclose(mean, 0, atol=float(largest) * 2.0**-50)


@pytest.mark.parametrize("last", [False, True])
def test_a_thread_that_reads_many_packs_far_from_zero(last):
    """It sums distances from the mean of what it read before."""
    device = Emulated(multiprocessors=1, resident_threads=256)
    p = _batch((2, 3, 6000), 1, last, BATCH_TYPES[0])
    p.x += np.float32(1e4)
    p.__post_init__()
    p.check_forward(device, *device.batch_norm(p))


def test_squares_that_are_all_rounded_alike():
    """A float that adds up thousands of them is off by as many roundings."""
    device = Emulated(multiprocessors=1, resident_threads=256)
    p = _batch((2, 3, 60_000), 1, True, BATCH_TYPES[0])
    p.x[:] = np.where(p.x < 0, -1, 1) * np.float32(3**-0.5)
    p.__post_init__()
    p.check_forward(device, *device.batch_norm(p))


def test_more_partial_rows_than_threads_that_add_up_a_column():
    """128 blocks leave a row each, and 32 threads share a column."""
    device = Emulated(multiprocessors=4, resident_threads=8192)
    dy, statistic = np.ones((2048, 64), np.float32), np.ones(2048, np.float32)
    outs = device.empty(dy, dy[0], dy[0])
    known = {"scale": dy[0], "mean": statistic, "inv_std": statistic}
    launch(device.run, LayerNormGrad, outs, dy=dy, x=3 * dy, **known)
    np.testing.assert_array_equal(outs[1], 2 * 2048)
    np.testing.assert_array_equal(outs[2], 2048)


@pytest.mark.parametrize("gaps", ["x", "scale", "mean", "inv_std"])
def test_one_array_with_gaps_after_a_call_without(gaps):
    """Each call looks for arrays with gaps."""
    device, p = Emulated(), make((5, 64))
    expected = [*device.layer_norm(p), device.inverse(p, p.x), *device.rms_norm(p)]
    setattr(p, gaps, np.repeat(getattr(p, gaps), 2, axis=-1)[..., ::2])
    found = [*device.layer_norm(p), device.inverse(p, p.x), *device.rms_norm(p)]
    assert_all_same_bits(found, expected)


@pytest.mark.parametrize("gaps", ["dy", "scale", "mean", "inv_std", 0, 1, 2])
@pytest.mark.parametrize(("shape", "axis", "last"), [BATCHES[1], BATCHES[7]], ids=str)
def test_one_array_of_a_batch_with_gaps_after_a_call_without(gaps, shape, axis, last):
    """An argument, or the result of that number."""
    device, p = Emulated(), _batch(shape, axis, last, BATCH_TYPES[0])
    expected = device.batch_norm_grad(p)
    outs = [np.empty_like(p.x), *device.empty(p.scale, p.scale)]
    if gaps in range(3):
        outs[gaps] = np.repeat(outs[gaps], 2, axis=-1)[..., ::2]
    else:
        setattr(p, gaps, np.repeat(getattr(p, gaps), 2, axis=-1)[..., ::2])
    device.write(BatchNormGrad, p, outs)
    assert_all_same_bits(outs, expected)


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
def test_sums_in_float_stay_short(last):
    """Of equal terms, which round the same way each time: a thread has 4096 of a channel's."""
    count, value = 1 << 20, np.float32(0.7)
    shape = (count, 4) if last else (1, 1, count)
    device = Emulated(multiprocessors=1)
    x = np.full(shape, value)
    x.reshape(-1, 4)[::2] *= -1
    one, ones = np.ones(shape[1], np.float32), np.ones(shape, np.float32)
    _, mean, inv_std = outs = device.empty(x, one, one)
    launch(device.run, BatchNorm, outs, x=x, eps=0.0)
    u = 2.0**-24
    assert np.abs(mean).max() <= u
    assert np.abs(inv_std * value - 1).max() <= 16 * u / 2  # 16 packs, and a root
    _, dscale, dbias = outs = device.empty(x, one, one)
    given = {"dy": np.abs(x), "x": ones, "scale": one, "mean": 0 * one}
    launch(device.run, BatchNormGrad, outs, **given, inv_std=one)
    for total in (dscale, dbias):
        assert np.abs(total / (count * float(value)) - 1).max() <= 64 * u
    launch(device.run, BatchNormInferenceGrad, outs, **given, var=one, eps=0.0)
    for total in (dscale, dbias):
        assert np.abs(total / (count * float(value)) - 1).max() <= 64 * u


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e30, 3e38, 1e-42])
def test_equal_elements_have_no_variance(value):
    device = Emulated(multiprocessors=1)
    for columns in (40, 43, 3000, 20_000):
        p = make((2, columns), eps=0.25, affine=False)
        p.x[:] = value
        for q in (p, replace(p, batch=True, axis=0)):
            y, mean, inv_std = device.batch_norm(q) if q.batch else device.layer_norm(q)
            np.testing.assert_array_equal(mean, p.x[0, 0])
            np.testing.assert_array_equal(inv_std, 2)
            np.testing.assert_array_equal(y, 0)


def test_long_constant_rows_at_the_top_of_the_range():
    """``mean * inv_std`` is infinite there, and 0 * infinity where a batch is not full."""
    device, p = Emulated(multiprocessors=1), make((3, 17_420))
    p.x[::2] = np.float32(2.0**127)
    p.__post_init__()
    p.check_gradients(device, *device.layer_norm_grad(p))


# Indices: the last block alone runs, on the last elements of arrays that are mostly not there

TYPES = {"DATA_T": "float16", "STAT_T": "float32", "PARAM_T": "float32", "VEC": 8}
TILE = 256 * 8  # columns of a block of kernels/layer_norm_grad_wide.cu


def _sparse(name, *shape):
    return sparse_array(shape, DTYPES[name])


def _long_row(columns):
    """Three rows of more than 2^31 columns, of which only the last ones are not 0."""
    p = make((3, TILE), ("float16", "float32", "float32"), seed=5, affine=False)
    dy, x, dx = (_sparse("float16", 3, columns) for _ in range(3))
    dy[:, -TILE:], x[:, -TILE:] = p.dy, p.x
    return p, dy, x, dx


def _launch(device, file, name, grid, block, *args, **macros):
    values = [np.int64(a) if isinstance(a, int) else a for a in args]
    with device.device.only_blocks([-1]):
        kernel(device.device, file, name, **(TYPES | macros))(grid, block, values)


def test_more_elements_in_short_rows_than_32_bits_can_count():
    rows = (1 << 22) + 8
    p = make((8, 1024), ("float16", "float32", "float32"), seed=5)
    device = Emulated(multiprocessors=rows)  # so many that every row has a block of its own
    dy, x, out = (_sparse("float16", rows, 1024) for _ in range(3))
    mean, inv_std = _sparse("float32", rows), _sparse("float32", rows)
    for whole, part in ((dy, p.dy), (x, p.x), (mean, p.mean), (inv_std, p.inv_std)):
        whole[-8:] = part
    with device.device.only_blocks(range(-8, 0)):
        known = {"mean": mean, "inv_std": inv_std}
        launch(device.run, LayerNormGrad, [out, None, None], dy=dy, x=x, **known)
        q = replace(p, scale=None)
        q.check_gradients(device, np.array(out[-8:]), None)
        device.write(LayerNorm, p, [out, mean, inv_std], x=x)
        p.check_forward(device, *(np.array(a[-8:]) for a in (out, mean, inv_std)))
        x[-8:] = out[-8:]
        device.write(LayerNormInverse, p, [out], y=x, **known)
        assert_close_to_input(p, np.array(out[-8:]))


def test_rows_longer_than_32_bits_can_count():
    parts = 65535
    columns = parts * TILE * 33  # of each row more than 2^32
    p, dy, x, dx = _long_row(columns)
    device, sums = Emulated(), np.zeros((parts, 3, 2))
    inputs = (dy, x, None, None, p.mean, p.inv_std)
    wide = {"FROM_OUTPUT": 0, "CENTRED": 1}
    _launch(
        device, "layer_norm_grad_wide", "row_sums_of_gradient", (3, parts), (256, 1),
        *inputs, sums, 3, columns, **wide,
    )  # fmt: skip
    w, xhat = p.dy[-1].astype(float), p.xhat[-1].astype(float)
    np.testing.assert_allclose(sums[-1, -1], [w.sum(), (w * xhat).sum()], rtol=1e-5)
    given = sums[-1:].copy()
    _launch(
        device, "layer_norm_grad_wide", "apply_gradient", (columns // TILE, 3), (256, 1),
        *inputs, given, dx, None, 3, columns, np.int32(1), **wide,
    )  # fmt: skip
    means = given[0, -1] / columns
    expected = p.inv_std[-1] * (w - means[0] - xhat * means[1])
    np.testing.assert_allclose(dx[-1, -TILE:].astype(float), expected, rtol=1e-3, atol=1e-6)


def test_blocks_of_long_rows_stride_over_more_than_32_bits():
    """The last block of a grid that must go round once more leaves the last tile to the first."""
    tiles = (1 << 21) + 1
    p, dy, x, dx = _long_row((tiles + 1) * TILE)
    mine = slice(-2 * TILE, -TILE)
    dy[:, mine], x[:, mine] = p.dy, p.x
    inputs = (dy, x, None, None, p.mean, p.inv_std, np.zeros((1, 3, 2)))
    _launch(
        Emulated(), "layer_norm_grad_wide", "apply_gradient", (tiles, 3), (256, 1),
        *inputs, dx, None, 3, dy.shape[1], np.int32(1), FROM_OUTPUT=0, CENTRED=1,
    )  # fmt: skip
    expected = p.inv_std[-1] * p.dy[-1].astype(float)
    np.testing.assert_allclose(dx[-1, mine].astype(float), expected, rtol=1e-3, atol=1e-6)
    assert not dx[-1, -TILE:].any()


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 96, 127, 128, 129, 300])
def test_partial_sums_of_any_number_of_rows(count):
    """A thread loads four of every 32nd at once, of which some are beyond the last."""
    partials = np.arange(2.0 * count * 40, dtype=np.float32) % 64
    out = np.zeros((2, 40), np.float32)
    partials = partials.reshape(2, count, 40)
    args = (partials, *out, np.int64(count), np.int64(40))
    macros = {"ACC_T": "float32", "PARAM_T": "float32"}
    kernel(Emulated().device, "column_sums", "column_sums", **macros)((2, 2), (32, 32), args)
    np.testing.assert_array_equal(out, partials.sum(axis=1))


def test_partial_sums_beyond_32_bits():
    columns, device = (1 << 32) + 32, Emulated(KernelDevice)
    partials, out = _sparse("float32", 2, 3, columns), _sparse("float32", 2, columns)
    partials[1, :, -32:] = np.arange(96).reshape(3, 32)
    macros = {"ACC_T": "float32", "PARAM_T": "float32"}
    args = (partials, out[0], out[1], 3, columns)
    _launch(device, "column_sums", "column_sums", (columns // 32, 2), (32, 32), *args, **macros)
    np.testing.assert_array_equal(out[1, -32:], np.arange(96).reshape(3, 32).sum(axis=0))


@pytest.mark.parametrize("last", [False, True])
def test_batches_of_more_elements_than_32_bits_can_count(last):
    """The last channels of (before, channels, after), in both layouts."""
    before, channels, after = ((1 << 22) + 8, 1024, 1) if last else (1 << 14, 1032, 256)
    device, block = Emulated(), (1, 256)
    grid = (channels // 8, before // 256 + 1) if last else (channels, before * after // 8 // 256)
    shape, macros = (before, channels, after), {"LAST": int(last)}
    dy, x, out = (_sparse("float16", *shape) for _ in range(3))
    corner = (slice(-8, None), slice(-8, None)) if last else (slice(-8, None), -1)
    rng = np.random.default_rng(5)
    dy[corner], x[corner] = rng.standard_normal((2, *x[corner].shape))
    some, other = np.array(dy[corner], float), np.array(x[corner], float)
    of = (lambda a: a.sum(axis=0).reshape(-1)) if last else (lambda a: a.sum())
    ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    partials = np.zeros((2, grid[1], channels))
    sums, kept = partials[:, -1, -8:] if last else partials[:, -1, -1], (x, zeros, ones, partials)
    _launch(device, "batch_norm_grad", "sum_channels", grid, block, dy, *kept, *shape, **macros)
    np.testing.assert_allclose(sums, [of(some * other), of(some)], rtol=1e-5)
    args = (dy, x, None, zeros, ones, np.zeros((2, channels), np.float32), out, *shape)
    _launch(device, "batch_norm_grad", "apply_channels", grid, block, *args, **macros)
    np.testing.assert_array_equal(out[corner], dy[corner])
    partials[...], out[corner] = 0, 0
    args = (dy, x, None, zeros, ones, out, partials, *shape, np.float64(0))
    name = "batch_norm_inference_grad"
    _launch(device, name, "infer_gradient", grid, block, *args, **macros)
    np.testing.assert_allclose(sums, [of(some * other), of(some)], rtol=1e-5)
    np.testing.assert_array_equal(out[corner], dy[corner])
    args = (x, None, None, zeros, ones, out, *shape, np.float64(0))
    _launch(device, "batch_norm_inference", "infer", grid, block, *args, **macros)
    np.testing.assert_array_equal(out[corner], x[corner])
    parts = np.zeros((grid[1], channels, 4))
    _launch(device, "batch_norm", "channel_moments", grid, block, x, parts, *shape, **macros)
    count, mean, _, squares = (parts[-1, -8:] if last else parts[-1, -1]).T
    found = count * mean, squares + count * mean**2
    np.testing.assert_allclose(found, [of(other), of(other**2)], rtol=1e-5)
    exact = np.array([np.zeros(channels), np.zeros(channels), np.ones(channels)])
    args = (x, None, None, exact, out, *shape)
    _launch(device, "batch_norm", "normalize", grid, block, *args, **macros)
    np.testing.assert_array_equal(out[corner], x[corner])


def test_more_channels_than_32_bits_can_count():
    """The last block of a grid that must go round once more; what is left to others stays 0."""
    device, covered, rest = Emulated(), (1 << 32) + 64, 64
    channels, mine = covered + rest, slice(covered - 8, covered)
    grid, block, shape = (covered // 8, 1), (1, 32), (1, covered + rest, 1)
    macros = {"LAST": 1, "PARAM_T": "float16", "STAT_T": "float16"}
    dy, x, out, zeros, ones = (_sparse("float16", channels) for _ in range(5))
    dy[mine], x[mine], ones[mine] = 2, 3, 1
    dy[covered:] = x[covered:] = 7
    partials, means = _sparse("float64", 2, channels), _sparse("float32", 2, channels)
    exact = _sparse("float64", 3, channels)
    exact[2, mine] = 1

    def run(file, name, *args, last=()):
        _launch(device, file, name, grid, block, *args, *shape, *last, **macros)

    run("batch_norm_grad", "sum_channels", dy, x, zeros, ones, partials)
    np.testing.assert_array_equal(partials[:, mine], [[6] * 8, [2] * 8])
    run("batch_norm_grad", "apply_channels", dy, x, None, zeros, ones, means, out)
    np.testing.assert_array_equal(out[mine], 2)
    eps, by_known = (np.float64(0),), _sparse("float16", channels)
    given = dy, x, ones, zeros, ones, by_known, _sparse("float64", 2, channels)
    run("batch_norm_inference_grad", "infer_gradient", *given, last=eps)
    np.testing.assert_array_equal(given[-1][:, mine], [[6] * 8, [2] * 8])
    np.testing.assert_array_equal(by_known[mine], 2)
    run("batch_norm_inference", "infer", x, ones, ones, zeros, ones, by_known, last=eps)
    np.testing.assert_array_equal(by_known[mine], 4)
    assert not by_known[covered:].any()
    run("batch_norm", "normalize", x, None, None, exact, out)
    np.testing.assert_array_equal(out[mine], 3)
    parts = _sparse("float64", channels, 4)
    run("batch_norm", "channel_moments", x, parts)
    np.testing.assert_array_equal(parts[mine], [[1, 3, 0, 0]] * 8)
    for array in (out, partials[0], partials[1], parts):
        assert not array[covered:].any()


def test_statistics_of_more_channels_than_32_bits_can_count():
    """The last block of a grid that must go round once more; what is left to others stays 0."""
    device, covered = Emulated(), (1 << 32) + 32
    channels, mine = covered + 32, slice(covered - 32, covered)
    grid, block = (covered // 32,), (32, 32)
    partials, means = _sparse("float64", 2, 1, channels), _sparse("float32", 2, channels)
    dscale, dbias = (_sparse("float32", channels) for _ in range(2))
    partials[..., mine] = [[[8.0]], [[20.0]]]  # of four elements
    partials[..., covered:] = 7
    shape = 1, channels, 4

    def run(file, name, *args, written, **macros):
        _launch(device, file, name, grid, block, *args, **macros)
        for value, array in written:
            np.testing.assert_array_equal(array[mine], value)
            assert not array[covered:].any()
            array[mine] = 0

    args, sums = (partials, dscale, dbias, means, *shape), [(8, dscale), (20, dbias)]
    written = [*sums, (2, means[0]), (5, means[1])]
    run("batch_norm_grad", "finish_channels", *args, written=written, LAST=1)
    args = (partials, dscale, dbias, *shape[:2])
    run("batch_norm_inference_grad", "finish_parameters", *args, written=sums, LAST=1)


def test_steps_of_more_channels_than_32_bits_can_count():
    """The same of the sums that steps finish, and of a norm's gradient."""
    device, covered = Emulated(KernelDevice), (1 << 32) + 32
    channels, mine = covered + 32, slice(covered - 32, covered)
    grid, block = (covered // 32,), (32, 32)
    partials = _sparse("float64", 2, 1, channels)
    one, other = (_sparse("float64", channels) for _ in range(2))
    partials[..., mine] = [[[8.0]], [[20.0]]]
    partials[..., covered:] = 7
    macros, shape = {"ACC_T": "float32", "STAT_T": "float16"}, (1, channels)
    parts, exact = _sparse("float64", channels, 4), _sparse("float64", 3, channels)
    parts[mine], parts[covered:] = (4, 2, 0, 4), 7  # four elements: mean 2, variance 1
    saved, running = ([_sparse("float32", channels) for _ in range(2)] for _ in range(2))
    args = (parts, one, other, exact, *saved, *saved, *running, *shape, *map(np.float64, (0, 1)))
    _launch(device, "batch_statistics", "finish_moments", grid, block, *args, RUN_T="float32")
    unbiased = np.float32(4 / 3)
    for found, var in (([one, other], 1), (exact[::2], 1), (saved, 1), (running, unbiased)):
        np.testing.assert_array_equal([array[mine] for array in found], [[2] * 32, [var] * 32])
    args = (partials, one, other, *shape)
    _launch(device, "batch_norm_steps", "finish_sums", grid, block, *args, **macros)
    np.testing.assert_array_equal([one[mine], other[mine]], [[8] * 32, [20] * 32])
    args, types = (partials, one, other, *shape), {"ACC_T": "float64", "PARAM_T": "float64"}
    one[mine] = other[mine] = 0
    _launch(device, "column_sums", "column_sums", (*grid, 2), block, *args, **types)
    np.testing.assert_array_equal(other[mine], 20)  # by the last block, of the second plane
    assert not one[covered:].any()
    assert not other[covered:].any()


def test_statistics_of_all_ranks_for_more_channels_than_32_bits_can_count():
    """The last block of a grid that must go round once more; what is left to others stays 0."""
    device, covered, rest = Emulated(KernelDevice), (1 << 32) + 128, 64
    channels, mine = covered + rest, slice(covered - 128, covered)
    grid, block = (covered // 128,), (128,)
    one, other, mean, var = (_sparse("float64", channels) for _ in range(4))
    one[mine], other[mine], one[covered:], other[covered:] = 2, 0.25, 7, 7
    exact, means = _sparse("float64", 3, channels), _sparse("float32", 2, channels)
    saved_mean, inv_std = (_sparse("float16", channels) for _ in range(2))
    macros = {"ACC_T": "float32", "STAT_T": "float16"}
    args = (one, other, exact, saved_mean, inv_std, channels, np.float64(0))
    _launch(device, "batch_norm_steps", "take_stats", grid, block, *args, **macros)
    args = (one, other, np.float64(4), means, channels)
    _launch(device, "batch_norm_steps", "take_sums", grid, block, *args, **macros)
    rows, counts, count = (a[None] for a in (one, other)), np.ones(1), np.zeros(())
    with device.device.only_blocks([-1]):
        args = (*rows, counts, np.uint32(1), np.int64(channels), mean, var, count)
        kernel(device.device, "combine_stats", "combine_stats")(grid, block, args)
        moved = _sparse("float16", channels), _sparse("float16", channels)
        numbers = np.float64(2), np.float64(0.5)
        args = (saved_mean, inv_std, one, other, *numbers, *moved, np.int64(channels))
        kinds = {"STAT_T": "float16", "RUN_T": "float16"}
        launch = kernel(device.device, "batch_statistics", "update_running", **kinds)
        launch(grid, block, args)
    for array, value in zip(moved, (2, 1.25), strict=True):
        np.testing.assert_array_equal(array[mine], value)
        assert not array[covered:].any()
    expected = {2: (exact[0], saved_mean, exact[2], inv_std, mean), 0.5: (means[0],)}
    expected |= {0.0625: (means[1],), 0.25: (var,)}
    for value, arrays in expected.items():
        for array in arrays:
            np.testing.assert_array_equal(array[mine], value)
            assert not array[covered:].any()

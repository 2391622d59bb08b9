"""The compiled CPU backend: the same bits on any number of threads and any instruction set."""

import math
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import gradkit
from gradkit import _host, _numpy
from gradkit._calls.backend import OPERATIONS
from gradkit._numpy import floating_point
from tests import steps
from tests.backends import Backend
from tests.bad_input.arguments import Factory, good, named
from tests.cpu.openmp import NEEDS_OPENMP
from tests.cpu.test_threads import flushing
from tests.layouts import LAYOUTS
from tests.operations import leaves, of
from tests.problems import BATCH_TYPES, LAYER_TYPES, make
from tests.tolerances import (
    DTYPES,
    WORKING_MEMORY,
    accumulation,
    assert_all_same_bits,
    assert_same_bits,
    assert_same_numbers,
    unit,
)

try:
    from gradkit import _cpu
    from gradkit._cpu import compiled
except ImportError:
    if os.environ.get("CI") == "true":
        raise
    pytest.skip("gradkit was installed without compiled code", allow_module_level=True)

TYPES = pytest.mark.parametrize("types", LAYER_TYPES, ids="-".join)


@pytest.fixture(autouse=True)
def _restored():
    threads, instructions = gradkit.get_num_threads(), compiled.instruction_set()
    with gradkit.use_cpu_backend("compiled"):
        yield
    gradkit.set_num_threads(threads)
    compiled.use_instruction_set(instructions)


def results(types, shape=(700, 130)):
    """Results of all operations, of many rows: several shares and pieces."""
    p, other = make(shape, types), make(shape, types, seed=5)
    data = {"dy": p.dy, "x": p.x, "y": p.x, "residual": other.x, "ds": other.x, "gate": other.x}

    def one(label, *_):
        return data[label] if label in data else getattr(p, label)

    found = []
    for each in of("rows"):
        for variant in ("", *each.variants):
            found += leaves(each.function(**each.arguments(one, types, variant=variant)))
    return [array for array in found if array is not None]  # those that are wanted


def test_it_is_what_computes():
    found = gradkit.show_config("dicts")["backends"]
    assert found["compiled"]["computes"] is True
    assert found["numpy"]["computes"] is False
    assert found["compiled"]["instruction_set"] in compiled.instruction_sets()
    assert _host.backend() is _cpu
    with gradkit.use_cpu_backend("numpy"):
        assert _host.backend() is _numpy
        with gradkit.use_cpu_backend("compiled"):
            assert _host.backend() is _cpu
        assert _host.backend() is _numpy


def test_both_backends_compute_what_was_chosen(monkeypatch):
    ran = []
    own, numpys = _cpu.rms_norm, _numpy.rms_norm
    monkeypatch.setattr(_cpu, "rms_norm", lambda call: ran.append("compiled") or own(call))
    monkeypatch.setattr(_numpy, "rms_norm", lambda call: ran.append("numpy") or numpys(call))
    x = np.ones((3, 4))
    for name in ("compiled", "numpy", "compiled"):
        with gradkit.use_cpu_backend(name):
            gradkit.rms_norm(x)
    assert ran == ["compiled", "numpy", "compiled"]


def test_what_has_no_compiled_code_is_numpys(monkeypatch):
    ran = []
    monkeypatch.setattr(_numpy, "rms_norm", lambda call: ran.append(call.x.shape))
    for shape in ((2, 3), (0, 3), (3, 0)):
        gradkit.rms_norm(np.ones(shape, np.float32))
    assert ran == [(0, 3), (3, 0)]
    monkeypatch.setattr(_numpy, "batch_norm", lambda call: ran.append(call.x.shape) or "native")
    for shape in ((2, 3), (2, 100_000), (0, 3), (3, 0)):
        gradkit.batch_norm(np.ones(shape, np.float32))
    assert ran[2:] == [(0, 3), (3, 0)]
    assert _cpu.step_verdict is _numpy.step_verdict


@pytest.mark.parametrize("function", named())
def test_where_numpy_is_chosen_nothing_else_computes(function, monkeypatch):
    """Not even where a call has been made before, or a list has nothing to be opened."""
    for name in OPERATIONS:
        own = getattr(_cpu, name)
        if own is not getattr(_numpy, name):
            monkeypatch.setattr(_cpu, name, pytest.fail)
    with gradkit.use_cpu_backend("numpy"):
        for _ in range(3):
            getattr(gradkit, function)(**good(function, Factory(Backend())))


def of_both(call):
    """Results of a call by compiled code, and by NumPy."""
    found = call()
    with gradkit.use_cpu_backend("numpy"):
        return found, call()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_running_statistics_move_as_numpys(dtype, layout):
    """Whole vectors, or parts of what is read and written at a time; perhaps where they lie."""
    lay, rng = LAYOUTS[layout], np.random.default_rng(1)
    for channels in (0, 1, 64, 200):
        present = [lay(rng.normal(size=channels).astype(DTYPES[dtype])) for _ in range(2)]
        batch = [lay(rng.random(channels)) for _ in range(2)]
        for momentum in (0.0, 0.3, 1.0):
            for count in (0.0, 9.0):
                move = partial(
                    steps.update_running_statistics, *present, *batch, count, momentum=momentum
                )
                found, expected = of_both(move)
                assert_all_same_bits(found, expected)
                assert all(a.dtype == DTYPES[dtype] for a in found)
                own = [lay(array) for array in present]
                given = *own, *batch, count
                steps.update_running_statistics(*given, momentum=momentum, out=tuple(own))
                assert_all_same_bits(own, expected)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("ranks", [1, 2, 7, 300, 20_000])
def test_ranks_are_combined_as_numpys(ranks, layout):
    """In steps of 64 channels, or of fewer for each of very many ranks."""
    lay, rng = LAYOUTS[layout], np.random.default_rng(2)
    for channels in (0, 1, 3) if ranks > 7 else (0, 1, 64, 201):
        means, variances = (lay(rng.normal(size=(ranks, channels))) for _ in range(2))
        for counts in (rng.integers(0, 3, ranks) * 1.5, np.zeros(ranks), rng.random(ranks)):
            combine = partial(steps.combine_stats, means, variances, lay(counts))
            assert_all_same_bits(*of_both(combine))


LONG = 40_001  # columns: more than are visited at once


def check_everywhere(work, counts=(1, 2, 4)):
    """Neither the number of threads nor the instruction set changes a bit of what it returns."""
    gradkit.set_num_threads(1)
    compiled.use_instruction_set((sets := compiled.instruction_sets())[-1])
    expected = work()
    for count, name in zip_longest(counts, sets):
        gradkit.set_num_threads(count or counts[-1])
        compiled.use_instruction_set(name or sets[0])
        assert compiled.instruction_set() == (name or sets[0])
        assert_all_same_bits(work(), expected)


@pytest.mark.sampled(3)
@TYPES
@pytest.mark.parametrize("shape", [(700, 130), (5, 4099), (40, 7), (3, LONG)], ids=str)
def test_neither_threads_nor_the_instruction_set_change_a_bit(types, shape):
    check_everywhere(partial(results, types, shape), counts=(2, 3, 4))


@pytest.mark.sampled(3)
@TYPES
@pytest.mark.parametrize(
    "shape", [(64, 3, 1030), (3, 20, 4099), (2, 400, 130), (2, 3, LONG)], ids=str
)
def test_threads_share_samples_that_have_the_bits_of_each_alone(types, shape):
    """Of few rows, in whose pieces are several samples; of many, with sums of several shares."""
    p, scale = make(shape, types, axis=2), make((shape[0], 1, shape[2]), types, axis=2).x

    def both(x, dy, mean, inv_std, scale):
        own = scale.astype(p.scale.dtype)
        y, *_ = gradkit.layer_norm(x, own, own)
        return [y, *gradkit.layer_norm_grad(dy, x, own, mean, inv_std)]

    given = p.x, p.dy, p.mean, p.inv_std, scale
    check_everywhere(partial(both, *given))
    whole = both(*given)
    for k in range(shape[0]):
        alone = both(*(array[k] for array in given[:4]), scale[k, 0])
        own = [array[k] for array in whole[:2]] + [array[k, 0] for array in whole[2:]]
        assert_all_same_bits(own, alone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [32_768, 32_769, LONG])
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_sums_over_long_rows_have_each_row_once(rows, width, dtype):
    """Windows of rows have sums of their own, which begin at nothing; whole numbers are exact."""
    rng = np.random.default_rng(rows)
    dy, x = (rng.integers(-9, 10, (rows, width)).astype(dtype) for _ in range(2))
    mean, inv_std = np.zeros(rows, dtype), np.ones(rows, dtype)
    _, dscale, dbias = gradkit.layer_norm_grad(dy, x, np.ones(width, dtype), mean, inv_std)
    np.testing.assert_array_equal(dscale, (dy * x).sum(axis=0))
    np.testing.assert_array_equal(dbias, dy.sum(axis=0))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("types", [LAYER_TYPES[k] for k in (0, 3)], ids="-".join)
def test_layouts_change_no_bit_of_long_rows(types, layout):
    """Windows begin within rows and columns of several dimensions."""

    def long(lay):
        p = make((2, 90, 11, 41), types, axis=1)
        dy, x = lay(p.dy), lay(p.x)
        saved = p.mean, p.inv_std
        return [
            *gradkit.add_layer_norm(x, dy, p.scale, p.bias, axis=1),
            *gradkit.layer_norm_grad(dy, x, p.scale, *saved, axis=1, ds=x),
            gradkit.layer_norm_inverse(x, p.scale, p.bias, *saved, axis=1),
        ]

    assert_all_same_bits(long(LAYOUTS[layout]), long(LAYOUTS["C"]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number_is_read_and_rounded_as_numpy_does(dtype):
    """``s = x + residual`` shows both conversions, of every number and beside every tie.

    So does ``y = x + bias`` of norms over channels, which have conversions of their own.
    """
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).reshape(4, -1)
    one, zero = np.ones(4, every.dtype), np.zeros(4, every.dtype)
    for further in (0.0, 1.0, 2.0**-9, 2.0**-14, 2.0**-24, 3e-5, 60000.0, -1.0):
        residual = np.full(every.shape, further, every.dtype)
        with np.errstate(all="ignore"):
            expected = (every.astype(np.float32) + residual.astype(np.float32)).astype(every.dtype)
        for width in (every.shape[1], 1):  # no vector converts one column
            s = gradkit.add_rms_norm(*(a.reshape(-1, width) for a in (every, residual)))[1]
            assert_same_numbers(s.reshape(every.shape), expected)
        for step in (1, -1):  # each number at even and at odd places
            x = every[None, :, ::step].copy()
            y = gradkit.batch_norm_inference(x, one, residual[:, 0], zero, one, eps=0)
            assert_same_numbers(y[0, :, ::step], expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_rounded_to_16_bits_once(dtype):
    """Next to a tie of 16 bits, the last term is so small that float32 has no place for it."""
    places = {"float16": 11, "bfloat16": 8}[dtype]
    dy = np.zeros((33, 1), np.float32)
    dy[0], dy[1], dy[32] = 1, 2.0**-places, 2.0**-40  # the last in another run of rows
    scale, statistics = np.ones(1, DTYPES[dtype]), np.zeros(33, np.float32)
    for sign in (1, -1):
        for last, places_up in ((2.0**-40, 1), (0.0, 0), (-(2.0**-40), 0)):
            dy[32] = last
            dbias = gradkit.layer_norm_grad(sign * dy, dy, scale, statistics, statistics)[2]
            assert dbias.dtype == DTYPES[dtype]
            assert float(dbias[0]) == sign * (1 + places_up * 2.0 ** (1 - places))


@pytest.mark.guarantee("Subnormal numbers")
@pytest.mark.skipif(
    platform.machine() != "x86_64" or floating_point.current() is None,
    reason="where the flag is, is known on x86-64 alone",
)
@pytest.mark.parametrize(  # on one thread, on four, and on four of OpenMP's
    ("size", "threads_of"),
    [
        (16, "gradkit"),
        (1 << 20, "gradkit"),
        pytest.param(1 << 20, "openmp", marks=NEEDS_OPENMP),
    ],
    indirect=["threads_of"],
)
def test_subnormal_numbers_count_whatever_the_calling_thread_does(size, threads_of):
    """In each family of operations; afterwards that thread does what it did."""
    flushing(True, threads_of, 4)  # OpenMP's threads begin with what the calling one does
    x = np.full((size // 4, 4), 2e-39, np.float32)
    images, ones, zeros = x.reshape(4, 4, -1), np.ones(4, np.float32), np.zeros(4, np.float32)
    norm, two = 2e-39 * math.sqrt(size), 2 * x[0, 0]

    def work():
        flushes.append(bool(x[:1, :1].copy() * ones[:1] == 0))
        added = gradkit.add_rms_norm(x, x)[1]
        y = gradkit.batch_norm_inference(images, ones, None, zeros, ones, eps=0)
        total = gradkit.accumulate_grad(x.copy(), x)
        norms = [gradkit.grad_norm([x], exact=exact) for exact in (False, True)]
        scaled = gradkit.clip_by_global_norm([x], norm / 2, eps=0)[0][0]
        guard = gradkit.spike_guard_update(np.array([0, 0, 0.0]), 5e-324)[0]
        flushes.append(bool(x[:1, :1].copy() * ones[:1] == 0))
        return added, y, total, norms, scaled, guard

    for flush in (True, False, True):
        flushes = []
        added, y, total, norms, scaled, guard = flushing(flush, work)
        assert flushes == [flush, flush]
        assert (added == two).all()
        assert (total == two).all()
        assert (y == x[0, 0]).all()
        assert (scaled == x[0, 0] / 2).all()
        assert np.allclose(norms, norm, rtol=1e-6, atol=0)
        assert guard[1] == 5e-324


def test_eight_threads_at_once():
    expected = results(LAYER_TYPES[0])
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(results, LAYER_TYPES[0]) for _ in range(16)]
    for job in jobs:
        assert_all_same_bits(job.result(), expected)


STARTED = """
import os, numpy as np, gradkit
count = lambda: len(os.listdir("/proc/self/task"))
before, x = count(), np.ones((300, 1000), np.float32)
for threads in (1, 3, 2):
    gradkit.set_num_threads(threads)
    gradkit.rms_norm(x)
    print(count() - before)
gradkit.set_num_threads(8)
gradkit.rms_norm(x[:60])
print(count() - before)
"""


@pytest.mark.guarantee("Any number of cores")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's threads")
def test_a_call_starts_as_many_threads_as_were_set():
    """The calling thread is one of them; a small call starts none, and none ends."""
    assert in_a_process(STARTED).stdout.split() == ["0", "2", "2", "2"]


LEFT_ALONE = """
import os, signal, numpy as np, gradkit
status = lambda task: open(f"/proc/self/task/{task}/status").read().split()
blocked = lambda task: int(status(task)[status(task).index("SigBlk:") + 1], 16)
took = lambda task: int(open(f"/proc/self/task/{task}/schedstat").read().split()[0])
tasks = lambda: sorted(map(int, os.listdir("/proc/self/task")))
own, x = tasks(), np.ones(1 << 20, np.float32)
for threads in (3, 2):
    gradkit.set_num_threads(threads)
    started = [task for task in tasks() if task not in own]
    before = [took(task) for task in started]
    norm = gradkit.grad_norm([x] * 600)
second, third = (took(task) - was for task, was in zip(started, before))
print(third < second / 4)
bits = 1 << signal.SIGINT - 1 | 1 << signal.SIGUSR1 - 1
print([blocked(task) & bits == bits for task in started], blocked(own[0]) & bits)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's threads")
def test_threads_take_no_signals_and_no_part_in_calls_of_fewer():
    """A handler may be another library's, which expects its own threads, not ours."""
    assert in_a_process(LEFT_ALONE).stdout == "True\n[True, True] 0\n"


PARTS = """
import os, resource, numpy as np, gradkit
x = np.random.default_rng(0).standard_normal((1 << 18,), np.float32)
channels, rows, gaps = np.ones(8, np.float32), x.reshape(8, -1), x.reshape(512, -1)[:, :-1]
y, mean, inv_std = gradkit.batch_norm(x.reshape(4, 8, -1))
def work():
    yield gradkit.grad_norm([x] * 4)
    yield gradkit.grad_norm([gaps] * 5)
    yield gradkit.grad_norm([np.ones(1, np.float32)] * 2, exact=True)
    yield from gradkit.clip_by_block_norm([gaps] * 2, 1.0, axis=0)[0]
    yield from gradkit.layer_norm_grad(rows, rows, None, *gradkit.layer_norm(rows)[1:])
    for images in x.reshape(4, 8, -1), x.reshape(256, 8, -1), x.reshape(-1, 8):
        yield from gradkit.batch_norm_grad(images, images, channels, mean, inv_std)
results = lambda: [np.asarray(each).tobytes() for each in work()]
gradkit.set_num_threads(1)
expected = results()
pages = int(open("/proc/self/statm").read().split()[0]) + (1 << 18)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
gradkit.set_num_threads(4096)
print(results() == expected, len(os.listdir("/proc/self/task")) <= 128)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's threads")
def test_no_more_threads_than_a_call_has_parts():
    """Nor memory for them: there is one GiB for all."""
    assert in_a_process(PARTS).stdout == "True True\n"


MANY = """
import numpy as np, gradkit
x = np.random.default_rng(0).standard_normal((3000, 257)).astype(np.float32)
found = []
for threads in (1, 100):
    gradkit.set_num_threads(threads)
    found.append([gradkit.layer_norm(x)[0].tobytes(), gradkit.grad_norm([x] * 9).tobytes()])
print(found[0] == found[1])
"""


def test_a_hundred_threads():
    """More than the parts that a call is cut into."""
    assert in_a_process(MANY).stdout == "True\n"


CHANNEL_TYPES = pytest.mark.parametrize("types", BATCH_TYPES, ids="-".join)
IMAGES = {
    "a row of channels": (3000, 24),
    "small images": (40, 24, 3, 5),
    "images": (5, 34, 13, 17),
    "wide groups": (3, 12, 40, 50),
    "long lines": (3, 6, 97, 101),
    "few channels": (40, 2, 31, 33),
    "many channels": (2, 1500, 25),
    "slices of channels": (3, 33_000, 2),
    "slices of groups' channels": (11, 33_002),
    "slices of groups' images": (2, 33_002, 9),
}


def channel_results(types, shape, lay=LAYOUTS["C"]):
    """Results of all norms over channels; of 16-bit statistics, batch norms alone."""
    p, axis = make(shape, types, 1, batch=True), {"channel_axis": 1}
    dy, x = lay(p.dy), lay(p.x)
    given, saved = (x, p.scale, p.bias), (p.mean, p.inv_std)
    running = np.zeros(shape[1]), np.ones(shape[1])
    moved = dict(zip(("running_mean", "running_var"), running, strict=True))
    mean, var = steps.batch_norm_stats(x, **axis)
    sums = steps.batch_norm_grad_sums(dy, x, *saved, **axis)
    var_known = np.square(p.inv_std)
    found = [
        *gradkit.batch_norm(*given, **moved, out=(None, *map(np.empty_like, saved))),
        *running,
        *(mean, var),
        *steps.batch_norm_apply(*given, mean, var, out=(None, *map(np.empty_like, saved))),
        gradkit.batch_norm_inference(*given, p.mean, var_known),
        *gradkit.batch_norm_grad(dy, x, p.scale, *saved),
        *sums,
        steps.batch_norm_grad_apply(dy, x, p.scale, *saved, *sums, float(x.size // x.shape[1])),
        *gradkit.batch_norm_inference_grad(dy, x, p.scale, p.mean, var_known),
    ]
    if "16" in types[1]:
        return found
    groups = shape[1] // (6 if shape[1] % 6 == 0 else 2)
    y, *known = gradkit.group_norm(x, groups, p.scale, p.bias)
    return [*found, y, *known, *gradkit.group_norm_grad(dy, x, p.scale, *known)]


@pytest.mark.sampled(11)
@CHANNEL_TYPES
@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("layout", ["C", "rolled"])
def test_neither_threads_nor_the_instruction_set_change_a_bit_of_channels(types, shape, layout):
    check_everywhere(partial(channel_results, types, shape, LAYOUTS[layout]))


@pytest.mark.sampled(19)
@CHANNEL_TYPES
@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
def test_norms_over_channels_are_those_of_numpy(types, shape):
    """To some roundings of the results, and of sums in the dtype of the computation."""
    with gradkit.use_cpu_backend("numpy"):
        expected = channel_results(types, shape, np.copy)
    for layout in LAYOUTS.values():
        for got, ref in zip(channel_results(types, shape, layout), expected, strict=True):
            assert got.dtype == ref.dtype
            wide, exact = got.astype(np.float64), ref.astype(np.float64)
            size = np.abs(exact).max()
            bound = 4 * unit(got.dtype) * np.abs(exact) + 64 * unit(accumulation(types[0])) * size
            assert (np.abs(wide - exact) <= bound).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_lines_of_any_length_have_the_bits_of_longer_ones(dtype):
    """And the same ones beside others: nothing is written in front of a line."""
    x = np.random.default_rng(0).standard_normal((2, 3, 140)).astype(dtype)
    scale, bias = (np.linspace(*ends, 3).astype(dtype) for ends in ((1, 2), (-1, 1)))
    wide = np.result_type(dtype, "f4")
    mean, var = (np.linspace(*ends, 3).astype(wide) for ends in ((0, 1), (1, 3)))
    whole = gradkit.batch_norm_inference(x, scale, bias, mean, var)
    for count in range(1, 140):
        short = x[..., :count].copy()
        for name in compiled.instruction_sets():
            compiled.use_instruction_set(name)
            y = gradkit.batch_norm_inference(short, scale, bias, mean, var)
            assert_same_bits(y, whole[..., :count])
            y, *_ = gradkit.group_norm(short, 3, scale, bias)
            turned, *_ = gradkit.group_norm(short[:, ::-1].copy(), 3, scale[::-1], bias[::-1])
            assert_same_bits(y, turned[:, ::-1])


# What makes images from images and numbers of each channel, and which of these it makes them from.
FROM_NUMBERS = {
    "batch_norm_inference": (
        lambda g: gradkit.batch_norm_inference(g.x, g.scale, g.bias, g.mean, g.var),
        ("x", "scale", "bias", "mean", "var"),
    ),
    "batch_norm_grad": (
        lambda g: gradkit.batch_norm_grad(g.dy, g.x, g.scale, g.mean, g.var)[0],
        ("dy", "x", "scale", "mean", "var"),
    ),
    "batch_norm_grad_apply": (
        lambda g: steps.batch_norm_grad_apply(
            g.dy, g.x, g.scale, g.mean, g.var, g.product, g.total, 140
        ),
        ("dy", "x", "scale", "mean", "var", "product", "total"),
    ),
    "batch_norm_inference_grad": (
        lambda g: gradkit.batch_norm_inference_grad(g.dy, g.x, g.scale, g.mean, g.var)[0],
        ("dy", "scale", "var"),
    ),
    "group_norm": (
        lambda g: gradkit.group_norm(g.x, 3, g.scale, g.bias)[0],
        ("x", "scale", "bias"),
    ),
    "group_norm_grad": (
        lambda g: gradkit.group_norm_grad(g.dy, g.x, g.scale, *g.of_samples(g.mean, g.var))[0],
        ("dy", "x", "scale", "mean", "var"),
    ),
}


@pytest.mark.parametrize(("call", "names"), FROM_NUMBERS.values(), ids=FROM_NUMBERS)
def test_bfloat16_is_a_nan_whatever_the_bits_of_what_it_comes_from(call, names):
    """Rounded as numbers are, some NaNs would be infinite, or zero."""
    rng = np.random.default_rng(0)
    images = {
        name: rng.standard_normal((2, 3, 70)).astype(ml_dtypes.bfloat16) for name in ("dy", "x")
    }
    numbers = {name: np.linspace(1, 2, 3, dtype="f4") for name in ("scale", "bias", "mean", "var")}
    numbers |= {name: np.linspace(1, 2, 3) for name in ("product", "total")}
    for bits in (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F810001, 0x7FFF8000, 0xFF80FFFF):
        for name in names:
            given = SimpleNamespace(
                **{key: array.copy() for key, array in (images | numbers).items()},
                of_samples=lambda *statistics: [np.stack([each, each]) for each in statistics],
            )
            array = getattr(given, name)
            wide = bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29
            word = {2: bits >> 16 | 1, 4: bits, 8: wide}[array.itemsize]
            array.view(f"u{array.itemsize}")[..., 1, *[slice(None)] * (array.ndim - 2)] = word
            for instructions in compiled.instruction_sets():
                compiled.use_instruction_set(instructions)
                found = np.isnan(call(given).astype(np.float32))
                assert found[:, 1].all(), (hex(bits), name)
                assert not found[:, ::2].any(), (hex(bits), name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("space", [(8, 7), (4, 5), (9001, 2)], ids=str)
@pytest.mark.parametrize("skipped", [0, 1], ids=["x without gaps", "x with gaps"])
def test_large_results_have_the_bits_of_small_ones(dtype, space, skipped):
    """From 16 MiB on, or 8, they are written past the caches."""
    channels, few, itemsize = 24, 2, np.dtype(dtype).itemsize
    samples = (1 << 24) // (channels * (space[0] - skipped) * space[1] * itemsize) + few
    x = np.random.default_rng(0).standard_normal((samples, channels, *space)).astype(dtype)
    x = x[:, :, skipped:]
    dy = x[::-1]
    scale, bias, var = (
        np.linspace(*ends, channels).astype(dtype) for ends in ((-1, 2), (3, 1), (1, 2))
    )
    memory = np.empty(x.size + 1, dtype)
    y = memory[1:].reshape(x.shape)  # not at a multiple of a vector's size
    for call in (
        lambda x, _, y: gradkit.group_norm(x, 4, scale, bias, out=(y, None, None)),
        lambda x, _, y: gradkit.batch_norm_inference(x, scale, bias, bias, var, out=y),
        lambda x, dy, y: gradkit.group_norm_grad(
            dy, x, scale, *gradkit.group_norm(x, 4)[1:], out=(y, None, None)
        ),
    ):
        call(x, dy, y)
        small = np.empty(x[:few].shape, dtype)
        call(x[:few], dy[:few], small)
        assert_same_bits(y[:few], small)


@pytest.mark.parametrize("shape", [(12, 33_000), (2, 33_000, 9)], ids=str)
def test_the_mean_of_a_group_in_slices_is_more_than_one_float64(shape):
    near = np.round(np.random.default_rng(0).standard_normal(shape) * 2.0**14) * 2.0**-24
    y, _, inv_std = gradkit.group_norm(near, 2)
    far, _, same = gradkit.group_norm(near + 2.0**28, 2)  # exactly that far
    assert (np.abs(far - y) <= 4 * unit(y.dtype) * np.abs(y).max()).all()
    assert (np.abs(same - inv_std) <= 4 * unit(y.dtype) * inv_std).all()


# What writes a result of rows, and its options: its arguments, and how many results it has.
OF_ROWS = {
    "layer_norm_grad": ("dy x scale mean inv_std", 3),
    "layer_norm_grad ds": ("dy x scale mean inv_std", 3),
    "layer_norm": ("x scale bias", 3),
    "rms_norm": ("x scale", 2),
    "add_rms_norm": ("x dy scale", 3),
    "layer_norm_inverse": ("x scale bias mean inv_std", 1),
}


def first_result(name, given, out=None):
    names, count = OF_ROWS[name]
    outs = (out, None, None)[:count] if count > 1 and out is not None else out
    function, *options = name.split()
    further = {option: given[option] for option in options}
    found = getattr(gradkit, function)(*map(given.get, names.split()), out=outs, **further)
    return found[0] if count > 1 else found


def rows_for_all(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    scale, bias = (np.linspace(*ends, shape[1]).astype(dtype) for ends in ((3, 1), (-1, 2)))
    wide = np.result_type(dtype, np.float32)
    mean, inv_std = x.mean(axis=1, dtype=wide), 1 / x.std(axis=1, dtype=wide)
    of_columns = {"scale": scale, "bias": bias}
    data = {"x": x, "dy": x[::-1].copy(), "ds": np.roll(x, 1, axis=0)}
    return data | {"mean": mean, "inv_std": inv_std} | of_columns


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("width", "gap", "offset"),
    [(1000, 0, 0), (1000, 0, 3), (1024, 0, 8), (999, 5, 8), (36_869, 0, 0), (36_869, 0, 8)],
)
def test_large_results_of_rows_have_the_bits_of_small_ones(name, dtype, width, gap, offset):
    """From 32 MiB on, they are written past the caches, and a line of these by two rows."""
    few, itemsize = 5, np.dtype(dtype).itemsize
    rows = (1 << 25) // (width * itemsize) + few
    given, end = rows_for_all((rows, width), dtype), offset + rows * (width + gap) * itemsize
    memory = np.full(end + 8, 7, np.uint8)
    whole = memory[offset:end].view(dtype).reshape(rows, width + gap)
    first_result(name, given, whole[:, :width])
    for part in (slice(few), slice(rows - few, None)):
        small = {key: own[part] if len(own) == rows else own for key, own in given.items()}
        assert_same_bits(whole[part, :width], first_result(name, small))
    assert set(whole[:, width:].tobytes() + memory[:offset].tobytes() + memory[end:].tobytes()) == {
        7
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_large_result_may_take_the_place_of_what_it_is_made_of(name, dtype):
    """That memory is in the caches already, and the result is written there."""
    given = rows_for_all(((1 << 25) // (1001 * np.dtype(dtype).itemsize) + 5, 1001), dtype)
    expected = first_result(name, given)
    place = given[{"layer_norm_grad": "dy", "layer_norm_grad ds": "ds"}.get(name, "x")]
    assert first_result(name, given, place) is place
    assert_same_bits(place, expected)


@pytest.mark.parametrize("offset", [0, 1, 17])
def test_large_lists_are_zeroed_and_nothing_beside_them(offset):
    """From 2^22 elements on, past the caches."""
    memory, few = np.ones((1 << 22) + 64, np.float32), np.ones(64, np.float32)
    gradkit.zero_grad([memory[offset:-5], few[offset : offset + 3]])
    assert few.sum() == 61
    assert not few[offset : offset + 3].any()
    assert not memory[offset:-5].any()
    assert memory[:offset].all()
    assert memory[-5:].all()


def test_equal_terms_of_long_lines_round_alike():
    """So few have one total in float32 that their sum is off by some units alone."""
    dy = np.full((2, 3, 8111), np.float32(0.1))
    one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
    dbias = gradkit.batch_norm_grad(dy, dy, one, zero, one)[2]
    exact = dy[0, 0, 0].astype(np.float64) * 16222
    assert (np.abs(dbias - exact) <= 8 * unit(dy.dtype) * exact).all()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("types", [BATCH_TYPES[k] for k in (0, 1, 3)], ids="-".join)
@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("layout", ["C", "rolled"])
def test_a_sample_does_not_depend_on_the_samples_around_it(types, shape, layout):
    """Of group norms and of batch norms by known statistics."""
    p, lay = make(shape, types, 1, batch=True), LAYOUTS[layout]
    dy, x, groups, var = lay(p.dy), lay(p.x), shape[1] // 2, np.square(p.inv_std)
    y, *known = gradkit.group_norm(x, groups, p.scale, p.bias)
    dx, *_ = gradkit.group_norm_grad(dy, x, p.scale, *known)
    by_known = gradkit.batch_norm_inference(x, p.scale, p.bias, p.mean, var)
    dx_of_known, *_ = gradkit.batch_norm_inference_grad(dy, x, p.scale, p.mean, var)
    for some in (slice(0, 1), slice(1, 3)):
        part, grad = lay(p.x[some]), lay(p.dy[some])
        own = [statistic[some] for statistic in known]
        assert_all_same_bits(gradkit.group_norm(part, groups, p.scale, p.bias), (y[some], *own))
        alone, *_ = gradkit.group_norm_grad(grad, part, p.scale, *own)
        assert_same_bits(alone, dx[some])
        alone = gradkit.batch_norm_inference(part, p.scale, p.bias, p.mean, var)
        assert_same_bits(alone, by_known[some])
        alone, *_ = gradkit.batch_norm_inference_grad(grad, part, p.scale, p.mean, var)
        assert_same_bits(alone, dx_of_known[some])


def _in_a_child(types, queue):
    queue.put([array.view(f"u{array.itemsize}") for array in results(types)])


def test_a_dtype_that_was_freed_is_not_taken_for_a_new_one():
    """The new dtype may lie where the old one lay."""
    for k, name in enumerate(("f4", "f8", "f2") * 8):
        one = np.ones(1000, np.dtype(name, metadata={"number": k}))
        assert float(gradkit.grad_norm([one], 1)) == 1000
        del one


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_threads_of_its_own():
    """Even if its parent's were at work."""
    gradkit.set_num_threads(3)
    expected = results(LAYER_TYPES[0])
    busy, stop = make((4000, 257)), threading.Event()

    def work():
        while not stop.is_set():
            gradkit.layer_norm(busy.x)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(4):
            queue = context.Queue()
            child = context.Process(target=_in_a_child, args=(LAYER_TYPES[0], queue))
            child.start()
            found = queue.get(timeout=60)
            child.join(60)
            assert child.exitcode == 0
            for got, ref in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got, ref.view(got.dtype))
    finally:
        stop.set()
        worker.join()


MEMORY = """
import resource, numpy as np, gradkit
gradkit.set_num_threads(4)
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = np.broadcast_to(np.ones(1 << 10, np.float32), (128, 256, 1 << 10))  # a scale per sample
dx, (scale, dscale, dbias) = np.ones_like(x), np.ones((3, 128, 1, 1 << 10), np.float32)
mean, inv_std = np.ones((2, 128, 256), np.float32)
gradkit.rms_norm(np.ones((2, 3)))
before = used()
gradkit.layer_norm_grad(x, x, scale, mean, inv_std, out=(dx, dscale, dbias))
most = used() - before
for rows, width in ((4, 1 << 20), (64, 1 << 15), (1 << 12, 1 << 10), (1 << 18, 16)):
    dy, x, dx, y = (np.ones((width, rows)).T for _ in range(4))
    scale, dscale, dbias = np.ones((3, width))
    mean, inv_std = np.ones((2, rows))
    gradkit.rms_norm(np.ones((2, 3)))
    before = used()
    gradkit.layer_norm_grad(dy, x, scale, mean, inv_std, ds=dx, out=(dx, dscale, dbias))
    gradkit.layer_norm(x, scale, scale, out=(y, mean, inv_std))
    most = max(most, used() - before)
rows = (64, 1 << 14), (1 << 12, 1 << 10), (1 << 18, 16)
wide = (4, 1 << 20), (2, 1 << 17, 16), (4, 1 << 14, 64)
for shape in (*rows, (1 << 10, 64, 8, 8), (2, 4, 1 << 19), *wide):
    dy, x, dx, y = (np.ones(shape) for _ in range(4))
    scale, dscale, dbias, mean, inv_std = np.ones((5, shape[1]))
    of_groups = np.ones((2, shape[0], 4))
    gradkit.batch_norm(np.ones((2, 3)))
    before = used()
    gradkit.batch_norm_grad(dy, x, scale, mean, inv_std, out=(dx, dscale, dbias))
    gradkit.batch_norm(x, scale, scale, out=(y, mean, inv_std))
    gradkit.group_norm_grad(dy, x, scale, *of_groups, out=(dx, dscale, dbias))
    gradkit.group_norm(x, 4, scale, scale, out=(y, *of_groups))
    most = max(most, used() - before)
print(most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts in kilobytes")
def test_working_memory():
    """The peak memory of the process grows by no more; its arrays are there before."""
    assert int(in_a_process(MEMORY).stdout) << 10 <= WORKING_MEMORY


INTERRUPTED = """
import os, signal, threading, time, numpy as np, gradkit
from gradkit._cpu import compiled
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have it ignore
gradkit.set_num_threads(2)
def later():
    time.sleep(0.3)
    print(time.process_time(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
BEFORE
try:
    threading.Thread(target=later).start()
    while True:
        CALL
except KeyboardInterrupt:
    print(time.process_time())
assert gradkit.rms_norm(np.ones((300, 1000)))[0].all()
print("done")
"""


ONE_ROW = """
x = np.broadcast_to(np.ones(1024, np.float32), (1 << BITS, 1024))  # three seconds and more
y = np.lib.stride_tricks.as_strided(np.empty(1024, np.float32), x.shape, (0, 4))
arrays = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
"""
LONG_ROWS = ONE_ROW.replace("BITS", "24")
LIST = """
one = np.ones(1 << 24, np.float32)
g = np.lib.stride_tricks.as_strided(one, (1 << 10, 1 << 24), (0, 4))
"""
ROWS = "compiled.layer_norm(0b1010101010, 1, 1e-5, 0.0, x, None, None, y, *arrays)"
CHANNELS = "compiled.batch_norm(0b1010101010, 0, 1e-5, 0.0, x, *[None] * 4, y, *arrays, None)"
LONG_CALLS = {
    "rows": (LONG_ROWS, ROWS),
    "channels": (ONE_ROW.replace("BITS", "22"), CHANNELS),
    "rows on OpenMP's threads": (
        "from tests.cpu import openmp; openmp.use(2)" + LONG_ROWS,
        ROWS,
    ),
    "norm": (LIST, "gradkit.grad_norm(g, 3)"),
    "norms of units": (
        LIST,
        "compiled.unit_norms([g], [(1,)], 2.0, False, np.zeros(1 << 10))",
    ),
    "exact norm": (LIST, "gradkit.grad_norm([one] * 500, exact=True)"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("before", "call"), LONG_CALLS.values(), ids=LONG_CALLS)
def test_an_interrupt_ends_a_long_call(before, call):
    done = in_a_process(INTERRUPTED.replace("CALL", call).replace("BEFORE", before))
    assert done.stdout.endswith("done\n"), done.stderr
    sent, caught = map(float, done.stdout.split()[:2])
    assert caught - sent < 1.5  # of processor time, which other load does not lengthen


def in_a_process(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_variables_choose():
    code = "import gradkit; print(gradkit.show_config('dicts')['backends'])"
    found = in_a_process(code, GRADKIT_CPU="numpy")
    assert "'numpy': {'available': True, 'computes': True" in found.stdout
    found = in_a_process(code, GRADKIT_CPU="", GRADKIT_CPU_ISA=compiled.instruction_sets()[-1])
    assert f"'instruction_set': '{compiled.instruction_sets()[-1]}'" in found.stdout
    assert "'compiled': {'available': True, 'computes': True" in found.stdout
    found = in_a_process(code, GRADKIT_CPU="fast")
    assert "GRADKIT_CPU must be 'compiled' or 'numpy', not 'fast'" in found.stderr
    found = in_a_process(code, GRADKIT_CPU_ISA="x86-64-v9")
    assert "GRADKIT_CPU_ISA is 'x86-64-v9'; this processor has" in found.stderr


def test_without_compiled_code_numpy_computes_and_says_so():
    code = """
import sys
sys.modules["gradkit._cpu.compiled"] = None
import gradkit, numpy as np
print(gradkit.show_config("dicts")["backends"])
gradkit.rms_norm(np.ones((2, 3)))
try:
    with gradkit.use_cpu_backend("compiled"): pass
except ValueError as error:
    print(error)
"""
    found = in_a_process(code, GRADKIT_CPU="")
    reason = "gradkit was installed without compiled code"
    assert f"'compiled': {{'available': False, 'reason': '{reason}'}}" in found.stdout
    assert f"name is 'compiled', and nothing is: {reason}" in found.stdout
    assert found.stderr == ""


FAILURES = {
    "it could not be compiled when": """
sys.modules["gradkit._cpu.compiled"] = None
left = sys.modules["gradkit._not_compiled"] = types.ModuleType("gradkit._not_compiled")
left.__spec__ = ModuleSpec("gradkit._not_compiled", None)
""",
    "it does not load: cannot import": """
sys.modules["gradkit._cpu.compiled"] = types.ModuleType("gradkit._cpu.compiled")
""",
}


@pytest.mark.parametrize(("reason", "failure"), FAILURES.items(), ids=["compiling", "loading"])
def test_compiled_code_that_failed_is_warned_of(reason, failure):
    """The remains of an installation that failed are tested in tests/check_package.py."""
    code = f"""
import sys, types
from importlib.machinery import ModuleSpec
{failure}
import gradkit
print(gradkit.show_config("dicts")["backends"]["compiled"])
"""
    found = in_a_process(code, GRADKIT_CPU="")
    assert reason in found.stdout
    assert "RuntimeWarning: gradkit computes on CPUs with NumPy, more slowly" in found.stderr
    assert reason in found.stderr
    assert in_a_process(code, GRADKIT_CPU="numpy").stderr == ""


def test_what_is_refused():
    refused = gradkit.use_cpu_backend("fast")
    with pytest.raises(ValueError, match="name must be 'compiled' or 'numpy', not 'fast'"):
        refused.__enter__()
    with pytest.raises(ValueError, match="no such instruction set"):
        compiled.use_instruction_set("x86-64-v9")

"""``warmup``: after it no call compiles, and nothing is compiled that no call asks for."""

import threading
from functools import wraps
from pathlib import Path

import numpy as np
import pytest

import gradkit
from gradkit._calls.backend import OPERATIONS, operations_of
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch import warmup as warming
from gradkit._cuda.launch.kernels import kernel, kernels_in, options_of, source_of
from gradkit._cuda.list_tables import CAPACITY
from gradkit._dtypes import BATCH_NORM_TYPES, FLOATS, LAYER_NORM_TYPES, accumulation_name
from testbed.emulator import IdleDevice
from tests.devices.emulated import emulated_backend, on_device
from tests.tolerances import DTYPES

# The public functions that compute.
_COMPILED = {name: getattr(gradkit, name) for name in gradkit.__all__ if operations_of(name)}
# Odd to vectors or not; short, long, longer, too long.
WIDTHS = (5, 64, 65, 512, 4099, 7001, 8192, 8193, 12288, 14337, 16392)


class Maker:
    """Arrays on a device that does nothing."""

    def __init__(self, **options):
        self.device = IdleDevice(multiprocessors=1, **options)
        self.backend = CudaBackend(self.device)

    def __call__(self, shape, dtype):
        return on_device(self.device.xp.asarray(np.ones(shape, DTYPES[dtype])), self.backend)


@pytest.fixture
def make():
    return Maker()


def row_norms(make, types, affine):
    data, statistic, parameter = types
    for width in WIDTHS:
        x, statistics = make((2, width), data), make(2, statistic)
        scale = make(width, parameter) if affine else None
        bias = make(width, parameter) if affine else None
        yield gradkit.layer_norm, (x, scale, bias)
        yield gradkit.rms_norm, (x, scale)
        yield gradkit.layer_norm_inverse, (x, scale, bias, statistics, statistics)
        yield gradkit.layer_norm_grad, (x, x, scale, statistics, statistics)
        yield gradkit.invertible_layer_norm_grad, (x, x, scale, bias, statistics)
        yield gradkit.rms_norm_grad, (x, x, scale, statistics)
        yield gradkit.add_layer_norm, (x, x, scale, bias)
        yield gradkit.add_rms_norm, (x, x, scale)
        yield layer_norm_grad_past, (x, x, scale, statistics, statistics)
        yield rms_norm_grad_past, (x, x, scale, statistics)
        x = make((2, width + 1), data)[:, :width]
        yield gradkit.layer_norm, (x, scale, bias)
        yield gradkit.rms_norm, (x, scale)
        yield gradkit.layer_norm_grad, (x, x, scale, statistics, statistics)
        yield gradkit.invertible_layer_norm_grad, (x, x, scale, bias, statistics)
        yield gradkit.rms_norm_grad, (x, x, scale, statistics)


def batch_norms(make, types, affine):
    data, statistic, parameter = types
    for shape in ((2, 3, 5), (2, 8, 64)):
        for x in (make(shape, data), make((*shape[:1], *shape[:0:-1]), data).transpose(0, 2, 1)):
            scale = make(shape[1], parameter) if affine else None
            statistics = make(shape[1], statistic)
            yield gradkit.batch_norm, (x, scale, scale)
            yield with_running, (x, scale, make(shape[1], statistic), make(shape[1], statistic))
            yield gradkit.batch_norm_inference, (x, scale, scale, statistics, statistics)
            yield gradkit.batch_norm_inference_grad, (x, x, scale, statistics, statistics)
            yield gradkit.batch_norm_grad, (x, x, scale, statistics, statistics)
            wide = make(shape[1], "float64")
            yield gradkit.batch_norm_stats, (x,)
            yield gradkit.batch_norm_apply, (x, scale, scale, wide, wide)
            yield gradkit.batch_norm_grad_sums, (x, x, statistics, statistics)
            sums = wide, wide, 9.0
            yield gradkit.batch_norm_grad_apply, (x, x, scale, statistics, statistics, *sums)


def group_norms(make, types, affine):
    data, statistic, parameter = types
    for shape in ((2, 3, 5), (2, 8, 64)):
        for x in (make(shape, data), make((*shape[:1], *shape[:0:-1]), data).transpose(0, 2, 1)):
            scale = make(shape[1], parameter) if affine else None
            statistics = make((2, 1), statistic)
            yield gradkit.group_norm, (x, 1, scale, scale)
            yield gradkit.group_norm_grad, (x, x, scale, statistics, statistics)


def lists(make, dtypes):
    norm = make((), "float64")
    for count in (1, 2, CAPACITY + 1):
        grads = [make(6, sorted(dtypes)[k % len(dtypes)]) for k in range(count)]
        for p in (1.0, 2.0, 3.5, np.inf):
            yield gradkit.grad_norm, (grads, p)
            yield gradkit.per_tensor_norms, (grads, p)
            yield over_ranks, (grads, p, make)
        yield gradkit.clip_grad_norm, (grads, 1.0)
        yield gradkit.clip_by_global_norm, (grads, 1.0)
        yield gradkit.clip_grads_with_norm, (grads, norm, 1.0)
        yield gradkit.scale_grads, (grads, norm)
        yield gradkit.clip_grad_value, (grads, 1.0)
        yield gradkit.zero_grad, (grads,)
        for p in (1.0, 2.0, 3.5, np.inf):
            yield gradkit.clip_grad_block_norm, (grads, 1.0, p)
            yield gradkit.clip_by_block_norm, (grads, 1.0, p)
        yield gradkit.clip_grad_adaptive, (grads, grads)
        yield gradkit.clip_by_adaptive_norm, (grads, grads)
    yield gradkit.clip_coefficient, (norm, 1.0)
    rows = make((2, 3), "float64")
    yield gradkit.combine_stats, (rows, rows, make(2, "float64"))
    for dtype in dtypes | {accumulation_name(dtype) for dtype in dtypes}:
        vector = make(3, dtype)
        yield gradkit.update_running_statistics, (vector, vector, vector, vector, 9.0)
    yield gradkit.spike_guard_update, (make(3, "float64"), norm)
    for into in dtypes:
        for addend in set(FLOATS[into].addends) & dtypes:
            yield gradkit.accumulate_grad, (make(9, into), make(9, addend))
            yield gradkit.accumulate_grad_v2, (make(9, into), make(9, addend))
            for count in (1, CAPACITY + 1):
                buffers, grads = ([make(9, name) for _ in range(count)] for name in (into, addend))
                yield gradkit.accumulate_grads, (buffers, grads)
                yield accumulate_with_norm, (buffers, grads, norm)


@wraps(gradkit.layer_norm_grad)
def layer_norm_grad_past(dy, *others):
    gradkit.layer_norm_grad(dy, *others, ds=dy)


@wraps(gradkit.rms_norm_grad)
def rms_norm_grad_past(dy, *others):
    gradkit.rms_norm_grad(dy, *others, ds=dy)


class TwoDevices:
    """A group whose ranks hear nothing of each other."""

    rank, size, on_device = 0, 2, True

    def __init__(self, make):
        self.faults, self.rows = make(2, "float64"), make((2, 6), "float64")

    def allgather(self, _):
        return self.rows

    def check(self):
        """Find nothing."""


@wraps(gradkit.grad_norm)
def over_ranks(grads, p, make):
    gradkit.grad_norm(grads, p, group=TwoDevices(make))


@wraps(gradkit.batch_norm)
def with_running(x, scale, running_mean, running_var):
    running = {"running_mean": running_mean, "running_var": running_var}
    gradkit.batch_norm(x, scale, scale, **running)


@wraps(gradkit.accumulate_grads)
def accumulate_with_norm(buffers, grads, norm):
    gradkit.accumulate_grads(buffers, grads, norm_out=norm)


def every_call(make, dtypes):
    for types in LAYER_NORM_TYPES:
        if {types[0], types[2]} <= dtypes:
            yield from row_norms(make, types, affine=True)
            yield from group_norms(make, types, affine=True)
        if types[0] in dtypes and types[2] == types[1]:
            yield from row_norms(make, types, affine=False)
            yield from group_norms(make, types, affine=False)
    for types in BATCH_NORM_TYPES:
        if {types[0], types[2]} <= dtypes:
            yield from batch_norms(make, types, affine=True)
        if types[0] in dtypes and types[2] == types[1]:
            yield from batch_norms(make, types, affine=False)
    yield from lists(make, dtypes)


def run(function, arguments):
    with np.errstate(all="ignore"):
        function(*arguments)


@pytest.mark.parametrize("dtypes", [{"float32"}, {"bfloat16"}, {"float32", "float16"}, {"float64"}])
def test_no_call_compiles_after_it(make, dtypes):
    ready = gradkit.warmup([make(1, dtype) for dtype in dtypes])
    assert 0 < ready <= len(make.device.compiled)
    before = len(make.device.compiled)
    called = set()
    for function, arguments in every_call(make, dtypes):
        called.add(function.__name__)
        run(function, arguments)
        assert len(make.device.compiled) == before, function.__name__
    assert called == set(_COMPILED)


@pytest.mark.parametrize("dtypes", [{"float32"}, {"bfloat16", "float32"}])
@pytest.mark.parametrize("name", sorted(_COMPILED))
def test_an_operation_by_itself(make, name, dtypes):
    gradkit.warmup([make(1, dtype) for dtype in dtypes], _COMPILED[name])
    warmed = set(make.device.compiled)
    assert warmed
    for function, arguments in every_call(make, dtypes):
        if function.__name__ == name:
            run(function, arguments)
    assert set(make.device.compiled) == warmed


@pytest.mark.cuda
@pytest.mark.parametrize("kib", [227, 163, 99, 64])
def test_nothing_is_compiled_in_vain(kib):
    """Whatever shared memory a block of the GPU may have, nor is anything left out."""
    make, other = (Maker(max_shared_memory=kib << 10) for _ in range(2))
    gradkit.warmup(make(1, "float32"))
    for function, arguments in every_call(other, {"float32"}):
        run(function, arguments)
    warm, asked = (set(maker.device.compiled) for maker in (make, other))
    assert not asked - warm
    spare = warm - asked
    # Asked for by an addend of more dimensions than a launch's parameters hold.
    uncommon = source_of("accumulate"), options_of({"CAPACITY": 0, "GRAD": "f32", "BUFFER": "f32"})
    assert spare == {uncommon}


def test_every_operation_and_every_file_is_known():
    assert set(warming._COMBINATIONS) == set(OPERATIONS)
    kernels = Path(__file__).parents[1] / "kernels"
    files = {file for file, _ in warming.combinations()}
    assert files == {path.stem for path in kernels.glob("*.cu")}


def test_names_of_kernels_are_read_from_their_source():
    assert kernels_in("norm") == ("norm_partials", "norm_finish", "norm_parts")
    assert kernels_in("norm_of_ranks") == ("rank_state", "join_ranks")
    assert kernels_in("column_sums") == ("column_sums",)
    assert kernels_in("coefficients") == ("clip_coefficient", "norm_shares", "norm_of_shares")


@pytest.mark.emulated
def test_the_kernels_that_it_compiles_run():
    backend = emulated_backend(multiprocessors=1)
    grads = [on_device(backend.device.xp.asarray(np.full(3, 2.0, np.float32)), backend)]
    assert gradkit.warmup(grads, gradkit.zero_grad, gradkit.clip_grad_value) == 4
    gradkit.clip_grad_value(grads, 1.5)
    np.testing.assert_array_equal(grads[0], np.full(3, 1.5))


def test_threads_that_ask_at_once_compile_once(make):
    started = threading.Barrier(4)

    def ask():
        started.wait()
        kernel(make.device, "zero", "zero_grad", CAPACITY=0)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(make.device.compiled) == 1


def test_host_arrays_need_nothing():
    assert gradkit.warmup({"w": np.ones(3), "b": [np.ones(2, np.float16), None]}) == 0
    assert gradkit.warmup([]) == 0


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"arrays\['w'\]\[1\] is a str; expected an array"):
        gradkit.warmup({"w": [np.ones(2), "x"]})
    with pytest.raises(TypeError, match=r"arrays\[0\] has dtype int64"):
        gradkit.warmup([np.ones(2, np.int64)])
    with pytest.raises(TypeError, match=r"sum.* is not an operation .* such as gradkit.layer_norm"):
        gradkit.warmup([np.ones(2)], sum)

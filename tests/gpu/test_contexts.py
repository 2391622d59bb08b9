"""A thread that made no call of CUDA's runtime has no context, which the driver's calls require."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest

import gradkit
from gradkit import _cuda
from gradkit._cuda.launch.device import CupyDevice
from gradkit._open import dispatch
from tests.backends import ON_GPU, CuPy
from tests.gpu.test_captures import CALLS, Arguments

pytestmark = ON_GPU

BACKEND = CuPy()
# Launches of one kernel and of several, on lists and on rows, with occupancy asked first.
NAMES = [
    *("rms_norm", "layer_norm_grad", "layer_norm into an array", "group_norm", "batch_norm"),
    *("grad_norm", "clip_grad_norm", "accumulate_grads and their norm"),
]


def without_context(work):
    """Return the result of ``work()`` in a new thread, whose context is of no call before it."""
    import cupy

    def run():
        assert cupy.cuda.driver.ctxGetCurrent() == 0
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@contextmanager
def captured():
    """While this thread captures a graph, in the mode that forbids the most to all threads."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        grads = [cupy.full(4, 2.0)]
        gradkit.scale_grads(grads, 0.5)
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        gradkit.scale_grads(grads, 0.5)
    yield
    with stream:
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert grads[0].tolist() == [0.5] * 4


@pytest.mark.parametrize("meanwhile", [nullcontext, captured])
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_thread_without_a_context(name, planned, meanwhile):
    """Its calls may be known, or first ask the driver for kernels and their occupancy."""
    import cupy

    operation, variant, more = CALLS[name]
    arguments = Arguments(operation, variant, more, "C")
    for _ in range(3):  # the last as launches that are known; memory stays in CuPy's pool
        with BACKEND.active():
            expected = arguments.bits(operation(**arguments.given))
        arguments.restore()
    number = cupy.cuda.Device().id
    new = {} if planned else {number: _cuda.CudaBackend(CupyDevice(number))}
    if not planned:
        dispatch._plans.clear()  # which know what computes
    cupy.cuda.runtime.deviceSynchronize()
    with BACKEND.active(), mock.patch.dict(_cuda.backends, new), meanwhile():
        results = without_context(lambda: operation(**arguments.given))
    if not planned:
        dispatch._plans.clear()
    assert arguments.bits(results) == expected


def test_a_thread_without_a_context_raises_the_limit_of_shared_memory():
    """The testbed's driver refuses that at first; an H200's takes it."""
    import cupy

    device = CupyDevice(cupy.cuda.Device().id)
    kernel = device.compile('extern "C" __global__ void k() {}', ()).get_function("k")

    def allow():
        kernel.max_dynamic_shared_size_bytes = 100_000

    without_context(allow)
    assert kernel.max_dynamic_shared_size_bytes == 100_000


def test_a_thread_without_a_context_asks_for_occupancy():
    """The testbed's driver binds one where a kernel is looked up; an H200's does not."""
    import cupy

    device = CupyDevice(cupy.cuda.Device().id)
    kernel = device.compile('extern "C" __global__ void k() {}', ()).get_function("k")
    expected = device.resident(kernel, 256, 0)
    assert without_context(lambda: device.resident(kernel, 256, 0)) == expected > 0

"""A call's second kernel starts before its first has ended, on devices that can."""

import sys
from contextlib import contextmanager
from unittest import mock

import pytest

from gradkit import _cuda
from gradkit._cuda.launch import packing
from gradkit._cuda.launch.device import CupyDevice
from gradkit._cuda.launch.kernels import kernel
from gradkit._open import dispatch
from gradkit.errors import KernelError
from tests.backends import CuPy, has_gpu
from tests.combinations import combinations
from tests.gpu.test_captures import CALLS, Arguments
from tests.gpu.test_contexts import without_context


def starts_early():
    """Return whether the device and its driver can."""
    if not has_gpu():
        return False
    return CupyDevice(0).clusters and packing.of_driver("cuLaunchKernelEx") is not None


plugin = sys.modules.get("testbed.driver.plugin")
on_driver = pytest.mark.skipif(plugin is None, reason="not on the testbed's driver")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not starts_early(), reason="no device of compute capability 9.0"),
]

BACKEND = CuPy()
# What adds partial rows up, and how often.
GRADIENTS = {
    "layer_norm_grad": 1,
    "rms_norm_grad": 1,
    "gated_rms_norm_grad": 1,
    "layer_norm": 0,
    "grad_norm": 0,
}
NO_CONTEXT, OUT_OF_RESOURCES = 201, 701


def given(name):
    operation, variant, more = CALLS[name]
    return operation, Arguments(operation, variant, more, "C")


@contextmanager
def plain_launches():
    """A device on which nothing has been launched yet, by a driver before CUDA 11.8."""
    new = {0: _cuda.CudaBackend(CupyDevice(0))}
    none = mock.patch.object(packing, "of_driver", return_value=None)
    dispatch._plans.clear()  # which know what computes
    with mock.patch.dict(_cuda.backends, new), none:
        yield
    dispatch._plans.clear()


def test_as_many_clusters_run_as_the_driver_says_fit():
    """In a part of the device at least, and not more than all of its blocks would make."""
    file = "layer_norm_grad_cluster"
    macros = next(macros for of, macros in combinations() if of == file)
    cluster = kernel(CupyDevice(0), file, file, **macros)
    found = cluster.clusters(8, 256)
    assert 1 <= found <= cluster.resident(256) * cluster.device.multiprocessors // 8
    with mock.patch.object(packing, "of_driver", return_value=None):
        rule = cluster.clusters(8, 256)
    assert (found, rule) == (2, 1) or plugin is None


@pytest.mark.parametrize("name", GRADIENTS)
def test_results_have_the_bits_of_plain_launches(name):
    operation, arguments = given(name)
    found = []
    with BACKEND.active():
        for _ in range(3):  # CuPy launches a kernel first
            arguments.restore()
            found.append(arguments.bits(operation(**arguments.given)))
        with plain_launches():
            for _ in range(2):
                arguments.restore()
                found.append(arguments.bits(operation(**arguments.given)))
    assert all(bits == found[0] for bits in found)


def count(call):
    """Count a call's launches that may start early."""
    before = plugin.driver.calls("cuLaunchKernelEx")
    call()
    return plugin.driver.calls("cuLaunchKernelEx") - before


@on_driver
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_second_kernel_of_a_call_starts_early(name):
    import cupy

    operation, arguments = given(name)
    streams = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    for stream in streams:
        with BACKEND.active(), stream:
            for _ in range(
                4
            ):  # CuPy launches a kernel first, and one whose arguments are of other types
                operation(**arguments.given)
            assert count(lambda: operation(**arguments.given)) == GRADIENTS[name]
    with BACKEND.active(), plain_launches():
        operation(**arguments.given)
        assert count(lambda: operation(**arguments.given)) == 0


@on_driver
def test_a_captured_launch_is_a_plain_one():
    import cupy

    operation, arguments = given("layer_norm_grad")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with BACKEND.active(), stream:
        operation(**arguments.given)
        stream.begin_capture()
        assert count(lambda: operation(**arguments.given)) == 0
        stream.end_capture()
        assert count(lambda: operation(**arguments.given)) == 1


@on_driver
def test_a_thread_without_a_context_launches_again():
    operation, arguments = given("layer_norm_grad")
    with BACKEND.active():
        operation(**arguments.given)
        expected = arguments.bits(operation(**arguments.given))
        plugin.driver.fail("cuLaunchKernelEx", NO_CONTEXT)
        results = []
        work = lambda: results.append(operation(**arguments.given))  # noqa: E731
        assert count(lambda: without_context(work)) == 1
    assert arguments.bits(results[0]) == expected


@on_driver
def test_a_refused_launch_is_an_error_and_the_next_call_works():
    operation, arguments = given("layer_norm_grad")
    with BACKEND.active():
        operation(**arguments.given)
        expected = arguments.bits(operation(**arguments.given))
        plugin.driver.fail("cuLaunchKernelEx", OUT_OF_RESOURCES)
        with pytest.raises(KernelError, match="column_sums"):
            operation(**arguments.given)
        assert arguments.bits(operation(**arguments.given)) == expected

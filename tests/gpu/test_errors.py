"""Errors of CUDA in the midst of calls, which the testbed's driver makes on request."""

import sys

import numpy as np
import pytest

import gradkit
from gradkit._arrays import cuda
from tests.backends import has_gpu
from tests.tolerances import assert_same_bits

plugin = sys.modules.get("testbed.driver.plugin")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu() or plugin is None, reason="not on the testbed's driver"),
]
OUT_OF_MEMORY, OUT_OF_RESOURCES = 2, 701


@pytest.fixture
def fails():
    names = []

    def fail(name, code, **options):
        names.append(name)
        plugin.driver.fail(name, code, **options)

    yield fail
    for name in names:
        plugin.driver.fail(name, 0, times=0)


def arrays(count=9):
    import cupy

    rng = np.random.default_rng(0)
    return [cupy.asarray(rng.standard_normal((4, k + 1))) for k in range(count)]


def test_a_clip_without_memory_leaves_the_gradients(fails):
    import cupy

    grads = arrays()
    gradkit.clip_grad_norm(grads, 1.0)  # compiles
    before = [grad.get() for grad in grads]
    fails("cuMemAlloc_v2", OUT_OF_MEMORY, times=1000)
    empty = cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc)
    with empty, pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        gradkit.clip_grad_norm(grads, 0.5)
    fails("cuMemAlloc_v2", 0, times=0)
    for grad, old in zip(grads, before, strict=True):
        assert_same_bits(grad.get(), old)
    assert float(gradkit.clip_grad_norm(grads, 0.5)) == pytest.approx(1.0)


@pytest.mark.parametrize("after", [1, 2])
def test_a_launch_that_fails_says_so_and_the_next_call_works(fails, after):
    import cupy

    grads = arrays()
    expected = gradkit.grad_norm(grads).get()
    fails("cuLaunchKernel", OUT_OF_RESOURCES, after=after)
    with pytest.raises((RuntimeError, cupy.cuda.driver.CUDADriverError)):
        gradkit.grad_norm(grads)
    assert_same_bits(gradkit.grad_norm(grads).get(), expected)


def test_a_call_allocates_nothing_from_cuda_once_the_pool_has_it():
    grads = arrays()
    for _ in range(2):
        gradkit.clip_grad_norm(grads, 1.0)
    before = plugin.driver.calls("cuMemAlloc_v2"), plugin.driver.calls("cuMemFree_v2")
    for _ in range(5):
        gradkit.clip_grad_norm(grads, 1.0)
    assert before == (plugin.driver.calls("cuMemAlloc_v2"), plugin.driver.calls("cuMemFree_v2"))


def test_calls_on_another_librarys_stream_take_memory_from_it_alone(fails):
    """As with a model that leaves CUDA no memory, while its library's allocator has some."""
    import cupy

    grads = arrays()
    expected = gradkit.grad_norm(grads).get()
    stream, room = cupy.cuda.Stream(non_blocking=True), cupy.cuda.alloc(1 << 20)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:  # behind which the norm has to come
        for grad in grads:
            grad *= 2
    used = 0

    def allocate(size):
        nonlocal used
        place = room + used
        used += -(-size // 512) * 512
        return place

    cupy.get_default_memory_pool().free_all_blocks()
    fails("cuMemAlloc_v2", OUT_OF_MEMORY, times=1000)
    with cuda.on_stream(0, stream.ptr, allocate):
        norm = gradkit.grad_norm(grads)
    assert used
    with stream:  # and before which
        for grad in grads:
            grad *= 0
    stream.synchronize()
    assert_same_bits(norm.get(), 2 * expected)

"""Gradients on two devices: work of each is in the order of its streams."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradkit
from gradkit._cuda.list_tables import CAPACITY
from tests.backends import ON_GPU
from tests.tolerances import assert_same_bits

pytestmark = ON_GPU


@pytest.fixture(autouse=True)
def two():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device")


def hosts(seed, count=12):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((3, 20)).astype(np.float32) for _ in range(count)]


def spread(arrays):
    """On two devices in turns, each made by a kernel that may not have run yet."""
    import cupy

    made = []
    for k, host in enumerate(arrays):
        with cupy.cuda.Device(k % 2):
            made.append(cupy.asarray(host / 2) * np.float32(2))
    return made


def test_a_norm_waits_for_both_devices():
    import cupy

    alone = [gradkit.grad_norm([cupy.asarray(h) for h in hosts(seed)]) for seed in range(3)]
    norms = [gradkit.grad_norm(spread(hosts(seed))) for seed in range(3)]
    with cupy.cuda.Device(1):  # whose memory the first norm's rows were in, and the next ones'
        cupy.cuda.runtime.deviceSynchronize()
    for norm, expected in zip(norms, alone, strict=True):
        assert norm.device.id == 0
        assert_same_bits(norm.get(), expected.get())


@pytest.mark.parametrize("count", [12, 2 * CAPACITY + 2], ids=["short", "uploaded"])
def test_a_clip_scales_on_both_devices(count):
    import cupy

    grads, alone = spread(hosts(1, count)), [cupy.asarray(h) for h in hosts(1, count)]
    norm = gradkit.clip_grad_norm(grads, 1.0)
    expected = gradkit.clip_grad_norm(alone, 1.0)
    for number in (1, 0):
        with cupy.cuda.Device(number):
            cupy.cuda.runtime.deviceSynchronize()
    assert_same_bits(norm.get(), expected.get())
    for k, (grad, other) in enumerate(zip(grads, alone, strict=True)):
        assert grad.device.id == k % 2
        assert_same_bits(grad.get(), other.get())


def test_lists_of_both_devices_and_the_host():
    """Each operation on a list works where its gradients lie."""
    import cupy

    alone = hosts(4)
    grads = [*spread(alone[:8]), *(host.copy() for host in alone[8:])]

    def check(rel, *pairs):
        for got, wanted in pairs:
            np.testing.assert_allclose(cupy.asnumpy(got), wanted, rel)

    check(
        1e-12,
        (gradkit.grad_norm(grads), gradkit.grad_norm(alone)),
        (gradkit.grad_norm(grads, exact=True), gradkit.grad_norm(alone, exact=True)),
        (gradkit.per_tensor_norms(grads, flat=True), gradkit.per_tensor_norms(alone, flat=True)),
        (gradkit.grad_norm(grads, 1), gradkit.grad_norm(alone, 1)),
    )
    clipped = gradkit.clip_grad_norm(alone, 1.0)
    check(1e-12, (gradkit.clip_grad_norm(grads, 1.0), clipped))
    check(1e-6, *zip(grads, alone, strict=True))
    gradkit.scale_grads(grads, 0.5)
    check(1e-6, *((grad, host / 2) for grad, host in zip(grads, alone, strict=True)))
    gradkit.zero_grad(grads)
    check(0, *((grad, 0 * host) for grad, host in zip(grads, alone, strict=True)))


def test_a_long_list_that_no_norm_has_planned():
    import cupy

    alone = hosts(5, 2 * CAPACITY + 2)
    grads = spread(alone)
    gradkit.scale_grads(grads, 0.5)
    for grad, host in zip(grads, alone, strict=True):
        assert_same_bits(cupy.asnumpy(grad), host / 2)


def test_a_capture_on_the_other_device_is_noticed():
    import cupy

    grads = spread(hosts(6))
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with cupy.cuda.Device(0), pytest.raises(RuntimeError, match="several devices"):
                gradkit.grad_norm(grads)
            stream.end_capture()


def test_streams_of_both_devices():
    import cupy

    expected = gradkit.grad_norm([cupy.asarray(h) for h in hosts(2)]).get()
    streams = []
    for number in range(2):
        with cupy.cuda.Device(number):
            streams.append(cupy.cuda.Stream(non_blocking=True))
    with cupy.cuda.Device(1), streams[1], cupy.cuda.Device(0), streams[0]:
        grads = spread(hosts(2))
        norm = gradkit.grad_norm(grads)
        streams[0].synchronize()
        assert_same_bits(norm.get(), expected)


def test_a_norm_of_the_other_device():
    import cupy

    x, dy = hosts(3, 2)
    for _ in range(2):
        for number in (0, 1):
            with cupy.cuda.Device(number):
                arrays = [cupy.asarray(h) for h in (dy, x, np.ones((3, 1), np.float32))]
                expected, _ = gradkit.rms_norm_grad(*arrays[:2], None, arrays[2])
            dx, _ = gradkit.rms_norm_grad(*arrays[:2], None, arrays[2])
            assert dx.device.id == expected.device.id == number
            assert_same_bits(dx.get(), expected.get())


def test_threads_that_have_not_touched_a_device():
    """Kernels are known there already, and launches of several threads are under way at once."""
    import cupy

    inputs = [hosts(seed, 2) for seed in range(6)]

    def norms_of(number, arrays):
        with cupy.cuda.Device(number):
            grads = [cupy.asarray(h) for h in arrays]
            return [gradkit.grad_norm(grads).get() for _ in range(3)]

    expected = [norms_of(k % 2, each) for k, each in enumerate(inputs)]
    with ThreadPoolExecutor(len(inputs)) as pool:
        found = list(pool.map(norms_of, itertools.cycle((0, 1)), inputs))
    assert_same_bits(np.array(found), np.array(expected))

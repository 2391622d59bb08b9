"""Devices and streams. What a GPU has to show is marked ``gpu``.

A stand-in for CuPy shows on the CPU which device and stream the work is sent to.
"""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit import _arrays
from gradkit._arrays import cuda
from gradkit._arrays import torch as torch_adapter
from gradkit._open import arguments

from .libraries import framework


class Log(list):
    @contextmanager
    def within(self, what):
        self.append(f"enter {what}")
        yield
        self.append(f"leave {what}")


@pytest.fixture
def cupy(monkeypatch):
    """A module with as much of CuPy as the device and stream code touches."""
    log = Log()

    class Device:
        current = 0

        def __init__(self, number):
            self.number = number

        def __enter__(self):
            log.append(f"enter device {self.number}")

        def __exit__(self, *_):
            log.append(f"leave device {self.number}")

        def __eq__(self, other):
            return self.number == other.number

        __hash__ = None

    class Stream:
        def __init__(self, address):
            self.address = address

        @classmethod
        def from_external(cls, stream):
            return cls(stream.__cuda_stream__()[1])

        def __enter__(self):
            log.append(f"enter stream {self.address}")
            return self

        def __exit__(self, *_):
            log.append(f"leave stream {self.address}")

        def record(self):
            log.append(f"record on {self.address}")
            return f"event of {self.address}"

        def wait_event(self, event):
            log.append(f"{self.address} waits for {event}")

        def synchronize(self):
            log.append(f"host waits for {self.address}")

    class Array:
        def __init__(self, device):
            self.device = Device(device)
            self.data = SimpleNamespace(device_id=device)

    module = ModuleType("cupy")
    module.log = log
    module.ndarray = Array
    module.cuda = SimpleNamespace(
        Device=Device,
        runtime=SimpleNamespace(getDevice=lambda: Device.current),
        Stream=Stream,
        get_current_stream=lambda: Stream("current"),
        using_allocator=lambda allocate: log.within(f"memory of {allocate.__name__}"),
        UnownedMemory=lambda *arguments: arguments,
        MemoryPointer=lambda memory, offset: (*memory, offset),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    for kind in [*_arrays._BY_TYPE]:
        monkeypatch.delitem(_arrays._BY_TYPE, kind)
    return module


def theirs(size):
    """Stand for the allocator of the library whose stream it is."""
    raise NotImplementedError(size)


def test_work_is_queued_on_the_given_stream_of_the_right_device(cupy):
    with cuda.on_stream(3, 77, theirs):
        cupy.log.append("work")
    assert cupy.log == [
        "enter device 3",
        "enter stream 77",
        "enter memory of theirs",
        "work",
        "leave memory of theirs",
        "leave stream 77",
        "leave device 3",
    ]


def test_before_cupy_14_streams_are_wrapped_by_address(cupy):
    opened = []

    def external(address, device):
        opened.append((address, device))
        return cupy.cuda.Stream(address)

    del cupy.cuda.Stream.from_external
    cupy.cuda.ExternalStream = external
    with cuda.on_stream(1, 77, theirs):
        pass
    assert opened == [(77, 1)]


def test_a_cupy_array_is_worked_on_on_its_device(cupy):
    array = cupy.ndarray(2)
    with _arrays.framework_of(array).on_stream(array):
        cupy.log.append("work")
    assert cupy.log == ["enter device 2", "work", "leave device 2"]


def test_a_torch_tensor_is_worked_on_in_torchs_current_stream(cupy, torch, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda number: asked.append(number) or 77,
        raising=False,  # that of CPUs has none
    )
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 2)
    with _arrays.framework_of(torch.ones(1)).on_stream(tensor):
        pass
    assert asked == [2]
    assert cupy.log[:3] == ["enter device 2", "enter stream 77", "enter memory of _allocate"]


def test_a_device_that_is_current_is_not_entered(cupy):
    for _ in range(2):
        with cuda.on_stream(0, 78, theirs):
            cupy.log.append("work")
    assert cupy.log == 2 * [
        "enter stream 78",
        "enter memory of theirs",
        "work",
        "leave memory of theirs",
        "leave stream 78",
    ]


def test_what_was_entered_is_left_if_the_next_context_cannot_be(cupy, monkeypatch):
    def broken(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(cupy.cuda.Stream, "__enter__", broken)
    with pytest.raises(RuntimeError, match="no memory"), cuda.on_stream(3, 79, theirs):
        cupy.log.append("work")
    assert cupy.log == ["enter device 3", "leave device 3"]


@pytest.mark.usefixtures("cupy")
def test_torchs_memory_lives_as_long_as_cupys_pointer_to_it(torch, monkeypatch):
    def empty(size, *, dtype, device):
        assert (dtype, device) == (torch.uint8, "cuda")
        made = SimpleNamespace(data_ptr=lambda: 512, device=SimpleNamespace(index=2), size=size)
        owners.append(made)
        return made

    owners = []
    monkeypatch.setattr(torch, "empty", empty)
    assert torch_adapter._allocate(100) == (512, 100, owners[0], 2, 0)
    assert owners[0].size == 100


def test_a_producer_that_names_its_stream_waits_for_ours(cupy):
    array = SimpleNamespace(__cuda_array_interface__={"stream": 55})
    with cuda.producer_waits(array, 0):
        cupy.log.append("work")
    assert cupy.log[1:-1] == ["work", "record on current", "55 waits for event of current"]


def test_for_any_other_producer_the_host_waits(cupy):
    with cuda.producer_waits(object(), 0):
        cupy.log.append("work")
    assert cupy.log[1:-1] == ["work", "host waits for current"]


def test_the_order_holds_after_an_error_too(cupy):
    with pytest.raises(ZeroDivisionError), cuda.producer_waits(object(), 0):
        raise ZeroDivisionError
    assert "host waits for current" in cupy.log


def test_arrays_of_two_devices_are_refused(cupy):
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[2\] are on different devices"):
        gradkit.clip_grad_block_norm([cupy.ndarray(0), cupy.ndarray(0), cupy.ndarray(1)], 1.0)


def test_arguments_of_two_devices_are_refused(cupy):
    with pytest.raises(ValueError, match="x and scale are on different devices"):
        gradkit.layer_norm(cupy.ndarray(0), cupy.ndarray(1))
    with pytest.raises(ValueError, match="buffer and grad are on different devices"):
        gradkit.accumulate_grad(cupy.ndarray(1), cupy.ndarray(0))


def test_host_and_device_are_two_devices(cupy):
    assert not arguments.same_device(np.ones(1), cupy.ndarray(0))
    assert not arguments.same_device(cupy.ndarray(0), np.ones(1))
    assert arguments.same_device(cupy.ndarray(1), cupy.ndarray(1))


# With a device


@pytest.fixture(scope="module")
def gpu():
    """CuPy on a device, with a backend that computes there."""
    cp = pytest.importorskip("cupy")
    try:
        cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    return cp


@pytest.fixture
def cuda_torch(gpu):
    assert gpu
    torch = framework("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch is built without CUDA")
    return torch


DTYPES = ("float16", "bfloat16", "float32", "float64")
_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture
def spin(gpu):
    """Keeps CuPy's current stream busy for about a tenth of a second."""
    kernel = gpu.RawKernel(_SPIN, "spin")
    return lambda: kernel((1,), (1,), (np.int64(200_000_000),))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_tensors_come_back_as_cuda_tensors(cuda_torch, dtype):
    torch = cuda_torch
    grad = torch.tensor([3.0, 4.0], dtype=getattr(torch, dtype), device="cuda")
    clipped, norm = gradkit.clip_by_global_norm([grad], 1.0)
    assert clipped[0].dtype is grad.dtype
    assert clipped[0].device == norm.device == grad.device
    assert norm.item() == 5
    assert gradkit.clip_grad_norm([grad], 1.0).item() == 5
    assert torch.equal(grad, clipped[0])
    assert grad._version > 0


def check_hazards(torch, on_gpu):
    """Check CUDA tensors that are refused, and arrays that may be beside them."""
    with pytest.raises(TypeError, match="negative bit"):
        gradkit.zero_grad(on_gpu(torch.tensor([1 + 2j])).conj().imag)
    with pytest.raises(TypeError, match="grads_of"):
        gradkit.zero_grad(on_gpu(torch.ones(2)).requires_grad_())
    with pytest.raises(ValueError, match="overlaps itself"):
        gradkit.zero_grad(on_gpu(torch.ones(1)).expand(3))
    with pytest.raises(TypeError, match="to_dense"):
        gradkit.grad_norm(on_gpu(torch.eye(2)).to_sparse())
    one, other = on_gpu(torch.ones(2)), torch.ones(2)
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] are on different devices"):
        gradkit.clip_grad_block_norm([one, other], 1.0)
    with pytest.raises(ValueError, match="x and scale are on different devices"):
        gradkit.rms_norm(one, other)
    with pytest.raises(ValueError, match=r"grads and coefficient are on different devices"):
        gradkit.scale_grads(other, on_gpu(torch.tensor(0.5)))
    assert gradkit.scale_grads(one, torch.tensor(3.0)).tolist() == [3, 3]
    assert gradkit.scale_grads([one, other], torch.tensor(0.5)) == [one, other]
    assert (one.tolist(), other.tolist()) == ([1.5, 1.5], [0.5, 0.5])
    norm = gradkit.clip_grad_norm([other, one], 1.0)
    assert norm.device == one.device
    assert norm.item() == pytest.approx(5**0.5)
    assert one.tolist() == pytest.approx([0.45**0.5] * 2)
    assert other.tolist() == pytest.approx([0.05**0.5] * 2)


@pytest.mark.gpu
def test_cuda_hazards_are_refused(cuda_torch):
    check_hazards(cuda_torch, lambda tensor: tensor.cuda())


@pytest.mark.gpu
def test_work_waits_for_torchs_side_stream_and_torch_for_it(cuda_torch):
    """A long kernel before and a read behind, all on a side stream and without a wait."""
    torch = cuda_torch
    side = torch.cuda.Stream()
    grads = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for grad in grads:
            grad.fill_(2.0)
        norm = gradkit.clip_grad_norm(grads, 1.0)
        after = [grad.clone() for grad in grads]
    side.synchronize()
    assert norm.item() == pytest.approx(2 * (4 << 20) ** 0.5)
    expected = torch.full((1 << 20,), 1 / (4 << 20) ** 0.5, device="cuda")
    for grad in after:
        torch.testing.assert_close(grad, expected)


@pytest.mark.gpu
def test_a_graph_that_torch_captures_in_its_default_mode(cuda_torch):
    torch = cuda_torch
    grads = [torch.full((1 << 20,), 2.0, device="cuda") for _ in range(200)]
    gradkit.clip_grad_norm(grads, 1e30)  # compiles, and takes memory from CuPy's pool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = gradkit.clip_grad_norm(grads, 1.0)
    for value in (3.0, 5.0):
        for grad in grads:
            grad.fill_(value)
        graph.replay()
        assert norm.item() == pytest.approx(value * (200 << 20) ** 0.5)
        expected = torch.full((1 << 20,), (200 << 20) ** -0.5, device="cuda")
        for grad in grads:
            torch.testing.assert_close(grad, expected)


@pytest.mark.gpu
def test_results_for_torch_survive_use_on_another_stream(cuda_torch):
    """Results come from PyTorch's allocator, which ``record_stream`` speaks to."""
    torch = cuda_torch
    side = torch.cuda.Stream()
    grad = torch.full((1 << 22,), 2.0, device="cuda")
    torch.cuda.synchronize()
    clipped, _ = gradkit.clip_by_global_norm(grad, 1e30)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        kept = clipped.clone()
    clipped.record_stream(side)
    del clipped
    for _ in range(8):
        gradkit.clip_by_global_norm(torch.full((1 << 22,), 7.0, device="cuda"), 1e30)
    side.synchronize()
    assert torch.equal(kept, grad)


@pytest.mark.gpu
def test_cupys_side_stream_is_the_one_that_works(gpu, spin):
    side = gpu.cuda.Stream(non_blocking=True)
    grad = gpu.zeros(1 << 20, gpu.float32)
    gpu.cuda.Device().synchronize()
    with side:
        spin()
        grad.fill(2)
        norm = gradkit.clip_grad_norm(grad, 1.0)
        after = grad.copy()
    side.synchronize()
    assert float(norm) == 2048
    assert float(after.sum()) == pytest.approx(1024, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("busy", [0, 1])
def test_two_gpus_wait_for_each_other(gpu, spin, busy):
    """Each is slow in turn; the other one's part of the norm and of the clip comes after."""
    if gpu.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device")
    grads = []
    for number in (0, 1):
        with gpu.cuda.Device(number):
            grads.append(gpu.zeros(1 << 20, gpu.float32))
            gpu.cuda.Device().synchronize()
    for number, grad in enumerate(grads):
        with gpu.cuda.Device(number):
            if number == busy:
                spin()
            grad.fill(2)
            limit = grad[0] / 2  # on the second one
    clipped, norm = gradkit.clip_by_global_norm(grads, limit)
    assert gradkit.clip_grad_norm(grads, 1.0).device == norm.device == grads[0].device
    assert float(norm) == pytest.approx(2**11.5)
    for number, (grad, copy) in enumerate(zip(grads, clipped, strict=True)):
        with gpu.cuda.Device(number):
            assert grad.device == copy.device == gpu.cuda.Device()
            assert bool((grad == copy).all())
            assert float(grad[0]) == pytest.approx(2**-10.5, rel=1e-6)


@pytest.mark.gpu
def test_torch_streams_of_two_gpus_wait_for_each_other(cuda_torch):
    torch = cuda_torch
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    grads = [torch.zeros(1 << 20, device=f"cuda:{number}") for number in (1, 0)]
    sides = [torch.cuda.Stream(grad.device) for grad in grads]
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    with torch.cuda.stream(sides[0]), torch.cuda.stream(sides[1]):
        torch.cuda._sleep(200_000_000)  # on the stream entered last
        for grad in grads:
            grad.fill_(2.0)
        norm = gradkit.clip_grad_norm(grads, 1.0)
        after = [grad.clone() for grad in grads]
    for side in sides:
        side.synchronize()
    assert norm.device == grads[0].device
    assert norm.item() == pytest.approx(2**11.5)
    for grad in after:
        torch.testing.assert_close(grad, torch.full_like(grad, 2**-10.5))


@pytest.mark.gpu
def test_another_producers_stream_is_put_behind_ours(gpu, spin):
    """Ours is slow; what the producer does next on its own stream sees our result."""

    class Producer:
        def __init__(self, array, stream):
            self.array, self.stream = array, stream

        def __dlpack__(self, **asked):
            with self.stream:
                return self.array.__dlpack__(**asked)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        @property
        def __cuda_array_interface__(self):
            return self.array.__cuda_array_interface__ | {"stream": self.stream.ptr}

    theirs, ours = (gpu.cuda.Stream(non_blocking=True) for _ in range(2))
    array = gpu.ones(1 << 20, gpu.float32)
    gpu.cuda.Device().synchronize()
    with ours:
        spin()
        gradkit.scale_grads(Producer(array, theirs), 3.0)
    with theirs:
        seen = array.copy()
    theirs.synchronize()
    assert float(seen.min()) == 3


@pytest.mark.gpu
def test_cuda_results_for_jax_are_jaxs(gpu):
    assert gpu
    jax = framework("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX is built without CUDA")
    for dtype in (jax.numpy.float16, jax.numpy.bfloat16, jax.numpy.float32):
        grad = jax.numpy.array([3.0, 4.0], dtype)
        clipped, norm = gradkit.clip_by_global_norm(grad, 1.0)
        assert clipped.dtype == grad.dtype
        assert clipped.device == norm.device == grad.device
        assert norm == 5
        assert grad.tolist() == [3, 4]

"""PyTorch's CUDA tensors on CuPy itself: CPU tensors in the memory of the testbed's driver.

``make test-driver-torch`` runs this; no environment has both libraries.
"""

import ctypes
import gc
import sys
import weakref
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._arrays import cuda
from gradkit._arrays import torch as adapter
from gradkit._cuda.cudnn import engines, library
from gradkit._open import dispatch
from tests.cudnn.fake import FakeCudnn

from .libraries import framework, on_a_device, without_tables
from .test_devices import check_hazards

if "testbed.driver.plugin" not in sys.modules:
    pytest.skip("not on the testbed's driver", allow_module_level=True)
import cupy

pytestmark = pytest.mark.filterwarnings("ignore:cuDNN cannot be used")
SHAPE = 12, 64
_ROOM = 1 << 20


class Memory:
    """The device's memory that PyTorch has, which is the host's here, and nobody's twice."""

    device = framework("torch").device("cpu")

    def __init__(self):
        self.room, self.used = cupy.zeros(_ROOM, np.uint8), 0
        self.kept = []  # weakly, what was allocated for gradkit

    def take(self, size, shift=0):
        start = self.room.data.ptr + self.used + shift
        self.used += -(-(size + shift) // 512) * 512
        assert self.used <= _ROOM
        return start

    def empty(self, shape, strides, dtype, shift=0):
        torch = framework("torch")
        count = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        size = count * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.take(size, shift))
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    def like(self, tensor, shift=0):
        """A tensor with the same values, written by the device."""
        made = self.empty(tensor.shape, tensor.contiguous().stride(), tensor.dtype, shift)
        values = cupy.asarray(tensor.reshape(-1).view(framework("torch").uint8).numpy())
        bytes_ = cuda.borrow(made, made.data_ptr(), 0, values.shape, values.strides, values.dtype)
        bytes_[...] = values
        return made

    def holds(self, tensor):
        try:
            return 0 <= tensor.data_ptr() - self.room.data.ptr < _ROOM
        except RuntimeError:  # of a sparse tensor, whose elements are elsewhere
            return True

    def allocate(self, size):
        owner = framework("torch").empty(1)
        self.kept.append(weakref.ref(owner))
        return cuda.pointer_of(owner, self.take(size), size, 0)


@pytest.fixture
def memory(torch, monkeypatch):
    """While CPU tensors are CUDA ones, and new ones are in the device's memory."""
    made = Memory()
    cuda.backends().backend_of(made.room)  # from a device's second call on its backend is known
    dispatch._plans.clear()
    monkeypatch.setattr(adapter, "_is_cuda", lambda _: True)
    monkeypatch.setattr(adapter, "_device_number", lambda _: 0)
    monkeypatch.setattr(adapter, "_allocate", made.allocate)
    monkeypatch.setattr(adapter, "_stream_of", lambda _: 0)

    def new(_, shape, dtype, like):
        dtype = adapter._torch_dtype(dtype)
        return made.empty(shape, like.new_empty(shape).stride(), dtype)

    def empty_like(tensor):
        return made.empty(tensor.shape, tensor.stride(), tensor.dtype)

    def empty_strided(shape, strides, *, dtype, device):
        assert device == made.device
        return made.empty(shape, strides, dtype)

    monkeypatch.setattr(adapter.Torch, "new", new)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    with on_a_device():
        yield made
    cupy.cuda.runtime.deviceSynchronize()


@pytest.fixture
def launched(monkeypatch):
    """Calls whose arrays were addresses."""
    seen, compute = [], adapter.Torch.compute

    def counted(self, call, *arrays):
        seen.append(type(call).__name__)
        compute(self, call, *arrays)

    monkeypatch.setattr(adapter.Torch, "compute", counted)
    return seen


def values(tensors):
    cupy.cuda.runtime.deviceSynchronize()
    return [None if each is None else each.clone() for each in tensors]


def arguments(torch, dtype="float32"):
    generator = torch.Generator().manual_seed(1)
    shapes = SHAPE, SHAPE, SHAPE[1:], SHAPE[1:]
    dy, x, scale, bias = (torch.randn(n, generator=generator) for n in shapes)
    data = getattr(torch, dtype)
    return dy.to(data), x.to(data), scale + 3, bias


CALLS = {
    "LayerNormGrad": lambda dy, x, scale, bias: gradkit.layer_norm_grad(
        dy, x, scale, *gradkit.layer_norm(x, scale, bias)[1:]
    ),
    "RmsNormGrad": lambda dy, x, scale, bias: gradkit.rms_norm_grad(  # noqa: ARG005
        dy, x, scale, gradkit.rms_norm(x, scale)[1]
    ),
    "LayerNorm": lambda dy, x, scale, bias: gradkit.layer_norm(x, scale, bias),  # noqa: ARG005
    "GroupNorm": lambda dy, x, scale, bias: gradkit.group_norm(x, 4, scale, bias),  # noqa: ARG005
    "GroupNormGrad": lambda dy, x, scale, bias: gradkit.group_norm_grad(
        dy, x, scale, *gradkit.group_norm(x, 4, scale, bias)[1:]
    ),
    "BatchNorm": lambda dy, x, scale, bias: gradkit.batch_norm(x, scale, bias),  # noqa: ARG005
    "BatchNormGrad": lambda dy, x, scale, bias: gradkit.batch_norm_grad(
        dy, x, scale, *gradkit.batch_norm(x, scale, bias)[1:]
    ),
    "BatchNormInference": lambda dy, x, scale, bias: (  # noqa: ARG005
        gradkit.batch_norm_inference(x, scale, bias, bias, scale),
    ),
    "BatchNormInferenceGrad": lambda dy, x, scale, bias: gradkit.batch_norm_inference_grad(
        dy, x, scale, bias, scale
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", CALLS)
def test_known_calls_are_launched_on_addresses(torch, memory, launched, name, dtype):
    host = arguments(torch, dtype)
    given = [memory.like(each) for each in host]
    elsewhere = [memory.like(each) for each in host]
    found = [values(CALLS[name](*each)) for each in (given, given, elsewhere, given)]
    assert launched.count(name) == 3
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
    expected = CALLS[name](*(each.double().numpy() for each in host))
    assert all(tensor.dtype == given[1].dtype for tensor in found[0][:1])
    for tensor, wanted in zip(found[0], expected, strict=True):
        tolerance = 2e-2 if dtype != "float32" else 1e-4
        np.testing.assert_allclose(tensor.double().numpy(), wanted, rtol=tolerance, atol=tolerance)


def moved(x, scale, bias, running):
    given = {"running_mean": running[0], "running_var": running[1], "momentum": 0.25}
    return gradkit.batch_norm(x, scale, bias, **given)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_running_statistics_move_by_addresses(torch, memory, launched, dtype):
    _, x, scale, bias = arguments(torch)
    running = [bias.to(getattr(torch, dtype)), (scale * scale).to(getattr(torch, dtype))]
    given = [memory.like(each) for each in (x, scale, bias)]
    expected = [each.double().numpy() for each in (x, scale, bias)]
    for times in range(3):
        there = [memory.like(each) for each in running]
        values(moved(*given, there))
        assert launched.count("BatchNorm") == times
        assert [each._version for each in there] == [1, 1]
        wanted = [each.double().numpy() for each in running]
        moved(*expected, wanted)
        for tensor, array in zip(values(there), wanted, strict=True):
            np.testing.assert_allclose(tensor.double().numpy(), array, rtol=2e-3, atol=2e-3)


def test_a_batch_norm_that_cudnn_may_compute_is_opened(torch, memory, launched, monkeypatch):
    dy, x, scale, bias = (memory.like(each) for each in arguments(torch))
    monkeypatch.setattr(library, "is_missing", lambda: False)
    first = memory.like(torch.randn(4, SHAPE[1], 3))
    for array, engine, times in ((first, None, 0), (first, "native", 2), (x, None, 4)):
        for _ in range(3):
            values(gradkit.batch_norm(array, scale, bias, engine=engine))
        assert launched.count("BatchNorm") == times
    values(gradkit.batch_norm_inference_grad(dy, x, scale, bias, scale))  # never cuDNN's
    values(gradkit.batch_norm_inference_grad(dy, x, scale, bias, scale))
    assert launched.count("BatchNormInferenceGrad") == 1


BY_CUDNN = {
    "BatchNorm": lambda _, x, scale, bias: gradkit.batch_norm(x, scale, bias),
    "BatchNormGrad": lambda dy, x, scale, bias: gradkit.batch_norm_grad(dy, x, scale, bias, scale),
    "BatchNormInference": lambda _, x, scale, bias: (
        gradkit.batch_norm_inference(x, scale, bias, bias, scale),
    ),
}


@pytest.mark.parametrize("name", BY_CUDNN)
def test_batch_norms_by_cudnn_are_known(torch, memory, launched, monkeypatch, name):
    """If it fails later, our own kernels compute, on arrays."""
    monkeypatch.setattr(library, "_library", library.Cudnn(FakeCudnn()))
    monkeypatch.setattr(engines, "_warned", False)
    shape = 2, SHAPE[1], 3
    _, _, scale, bias = arguments(torch)
    host = torch.randn(shape), torch.randn(shape), scale, bias
    expected = BY_CUDNN[name](*(each.double().numpy() for each in host))
    given = [memory.like(each) for each in host]

    def check(times, engine):
        cupy.cuda.runtime.deviceSynchronize()  # which the double of cuDNN does not wait for
        for tensor, array in zip(values(BY_CUDNN[name](*given)), expected, strict=True):
            np.testing.assert_allclose(tensor.double().numpy(), array, rtol=1e-3, atol=1e-3)
        assert gradkit.last_engine() == engine
        assert launched.count(name) == times

    for times in range(3):
        check(times, "cudnn")
    library.cudnn().bindings.fails = "CUDNN_STATUS_EXECUTION_FAILED"
    with pytest.warns(RuntimeWarning, match="cuDNN failed"):
        check(3, "native")
    check(4, "native")
    assert library.cudnn().bindings.asked == 5


@pytest.mark.parametrize("name", ["GroupNorm", "GroupNormGrad", "BatchNormGrad"])
def test_images_with_the_channels_last_are_known(torch, memory, launched, name):
    """Those of which the gradient that arrives has the channels first are opened."""
    _, _, scale, bias = arguments(torch)
    given = [memory.like(torch.randn(2, 3, 5, 64)).movedim(3, 1) for _ in range(2)]
    vectors = [memory.like(each) for each in (scale, bias)]
    found = [values(CALLS[name](*given, *vectors)) for _ in range(3)]
    assert launched.count(name) == 2
    assert found[2][0].stride() == given[1].stride()
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
    if name != "GroupNorm":
        first = memory.like(given[0].contiguous())
        for _ in range(2):
            other = values(CALLS[name](first, given[1], *vectors))
            for tensor, wanted in zip(other, found[0], strict=True):
                torch.testing.assert_close(tensor, wanted)
        assert launched.count(name) == 2


SUMS = {
    "AccumulateGrad": lambda buffer, grad: gradkit.accumulate_grad(buffer, grad, scale=0.5),
    "AccumulateGradV2": lambda buffer, grad: gradkit.accumulate_grad_v2(buffer, grad)[1],
}


@pytest.mark.parametrize("shape", [SHAPE, SHAPE[1:], (SHAPE[0], 1)])
@pytest.mark.parametrize("name", SUMS)
def test_known_sums_are_launched_on_addresses(torch, memory, launched, name, shape):
    host = [torch.randn(n).to(torch.bfloat16) for n in (SHAPE, shape)]
    expected = SUMS[name](host[0].float().numpy(), host[1].float().numpy())
    for times, shift in enumerate((4, 0, 0, 0, 4)):  # one that is not aligned decides nothing
        buffer, grad = (memory.like(each, shift=shift) for each in host)
        buffer = memory.like(host[0].float(), shift=shift)
        assert SUMS[name](buffer, grad) is buffer
        assert buffer._version == 1
        np.testing.assert_allclose(values([buffer])[0].numpy(), expected, rtol=1e-6)
        assert launched.count(name) == min(max(times - 1, 0), 2)
    with pytest.raises(ValueError, match="shares memory"):
        SUMS[name](buffer[1:], buffer[:-1])
    twice = memory.like(host[0].float())
    SUMS[name](twice, twice)
    factor = 1.5 if name == "AccumulateGrad" else 2
    torch.testing.assert_close(values([twice])[0], host[0].float() * factor)


def test_results_are_written_where_the_caller_wants_them(torch, memory, launched):
    dy, x, scale, bias = (memory.like(each) for each in arguments(torch))
    saved = gradkit.layer_norm(x, scale, bias)[1:]
    expected = values(gradkit.layer_norm_grad(dy, x, scale, *saved))
    for times in range(2):
        out = [memory.like(torch.zeros(n)) for n in (SHAPE, SHAPE[1:])]
        versions = [each._version for each in out]
        found = gradkit.layer_norm_grad(dy, x, scale, *saved, out=(*out, None))
        assert all(map(torch.equal, values(found), expected))
        assert found[0] is out[0]
        assert [each._version for each in out] == [version + 1 for version in versions]
        assert launched.count("LayerNormGrad") == times
    with pytest.raises(ValueError, match=r"out\[0\] shares memory with x"):
        gradkit.layer_norm_grad(dy, x, scale, *saved, out=(x, out[1], None))
    found = gradkit.layer_norm_grad(dy, x, scale, *saved, out=(dy, None, None))
    assert found[0] is dy
    assert torch.equal(values(found)[0], expected[0])


@pytest.mark.parametrize("shift", [4, 8])
def test_tensors_that_are_not_aligned_are_opened(torch, memory, launched, shift):
    host = arguments(torch)
    given = [memory.like(each) for each in host]
    for _ in range(2):
        expected = values(CALLS["LayerNorm"](*given))
    before = len(launched)
    shifted = [memory.like(each, shift=shift) for each in host]
    found = values(CALLS["LayerNorm"](*shifted))
    assert all(map(torch.equal, found, expected))
    assert len(launched) == before


def test_a_device_that_is_not_current_is_entered(torch, memory, launched):
    given = [memory.like(each) for each in arguments(torch)]
    for _ in range(2):
        expected = values(CALLS["LayerNorm"](*given))
    before = len(launched)
    with cupy.cuda.Device(1):
        found = CALLS["LayerNorm"](*given)
    assert all(map(torch.equal, values(found), expected))
    assert len(launched) == before + 1


@contextmanager
def captured_on(stream, monkeypatch):
    monkeypatch.setattr(adapter, "_stream_of", lambda _: stream.ptr)
    graphs = []
    with stream:
        stream.begin_capture()
    yield graphs
    with stream:
        graphs.append(stream.end_capture())


@pytest.mark.parametrize(
    ("name", "kept"), [("LayerNormGrad", 1), ("GroupNormGrad", 4), ("BatchNorm", 2)]
)
def test_a_graph_that_pytorchs_stream_captures_has_all_that_it_needs(
    torch, memory, launched, monkeypatch, name, kept
):
    """Work goes to that stream, which is not CuPy's, and a workspace lives as long as the graph."""
    host = arguments(torch)
    given = [memory.like(each) for each in host]
    call = CALLS[name]
    for _ in range(2):
        values(call(*given))
    stream, before, first = cupy.cuda.Stream(non_blocking=True), len(launched), len(memory.kept)
    with captured_on(stream, monkeypatch) as graphs:
        results = call(*given)
    assert launched[before:].count(name) == 1
    gc.collect()
    assert [owner() is not None for owner in memory.kept[first:]] == [True] * kept
    others = [each.flip(0).contiguous() for each in host]
    for each, other in zip(given, others, strict=True):
        made = memory.like(other)
        cupy.cuda.runtime.memcpy(each.data_ptr(), made.data_ptr(), each.nbytes, 3)
    graphs[0].launch(stream)
    stream.synchronize()
    found = values(results)
    monkeypatch.setattr(adapter, "_stream_of", lambda _: 0)
    assert all(map(torch.equal, found, values(call(*given))))


def test_lists_are_described_at_once_and_known_again(torch, memory):
    host = [torch.randn(n, n + 1) for n in range(1, 30)]
    expected = [each.clone() for each in host]
    norm = gradkit.clip_grad_norm([each.numpy() for each in expected], 2.0)
    for again in (False, True):
        grads = [memory.like(each) for each in host]
        with mock.patch.object(cuda, "borrow", wraps=cuda.borrow) as borrow:
            found = gradkit.clip_grad_norm(grads, 2.0)
        if again:  # the first time each is cut into chunks
            assert borrow.call_count == 1  # of the norm
        assert values([found])[0].item() == pytest.approx(float(norm), rel=1e-6)
        for grad, wanted in zip(values(grads), expected, strict=True):
            torch.testing.assert_close(grad, wanted)
        assert all(grad._version == 1 for grad in grads)
    whole = memory.like(torch.ones(8))
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] share memory"):
        gradkit.zero_grad([whole[:5], whole[4:]])
    gradkit.zero_grad([whole[:4], whole[4:]])
    assert values([whole])[0].tolist() == [0] * 8


def test_hazards_are_refused_and_cpu_tensors_may_be_in_lists(torch, memory, monkeypatch):
    monkeypatch.setattr(adapter, "_is_cuda", memory.holds)
    monkeypatch.setattr(adapter, "_describing", lambda: None)  # to compiled code all are alike
    monkeypatch.setattr(_host, "code", without_tables())
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read(values([tensor])[0]))
    check_hazards(torch, memory.like)

"""Lists of PyTorch's CUDA tensors, by kernels: CPU tensors are taken for CUDA ones.

The emulated device computes in their memory. What only a GPU can show is in ``test_devices.py``.
"""

from contextlib import contextmanager, nullcontext
from operator import attrgetter
from unittest.mock import patch

import numpy as np
import pytest

import gradkit
from gradkit import _host, clipping
from gradkit._arrays import cuda
from gradkit._arrays import torch as adapter
from gradkit._cuda import CudaBackend
from gradkit._open import dispatch, gradients
from testbed.emulator import EmulatedDevice, IdleDevice
from tests.devices.emulated import on_device

from .libraries import HAZARDS, framework, on_a_device, without_tables

FUNCTIONS = {
    "norm": lambda grads: gradkit.grad_norm(grads),
    "norms": lambda grads: gradkit.per_tensor_norms(grads, np.inf, flat=True),
    "clip": lambda grads: gradkit.clip_grad_norm(grads, 0.5),
    "clip, raise": lambda grads: gradkit.clip_grad_norm(grads, 0.5, nonfinite="raise"),
    "clipped": lambda grads: gradkit.clip_by_global_norm(grads, 0.5),
    "blocks": lambda grads: gradkit.clip_grad_block_norm(grads, 0.5),
    "rows": lambda grads: gradkit.clip_grad_block_norm(grads, 0.5, axis=(0, -1)),
    "adaptive": lambda grads: gradkit.clip_by_adaptive_norm(grads, grads, 0.01, axis=1),
    "scale": lambda grads: gradkit.scale_grads(grads, 0.25),
    "clip value": lambda grads: gradkit.clip_grad_value(grads, 0.5),
    "zero": lambda grads: gradkit.zero_grad(grads),
    "limit on the device": lambda grads: gradkit.clip_grad_norm(grads, _number(0.5)),
    "out": lambda grads: gradkit.grad_norm(grads, out=_number(0.0)),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def _number(value):
    torch = framework("torch")
    return torch.full((), value, dtype=torch.float64)


@contextmanager
def cuda_tensors_on(device, known=on_a_device):
    """While CPU tensors are CUDA ones: the tensors of which an array was made.

    ``known``: a context in which compiled code has them for such.
    """
    backend, made = CudaBackend(device), []
    dispatch._plans.clear()  # which know a device by its number

    def borrow(owner, address, device, shape, strides, dtype):
        made.append(owner)
        host = adapter._seen(owner)
        assert (shape, dtype, device) == (host.shape, host.dtype, 0)
        if host.size:
            assert (address, strides) == (host.ctypes.data, host.strides)
        return on_device(host, backend)

    with (
        known(),
        patch.object(adapter, "_is_cuda", attrgetter("is_cpu")),
        patch.object(adapter, "_device_number", lambda _: 0),
        patch.object(adapter.Torch, "on_stream", lambda *_: nullcontext()),
        patch.object(cuda, "borrow", borrow),
        patch.object(gradients, "_device_of", lambda _: 0),
    ):
        yield made


@pytest.fixture
def borrowed():
    with cuda_tensors_on(EmulatedDevice(multiprocessors=1)) as made:
        yield made


def tensors(torch, count, lay=lambda tensor: tensor):
    """Tensors of every dtype in turn."""
    rng = np.random.default_rng(count)
    hosts = [rng.standard_normal((2, 3, 1 + k % 5, 2)) for k in range(count)]
    return [
        lay(torch.from_numpy(host).to(getattr(torch, DTYPES[k % 4])))
        for k, host in enumerate(hosts)
    ]


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "channels last": lambda tensor: tensor.contiguous(memory_format=_channels_last()),
    "transposed": lambda tensor: tensor.transpose(0, 1),
    "stepped": lambda tensor: tensor[:, ::2],
    "empty": lambda tensor: tensor[:, :0],
    "one of them empty": lambda tensor: tensor[:0] if tensor.shape[2] == 3 else tensor,
}


def _channels_last():
    return framework("torch").channels_last


def values(result):
    """All numbers of a result, in order."""
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in values(part)]
    return result.double().flatten().tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_lists_give_what_the_cpu_gives(torch, function, layout):
    expected = {}
    for count in (1, 2, 7, 95):
        grads = tensors(torch, count, LAYOUTS[layout])
        expected[count] = values(FUNCTIONS[function](grads)), values(grads)
    for count, (result, after) in expected.items():
        grads = tensors(torch, count, LAYOUTS[layout])
        before = [grad._version for grad in grads]
        with cuda_tensors_on(EmulatedDevice(multiprocessors=1)):
            assert values(FUNCTIONS[function](grads)) == pytest.approx(result, rel=2**-7)
        assert values(grads) == pytest.approx(after, rel=2**-7)
        written = function not in ("norm", "norms", "clipped", "adaptive", "out")
        assert all((g._version > v) == written for g, v in zip(grads, before, strict=True))


@pytest.mark.parametrize(
    "function",
    ["norm", "norms", "clip", "scale", "clip value", "zero", "limit on the device"],
)
def test_no_array_is_made_for_each_tensor(torch, function):
    """An array takes longer than all else that is done for a tensor."""
    lists = [tensors(torch, 200) for _ in range(2)]
    with cuda_tensors_on(IdleDevice()) as borrowed:
        for grads in (lists[0], *lists):  # after the first call: the same memory, then other memory
            before = len(borrowed)
            FUNCTIONS[function](grads)
    # The first gradient, to find its device, and numbers, which are opened one by one.
    few = 2 if function in ("norm", "clip", "zero") else 6
    assert len(borrowed) - before <= few
    assert before <= 2 * few + 200  # the first call of a process makes one for each


@pytest.mark.usefixtures("borrowed")
def test_gradients_that_come_back_elsewhere_are_read_there(torch):
    kept = []
    for value in (1.0, 2.0, 3.0):
        grads = [torch.full((3, 5), value) for _ in range(100)]
        kept.append(grads)  # so that no memory is used twice
        assert gradkit.grad_norm(grads).item() == pytest.approx(value * 1500**0.5)
    gradkit.zero_grad(kept[1])
    assert [float(sum(grad.sum() for grad in grads)) for grads in kept] == [1500, 0, 4500]


@pytest.mark.usefixtures("borrowed")
def test_tensors_of_the_same_memory_in_another_shape(torch):
    """A plan knows only the number of elements of contiguous tensors."""
    flat = torch.arange(1.0, 13.0)
    for shape in ((3, 4), (4, 3), (2, 6), (3, 4)):
        grads = [flat.view(shape), torch.ones(2, 2)]
        norms = gradkit.clip_grad_block_norm(grads, np.inf, axis=1)
        torch.testing.assert_close(norms[0], grads[0].double().norm(dim=1))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("hazard", HAZARDS)
def test_a_tensor_without_plain_memory_is_refused_by_name(request, torch, hazard, place):
    """In a list like one that was taken, alone, and as the data of a norm."""
    if place == "device":
        request.getfixturevalue("borrowed")
    make, message = HAZARDS[hazard]
    first, last = torch.ones(3), torch.ones(2)
    for function in (gradkit.grad_norm, gradkit.zero_grad):
        function([first, torch.ones(2, 2), last])
        first.fill_(1)
        with pytest.raises(
            (TypeError, ValueError), match=rf"grads\[1\] .*({message}|one framework)"
        ):
            function([first, make(torch.ones(2, 2)), last])
        assert first.tolist() == [1] * 3
        with pytest.raises((TypeError, ValueError), match=f"^grads .*{message}"):
            function(make(whole := torch.ones(2, 2)))
        assert whole.tolist() == [[1, 1]] * 2
    if hazard != "requires grad":
        with pytest.raises((TypeError, ValueError), match=f"x .*{message}"):
            gradkit.layer_norm(make(torch.ones(2, 2)))


@pytest.mark.usefixtures("borrowed")
def test_neighbours_in_memory_are_written(torch):
    whole = torch.ones(10)
    with pytest.raises(ValueError, match=r"grads\[1\] and grads\[2\] share memory"):
        gradkit.zero_grad([torch.ones(3), whole[:6], whole[5:]])
    gradkit.zero_grad([torch.ones(3), whole[5:], whole[:5]])
    assert not whole.any()


class Numbered(EmulatedDevice):
    """One of several devices, of which the last one entered is current."""

    current = None

    def __init__(self, number):
        super().__init__(multiprocessors=1)
        self.number = number

    @contextmanager
    def active(self):
        before, Numbered.current = Numbered.current, self
        try:
            yield
        finally:
            Numbered.current = before


@contextmanager
def cuda_tensors_on_both(number_of):
    """While CPU tensors are CUDA ones of device 0 or 1; a new one is on the current device."""
    backends = [CudaBackend(Numbered(number)) for number in range(2)]

    def device_number(tensor):
        return number_of.setdefault(id(tensor), getattr(Numbered.current, "number", None))

    def borrow(owner, address, device, shape, strides, dtype):  # noqa: ARG001
        return on_device(adapter._seen(owner), backends[device])

    def on_stream(_, like):
        return backends[number_of[id(like)]].device.active()

    with (
        cuda_tensors_on(Numbered(0), lambda: patch.object(_host, "code", without_tables())),
        patch.object(adapter, "_device_number", device_number),
        patch.object(adapter.Torch, "on_stream", on_stream),
        patch.object(cuda, "borrow", borrow),
        patch.object(gradients, "_device_of", lambda view: view.backend.device.number),
    ):
        yield


@pytest.mark.parametrize(
    "function",
    ["norm", "norms", "clip", "clip, raise", "clipped", "scale", "clip value", "zero"],
)
def test_tensors_on_two_devices(torch, function):
    """New tensors are where their gradients are, and the norm is where the first gradient is."""
    grads = tensors(torch, 7)
    result = FUNCTIONS[function](grads)
    expected, after = values(result), values(grads)
    grads, made = tensors(torch, 7), []
    before = [grad._version for grad in grads]
    number_of = {id(grad): 1 - k % 2 for k, grad in enumerate(grads)}
    with cuda_tensors_on_both(number_of):
        found = FUNCTIONS[function](grads)
        made, wanted = [found], [1]
        if function == "clipped":
            made, wanted = [*found[0], found[1]], [*map(number_of.get, map(id, grads)), 1]
        if found is not grads:
            assert [number_of[id(tensor)] for tensor in made] == wanted
    assert values(found) == pytest.approx(expected, rel=2**-7)
    assert values(grads) == pytest.approx(after, rel=2**-7)
    written = function not in ("norm", "norms", "clipped")
    assert all((g._version > v) == written for g, v in zip(grads, before, strict=True))


@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_host_tensor_among_those_of_two_devices(torch, of_numpy):
    """It is scaled where it lies, as a NumPy array is; calls for one device name it."""
    grads = [torch.ones(3) for _ in range(4)]
    number_of = {id(grad): k % 2 for k, grad in enumerate(grads)}
    on_host = grads[2]
    if of_numpy:
        grads[2] = on_host.numpy()
    before = [grad._version for grad in (*grads[:2], grads[3])]
    with (
        cuda_tensors_on_both(number_of),
        patch.object(adapter, "_is_cuda", lambda tensor: tensor is not on_host),
    ):
        norm = gradkit.clip_grad_norm(grads, 12**0.5 / 2)
        clipped, _ = gradkit.clip_by_global_norm(grads, 1e9)
        refused = TypeError if of_numpy else ValueError
        with pytest.raises(refused, match=r"grads\[0\].*grads\[1\]|grads\[1\].*grads\[0\]"):
            gradkit.clip_grad_block_norm(grads[::2], 1.0)
    assert float(norm) == pytest.approx(12**0.5)
    assert isinstance(norm, torch.Tensor)
    assert list(map(type, clipped)) == list(map(type, grads))
    for grad, copy in zip(grads, clipped, strict=True):
        assert grad.tolist() == copy.tolist() == pytest.approx([0.5] * 3)
    after = [grad._version for grad in (*grads[:2], grads[3])]
    assert all(new > old for new, old in zip(after, before, strict=True))


@pytest.mark.usefixtures("borrowed")
def test_arrays_are_made_on_demand_and_once(torch):
    views = _host.code.table(tensors(torch, 3), False)
    assert views.device == 0
    assert len(views) == 3
    assert views[1].shape == (2, 3, 2, 2)
    first, again = list(views), list(views)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert views[1] is first[1]


def test_a_plain_list_is_clipped_without_the_machinery_of_ranks(torch, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a plain list took the long way")

    for long_way in ("clip_all", "norm_of"):
        monkeypatch.setattr(clipping, long_way, refuse)
    grads = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    before = [grad._version for grad in grads]
    with cuda_tensors_on(EmulatedDevice(multiprocessors=1)):
        norm = gradkit.grad_norm(grads)
        assert [grad._version for grad in grads] == before
        clipped = gradkit.clip_grad_norm(grads, 0.5)
    for result in (norm, clipped):
        assert type(result) is torch.Tensor
        assert (result.dtype, result.item()) == (torch.float64, pytest.approx(50**0.5))
    assert values(grads) == pytest.approx([n / (2 * 50**0.5) for n in (3.0, 3.0, 4.0, 4.0)])
    assert all(grad._version > version for grad, version in zip(grads, before, strict=True))


@pytest.mark.usefixtures("borrowed")
def test_pairs_of_tensors_that_fit_say_nothing_of_those_of_another_shape(torch):
    """A plan knows only the number of elements of contiguous tensors."""
    buffers, grads = ([torch.full((2, 3), 1.0 + k) for _ in range(2)] for k in range(2))
    for k in range(3):
        gradkit.accumulate_grads(buffers, grads)
        assert values(buffers) == [1.0 + 2 * (k + 1)] * 12
        for wrong in ([grads[0], grads[1].view(3, 2)], [each.view(6) for each in grads]):
            with pytest.raises(ValueError, match="the shape of buffers"):
                gradkit.accumulate_grads(buffers, wrong)


@pytest.mark.usefixtures("borrowed")
def test_a_plain_tensor_is_not_asked_why_it_cannot_be_seen(torch, monkeypatch):
    monkeypatch.setattr(adapter, "_why_not", lambda _: "was asked")
    x = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    y, mean, _ = gradkit.layer_norm(x, eps=0.0625)
    assert mean.flatten().tolist() == [2, 5]
    assert values(y) == pytest.approx([-0.9701425, 0.9701425, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "strides", "size"),
    [
        ((), (), 4),
        ((0, 3), (12, 4), 0),
        ((2, 3), (12, 4), 24),
        ((2, 3), (4, 16), 40),
        ((5,), (0,), 4),
    ],
)
def test_borrowed_memory_ends_behind_the_last_element(shape, strides, size):
    assert cuda._extent(shape, strides, 4) == size


@pytest.mark.usefixtures("borrowed")
def test_results_that_lie_apart_are_known_to_by_a_quick_look(torch, monkeypatch):
    x, out = torch.tensor([[1.0, 3.0], [6.0, 4.0]]), (torch.empty(2, 2), None, None)
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "refuse", None)
        y, mean, _ = gradkit.layer_norm(x, eps=0.0, out=out)
    assert y is out[0]
    assert (values(y), values(mean)) == ([-1, 1, 1, -1], [2, 5])
    base = torch.arange(6.0)
    with pytest.raises(ValueError, match="shares memory with x"):
        gradkit.layer_norm(base[:4].view(2, 2), out=(base[2:].view(2, 2), None, None))
    assert base.tolist() == [0, 1, 2, 3, 4, 5]

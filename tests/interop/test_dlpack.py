"""Any other object with ``__dlpack__``: what it exports is checked before it is believed."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import gradkit
from gradkit._arrays import framework_of


class Producer:
    """A library of one class: DLPack out, and no way back in."""

    def __init__(self, array, device=None, dtype="float32"):
        self.array, self.device, self.dtype = array, device, dtype

    def __dlpack__(self, **asked):
        return self.array.__dlpack__(**asked)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


class Old(Producer):
    """A producer from before DLPack 1.0: it takes no request and makes unversioned capsules."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def test_any_producer_is_read_and_written_in_place():
    values = np.array([3.0, 4.0])
    producer = Producer(values)
    assert gradkit.grad_norm([producer]) == 5
    assert gradkit.scale_grads(producer, 2.0) is producer
    assert values.tolist() == [6, 8]


def test_an_export_that_cannot_say_whether_it_may_be_written_is_only_read():
    """JAX, for one, exports its immutable memory so."""
    values = np.array([3.0, 4.0])
    assert gradkit.grad_norm([Old(values)]) == 5
    with pytest.raises(ValueError, match="read-only"):
        gradkit.zero_grad(Old(values))
    assert values.tolist() == [3, 4]


def test_without_a_way_back_results_are_numpys():
    clipped, norm = gradkit.clip_by_global_norm(Producer(np.array([3.0, 4.0])), 1.0)
    assert type(clipped) is np.ndarray
    np.testing.assert_allclose(clipped, [0.6, 0.8])
    assert norm == 5


@pytest.mark.parametrize("kind", [Producer, Old])
def test_bfloat16_comes_in_by_its_bits(torch, kind):
    tensor = torch.tensor([3.0, 4.0, 1.5], dtype=torch.bfloat16)
    producer = kind(tensor, dtype="bfloat16")
    native = framework_of(producer).view(producer, write=False)
    assert native.dtype == ml_dtypes.bfloat16
    assert native.__array_interface__["data"][0] == tensor.data_ptr()
    if kind is Producer:
        gradkit.scale_grads(producer, 2.0)
        assert tensor.tolist() == [6, 8, 3]


def test_bfloat16_goes_out_by_its_bits(torch, jax):
    from gradkit._arrays.dlpack import exportable

    native = np.array([1.0, 2.5, -3.0]).astype(ml_dtypes.bfloat16)
    tensor = torch.from_dlpack(exportable(native))
    assert tensor.dtype is torch.bfloat16
    assert tensor.tolist() == [1, 2.5, -3]
    array = jax.dlpack.from_dlpack(exportable(native))
    assert array.dtype == jax.numpy.bfloat16
    assert array.tolist() == [1, 2.5, -3]


def test_the_producers_own_array_keeps_its_dtype(torch):
    tensor = torch.ones(3, dtype=torch.bfloat16)
    gradkit.grad_norm(Producer(tensor, dtype="bfloat16"))
    assert tensor.dtype is torch.bfloat16
    assert torch.from_dlpack(tensor).dtype is torch.bfloat16


def test_a_read_only_export_is_not_written():
    values = np.array([3.0, 4.0])
    values.flags.writeable = False
    assert gradkit.grad_norm(Producer(values)) == 5
    first = np.ones(2)
    with pytest.raises(ValueError, match=r"grads\[1\] is read-only.*; make new zeros"):
        gradkit.zero_grad([Producer(first), Producer(values)])
    with pytest.raises(ValueError, match="use clip_by_global_norm, which returns new"):
        gradkit.clip_grad_norm(Producer(values), 1.0)
    with pytest.raises(ValueError, match=r"buffer is read-only.*; compute buffer \+ grad"):
        gradkit.accumulate_grad(Producer(values), Producer(first))
    column, rule = Producer(first[:, None]), (Producer(values[:, None]), None, None)
    for norm in (gradkit.layer_norm, gradkit.batch_norm):
        with pytest.raises(ValueError, match=r"out\[0\] is read-only.*; leave out=None and take"):
            norm(column, out=rule)
    assert values.tolist() == [3, 4]
    assert first.tolist() == [1, 1]


def test_a_copy_is_read_and_not_written():
    """A write there would be lost; NumPy alone does not look at this flag."""

    class Copying(Producer):
        def __dlpack__(self, **asked):
            return self.array.__dlpack__(**asked | {"copy": True})

    values = np.array([3.0, 4.0])
    assert gradkit.grad_norm([Copying(values)]) == 5
    with pytest.raises(ValueError, match=r"grads is read-only.*; use clip_by_global_norm"):
        gradkit.clip_grad_norm(Copying(values), 1.0)
    with pytest.raises(ValueError, match=r"buffer is read-only"):
        gradkit.accumulate_grad(Copying(values), Producer(np.ones(2)))
    assert values.tolist() == [3, 4]


def test_a_read_only_array_api_array_is_not_written():
    from .libraries import framework

    xp = framework("array_api_strict")
    values = np.array([3.0, 4.0])
    values.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gradkit.zero_grad(xp.asarray(values, copy=False))
    assert values.tolist() == [3, 4]


def test_a_broadcast_export_is_not_written():
    values = np.array([3.0])
    with pytest.raises(ValueError, match="overlaps itself"):
        gradkit.zero_grad(Producer(np.lib.stride_tricks.as_strided(values, (4,), (0,))))
    assert values.tolist() == [3]


def test_negative_strides_are_written_through():
    values = np.arange(4.0)
    gradkit.scale_grads(Producer(values[::-1]), 2.0)
    assert values.tolist() == [0, 2, 4, 6]


def test_pytorch_never_meets_a_negative_stride(torch, run_alone):
    """``torch.from_dlpack`` of one ends the process, so that no result may have one."""
    assert torch is not None
    run_alone(
        """
        import numpy as np, torch, gradkit

        class Reversed:
            def __init__(self, array): self.array = array
            def __dlpack__(self, **asked): return self.array.__dlpack__(**asked)
            def __dlpack_device__(self): return self.array.__dlpack_device__()
            def __array_namespace__(self): return torch

        grads = [Reversed(np.arange(4.0)[::-1]), Reversed(np.ones((2, 3))[::-1, ::-1])]
        clipped, norm = gradkit.clip_by_global_norm(grads, 1e9)
        assert clipped[0].tolist() == [3, 2, 1, 0], clipped
        y, mean, inv_std = gradkit.layer_norm(grads[1])
        assert y.shape == (2, 3)
        """
    )


@pytest.mark.parametrize(("device", "name"), [((8, 0), 8), ((10, 0), 10), ((14, 1), 14)])
def test_other_devices_are_refused(device, name):
    with pytest.raises(TypeError, match=f"DLPack device type {name}; .* CPU and on CUDA"):
        gradkit.grad_norm(Producer(np.ones(3), device))


def test_a_producer_that_refuses_is_quoted():
    with pytest.raises(TypeError, match=r"grads\[0\] cannot be read through DLPack"):
        gradkit.grad_norm([Producer(np.ones(3, np.dtype(np.float32).newbyteorder()))])


@pytest.mark.guarantee("no CuPy, but another framework's CUDA tensor")
def test_without_cupy_a_cuda_array_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(gradkit.BackendUnavailableError, match=r"pip install '\.\[cuda12\]'"):
        gradkit.grad_norm(Producer(np.ones(3), (2, 0)))


class NoDriverError(RuntimeError):
    """An error of CuPy."""


@pytest.mark.parametrize("driver", [False, True])
def test_a_claim_to_be_on_cuda_where_there_is_none(monkeypatch, driver):
    """CuPy is there, its driver is not; with one, the producer's own error is quoted."""
    from gradkit._arrays import cuda

    def fail(*_):
        raise NoDriverError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(
        getDeviceCount=(lambda: 1) if driver else fail, CUDARuntimeError=NoDriverError
    )
    fake = SimpleNamespace(from_dlpack=fail, cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cuda, "cupy", lambda: fake)
    error = TypeError if driver else gradkit.BackendUnavailableError
    message = (
        "grads cannot be read through DLPack: cudaErrorInsuff"
        if driver
        else "CUDA cannot be used: cudaErrorInsuff"
    )
    with pytest.raises(error, match=message):
        gradkit.grad_norm(Producer(np.ones(3), (2, 0)))

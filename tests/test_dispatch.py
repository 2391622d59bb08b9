"""From an argument's type to a framework and a backend, and back to the caller's own type."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import array_api_strict as xp
import numpy as np
import pytest

import gradkit
from gradkit._cuda import CudaBackend
from testbed.emulator.idle import IdleDevice
from tests import golden
from tests.devices.emulated import Emulated, on_device
from tests.problems import on_purpose
from tests.tolerances import assert_same_bits


def as_strict(host):
    return xp.asarray(host)


@pytest.fixture
def fake_cupy(monkeypatch):
    """A CuPy that has arrays and no device."""
    module = ModuleType("cupy")

    class ndarray:  # noqa: N801
        shape, strides, ndim, size = (3,), (4,), 1, 3
        dtype, itemsize = np.dtype(np.float32), 4
        flags = SimpleNamespace(c_contiguous=True, f_contiguous=True)
        data = SimpleNamespace(ptr=4096, device_id=0)
        device = SimpleNamespace(id=0)

        def reshape(self, *_):
            return self

    module.ndarray = ndarray
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_a_cupy_array_without_its_backend_says_what_would_help(fake_cupy):
    array = fake_cupy.ndarray()
    for call in (
        lambda: gradkit.clip_grad_norm([array], 1.0),
        lambda: gradkit.layer_norm(array),
        lambda: gradkit.accumulate_grad(array, array),
        lambda: gradkit.zero_grad({"w": array}),
    ):
        with pytest.raises(
            gradkit.BackendUnavailableError, match=r"(?i)cupy.*pass NumPy"
        ) as caught:
            call()
        assert isinstance(caught.value, ImportError)


def test_frameworks_do_not_mix(fake_cupy):
    host, strict, cupy = np.ones(3), xp.ones(3), fake_cupy.ndarray()
    for first, second, one, two in (
        (host, strict, "numpy", "DLPack"),
        (strict, host, "DLPack", "numpy"),
        (host, cupy, "numpy", "cupy"),
    ):
        message = rf"grads\[1\] is a {two} array and grads\[0\] a {one} array; .*one framework"
        with pytest.raises(TypeError, match=message):
            gradkit.clip_grad_norm([first, second], 1.0)
        message = f"grad is a {two} array and buffer a {one} array; .*one framework"
        with pytest.raises(TypeError, match=message):
            gradkit.accumulate_grad(first, second)
    rows = np.ones((2, 3)), np.ones(2)
    with pytest.raises(TypeError, match="scale is a DLPack array and x a numpy array"):
        gradkit.layer_norm(rows[0], strict)
    with pytest.raises(TypeError, match=r"out\[1\] is a DLPack array and x a numpy"):
        gradkit.layer_norm(rows[0], out=(None, xp.ones(2), None))
    with pytest.raises(TypeError, match=r"out is a DLPack array and grads\[0\] a numpy"):
        gradkit.grad_norm([host], out=xp.asarray(1.0))
    assert_same_bits(host, np.ones(3))
    assert_same_bits(np.from_dlpack(strict), np.ones(3))


class Exporter:
    """An array of a library that says nothing of it but by ``__dlpack__``."""

    def __init__(self, host):
        self._host = host

    def __dlpack__(self, **asked):
        return self._host.__dlpack__(**asked)


class Array(Exporter):
    """The same with what makes it an array."""

    def __dlpack_device__(self):
        return self._host.__dlpack_device__()


class OnCuda:
    """An array on a device, by the protocol that CuPy and Numba share."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (), "typestr": "<f8", "data": (4096, True), "version": 3}


# Each with one number, by what it is called in errors.
NUMBERS = {
    "max_norm": lambda grads, number: gradkit.clip_grad_norm(grads, number),
    "scale": lambda grads, number: gradkit.clip_grad_norm(grads, 5.0, scale=number),
    "norm": lambda grads, number: gradkit.clip_grads_with_norm(grads, number, max_norm=5.0),
    "coefficient": lambda grads, number: gradkit.scale_grads(grads, number),
}


@pytest.mark.parametrize("label", NUMBERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [Array, xp.asarray], ids=["without a shape", "array API"])
def test_a_number_in_host_memory_may_be_of_another_library(backend, make, dtype, label):
    number = np.array(2.5, dtype)
    grads, expected = (backend.asarray(np.array([3.0, 4.0])) for _ in range(2))
    NUMBERS[label]([expected], 2.5)
    NUMBERS[label]([grads], make(number))
    assert_same_bits(backend.asnumpy(grads), backend.asnumpy(expected))
    assert number == 2.5


@pytest.mark.parametrize("label", NUMBERS)
@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (Exporter(np.array(2.5)), TypeError, "not Exporter, which has __dlpack__ without"),
        (OnCuda(), TypeError, "not OnCuda; pass what cupy.asarray makes of it"),
        (Array(np.ones(1)), ValueError, r"has shape \(1,\); expected \(\), one number"),
        (Array(np.array(3)), TypeError, "has dtype int64; accepted: float16"),
    ],
    ids=["no device", "no DLPack", "a vector", "an int"],
)
def test_another_librarys_number_that_is_none_is_named(backend, number, error, match, label):
    grads = backend.asarray(np.array([3.0, 4.0]))
    with pytest.raises(error, match=rf"^{label} .*{match}"):
        NUMBERS[label]([grads], number)
    assert_same_bits(backend.asnumpy(grads), np.array([3.0, 4.0]))


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("max_norm", -1.0),
        ("max_norm", np.nan),
        ("scale", np.nan),
        ("scale", np.inf),
        ("norm", -1.0),
    ],
)
def test_another_librarys_number_is_checked_as_a_number(backend, label, number):
    grads = backend.asarray(np.array([3.0, 4.0]))
    with pytest.raises(ValueError, match=f"^{label} must be .*{number}"):
        NUMBERS[label]([grads], Array(np.array(number)))
    assert_same_bits(backend.asnumpy(grads), np.array([3.0, 4.0]))


def calls(a):
    """Every function on arrays that ``a`` makes, with the arrays that are written."""
    rng = np.random.default_rng(1)
    host = {name: rng.standard_normal((4, 6)) for name in ("dy", "x")}
    dy, x = (a(host[name]) for name in ("dy", "x"))
    scale, bias = (a(1 + rng.random(6)) for _ in range(2))
    mean, inv_std = a(rng.standard_normal(4)), a(1 + rng.random(4))
    channel = a(rng.standard_normal(6)), a(1 + rng.random(6))
    group = a(rng.standard_normal((4, 2))), a(1 + rng.random((4, 2)))
    flag = a(np.array(True))
    fresh = lambda: a(host["x"])  # noqa: E731
    return {
        "grad_norm": lambda: gradkit.grad_norm([x, dy]),
        "per_tensor": lambda: gradkit.per_tensor_norms([x, dy], flat=True),
        "reduce": lambda: on_purpose(gradkit.grad_norm, [x], reduce=lambda value, _: value),
        "out": lambda: gradkit.grad_norm([x], out=a(np.array(7.0))),
        "clip_grad_norm": lambda: (gradkit.clip_grad_norm(g := [fresh()], 0.5), g),
        "clip_by_global_norm": lambda: gradkit.clip_by_global_norm({"x": x, "n": (dy, None)}, 0.5),
        "clip_coefficient": lambda: gradkit.clip_coefficient(a(np.array(4.0)), 1.0),
        "spike_guard_init": lambda: gradkit.spike_guard_init(x),
        "spike_guard_update": lambda: gradkit.spike_guard_update(
            a(np.array([30.0, 2.0, 0.5])), a(np.array(9.0))
        ),
        "SpikeGuard": lambda: gradkit.SpikeGuard().update(a(np.array(9.0))),
        "scale_grads": lambda: gradkit.scale_grads([fresh()], a(np.array(0.5))),
        "clip_grad_value": lambda: gradkit.clip_grad_value(fresh(), 0.5),
        "accumulate_grad": lambda: gradkit.accumulate_grad(fresh(), dy, do_update=flag),
        "accumulate_grad_v2": lambda: gradkit.accumulate_grad_v2(fresh(), scale, overwrite=True),
        "zero_grad": lambda: gradkit.zero_grad([fresh()]),
        "layer_norm": lambda: gradkit.layer_norm(x, scale, bias),
        "layer_norm_grad": lambda: gradkit.layer_norm_grad(dy, x, scale, mean, inv_std),
        "layer_norm_inverse": lambda: gradkit.layer_norm_inverse(x, scale, bias, mean, inv_std),
        "invertible_layer_norm_grad": lambda: gradkit.invertible_layer_norm_grad(
            dy, x, scale, bias, inv_std
        ),
        "rms_norm": lambda: gradkit.rms_norm(x, scale),
        "rms_norm_grad": lambda: gradkit.rms_norm_grad(dy, x, None, inv_std),
        "rms_norm_grad with ds": lambda: gradkit.rms_norm_grad(
            dy, x, scale, inv_std, ds=fresh(), scale_offset=1.0
        ),
        "layer_norm_grad with ds": lambda: gradkit.layer_norm_grad(
            dy, x, scale, mean, inv_std, ds=fresh(), scale_offset=1.0
        ),
        "add_layer_norm": lambda: gradkit.add_layer_norm(x, dy, scale, bias, scale_offset=1.0),
        "add_rms_norm": lambda: gradkit.add_rms_norm(x, dy, scale, scale_offset=1.0),
        "rms_norm of columns": lambda: gradkit.rms_norm(x[:, 1:4], scale[:3]),
        "batch_norm": lambda: gradkit.batch_norm(x, scale, bias),
        "batch_norm_grad": lambda: gradkit.batch_norm_grad(dy, x, scale, *channel),
        "running": lambda: gradkit.batch_norm(
            x, running_mean=a(host["dy"][0]), running_var=a(host["dy"][1] ** 2)
        ),
        "update_running_statistics": lambda: gradkit.update_running_statistics(
            scale, bias, *channel, 24.0
        ),
        "batch_norm_inference": lambda: gradkit.batch_norm_inference(x, scale, bias, *channel),
        "batch_norm_inference_grad": lambda: gradkit.batch_norm_inference_grad(
            dy, x, scale, *channel
        ),
        "group_norm": lambda: gradkit.group_norm(x, 1, scale, bias),
        "group_norm_grad": lambda: gradkit.group_norm_grad(dy, x, scale, *group),
        "batch_norm_stats": lambda: gradkit.batch_norm_stats(x),
        "combine_stats": lambda: gradkit.combine_stats(dy, x, inv_std),
        "batch_norm_apply": lambda: gradkit.batch_norm_apply(x, scale, bias, *channel),
        "batch_norm_grad_sums": lambda: gradkit.batch_norm_grad_sums(dy, x, *channel),
        "batch_norm_grad_apply": lambda: gradkit.batch_norm_grad_apply(
            dy, x, scale, *channel, scale, bias, a(np.array(8.0))
        ),
    }


def flat(result):
    """The arrays and other leaves of whatever a function returned."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [leaf for branch in result for leaf in flat(branch)]
    return [result]


@pytest.mark.parametrize("name", calls(np.array))
def test_array_api_strict(name):
    """Through DLPack in, computed, and back as the caller's own type: NumPy's very bits."""
    expected, found = flat(calls(np.array)[name]()), flat(calls(as_strict)[name]())
    assert len(found) == len(expected)
    for got, ref in zip(found, expected, strict=True):
        if isinstance(ref, np.ndarray):
            assert type(got) is type(xp.asarray(1.0))
            assert_same_bits(np.from_dlpack(got), ref)
        else:
            assert got == ref


def test_array_api_strict_is_written_in_place():
    grads = {"w": xp.asarray([3.0, 0.0]), "b": xp.asarray([4.0])}
    assert gradkit.scale_grads(grads, 0.5) is grads
    np.testing.assert_array_equal(np.from_dlpack(grads["w"]), [1.5, 0.0])
    buffer = xp.asarray([1.0, 2.0])
    assert gradkit.accumulate_grad(buffer, buffer) is buffer
    np.testing.assert_array_equal(np.from_dlpack(buffer), [2.0, 4.0])


@pytest.mark.parametrize("dtype", [xp.int64, xp.bool, xp.complex128])
def test_array_api_strict_of_another_dtype(dtype):
    with pytest.raises(TypeError, match=r"grads\[0\] has dtype"):
        gradkit.clip_grad_norm([xp.ones(3, dtype=dtype)], 1.0)


def test_numpy_subclasses_are_numpy(tmp_path):
    grads = np.memmap(tmp_path / "grads", np.float32, "w+", shape=(2,))
    grads[...] = [3.0, 4.0]
    norm = gradkit.clip_grad_norm(grads, 2.5)
    assert type(norm) is np.ndarray
    np.testing.assert_array_equal(np.fromfile(tmp_path / "grads", np.float32), [1.5, 2.0])
    grads.flush()
    kept = np.memmap(tmp_path / "grads", np.float32, "r", shape=(2,))
    with pytest.raises(ValueError, match="grads is read-only"):
        gradkit.zero_grad(kept)
    assert float(gradkit.grad_norm(kept)) == 2.5


def test_numpy_scalars_are_read():
    assert float(gradkit.grad_norm([np.float32(3), np.float64(4)])) == 5.0
    assert float(gradkit.clip_coefficient(np.float64(4), np.float32(1))) == 0.25
    y, mean, inv_std = gradkit.layer_norm(np.array([1.0, 3.0]), eps=0.0)
    assert type(mean) is type(inv_std) is np.ndarray
    assert mean.shape == inv_std.shape == ()
    np.testing.assert_array_equal(y, [-1.0, 1.0])


@pytest.mark.emulated
def test_kernels_are_launched_on_the_stream_of_the_arrays(monkeypatch):
    """Of every public function that launches any."""
    current, launched, astray = [], set(), []

    @contextmanager
    def on_stream(_, like):
        current.append(like)
        yield
        current.pop()

    def launch(*_, **__):
        launched.add(case.name.split()[0])
        astray.extend([] if current else [case.name])

    monkeypatch.setattr(Emulated, "on_stream", on_stream)
    monkeypatch.setattr(IdleDevice, "get_function", lambda *_: launch)
    backend = CudaBackend(IdleDevice())
    for case in filter(lambda case: case.quick, golden.cases()):
        case.call(lambda host: on_device(backend.device.xp.array(host), backend))
    assert astray == []
    assert len(launched) > 30

"""From an argument's type to a framework and a backend, and back to the caller's own type."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit._arrays import HOST, backend_of
from gradkit._cuda import CudaBackend
from gradkit._open.gradients import backend_of_table
from testbed.emulator.idle import IdleDevice
from tests import golden
from tests import strategies as draw_
from tests.devices.emulated import Emulated, on_device
from tests.operations import FLOAT64, calls, leaves, on
from tests.tolerances import assert_same_bits


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


@pytest.mark.guarantee("no driver, or CuPy without a device")
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


def test_frameworks_do_not_mix(fake_cupy, xp):
    host, strict, cupy = np.ones(3), xp.ones(3), fake_cupy.ndarray()
    for first, second, one, two in (
        (host, strict, "numpy", "DLPack"),
        (strict, host, "DLPack", "numpy"),
        (host, cupy, "numpy", "cupy"),
    ):
        message = rf"grads\[1\] is a {two} array and grads\[0\] a {one} array; .*one framework"
        with pytest.raises(TypeError, match=message):
            gradkit.clip_grad_block_norm([first, second], 1.0)
        message = f"grad is a {two} array and buffer a {one} array; .*one framework"
        with pytest.raises(TypeError, match=message):
            gradkit.accumulate_grad(first, second)
        if second is not cupy:  # which may lie on a device, where NumPy's accompany it
            with pytest.raises(TypeError, match=r"one framework"):
                gradkit.clip_grad_norm([first, second], 1.0)
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
@pytest.mark.parametrize("kind", ["without a shape", "array API"])
def test_a_number_in_host_memory_may_be_of_another_library(backend, kind, dtype, label, request):
    make = Array if kind == "without a shape" else request.getfixturevalue("xp").asarray
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
        (Array(np.array(True)), TypeError, "has dtype bool; accepted: float16"),
    ],
    ids=["no device", "no DLPack", "a vector", "a bool"],
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


def every_call(a):
    """Of every function, and with arrays where there could be numbers."""
    x, row = (a(draw_.values(shape, "float64", 1)) for shape in ((4, 6), 6))
    one = lambda number: a(np.array(number))  # noqa: E731
    return calls(on(a), types=FLOAT64) | {
        "per_tensor": lambda: gradkit.per_tensor_norms([x, row], flat=True),
        "out": lambda: gradkit.grad_norm([x], out=one(7.0)),
        "nested": lambda: gradkit.clip_by_global_norm({"x": x, "n": (row, None)}, 0.5),
        "spike_guard_init": lambda: gradkit.spike_guard_init(x),
        "SpikeGuard": lambda: gradkit.SpikeGuard().update(one(9.0)),
        "a coefficient": lambda: gradkit.scale_grads([x], one(0.5)),
        "a flag": lambda: gradkit.accumulate_grad(x, row, do_update=one(True)),
        "columns": lambda: gradkit.rms_norm(x[:, 1:4], row[:3]),
    }


@pytest.mark.parametrize("name", every_call(np.array))
def test_array_api_strict(name, xp):
    """Through DLPack in, computed, and back as the caller's own type: NumPy's very bits."""
    expected, found = ([*leaves(every_call(a)[name]())] for a in (np.array, xp.asarray))
    for got, ref in zip(found, expected, strict=True):
        if isinstance(ref, np.ndarray):
            assert type(got) is type(xp.asarray(1.0))
            assert_same_bits(np.from_dlpack(got), ref)
        else:
            assert got == ref


def test_array_api_strict_is_written_in_place(xp):
    grads = {"w": xp.asarray([3.0, 0.0]), "b": xp.asarray([4.0])}
    assert gradkit.scale_grads(grads, 0.5) is grads
    np.testing.assert_array_equal(np.from_dlpack(grads["w"]), [1.5, 0.0])
    buffer = xp.asarray([1.0, 2.0])
    assert gradkit.accumulate_grad(buffer, buffer) is buffer
    np.testing.assert_array_equal(np.from_dlpack(buffer), [2.0, 4.0])


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex128"])
def test_array_api_strict_of_another_dtype(dtype, xp):
    with pytest.raises(TypeError, match=r"grads\[0\] has dtype"):
        gradkit.clip_grad_norm([xp.ones(3, dtype=getattr(xp, dtype))], 1.0)


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


def test_a_spike_guards_arguments_are_of_one_library(xp):
    with pytest.raises(TypeError, match="state is a str; expected an array"):
        gradkit.spike_guard_update("mean", 1.0)
    with pytest.raises(TypeError, match="norm is a DLPack array and state a numpy array"):
        gradkit.spike_guard_update(np.zeros(3), xp.asarray(1.0))


def test_a_library_that_keeps_count_is_told_what_was_written(monkeypatch):
    """PyTorch, for one, whose autograd must know; here NumPy stands in for it."""
    told = []
    monkeypatch.setattr(type(HOST), "returns_views", False)
    monkeypatch.setattr(type(HOST), "wrote", lambda _, arrays: told.extend(arrays))
    grads, norm, mean = [np.ones(4)], np.zeros(()), np.zeros(2)
    gradkit.grad_norm(iter(grads), out=norm)
    gradkit.layer_norm(np.ones((2, 3)), out=(None, mean, None))
    gradkit.scale_grads(grads, 2.0)
    assert [id(array) for array in told] == [id(array) for array in (norm, mean, *grads)]


def test_an_unknown_devices_backend_is_found_by_an_array_that_nothing_writes():
    """Immutable arrays may be the first of a device."""

    class Immutable:
        @staticmethod
        def known_backend(_):
            return None

        @staticmethod
        def view(array, *, write):
            assert not write
            return array

    table = SimpleNamespace(device=1, arrays=[np.zeros(3)])
    assert backend_of_table(table, Immutable) is backend_of(table.arrays[0])

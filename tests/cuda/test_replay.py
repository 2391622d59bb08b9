"""Notes of what a call does on a device, and the same launches for the next one."""

import ctypes
import itertools
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._calls import engines
from gradkit._cuda import CudaBackend
from gradkit._cuda.cudnn import library
from gradkit._cuda.launch import buffers
from gradkit._cuda.launch.device import note_others, noted, noting, scratch, workspace
from gradkit._cuda.launch.kernels import Launch, kernel
from gradkit._cuda.list_tables import plan_of
from gradkit._cuda.lists import _write
from gradkit._open import dispatch
from gradkit.errors import KernelError
from testbed.emulator.idle import IdleDevice
from tests.devices.emulated import IdleArray, emulated_backend, on_device
from tests.operations import OPERATIONS, leaves, on

compiled = pytest.mark.skipif(_host.code is None, reason="compiled code finds plans")
FLOAT64 = np.dtype(np.float64)


@pytest.fixture(scope="module")
def emulated():
    return emulated_backend(multiprocessors=2)


def test_nothing_is_noted_unless_somebody_notes(emulated):
    note_others()
    assert noted() is None
    with noting() as outer:
        with noting() as inner:
            note_others()
        scratch(emulated.device, 3, FLOAT64)
        assert noted() is outer
    assert (inner.others, outer.others, len(inner.rooms), len(outer.rooms)) == (True, False, 0, 1)
    assert noted() is None


def test_launches_rooms_and_lists_are_noted(emulated):
    device = emulated.device
    one = on_device(device.xp.array(np.ones(4)), emulated)
    run = Launch(kernel(device, "zero", "zero_grad", CAPACITY=0), (1,), (32,))
    run.start = lambda _: None
    with noting() as notes:
        room, memory = scratch(device, (2, 3), FLOAT64), workspace(device, (2,), FLOAT64)
        run(one, None)
        plan_of(device, [one], [one])
    (found,) = notes.launches
    assert found == (run, (one, None))
    assert [(id(each), size) for each, size in notes.rooms] == [(id(room), 48), (id(memory), 16)]
    assert [[*map(id, each)] for each in notes.lists] == [[id(one)], [id(one)]]
    assert not notes.others


def others(backend):
    """Acts on a device that are no launches, by name."""
    device = backend.device

    def array(*shape):
        return on_device(device.xp.array(np.ones(shape)), backend)

    four, grid = array(4), array(2, 4)
    many = [array(2) for _ in range(300)]
    return {
        "a copy": lambda: buffers.contiguous(device, grid[:, ::2]),
        "a copy back": lambda: buffers.copy_back(four, array(4)),
        "a fill": lambda: buffers.fill(device, four, 1.0),
        "an upload": lambda: buffers.on_device(device, [1.0]),
        "an assignment": lambda: buffers.assign(four, array(4)),
        "a value that the host reads": lambda: backend.read(four),
        "a scalar": lambda: backend.scalar(np.float64(1)),
        "another dtype": lambda: backend.as_float64(array(1)),
        "elements of places": lambda: backend.take(four, np.array([1])),
        "steps that no interrupt parts": lambda: _write([lambda: None, lambda: None]),
        "a table that was uploaded": lambda: plan_of(device, many),
        "one pair of arrays in a table": lambda: plan_of(device, [four], [four]).table.at(16, 32),
    }


@pytest.mark.parametrize("name", others(emulated_backend(multiprocessors=2)))
def test_what_is_no_launch_is_noted(emulated, name):
    with noting() as notes:
        others(emulated)[name]()
    assert notes.others


class Noting(IdleDevice):
    """Launches nothing, and knows what it was to launch."""

    def __init__(self):
        super().__init__(multiprocessors=132)
        self.backend, self.launched, self.error = CudaBackend(self), [], None

    def empty(self, shape, dtype):
        return on_device(np.empty(shape, dtype), self.backend, IdleArray)

    def get_function(self, name):
        return partial(self._launch, name)

    def _launch(self, name, grid, block, args, shared_mem=0):
        if self.error:
            raise self.error
        self.launched.append((name, grid, block, [*args], shared_mem))


def on_idle(device, host):
    return on_device(host, device.backend, IdleArray)


@contextmanager
def known():
    """Count the calls that were launched as an earlier one, with no cuDNN."""
    from gradkit._cuda.launch import replay

    again, found = replay._Launched.again, []

    def counted(*arguments):
        found.append(again(*arguments))
        return found[-1]

    dispatch._plans.clear()
    with (
        mock.patch.object(replay._Launched, "again", counted),
        mock.patch.object(library, "is_missing", return_value=True),
        mock.patch("gradkit._cuda.cudnn.engines._try_cudnn", return_value=False),
    ):
        yield found
    dispatch._plans.clear()


def described(launches, *trees):
    """Launches, with places among arrays in the place of these arrays' addresses."""
    arrays = [each for tree in trees for each in leaves(tree) if isinstance(each, IdleArray)]
    places = {each.data.ptr: f"array {k:3}" for k, each in reversed([*enumerate(arrays)])}

    def name(argument):
        if isinstance(argument, np.generic):
            return argument
        if type(argument) is np.ndarray:  # a table, which has addresses
            words = np.frombuffer(argument.tobytes().ljust(argument.nbytes + -argument.nbytes % 8))
            return [places.get(n, n if n < 1 << 40 else "memory") for n in words.view(int).tolist()]
        address = getattr(getattr(argument, "data", None), "ptr", argument)
        return places.get(address, "memory") if address else None

    return [(*about, [*map(name, args)], shared) for *about, args, shared in launches]


@compiled
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_known_call_has_the_launches_of_the_one_before(name):
    """On arrays that lie elsewhere; of lists on those that lie where they did."""
    operation, device = OPERATIONS[name], Noting()
    for variant in ("", *operation.variants):
        sets = [
            operation.arguments(on(lambda host: on_idle(device, host)), variant=variant)
            for _ in range(2)
        ]
        found = []
        with known() as again:
            for given in (sets[0], sets[0], sets[1], sets[1], sets[0], sets[0]):
                device.launched.clear()
                results = operation(**given)
                found.append(described(device.launched, given, [*results]))
        assert found == [found[0]] * len(found)
        if operation.family in ("rows", "groups", "channels"):
            assert again == [True] * 4


@compiled
@pytest.mark.parametrize("name", ["max_norm", "scale"])
def test_other_numbers_are_other_launches(name):
    """Also zeros of another sign, and numbers in arrays, which are read where they lie."""
    device = Noting()
    grads = [on_idle(device, np.ones(n)) for n in (4, 9)]
    arrays = [on_idle(device, np.full((), n)) for n in (3.0, 4.0)]

    def call(value):
        device.launched.clear()
        gradkit.clip_grad_norm(grads, **{"max_norm": 1.0, name: value})
        numbers = device.launched[-1][3][slice(2, 4) if name == "max_norm" else slice(5, 7)]
        array, number = numbers
        at = getattr(getattr(array, "data", None), "ptr", array)
        read = number if array is None else ctypes.c_double.from_address(at).value
        return float(read).hex(), array is None

    values = (1.0, 2.0, 3, 3.0, 0.0, -0.0, *arrays)
    for first, second in itertools.product(values, values):
        with known() as again:
            for value in (first, first, first, second, first, second, second):
                is_plain = isinstance(value, int | float)
                assert call(value) == (float(value).hex(), is_plain)
            assert again.count(True) > 1
            if first in arrays and second not in arrays:
                assert False in again


@compiled
def test_lists_that_were_uploaded_are_never_known():
    device = Noting()
    grads = [on_idle(device, np.ones(4)) for _ in range(300)]
    with known() as again:
        for _ in range(4):
            gradkit.clip_grad_norm(grads, 1.0)
    assert not again


@compiled
def test_arrays_that_begin_together_or_between_packs_are_launched_by_themselves():
    device, room = Noting(), np.ones(80)
    start = -room.ctypes.data % 16 // 8

    def call(first, second):
        x = on_idle(device, room[start + first : start + first + 32].reshape(4, 8))
        scale = on_idle(device, room[start + second : start + second + 8])
        device.launched.clear()
        gradkit.rms_norm(x, scale)
        ((*_, args, _),) = device.launched
        found = [getattr(getattr(each, "data", None), "ptr", each) for each in args[:2]]
        return found == [x.data.ptr, scale.data.ptr]

    for calls in (((0, 0), (0, 0), (0, 32), (8, 8), (0, 40)), ((0, 32), (0, 32), (0, 0))):
        with known() as again:
            assert all(call(*each) for each in calls * 2)
            assert again[-1]
            call(1, 33)
            assert not again[-1]


@compiled
def test_a_known_launch_that_fails_is_an_error_as_any_other():
    device = Noting()
    device.launch_errors = (OSError,)
    x = on_idle(device, np.ones((4, 8)))
    with known() as again:
        for _ in range(3):
            gradkit.rms_norm(x)
        assert again == [True]
        device.error = OSError("no")
        with pytest.raises(KernelError, match=r"refused kernel layer_norm on a grid .*: no"):
            gradkit.rms_norm(x)


@compiled
def test_a_captured_call_is_computed_and_not_noted():
    device = Noting()
    x = on_idle(device, np.ones((4, 8)))
    with known() as again:
        gradkit.rms_norm(x)
        with mock.patch.object(device, "capturing", return_value=True):
            for _ in range(3):
                gradkit.rms_norm(x)
        assert not again
        for _ in range(2):
            gradkit.rms_norm(x)
        assert again == [True]


@compiled
def test_a_known_batch_norm_says_that_it_ran_natively():
    device = Noting()
    x = on_idle(device, np.ones((4, 8, 3)))
    with known() as again:
        for _ in range(3):
            engines.ran(None)
            gradkit.batch_norm(x)
            assert engines.latest() == "native"
        assert again == [True]
        engines.ran("cudnn")
        gradkit.group_norm(x, 2)
        assert engines.latest() == "cudnn"

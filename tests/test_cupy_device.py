"""What ``CupyDevice`` asks of CuPy, on a stand-in for it: streams, captures, uploads, devices."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from gradkit._cuda.launch.device import CupyDevice, keep_if_captured, scratch

pytestmark = pytest.mark.cuda

PER_THREAD = 2  # CUDA's handle of the per-thread default stream


class Stream:
    """A stream that may be captured; the legacy default one, handle 0, may not be asked."""

    def __init__(self, ptr, *, capturing=False):
        self.ptr, self.capturing = ptr, capturing

    def is_capturing(self):
        assert self.ptr, "cudaErrorStreamCaptureImplicit"
        return self.capturing


class Current:
    """A device that is current inside a ``with``."""

    def __init__(self, cupy, number):
        self.cupy, self.number = cupy, number
        self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}

    def __enter__(self):
        self.before, self.cupy.current = self.cupy.current, self.number

    def __exit__(self, *_):
        self.cupy.current = self.before


@pytest.fixture
def cupy(monkeypatch):
    cupy = SimpleNamespace(current=0, stream=Stream(0))
    cupy.cuda = SimpleNamespace(
        Device=lambda number: Current(cupy, number),
        get_current_stream=lambda: cupy.stream,
        driver=SimpleNamespace(CUDADriverError=KeyError),
        runtime=SimpleNamespace(CUDARuntimeError=OSError, getDevice=lambda: cupy.current),
    )
    cupy.RawModule = lambda **arguments: arguments
    cupy.asarray = np.array
    cupy.empty = np.empty
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def in_another_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("cupy")
def test_what_it_knows_of_its_gpu():
    device = CupyDevice(3)
    assert (device.number, device.multiprocessors, device.max_shared_memory) == (3, 132, 232448)
    assert device.launch_errors == (KeyError, OSError)


def test_each_stream_has_a_key_of_its_own(cupy):
    device, keys = CupyDevice(0), set()
    for ptr in (0, 1, 7 << 40, 7 << 40):
        cupy.stream = Stream(ptr)
        keys.add(device.stream)
        assert device.cuda_stream() == ptr
        assert in_another_thread(lambda: device.stream) == device.stream
    assert len(keys) == 3


def test_the_per_thread_stream_is_another_in_each_thread(cupy):
    device, cupy.stream = CupyDevice(0), Stream(PER_THREAD)
    assert device.stream == device.stream
    assert in_another_thread(lambda: device.stream) != device.stream


def test_a_capture_is_noticed_when_it_begins_and_when_it_ends(cupy):
    device = CupyDevice(0)
    assert device.capturing() is False  # without asking the legacy stream
    cupy.stream = Stream(5)
    for capturing in (False, True, False):
        cupy.stream.capturing = capturing
        assert device.capturing() is capturing


def test_memory_of_a_captured_call_is_kept(cupy, monkeypatch):
    kept = []
    monkeypatch.setattr("gradkit._cuda.launch.device._recorded", kept)
    device, cupy.stream = CupyDevice(0), Stream(5)
    scratch(device, 3, np.float32)
    assert not kept
    cupy.stream.capturing = True
    made = scratch(device, 3, np.float32)
    assert keep_if_captured(device, made) is made
    assert [id(array) for array in kept] == [id(made)] * 2


@pytest.mark.usefixtures("cupy")
def test_an_upload_is_a_copy_of_the_bytes_without_gaps():
    host = np.arange(24, dtype=np.int64).reshape(4, 6)[::2, ::3]
    found = CupyDevice(0).upload(host)
    assert (found.dtype, found.shape) == (np.uint8, (32,))
    np.testing.assert_array_equal(found.view(np.int64), [0, 3, 12, 15])
    assert not np.shares_memory(found, host)
    table = np.zeros(2, [("a", "u8"), ("b", "u4")])
    assert CupyDevice(0).upload(table).nbytes == table.nbytes


@pytest.mark.usefixtures("cupy")
def test_source_and_options_go_to_cupy_as_they_are():
    assert CupyDevice(0).compile("source", ("-DA=1",)) == {"code": "source", "options": ("-DA=1",)}


def test_another_device_is_made_current_and_the_same_one_is_not(cupy):
    device = CupyDevice(1)
    with device.active():
        assert cupy.current == 1
        with device.active() as nothing:
            assert nothing is None
        assert cupy.current == 1
    assert cupy.current == 0


@pytest.mark.usefixtures("cupy")
def test_addresses():
    arrays = [SimpleNamespace(data=SimpleNamespace(ptr=np.uint64(16 * k))) for k in (5, 3)]
    assert CupyDevice(0).pointers(arrays, write=True) == (80, 48)
    address = CupyDevice(0).pointer(arrays[0])
    assert (type(address), address) == (int, 80)

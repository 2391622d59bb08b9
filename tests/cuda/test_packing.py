"""Launches whose parameters lie in one buffer, on a stand-in for CuPy's driver."""

import ctypes
import struct
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from gradkit._cuda.launch import packing
from gradkit._cuda.launch.buffers import Usable
from gradkit._cuda.launch.device import CupyDevice
from gradkit._cuda.launch.packing import PackedModule

pytestmark = pytest.mark.cuda

ONE = (1, 1, 1)
GRID, BLOCK = (3, 1, 1), (32, 4, 1)


class Pointer(SimpleNamespace):
    """Memory without a shape, as CuPy's allocators give it."""


def array(address):
    flags = SimpleNamespace(c_contiguous=True)
    return SimpleNamespace(data=SimpleNamespace(ptr=address), flags=flags)


class DriverError(RuntimeError):
    """An error with CUDA's number."""

    def __init__(self, status):
        super().__init__(status)
        self.status = status


class Driver:
    """Keeps what each launch was given: CuPy's own arguments, or the packed bytes.

    ``lacking`` is the status that calls end in until the runtime is called.
    """

    CUDADriverError = DriverError

    def __init__(self):
        self.own, self.packed, self.during = [], [], lambda: None
        self.kernel = SimpleNamespace(ptr=77)  # a compiled function's
        self.limit, self.lacking, self.refused = 0, None, 0
        self.captured, self.early = False, []
        self.stream = SimpleNamespace(ptr=5, is_capturing=lambda: self.captured)
        runtime = SimpleNamespace(getDevice=lambda: 3, setDevice=self.bind)
        self.cuda = SimpleNamespace(driver=self, runtime=runtime, MemoryPointer=Pointer)
        self.cuda.get_current_stream = lambda: self.stream
        self.module = PackedModule(self.cuda, self)

    def bind(self, device):
        assert device == 3
        self.lacking = None

    def check(self):
        if self.lacking:
            self.refused += 1
            raise DriverError(self.lacking)

    @property
    def max_dynamic_shared_size_bytes(self):
        return self.limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, limit):
        self.check()
        self.limit = limit

    def occupancyMaxActiveBlocksPerMultiprocessor(self, *given):  # noqa: N802 - CuPy's name
        self.check()
        assert given == (77, 64, 128)
        return 9

    def get_function(self, name):
        self.check()
        assert name == "k"
        return self

    def __call__(self, grid, block, args, shared_mem=0):
        self.check()
        self.own.append((grid, block, [*args], shared_mem))

    def launchKernel(self, *given):  # noqa: N802
        self.check()
        self.packed.append((given[:-1], self.content(given[-1])))

    def content(self, extra):
        address, size, end = (ctypes.c_void_p.from_address(extra + 8 * k).value for k in (1, 3, 4))
        self.during()
        length = ctypes.c_size_t.from_address(size).value
        assert end is None
        return ctypes.string_at(address, length)

    def cuLaunchKernelEx(self, configuration, function, arguments, extra):  # noqa: N802
        """Return an error's number, as the driver itself does."""
        if self.lacking:
            self.refused += 1
            return self.lacking
        assert arguments is None
        where = ctypes.string_at(configuration, 56)
        *numbers, stream, attributes, count = struct.unpack("7I4x2QI4x", where)
        attribute = struct.unpack("I4xi60x", ctypes.string_at(attributes, 72))
        assert (count, attribute) == (1, (6, 1))  # programmatic stream serialization
        given = function.value, *numbers, stream
        self.early.append((given, self.content(ctypes.addressof(extra))))
        return 0

    @staticmethod
    def check_status(status):
        raise DriverError(status)


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def kernel(driver):
    return driver.module.get_function("k")


@pytest.fixture
def dependent(driver, kernel, monkeypatch):
    """A launch that may start early, whose arguments' types are known."""
    monkeypatch.setattr(packing, "of_driver", partial(getattr, driver))
    start = kernel.on(GRID, BLOCK, 128, dependent=True)
    start((np.int32(0),))
    return start


def test_parameters_lie_as_in_a_struct(driver, kernel):
    table = np.frombuffer(b"12345678abcdefgh", "V16").reshape(())
    scalars = np.int32(-3), np.float64(0.1), np.uint32(7), np.int64(-(1 << 40))
    args = np.uint32(9), table, array(1 << 47), None, Pointer(ptr=64), *scalars, np.float32(0.5)
    for _ in range(3):
        kernel(GRID, BLOCK, args, 128)
    numbers = 1 << 47, 0, 64, -3, 0.1, 7, -(1 << 40), 0.5
    content = struct.pack("@I4x16s3Qi4xdI4xqf", 9, b"12345678abcdefgh", *numbers)
    assert driver.packed == [((77, *GRID, *BLOCK, 128, 5, 0), content)] * 2
    assert len(driver.own) == 1


def test_cupy_gets_null_pointers_as_numbers(driver, kernel):
    """Some of its releases pass garbage for None."""
    kernel(GRID, BLOCK, (None, np.int64(3)), 64)
    [(grid, block, passed, shared)] = driver.own
    assert (grid, block, shared) == (GRID, BLOCK, 64)
    assert passed == [0, 3]
    assert all(isinstance(value, np.generic) and value.nbytes == 8 for value in passed)


def test_addresses_are_passed_as_arrays_are(driver, kernel):
    for _ in range(2):
        kernel(GRID, BLOCK, (1 << 47, None, np.uint32(5), 0), 64)
    [(_, _, passed, _)] = driver.own
    assert passed == [1 << 47, 0, 5, 0]
    assert [value.nbytes for value in passed] == [8, 8, 4, 8]
    assert driver.packed == [
        ((77, *GRID, *BLOCK, 64, 5, 0), struct.pack("@2QI4xQ", 1 << 47, 0, 5, 0))
    ]


def test_other_types_are_packed_in_another_way(driver, kernel):
    for _ in range(2):
        for argument in (None, array(64), Pointer(ptr=32), np.int32(5)):
            kernel(ONE, ONE, (argument,))
    assert len(driver.own) == 4
    sent = [content for _, content in driver.packed]
    assert sent == [struct.pack(*each) for each in (("Q", 0), ("Q", 64), ("Q", 32), ("i", 5))]


def test_a_launch_goes_to_the_stream_that_is_current_then(driver, kernel):
    start = kernel.on(GRID, BLOCK, 0)
    for stream in (5, 6, 7):
        driver.stream = SimpleNamespace(ptr=stream)
        start((np.int32(stream),))
    assert driver.packed == [
        ((77, *GRID, *BLOCK, 0, stream, 0), struct.pack("i", stream)) for stream in (6, 7)
    ]


def test_a_dependent_launch_is_told_to_the_driver_itself(driver, dependent):
    for number, stream in enumerate((5, 1 << 47, 0, 5)):
        driver.stream.ptr = stream
        dependent((np.int32(number),))
    assert driver.early == [
        ((77, *GRID, *BLOCK, 128, stream), struct.pack("i", number))
        for number, stream in enumerate((5, 1 << 47, 0, 5))
    ]
    assert (len(driver.own), driver.packed) == (1, [])


def test_configurations_are_kept_for_a_few_streams(driver, dependent):
    streams = [*range(5, 105), 7]
    for stream in streams:
        driver.stream.ptr = stream
        dependent((np.int32(stream),))
    assert [where[-1] for where, _ in driver.early] == streams


def test_a_dependent_launch_is_a_plain_one_while_its_stream_is_captured(driver, dependent):
    driver.captured = True
    dependent((np.int32(1),))
    assert driver.packed == [((77, *GRID, *BLOCK, 128, 5, 0), struct.pack("i", 1))]
    driver.stream.ptr = 0  # which cannot be captured
    dependent((np.int32(2),))
    driver.captured = False
    assert [content for _, content in driver.early] == [struct.pack("i", 2)]


def test_a_dependent_launch_without_a_context(driver, dependent):
    driver.lacking = 201
    dependent((np.int32(1),))
    assert (driver.refused, driver.early) == (1, [])
    assert driver.packed == [((77, *GRID, *BLOCK, 128, 5, 0), struct.pack("i", 1))]
    dependent((np.int32(2),))
    assert [content for _, content in driver.early] == [struct.pack("i", 2)]
    driver.lacking = 700
    with pytest.raises(DriverError) as raised:
        dependent((np.int32(1),))
    assert (raised.value.status, driver.refused) == (700, 2)


@pytest.mark.usefixtures("dependent")
def test_launches_are_plain_if_they_are_not_dependent_or_the_driver_is_older(
    driver, kernel, monkeypatch
):
    kernel.on(GRID, BLOCK, 0)((np.int32(1),))
    monkeypatch.setattr(packing, "of_driver", lambda _: None)
    kernel.on(GRID, BLOCK, 0, dependent=True)((np.int32(2),))
    assert driver.early == []
    assert [content for _, content in driver.packed] == [struct.pack("i", n) for n in (1, 2)]


def test_a_driver_without_the_function_is_known(monkeypatch):
    def absent(name):
        raise OSError(name)

    for library in (lambda _: SimpleNamespace(), absent):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert packing.of_driver.__wrapped__("cuLaunchKernelEx") is None
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuLaunchKernelEx=9))
    assert packing.of_driver.__wrapped__("cuLaunchKernelEx") == 9


def test_the_driver_tells_how_many_clusters_fit(driver, kernel, monkeypatch):
    asked = []

    def ask(found, function, configuration):
        asked.append((function.value, struct.unpack("@7IPPI4x", configuration)))
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 66
        return driver.status

    driver.cuOccupancyMaxActiveClusters, driver.status = ask, 0
    monkeypatch.setattr(packing, "of_driver", partial(getattr, driver))
    assert kernel.clusters(8, 512) == 66
    assert asked == [(77, (8, 1, 1, 512, 1, 1, 0, 0, 0, 0))]
    driver.status = 1
    assert kernel.clusters(8, 512) is None
    monkeypatch.setattr(packing, "of_driver", lambda _: None)
    assert kernel.clusters(8, 512) is None


CALLS = {
    "get a function": lambda kernel: kernel.function.module.get_function("k"),
    "raise a limit": lambda kernel: setattr(kernel, "max_dynamic_shared_size_bytes", 5),
    "launch by CuPy": lambda kernel: kernel(ONE, ONE, (np.int64(1),)),
    "launch": lambda kernel: kernel(ONE, ONE, (np.int32(1),)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_without_a_context_gets_one_and_calls_again(driver, kernel, call):
    kernel(ONE, ONE, (np.int32(1),))
    driver.lacking = 201
    for _ in range(2):
        CALLS[call](kernel)
    assert driver.refused == 1
    assert driver.limit == (5 if call == "raise a limit" else 0)
    assert (len(driver.own), len(driver.packed)) == {
        "launch by CuPy": (2, 1),
        "launch": (1, 2),
    }.get(call, (1, 0))


def test_a_thread_without_a_context_gets_one_before_it_asks_for_occupancy(driver, kernel):
    """CuPy 13.6 raises no error of that call."""
    device = SimpleNamespace(number=3, xp=SimpleNamespace(cuda=driver.cuda))
    driver.lacking = 201
    assert CupyDevice.resident(device, kernel, 64, 128) == 9
    assert driver.refused == 0


@pytest.mark.parametrize("call", CALLS)
def test_any_other_error_is_raised_at_once(driver, kernel, call):
    kernel(ONE, ONE, (np.int32(1),))
    driver.lacking = 700
    with pytest.raises(DriverError) as raised:
        CALLS[call](kernel)
    assert (raised.value.status, driver.refused) == (700, 1)


def test_a_launch_during_another_has_a_buffer_of_its_own(driver, kernel):
    """The driver reads the buffer while other threads run."""

    def launch_once():
        driver.during = lambda: None
        kernel(ONE, ONE, (np.int32(2),))

    for _ in range(2):
        kernel(ONE, ONE, (np.int32(0),))
    driver.during = launch_once
    kernel(ONE, ONE, (np.int32(1),))
    assert [content for _, content in driver.packed[1:]] == [struct.pack("i", n) for n in (2, 1)]
    driver.during = lambda: None
    kernel(ONE, ONE, (np.int32(3),))
    assert driver.packed[-1][1] == struct.pack("i", 3)


def test_a_refused_launch_leaves_the_next_ones_alone(driver, kernel):
    def refuse():
        driver.during = lambda: None
        raise KeyError

    kernel(ONE, ONE, (np.int32(0),))
    driver.during = refuse
    with pytest.raises(KeyError):
        kernel(ONE, ONE, (np.int32(1),))
    kernel(ONE, ONE, (np.int32(2),))
    assert [content for _, content in driver.packed] == [struct.pack("i", 2)]


def test_limits_and_handles_are_the_functions(driver, kernel):
    kernel.max_dynamic_shared_size_bytes = 100_000
    assert driver.max_dynamic_shared_size_bytes == kernel.max_dynamic_shared_size_bytes == 100_000
    assert kernel.address == 77


def test_arrays_are_usable_if_each_begins_where_vectors_may():
    """And its strides are looked at once a plan; of CuPy's arrays kernels get addresses."""
    usable, given = Usable(), [array(64), None, array(1 << 47)]
    assert usable(given) == [64, 0, 1 << 47]
    assert usable([64, None, 72]) == [64, None, 72]  # whoever gives addresses has looked
    for place, shift in ((0, 8), (2, 8), (2, 1)):
        moved = list(given)
        moved[place] = array(given[place].data.ptr + shift)
        assert usable(moved) is None
    assert usable.gapless
    given[2].flags.c_contiguous = False
    assert usable(given) is not None
    other = Usable()
    assert other(given) is None
    assert other.gapless is False


def test_emulated_arrays_are_passed_themselves():
    room = np.zeros(20, np.float64)
    first = room[room.ctypes.data % 16 // 8 :][:16]
    usable = Usable()
    assert usable(given := (first[:4], None, first[4:8])) is given
    assert usable((first[:4], None, first[5:9])) is None

"""Memory: what a view opens, who wrote it, whose it is, and more of it than there is."""

import numpy as np
import pytest

from testbed.emulator.device import EmulatedDevice
from testbed.emulator.faults import EmulatorFault
from testbed.emulator.memory import Extent, owner_of, sparse_array

IN_PLACE = """
extern "C" __global__ void both(const float* dy, float* dx, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) dx[i] = dy[SHIFT] * 2;
}
"""


def test_output_may_be_an_input(device):
    array = device.xp.asarray(np.arange(50, dtype=np.float32))
    kernel = device.compile(IN_PLACE, ("-DSHIFT=i",)).get_function("both")
    kernel((1,), (32,), (array, array, np.int32(50)))
    np.testing.assert_array_equal(array, np.arange(50) * 2)
    shifted = device.compile(IN_PLACE, ("-DSHIFT=(i + 1) % n",)).get_function("both")
    with pytest.raises(EmulatorFault, match="race"):
        shifted((1,), (32,), (array, array, np.int32(50)))


def test_a_view_opens_no_more_than_its_bytes(device):
    array = device.xp.asarray(np.zeros((6, 8), np.float32))
    kernel = device.compile(IN_PLACE, ("-DSHIFT=i",)).get_function("both")
    out = device.xp.empty(16, np.float32)
    kernel((1,), (4,), (array[2:4], out, np.int32(16)))
    with pytest.raises(EmulatorFault, match="out-of-bounds") as caught:
        kernel((1,), (4,), (array[2:4], device.xp.empty(17, np.float32), np.int32(17)))
    assert (caught.value.array, caught.value.index) == ("dy", 16)


@pytest.mark.parametrize(
    "cut", [np.s_[:], np.s_[::-1], np.s_[1:5:2, ::-3], np.s_[..., 2], np.s_[:0], np.s_[3, 3:4]]
)
def test_extent_of_a_view(cut):
    whole = np.zeros((6, 8), np.float64)
    view = whole[cut]
    numbers = np.arange(48).reshape(6, 8)[cut].ravel()
    extent = Extent.of(view)
    base = whole.__array_interface__["data"][0]
    if numbers.size:
        assert (extent.start - base) // 8 == numbers.min()
        assert (extent.end - base) // 8 == numbers.max() + 1
        assert (extent.origin - base) // 8 == numbers[0]
    else:
        assert extent.start == extent.end


def test_what_the_host_writes_is_written():
    device = EmulatedDevice()
    kernel = device.compile(IN_PLACE, ("-DSHIFT=i",)).get_function("both")
    x, out = device.xp.empty(4, np.float32), device.xp.empty(4, np.float32)
    assert (x.view(np.uint8) == 0xFF).all()
    x[:3] = 1
    with pytest.raises(EmulatorFault, match="uninitialised") as caught:
        kernel((1,), (1,), (x, out, np.int32(4)))
    assert caught.value.index == 3
    x.fill(2)
    kernel((1,), (1,), (x, out, np.int32(4)))
    np.testing.assert_array_equal(out, 4)


COPY = """
extern "C" __global__ void copy(const T* from, T* to, int first, int n) {
  for (int i = first + threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.parametrize("place", range(8))
def test_a_number_that_the_host_writes_may_hold_the_byte_of_blank_memory(device, place):
    copies = {
        size: device.compile(COPY.replace("T", of)).get_function("copy")
        for size, of in ((1, "unsigned char"), (8, "double"))
    }
    memory, out = device.xp.empty(16, np.uint8), device.xp.empty(1, np.float64)
    memory[:] = 0
    memory[place] = 0xFF
    copies[1]((1,), (8,), (memory[8:], out.view(np.uint8), np.int32(0), np.int32(8)))
    number = memory[:8].view(np.float64)  # its neighbours were read byte by byte
    copies[8]((1,), (8,), (number, out, np.int32(0), np.int32(1)))
    assert out.tobytes() == number.tobytes()


def test_beside_what_a_kernel_wrote_memory_is_blank(device):
    copy = device.compile(COPY.replace("T", "unsigned char")).get_function("copy")
    zeros, partly, out = device.xp.zeros(8, np.uint8), *(device.xp.empty(8, "u1") for _ in "ab")
    copy((1,), (8,), (zeros, partly, np.int32(0), np.int32(5)))
    copy((1,), (8,), (partly, out, np.int32(0), np.int32(5)))
    with pytest.raises(EmulatorFault, match="uninitialised"):
        copy((1,), (8,), (partly, out, np.int32(5), np.int32(8)))


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (3, 8), (3, 21)])
def test_blank_memory_ends_within_a_number(device, begin, end):
    """The other bytes of the number are someone else's, and may look blank."""
    copies = {
        size: device.compile(COPY.replace("T", of)).get_function("copy")
        for size, of in ((1, "unsigned char"), (8, "double"))
    }
    pages, out = device.xp.empty(3 << 12, np.uint8), device.xp.zeros(64, np.uint8)
    memory = pages[-pages.ctypes.data % (1 << 12) :][:64]  # of a page that no bytes were read in
    numbers, start = memory.view(np.float64), memory.ctypes.data
    device.runtime.mark_initialised(start, start + 64)
    copies[8]((1,), (8,), (numbers, numbers, np.int32(0), np.int32(8)))
    device.runtime.mark_uninitialised(start + begin, start + end)
    copies[1]((1,), (8,), (memory, out, np.int32(24), np.int32(64)))  # byte by byte
    for first, last in ((0, begin), (end, 24)):
        copies[1]((1,), (8,), (memory, out, np.int32(first), np.int32(last)))
    device.runtime.mark_initialised(start + begin, start + end)
    copies[1]((1,), (8,), (memory, out, np.int32(0), np.int32(24)))


def test_memory_given_back_counts_as_written():
    device = EmulatedDevice()
    kernel = device.compile(IN_PLACE, ("-DSHIFT=i",)).get_function("both")
    one = device.xp.zeros(1, np.float32)
    reused = 0
    for _ in range(20):
        fresh = device.xp.empty(64, np.float32)
        kernel((1,), (1,), (one, fresh, np.int32(1)))
        address = owner_of(fresh).__array_interface__["data"][0]
        size = owner_of(fresh).nbytes
        del fresh
        # NumPy gives the memory out again; its bytes look as if nobody had written them.
        x = np.full(size, 0xFF, np.uint8)
        reused += x.__array_interface__["data"][0] == address
        view = x[-address % 4 :][:400].view(np.float32)
        kernel((1,), (1,), (view, view, np.int32(100)))
    assert reused > 0


def test_arrays_of_the_device():
    xp = EmulatedDevice().xp
    host = np.arange(3.0)
    on_device = xp.asarray(host)
    assert not np.shares_memory(on_device, host)
    assert xp.asarray(on_device) is on_device
    assert xp.asarray(on_device, np.float32).dtype == np.float32
    assert xp.ascontiguousarray(on_device) is on_device
    np.testing.assert_array_equal(xp.ascontiguousarray(on_device[::-1]), host[::-1])
    np.testing.assert_array_equal(xp.zeros((2, 3), np.int8), np.zeros((2, 3)))
    assert xp.empty_like(on_device).shape == (3,)
    assert xp.float32 is np.float32
    for size in (1, 3, 1000):
        assert Extent.of(xp.empty(size, np.float16)).start % 256 == 0


ROW = """
extern "C" __global__ void row(const float* x, float* out, long long n) {
  for (INDEX j = threadIdx.x; j < (INDEX)n; j += blockDim.x) {
    INDEX at = (INDEX)blockIdx.x * (INDEX)n + j;
    out[at] = x[at] + 1;
  }
}
"""


@pytest.mark.parametrize(
    ("index", "right"), [("long long", True), ("unsigned", False), ("int", False)]
)
def test_index_that_wraps_beyond_2_to_the_32(device, index, right):
    n, rows = 4096, (1 << 20) + 3
    x, out = sparse_array((rows, n), np.float32), sparse_array((rows, n), np.float32)
    assert x.size > 2**32
    x[-1] = 7
    kernel = device.compile(ROW, (f"-DINDEX={index}",)).get_function("row")
    with device.only_blocks([-1]):
        kernel((rows,), (64,), (x, out, np.int64(n)))
    assert (out[-1] == 8).all() == right
    assert (out[2] == 1).all() != right  # where a 32-bit index ends up


def test_huge_index_that_turns_negative(device):
    n, rows = 4096, (1 << 19) + 3
    x, out = sparse_array((rows, n), np.float32), sparse_array((rows, n), np.float32)
    kernel = device.compile(ROW, ("-DINDEX=int",)).get_function("row")
    with device.only_blocks([-1]), pytest.raises(EmulatorFault) as caught:
        kernel((rows,), (64,), (x, out, np.int64(n)))
    assert caught.value.kind == "out-of-bounds"

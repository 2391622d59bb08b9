"""Launches as CuPy makes them, on both machines: arguments, memory that is open, traffic."""

import gc

import numpy as np
import pytest

from testbed.emulator.device import EmulatedDevice
from testbed.emulator.faults import EmulatorFault
from testbed.emulator.memory import owner_of
from testbed.ptx import PtxDevice


@pytest.fixture(
    params=[
        pytest.param(EmulatedDevice, id="emulated"),
        pytest.param(PtxDevice, id="ptx"),
    ]
)
def machine(request):
    return request.param


@pytest.fixture
def device(machine):
    return machine()


SCALARS = """
extern "C" __global__ void scalars(double* out, int a, long long b, float c, double d, unsigned e,
                                   unsigned short h) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = h;
}
"""
SCALAR_VALUES = (
    np.int32(-7),
    np.int64(-(2**40)),
    np.float32(0.1),
    np.float64(0.1),
    np.uint32(2**32 - 1),
    np.uint16(65535),
)


def test_scalars_arrive_as_they_are(device):
    out = device.xp.empty(6, np.float64)
    device.compile(SCALARS).get_function("scalars")((1,), (1,), (out, *SCALAR_VALUES))
    np.testing.assert_array_equal(out, [float(value) for value in SCALAR_VALUES])


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (1, 3, "int 3"),
        (3, 0.5, "float 0.5"),
        (1, True, "bool True"),
        (1, np.int64(3), "a is 4 bytes in the kernel and 8 as given"),
        (3, np.float64(3), "c is 4 bytes in the kernel and 8 as given"),
        (1, np.float32(3), "a is an integer or a pointer in the kernel"),
        (3, np.int32(3), "c is floating in the kernel"),
        (0, np.float64(3), "out is an integer or a pointer in the kernel"),
        (1, None, "NoneType None"),
        (1, np.zeros(3, np.int32), "a is no pointer"),
        (2, "x", "str 'x'"),
    ],
)
def test_arguments_that_cupy_would_pass_wrongly(device, position, value, reason):
    out = device.xp.empty(6, np.float64)
    args = [out, *SCALAR_VALUES]
    args[position] = value
    with pytest.raises(EmulatorFault) as caught:
        device.compile(SCALARS).get_function("scalars")((1,), (1,), args)
    assert caught.value.kind == "argument"
    assert reason in str(caught.value)
    assert (out.view(np.uint8) == 0xFF).all()


def test_number_of_arguments(device):
    with pytest.raises(
        EmulatorFault, match="argument: kernel scalars: 1 arguments for 7 parameters"
    ):
        device.compile(SCALARS).get_function("scalars")((1,), (1,), (device.xp.empty(6, float),))


def test_read_only_array_for_a_parameter_that_is_written(device):
    out = device.xp.zeros(6, float)
    out.flags.writeable = False
    with pytest.raises(EmulatorFault, match="out may be written by the kernel"):
        device.compile(SCALARS).get_function("scalars")((1,), (1,), (out, *SCALAR_VALUES))


ADD = """
extern "C" __global__ void __launch_bounds__(2 * 32, 1) add(const float* x, float* out, int n) {
  __shared__ float pad[1024];
  pad[threadIdx.x] = 1;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    out[i] = x[i] + pad[threadIdx.x];
}
extern "C" __global__ void which(int* out) { out[blockIdx.x] = gridDim.x; }
"""


@pytest.mark.parametrize(
    ("grid", "block", "shared", "reason"),
    [
        ((1,), (65,), 0, "65 threads in a block; at most 64"),
        ((1,), (0,), 0, "block"),
        ((0,), (1,), 0, "grid"),
        ((1, 65536), (1,), 0, "grid"),
        ((1, 1, 1, 1), (1,), 0, "grid"),
        ((1.0,), (1,), 0, "grid"),
        ((1,), (1,), 44 * 1024 + 1, "4096 bytes of static and 45057 of dynamic"),
    ],
)
def test_launches_that_cuda_refuses(machine, grid, block, shared, reason):
    device = machine(max_shared_memory=48 * 1024)
    args = (device.xp.zeros(4, np.float32), device.xp.zeros(4, np.float32), np.int32(4))
    kernel = device.compile(ADD).get_function("add")
    with pytest.raises(EmulatorFault) as caught:
        kernel(grid, block, args, shared)
    assert caught.value.kind == "launch"
    assert reason in str(caught.value)
    kernel((1,), (64,), args, 44 * 1024)


def test_more_shared_memory_than_was_asked_for(device):
    args = (device.xp.zeros(4, np.float32), device.xp.zeros(4, np.float32), np.int32(4))
    kernel = device.compile(ADD).get_function("add")
    with pytest.raises(EmulatorFault, match="the kernel was allowed 45056 of dynamic") as caught:
        kernel((1,), (64,), args, 44 * 1024 + 1)
    assert caught.value.kind == "launch"
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (64,), args, 100_000)


def test_grid_limit(machine):
    def grid_seen(limit):
        device = machine(grid_limit=limit)
        out = device.xp.zeros(5, np.int32)
        device.compile(ADD).get_function("which")((5,), (1,), (out,))
        return out.tolist()

    assert grid_seen(None) == [5, 5, 5, 5, 5]
    assert grid_seen(2) == [2, 2, 0, 0, 0]
    assert grid_seen({"which": 1}) == [1, 0, 0, 0, 0]
    assert grid_seen({"add": 1}) == [5, 5, 5, 5, 5]


def test_only_chosen_blocks(device):
    out = device.xp.zeros(5, np.int32)
    kernel = device.compile(ADD).get_function("which")
    with device.only_blocks([1, -1]):
        kernel((5,), (1,), (out,))
    assert out.tolist() == [0, 5, 0, 0, 5]
    with pytest.raises(IndexError), device.only_blocks([5]):
        kernel((5,), (1,), (out,))


TENSOR_LIST = """
struct Tensors { float* data[3]; long long size[3]; int count; };
extern "C" __global__ void scale(const Tensors list, float by) {
  for (int t = 0; t < list.count; ++t)
    for (long long i = threadIdx.x; i < list.size[t]; i += blockDim.x) list.data[t][i] *= by;
}
"""
TENSORS = np.dtype([("data", np.uint64, 3), ("size", np.int64, 3), ("count", np.int32)], align=True)


def tensor_list(device, arrays, *, write=True):
    packed = np.zeros(1, TENSORS)
    packed["count"] = len(arrays)
    for number, array in enumerate(arrays):
        (packed["data"][0, number],) = device.pointers([array], write=write)
        packed["size"][0, number] = array.size
    return packed


@pytest.mark.parametrize("raw", [False, True])
def test_struct_of_pointers_by_value(device, raw):
    arrays = [device.xp.asarray(np.arange(n, dtype=np.float32)) for n in (5, 70, 1)]
    scale = device.compile(TENSOR_LIST).get_function("scale")
    packed = tensor_list(device, arrays)
    packed = packed.view(f"V{packed.nbytes}") if raw else packed
    scale((1,), (64,), (packed, np.float32(3)))
    for array in arrays:
        np.testing.assert_array_equal(array, np.arange(array.size, dtype=np.float32) * 3)
    assert (device.traffic.read, device.traffic.written) == (76 * 4, 76 * 4)


def test_registered_memory_is_checked_as_a_parameter_is(device):
    scale = device.compile(TENSOR_LIST).get_function("scale")
    array = device.xp.asarray(np.ones(8, np.float32))

    def kind(packed):
        with pytest.raises(EmulatorFault) as caught:
            scale((1,), (1,), (packed, np.float32(3)))
        return caught.value.kind, caught.value.index

    too_long = tensor_list(device, [array])
    too_long["size"][0, 0] = 9
    assert kind(too_long) == ("out-of-bounds", 8)
    assert kind(tensor_list(device, [array], write=False)) == ("read-only", 0)
    assert kind(tensor_list(device, [device.xp.empty(2, np.float32)])) == ("uninitialised", 0)
    other = device.xp.asarray(np.ones(8, np.float32))
    view = tensor_list(device, [other[2:4]])
    view["size"][0, 0] = 3
    assert kind(view) == ("out-of-bounds", 2)


def test_registration_dies_with_the_array(device):
    array = device.xp.asarray(np.ones(1 << 16, np.float32))
    keep = np.ones(1 << 16, np.float32)  # so that the memory cannot be handed out again
    packed = tensor_list(device, [array])
    owner = owner_of(array)
    del array
    scale = device.compile(TENSOR_LIST).get_function("scale")
    scale((1,), (1,), (packed, np.float32(1)))
    del owner
    gc.collect()
    with pytest.raises(EmulatorFault, match="out-of-bounds"):
        scale((1,), (1,), (packed, np.float32(3)))
    assert keep.sum() == keep.size


def test_parameter_block_limit(machine):
    source = """
    struct Large { unsigned char bytes[SIZE]; };
    extern "C" __global__ void take(Large large, unsigned char* out) {
      *out = large.bytes[SIZE - 1];
    }
    """

    def take(size, limit):
        device = machine(parameter_bytes=limit)
        large = np.zeros(1, [("bytes", np.uint8, size)])
        large["bytes"][0, -1] = 77
        out = device.xp.empty(1, np.uint8)
        device.compile(source, (f"-DSIZE={size}",)).get_function("take")((1,), (1,), (large, out))
        return out[0]

    assert take(4088, 4096) == 77
    assert take(8192, 32764) == 77
    with pytest.raises(EmulatorFault, match="4104 bytes of parameters; at most 4096"):
        take(4089, 4096)


def test_struct_of_another_size(machine):
    packed = np.zeros(1, np.dtype([("data", np.uint64, 3), ("size", np.int64, 3)]))
    scale = machine().compile(TENSOR_LIST).get_function("scale")
    with pytest.raises(EmulatorFault, match="list is 56 bytes in the kernel and 48 as given"):
        scale((1,), (1,), (packed, np.float32(3)))


def test_table_of_pointers_on_the_device(device):
    source = """
    struct Entry { const float* data; long long size; };
    extern "C" __global__ void sums(const Entry* entries, float* out) {
      Entry entry = entries[blockIdx.x];
      float sum = 0;
      for (long long i = 0; i < entry.size; ++i) sum += entry.data[i];
      out[blockIdx.x] = sum;
    }"""
    arrays = [device.xp.asarray(np.arange(n, dtype=np.float32)) for n in (3, 5)]
    table = np.array(
        [(device.pointer(a), a.size) for a in arrays], [("data", np.uint64), ("size", np.int64)]
    )
    with device.active():
        entries, out = device.upload(table), device.xp.empty(2, np.float32)
        device.compile(source).get_function("sums")((2,), (1,), (entries, out))
    assert entries.dtype == np.uint8
    np.testing.assert_array_equal(out, [3, 10])


def test_traffic_counts_each_parameter_and_adds_up(device):
    x, out = device.xp.asarray(np.ones(100, np.float32)), device.xp.empty(100, np.float32)
    kernel = device.compile(ADD).get_function("add")
    for _ in range(2):
        kernel((2,), (32,), (x, out, np.int32(100)))
    assert device.traffic.by_array == {("add", "x"): (400, 0), ("add", "out"): (0, 400)}
    assert (device.traffic.read, device.traffic.written, device.traffic.launches) == (400, 400, 1)
    assert (device.total_traffic.read, device.total_traffic.launches) == (800, 2)


def test_portable_fibers_do_the_same():
    def run(device):
        out = device.xp.empty(100, np.float32)
        x = device.xp.asarray(np.arange(100, dtype=np.float32))
        device.compile(ADD).get_function("add")((2,), (32,), (x, out, np.int32(100)))
        with pytest.raises(EmulatorFault, match="out-of-bounds"):
            device.compile(ADD).get_function("add")((2,), (32,), (x, out, np.int32(101)))
        return out

    np.testing.assert_array_equal(run(EmulatedDevice(portable_fibers=True)), run(EmulatedDevice()))

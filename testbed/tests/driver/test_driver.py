"""The driver by its C interface: what a GPU would do, and what it would leave to luck."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_void_p

import numpy as np
import pytest

from testbed.driver import Machine, load
from testbed.driver.library import build, build_cublas
from testbed.nvrtc import cupy_options, kept_ptx

SOURCE = r"""
extern "C" __global__ void add(float* x, float value, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += value;
}
extern "C" __global__ void share(float* x) {
  extern __shared__ float room[];
  room[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
}
"""
N = 40
INVALID, NO_MEMORY, NO_CONTEXT, BAD_HANDLE, ILLEGAL = 1, 2, 201, 400, 700


class Cuda:
    """Calls of the driver, each of which must return ``code``."""

    def __init__(self):
        self.driver = load()
        self.machine = Machine(self.driver, architecture=90)
        self.modules = {}

    def __call__(self, name, *arguments, code=0):
        found = getattr(self.driver.library, name)(*arguments)
        assert found == code, f"{name}: {found}, {self.driver.message()}"

    def made(self, name, *arguments, kind=c_void_p):
        result = kind()
        self(name, byref(result), *arguments)
        return result

    def made_from(self, name, *arguments):
        result = c_void_p()
        self(name, *arguments, byref(result))
        return result

    def device(self, number):
        self("cuCtxSetCurrent", c_void_p(number + 1))

    def kernel(self, name="add", device=0):
        if device not in self.modules:
            options = [o.replace("=sm_", "=compute_") for o in cupy_options((), 80)]
            image = kept_ptx(SOURCE, tuple(options)).encode()
            self.modules[device] = self.made("cuModuleLoadData", image)
        return self.made("cuModuleGetFunction", self.modules[device], name.encode())

    def array(self, values=None):
        address = self.made("cuMemAlloc_v2", c_size_t(4 * N))
        host = np.arange(N, dtype="f4") if values is None else np.asarray(values, "f4")
        self("cuMemcpy", address, c_void_p(host.ctypes.data), c_size_t(4 * N))
        return address

    def values(self, address):
        host = np.empty(N, "f4")
        self("cuMemcpy", c_void_p(host.ctypes.data), address, c_size_t(4 * N))
        return host

    def add(self, x, value=1.0, stream=None, *, n=N, function=None, code=0):
        arguments = c_void_p(x.value), c_float(value), c_int(n)
        addresses = (c_void_p * 3)(*map(ctypes.addressof, arguments))
        sizes = (*(2, 1, 1), *(32, 1, 1), 0)
        function = function or self.kernel()
        self("cuLaunchKernel", function, *sizes, stream, addresses, None, code=code)

    def copy(self, to, source, stream, size=4 * N, code=0):
        self("cuMemcpyAsync", to, source, c_size_t(size), stream, code=code)

    def wait(self, stream):
        self("cuStreamSynchronize", stream)


@pytest.fixture(scope="module")
def made():
    return Cuda()


@pytest.fixture
def cuda(made):
    made.device(0)
    yield made
    for device in (1, 0):
        made.device(device)
        made.driver.library.cuCtxSynchronize()
    assert made.driver.mend() == 0, made.driver.message()
    made.machine.faults.clear()


@pytest.fixture
def streams(cuda):
    """Two that are ordered with nothing."""
    return [cuda.made("cuStreamCreate", 1) for _ in range(2)]


BEFORE = np.arange(N, dtype="f4")


def test_a_launch_computes(cuda):
    x = cuda.array()
    cuda.add(x, 2.5)
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 2.5)


def test_a_thread_has_no_context_until_it_binds_one(cuda):
    x, function = cuda.array(), cuda.kernel()

    def launch_unbound():
        assert cuda.made("cuCtxGetCurrent").value is None
        cuda("cuMemGetInfo_v2", byref(c_size_t()), byref(c_size_t()), code=NO_CONTEXT)
        cuda("cuCtxGetDevice", byref(c_int()), code=NO_CONTEXT)
        cuda.add(x, function=function, code=NO_CONTEXT)
        for device in (1, 0):
            cuda.device(device)
            assert cuda.made("cuCtxGetDevice", kind=c_int).value == device
        cuda.add(x, function=function)
        cuda("cuCtxSetCurrent", None)
        cuda.add(x, function=function, code=NO_CONTEXT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch_unbound).result()
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_an_event_does_not_order_runs_too_early(cuda, streams, ordered):
    first, second = streams
    x, y = cuda.array(), cuda.array()
    cuda.add(x, 1, first)
    event = cuda.made("cuEventCreate", 0)
    cuda("cuEventRecord", event, first)
    cuda.add(x, 10, first)  # behind the event: nobody waits for it
    if ordered:
        cuda("cuStreamWaitEvent", second, event, 0)
    cuda.copy(y, x, second)
    cuda.wait(second)
    np.testing.assert_array_equal(cuda.values(y), BEFORE + (1 if ordered else 0))


@pytest.mark.parametrize("flags", [0, 1])
def test_the_legacy_stream_orders_those_that_block(cuda, flags):
    stream = cuda.made("cuStreamCreate", flags)
    x = cuda.array()
    cuda.add(x, 1, stream)
    np.testing.assert_array_equal(cuda.values(x), BEFORE + (flags == 0))
    cuda.wait(stream)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_from_pinned_memory_reads_it_late(cuda, streams, pinned):
    host = np.ones(N, "f4")
    address = c_void_p(host.ctypes.data)
    if pinned:
        cuda("cuMemHostRegister_v2", address, c_size_t(host.nbytes), 0)
    x = cuda.array()
    cuda.copy(x, address, streams[0])
    host[:] = 2
    cuda.wait(streams[0])
    np.testing.assert_array_equal(cuda.values(x), 2 if pinned else 1)
    if pinned:
        cuda("cuMemHostUnregister", address)


def test_queries_say_what_has_run(cuda, streams):
    x, event = cuda.array(), cuda.made("cuEventCreate", 0)
    cuda.add(x, 1, streams[0])
    cuda("cuEventRecord", event, streams[0])
    cuda("cuEventQuery", event, code=600)
    cuda("cuStreamQuery", streams[0], code=600)
    cuda("cuEventSynchronize", event)
    cuda("cuEventQuery", event)
    cuda("cuStreamQuery", streams[0])


@pytest.mark.parametrize("what", ["beyond", "given back"])
def test_a_kernel_outside_its_memory_breaks_the_device(cuda, what):
    x = cuda.array()
    if what == "given back":
        cuda("cuMemFree_v2", x)
    cuda.add(x, n=N + (what == "beyond"))
    cuda("cuCtxSynchronize", code=ILLEGAL)
    assert "out-of-bounds" in cuda.driver.message()
    cuda("cuCtxSynchronize", code=ILLEGAL)  # until it is mended
    assert cuda.driver.mend() == ILLEGAL


def test_memory_that_was_never_written_is_not_read(cuda):
    x = cuda.made("cuMemAlloc_v2", c_size_t(4 * N))
    cuda.add(x)
    cuda("cuCtxSynchronize", code=ILLEGAL)
    assert "uninitialised" in cuda.driver.message()
    assert cuda.driver.mend() == ILLEGAL
    cuda("cuMemsetD8Async", x, 0, c_size_t(4 * N), None)
    cuda.add(x)
    np.testing.assert_array_equal(cuda.values(x), 1)


def test_something_beside_an_allocation_is_found_when_it_is_given_back(cuda):
    x = cuda.array()
    ctypes.memset(x.value + 4 * N, 1, 1)
    cuda("cuMemFree_v2", x, code=ILLEGAL)
    assert "beside" in cuda.driver.message()
    assert cuda.driver.mend() == ILLEGAL


def test_copies_stay_in_their_allocations(cuda):
    x, y = cuda.array(), cuda.array()
    cuda.copy(y, x, None, 4 * N + 1, code=INVALID)
    cuda.copy(c_void_p(y.value + 4 * N), x, None, 4, code=INVALID)
    cuda("cuMemsetD8Async", c_void_p(x.value - 1), 0, c_size_t(1), None, code=INVALID)
    cuda("cuMemFree_v2", x)
    cuda.copy(y, x, None, code=INVALID)
    cuda("cuMemFree_v2", x, code=INVALID)
    np.testing.assert_array_equal(cuda.values(y), BEFORE)


def test_calls_fail_on_request_and_are_counted(cuda):
    before = cuda.driver.calls("cuMemAlloc_v2")
    cuda.driver.fail("cuMemAlloc_v2", NO_MEMORY, after=2)
    room = c_void_p()
    cuda("cuMemAlloc_v2", byref(room), c_size_t(8))
    cuda("cuMemAlloc_v2", byref(room), c_size_t(8), code=NO_MEMORY)
    cuda("cuMemAlloc_v2", byref(room), c_size_t(8))
    assert cuda.driver.calls("cuMemAlloc_v2") == before + 3
    cuda("cuMemAlloc_v2", byref(room), c_size_t(1 << 50), code=NO_MEMORY)


def test_arguments_are_those_of_the_kernel(cuda):
    x, function = cuda.array(), cuda.kernel()
    sizes = (*(2, 1, 1), *(32, 1, 1), 0, None)
    few = (c_void_p * 3)(ctypes.addressof(x), 0, 0)
    cuda("cuLaunchKernel", function, *sizes, few, None, code=INVALID)
    block = np.zeros(1, [("x", "u8"), ("value", "f4"), ("n", "i4")])
    block[0] = x.value, 1, N
    for size, code in ((12, INVALID), (16, 0), (24, INVALID)):
        length, place = c_size_t(size), c_void_p(block.ctypes.data)
        extra = (c_void_p * 5)(1, place, 2, ctypes.addressof(length), 0)
        cuda("cuLaunchKernel", function, *sizes, None, extra, code=code)
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 1)


class Configuration(ctypes.Structure):
    _fields_ = [
        *(("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p)),
        *(("attributes", c_void_p), ("count", c_uint)),
    ]


def test_launches_by_configuration(cuda):
    x = cuda.array()
    arguments = c_void_p(x.value), c_float(3), c_int(N)
    addresses = (c_void_p * 3)(*map(ctypes.addressof, arguments))
    attribute = np.zeros(18, "i4")
    chosen = Configuration((2, 1, 1), (32, 1, 1), 0, None, attribute.ctypes.data, 1)
    cuda("cuLaunchKernelEx", byref(chosen), cuda.kernel(), addresses, None)
    attribute[0] = 4  # a cluster
    cuda("cuLaunchKernelEx", byref(chosen), cuda.kernel(), addresses, None, code=801)
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 3)


def test_clusters_lie_within_parts_of_the_device(cuda):
    chosen, found = Configuration((1, 1, 1), (256, 1, 1), 0), c_int()
    cuda("cuOccupancyMaxActiveClusters", byref(found), cuda.kernel(), byref(chosen))
    assert found.value == 2 * 8  # of one block each
    cuda("cuOccupancyMaxActiveClusters", byref(found), None, byref(chosen), code=BAD_HANDLE)


WAITING = """
extern "C" __global__ void add(float* x, float value, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x < n) x[threadIdx.x] += value;
}
extern "C" __global__ void add_early(float* x, float value, int n) {
  if (threadIdx.x < n) x[threadIdx.x] += value;
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""


def test_launches_that_may_start_early(cuda, streams):
    x, stream = cuda.array(), streams[0]
    arguments = c_void_p(x.value), c_float(3), c_int(N)
    addresses = (c_void_p * 3)(*map(ctypes.addressof, arguments))
    attribute = np.zeros(18, "i4")
    attribute[[0, 2]] = 6, 1  # programmatic stream serialization
    chosen = Configuration((1, 1, 1), (64, 1, 1), 0, stream, attribute.ctypes.data, 1)
    options = [o.replace("=sm_", "=compute_") for o in cupy_options((), 90)]
    image = kept_ptx(WAITING, tuple(options)).encode()
    module = cuda.made("cuModuleLoadData", image)
    right = cuda.made("cuModuleGetFunction", module, b"add")
    cuda("cuLaunchKernelEx", byref(chosen), right, addresses, None)
    cuda("cuStreamSynchronize", stream)
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 3)

    cuda("cuLaunchKernelEx", byref(chosen), cuda.kernel(), addresses, None, code=INVALID)
    cuda("cuStreamBeginCapture_v2", stream, 1)
    cuda("cuLaunchKernelEx", byref(chosen), right, addresses, None, code=BAD_HANDLE)
    cuda.made_from("cuStreamEndCapture", stream)

    wrong = cuda.made("cuModuleGetFunction", module, b"add_early")
    cuda("cuLaunchKernelEx", byref(chosen), wrong, addresses, None)
    cuda("cuStreamSynchronize", stream, code=ILLEGAL)
    assert "early: read of 4 bytes before griddepcontrol.wait" in cuda.driver.message()
    assert cuda.driver.mend() == ILLEGAL


def test_shared_memory_beyond_the_usual_is_asked_for(cuda):
    x, function = cuda.array(), cuda.kernel("share")
    arguments = (c_void_p * 1)(ctypes.addressof(x))
    sizes = *(1, 1, 1), *(N, 1, 1), 60 << 10, None
    cuda("cuLaunchKernel", function, *sizes, arguments, None, code=INVALID)
    cuda("cuFuncSetAttribute", function, 8, 60 << 10)
    cuda("cuLaunchKernel", function, *sizes, arguments, None)
    np.testing.assert_array_equal(cuda.values(x), BEFORE[::-1])


CLUSTERS = """
extern "C" __global__ void __cluster_dims__(2) exchange(float* x) {
  __shared__ float given[32];
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  const int rank = __clusterRelativeBlockRank();
  float* const there = static_cast<float*>(__cluster_map_shared_rank(given, 1 - rank));
  there[threadIdx.x] = x[blockDim.x * blockIdx.x + threadIdx.x];
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  x[blockDim.x * blockIdx.x + threadIdx.x] = given[threadIdx.x];
}
"""


def test_clusters_of_blocks(cuda):
    options = [o.replace("=sm_", "=compute_") for o in cupy_options((), 90)]
    module = cuda.made("cuModuleLoadData", kept_ptx(CLUSTERS, tuple(options)).encode())
    function, x = cuda.made("cuModuleGetFunction", module, b"exchange"), cuda.array()
    arguments = (c_void_p * 1)(ctypes.addressof(x))
    block = *(16, 1, 1), 0, None
    cuda("cuLaunchKernel", function, *(3, 1, 1), *block, arguments, None, code=912)
    cuda("cuLaunchKernel", function, *(2, 1, 1), *block, arguments, None)
    expected = np.concatenate([BEFORE[16:32], BEFORE[:16], BEFORE[32:]])
    np.testing.assert_array_equal(cuda.values(x), expected)


# Graphs


def test_a_graph_replays_on_what_is_there_then(cuda, streams):
    x = cuda.array()
    cuda("cuStreamBeginCapture_v2", streams[0], 0)
    cuda.add(x, 1, streams[0])
    graph = cuda.made_from("cuStreamEndCapture", streams[0])
    np.testing.assert_array_equal(cuda.values(x), BEFORE)  # nothing ran
    executable = cuda.made("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    cuda("cuGraphDestroy", graph)
    for _ in range(3):
        cuda("cuGraphLaunch", executable, streams[0])
    cuda.wait(streams[0])
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 3)
    cuda("cuMemFree_v2", x)
    cuda("cuGraphLaunch", executable, streams[0])
    cuda("cuStreamSynchronize", streams[0], code=ILLEGAL)
    assert cuda.driver.mend() == ILLEGAL


@pytest.mark.parametrize("joined", [True, False])
def test_a_fork_joins_its_capture_again(cuda, streams, joined):
    first, second = streams
    x, y = cuda.array(), cuda.array()
    forked, done = (cuda.made("cuEventCreate", 2) for _ in range(2))
    cuda("cuStreamBeginCapture_v2", first, 2)
    cuda.add(x, 1, first)
    cuda("cuEventRecord", forked, first)
    cuda("cuStreamWaitEvent", second, forked, 0)
    cuda.copy(y, x, second)
    cuda("cuEventRecord", done, second)
    if not joined:
        cuda("cuStreamEndCapture", first, byref(c_void_p()), code=904)
        return
    cuda("cuStreamWaitEvent", first, done, 0)
    cuda.add(x, 1, first)
    graph = cuda.made_from("cuStreamEndCapture", first)
    executable = cuda.made("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    cuda("cuGraphLaunch", executable, first)
    cuda.wait(first)
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 2)
    np.testing.assert_array_equal(cuda.values(y), BEFORE + 1)


def test_what_a_capture_forbids_ends_it(cuda, streams):
    blocking = cuda.made("cuStreamCreate", 0)
    x, room = cuda.array(), c_void_p()
    event = cuda.made("cuEventCreate", 2)
    cuda("cuEventRecord", event, None)
    forbidden = {
        "an allocation": (lambda: cuda("cuMemAlloc_v2", byref(room), c_size_t(8), code=900)),
        "waiting": (lambda: cuda("cuStreamSynchronize", blocking, code=900)),
        "asking": (lambda: cuda("cuStreamQuery", blocking, code=900)),
        "the legacy stream": (lambda: cuda.add(x, code=906)),
        "what is not captured": (lambda: cuda("cuStreamWaitEvent", blocking, event, 0, code=905)),
    }
    for attempt in forbidden.values():
        cuda("cuStreamBeginCapture_v2", blocking, 0)
        attempt()
        cuda.add(x, 1, blocking, code=901)
        cuda("cuStreamEndCapture", blocking, byref(c_void_p()), code=901)
    cuda("cuStreamBeginCapture_v2", blocking, 0)
    cuda("cuStreamIsCapturing", None, byref(ctypes.c_int()), code=906)
    cuda.made_from("cuStreamEndCapture", blocking)  # which that did not end
    cuda("cuStreamBeginCapture_v2", streams[0], 2)  # relaxed, and it blocks nothing
    cuda("cuMemAlloc_v2", byref(room), c_size_t(8))
    cuda.add(x)
    cuda.made_from("cuStreamEndCapture", streams[0])
    cuda("cuStreamBeginCapture_v2", None, 2, code=900)


# Devices


def test_memory_of_another_device_needs_peer_access(cuda):
    x = cuda.array()
    cuda.device(1)
    function, own = cuda.kernel(device=1), cuda.array()
    cuda.add(own, 1, function=function)
    np.testing.assert_array_equal(cuda.values(own), BEFORE + 1)
    cuda.add(x, 1, function=function)
    cuda("cuCtxSynchronize", code=ILLEGAL)
    assert cuda.driver.mend() == ILLEGAL
    cuda("cuCtxEnablePeerAccess", c_void_p(1), 0)
    cuda("cuCtxEnablePeerAccess", c_void_p(1), 0, code=704)
    cuda.add(x, 1, function=function)
    cuda("cuCtxSynchronize")
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 1)


def test_copies_between_devices_name_the_right_ones(cuda):
    x = cuda.array()
    cuda.device(1)
    y = cuda.array()
    zero, one, size = c_void_p(1), c_void_p(2), c_size_t(4 * N)
    cuda("cuMemcpyPeerAsync", x, zero, y, zero, size, None, code=INVALID)
    cuda.add(y, 1, function=cuda.kernel(device=1))
    cuda("cuMemcpyPeerAsync", x, zero, y, one, size, None)
    cuda("cuCtxSynchronize")
    np.testing.assert_array_equal(cuda.values(x), BEFORE + 1)


def test_a_stream_an_event_and_a_function_are_of_one_device(cuda, streams):
    x, function, event = cuda.array(), cuda.kernel(), cuda.made("cuEventCreate", 0)
    cuda.device(1)
    cuda.add(x, 1, None, function=function, code=BAD_HANDLE)
    cuda("cuEventRecord", event, None, code=BAD_HANDLE)
    cuda.device(0)
    cuda("cuEventRecord", event, streams[0])


def test_a_thread_waits_for_what_another_runs(cuda):
    arrays = [cuda.array() for _ in range(4)]
    found = [None] * 4

    def work(k):
        cuda.device(0)
        for _ in range(5):
            cuda.add(arrays[k], k)
            cuda("cuCtxSynchronize")
        found[k] = cuda.values(arrays[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found, [BEFORE + 5 * k for k in range(4)])


def test_products_of_matrices_in_the_order_of_a_stream(cuda, streams, capfd):
    blas = ctypes.CDLL(str(build_cublas({"cublasGemmEx", "cublasZher2k"}, build())))
    handle, one, zero = c_void_p(), byref(c_float(1)), byref(c_float(0))
    assert blas.cublasCreate_v2(byref(handle)) == 0
    assert blas.cublasSetStream_v2(handle, streams[0]) == 0
    a, c = cuda.array(), cuda.array()
    cuda.add(a, 1, streams[0])
    shape = (c_int(size) for size in (5, 4, 8))  # by columns: c is 5 by 4, a 5 by 8, b 8 by 4
    types, common = c_int(0), (0, 0, *shape, one)
    operands = a, types, 5, a, types, 8, zero, c, types
    assert blas.cublasGemmEx(handle, *common, *operands, 6, 0, 0) == 15  # with gaps
    assert blas.cublasGemmEx(handle, *common, *operands, 5, 0, 0) == 0
    cuda("cuStreamSynchronize", streams[0])
    x = BEFORE[:N] + 1
    expected = x.reshape(8, 5).T @ x[:32].reshape(4, 8).T
    np.testing.assert_array_equal(cuda.values(c)[:20].reshape(4, 5).T, expected)
    assert blas.cublasZher2k() == 15
    assert capfd.readouterr().err == "testbed.driver has no cublasZher2k\n"


def test_what_is_not_there_is_not_found(cuda):
    place = c_void_p()
    for name, code in ((b"cuMemAlloc", 0), (b"cuLaunchKernel", 0), (b"cuTexRefCreate", 500)):
        cuda("cuGetProcAddress", name, byref(place), 12000, ctypes.c_uint64(0), code=code)
        assert bool(place.value) == (code == 0)
    cuda("cuModuleLoadData", byref(place), b"\x7fELF", code=200)
    cuda.kernel()
    cuda("cuModuleGetFunction", byref(place), cuda.modules[0], b"none", code=500)

"""Use of CuPy by ``CupyDevice``: streams, captures, uploads, devices.

The driver is faked, so no GPU is needed. Each test runs on a stand-in for CuPy, and on CuPy itself
if it is installed, which shows that the stand-in has nothing that CuPy lacks.
"""

import importlib.util
import inspect
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit import _host, distributed
from gradkit._arrays import backend_of, cuda
from gradkit._cuda.launch.device import CupyDevice, keep_if_captured, scratch, workspace
from gradkit._cuda.launch.kernels import LoadedKernel
from gradkit._cuda.several_devices import carry
from gradkit._dtypes import dtype_named
from gradkit._ranks import device as groups_device
from gradkit._ranks.nccl import _NCCL_FLOAT64, _is_a
from gradkit.errors import KernelError
from tests.devices.idle_cupy import idle_cupy

pytestmark = pytest.mark.cuda

PER_THREAD = 2  # CUDA's handle of the per-thread default stream
ROOM = np.zeros(1 << 12, np.uint8)  # the memory of every array that is allocated

needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="cupy is not installed"
)


class Stream:
    """A stream that may be captured; the legacy default one, handle 0, may not be asked."""

    def __init__(self, ptr, *, capturing=False):
        self.ptr, self.capturing = ptr, capturing

    def is_capturing(self):
        assert self.ptr, "cudaErrorStreamCaptureImplicit"
        return self.capturing


class Driver:
    """State of the driver: the current device and the current stream."""

    device, stream = 0, Stream(0)
    version, compiler = 13000, (12, 9)


class Current:
    """A device that is current inside a ``with``."""

    def __init__(self, driver, number):
        self.driver, self.number = driver, number
        self.attributes = {"MultiProcessorCount": 108, "MaxSharedMemoryPerBlockOptin": 232448}
        self.compute_capability = f"{7 + number}0"

    def __enter__(self):
        self.before, self.driver.device = self.driver.device, self.number

    def __exit__(self, *_):
        self.driver.device = self.before


def stand_in():
    """A module with as much of CuPy as ``CupyDevice`` touches."""
    cupy = SimpleNamespace(asarray=np.array, ndarray=np.ndarray)
    cupy.RawModule = lambda *, code, options: SimpleNamespace(code=code, options=options)
    cupy.cuda = SimpleNamespace(
        driver=SimpleNamespace(CUDADriverError=KeyError),
        runtime=SimpleNamespace(CUDARuntimeError=OSError),
        nvrtc=SimpleNamespace(),
        alloc=None,
    )
    return cupy


@pytest.fixture(params=["stand-in", pytest.param("CuPy", marks=needs_cupy)])
def cupy(request, monkeypatch):
    """A stand-in or CuPy itself, with ``driver`` in the driver's place."""
    own = request.param == "CuPy"
    cupy = importlib.import_module("cupy") if own else stand_in()
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for module, name, answer in (
        (cupy, "driver", driver),
        (cupy.cuda, "Device", lambda number: Current(driver, number)),
        (cupy.cuda, "get_current_stream", lambda: driver.stream),
        (cupy.cuda.runtime, "getDevice", lambda: driver.device),
        (cupy.cuda.runtime, "setDevice", lambda _: None),
        (cupy.cuda.runtime, "driverGetVersion", lambda: driver.version),
        (cupy.cuda.nvrtc, "getVersion", lambda: driver.compiler),
    ):
        monkeypatch.setattr(module, name, answer, raising=False)
    if not own:
        yield cupy
        return
    with cupy.cuda.using_allocator(lambda size: cuda.pointer_of(ROOM, ROOM.ctypes.data, size, 0)):
        yield cupy


def in_another_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_what_it_knows_of_its_gpu(cupy):
    device = CupyDevice(3)
    assert (device.number, device.multiprocessors, device.max_shared_memory) == (3, 108, 232448)
    assert device.sharing == 132  # on every GPU
    errors = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)
    assert device.launch_errors == errors
    assert all(issubclass(error, Exception) for error in errors)
    assert [CupyDevice(number).clusters for number in (0, 1, 2, 3)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("driver", "compiler", "limit"),
    [
        (12010, (12, 1), 32764),
        (12000, (12, 1), 4096),
        (13000, (12, 0), 4096),
        (13000, (11, 8), 4096),
        (13000, (13, 0), 32764),
    ],
)
def test_a_launch_has_32_kib_of_parameters_since_cuda_12_1(cupy, driver, compiler, limit):
    cupy.driver.version, cupy.driver.compiler = driver, compiler
    assert CupyDevice(0).parameter_bytes == limit


def test_each_stream_has_a_key_of_its_own(cupy):
    device, keys = CupyDevice(0), set()
    for ptr in (0, 1, 7 << 40, 7 << 40):
        cupy.driver.stream = Stream(ptr)
        keys.add(device.stream)
        assert device.cuda_stream() == ptr
        assert in_another_thread(lambda: device.stream) == device.stream
    assert len(keys) == 3


def test_the_per_thread_stream_is_another_in_each_thread(cupy):
    device, cupy.driver.stream = CupyDevice(0), Stream(PER_THREAD)
    assert device.stream == device.stream
    assert in_another_thread(lambda: device.stream) != device.stream


def test_a_capture_is_noticed_when_it_begins_and_when_it_ends(cupy):
    device = CupyDevice(0)
    assert device.capturing() is False  # without asking the legacy stream
    cupy.driver.stream = Stream(5)
    for capturing in (False, True, False):
        cupy.driver.stream.capturing = capturing
        assert device.capturing() is capturing


def test_memory_of_a_captured_call_is_kept(cupy, monkeypatch):
    kept = []
    monkeypatch.setattr("gradkit._cuda.launch.device._recorded", kept)
    device, cupy.driver.stream = CupyDevice(0), Stream(5)
    scratch(device, 3, np.float32)
    assert not kept
    cupy.driver.stream.capturing = True
    made = scratch(device, 3, np.float32)
    assert (made.shape, made.dtype) == ((3,), np.float32)
    assert keep_if_captured(device, made) is made
    assert [id(array) for array in kept] == [id(made)] * 2


def test_workspace_holds_what_was_asked_for_and_is_kept_for_a_graph(cupy, monkeypatch):
    kept, asked = [], []
    monkeypatch.setattr("gradkit._cuda.launch.device._recorded", kept)
    monkeypatch.setattr(
        cupy.cuda, "alloc", lambda size: asked.append(size) or [size], raising=False
    )
    device, cupy.driver.stream = CupyDevice(0), Stream(5)
    workspace(device, (2, 3), np.dtype(np.float64))
    assert (asked, kept) == ([48], [])
    cupy.driver.stream.capturing = True
    made = workspace(device, (5,), np.dtype(np.float32))
    assert asked == [48, 20]
    assert [id(memory) for memory in kept] == [id(made)]


def test_an_upload_is_a_copy_of_the_bytes_without_gaps(cupy, monkeypatch):
    monkeypatch.setattr(cupy, "asarray", np.array)  # CuPy's asks the driver
    host = np.arange(24, dtype=np.int64).reshape(4, 6)[::2, ::3]
    found = CupyDevice(0).upload(host)
    assert (found.dtype, found.shape) == (np.uint8, (32,))
    np.testing.assert_array_equal(found.view(np.int64), [0, 3, 12, 15])
    assert not np.shares_memory(found, host)
    table = np.zeros(2, [("a", "u8"), ("b", "u4")])
    assert CupyDevice(0).upload(table).nbytes == table.nbytes


@pytest.mark.usefixtures("cupy")
def test_macros_are_lines_of_the_text():
    """CuPy compiles an empty file for each new set of options, which takes tens of milliseconds."""
    module = CupyDevice(0).compile("source", ("-std=c++17", "-DA=1", "-DB=long long")).module
    lines = ["#define A 1", "#define B long long", "#line 1", "source"]
    assert (module.code, module.options) == ("\n".join(lines), ("-std=c++17",))


def test_the_driver_knows_how_many_blocks_are_resident(cupy, monkeypatch):
    asked = []

    def occupancy(*args):
        asked.append(args)
        return np.int32(len(asked))

    name = "occupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(cupy.cuda.driver, name, occupancy, raising=False)
    device, compiled = CupyDevice(0), SimpleNamespace(address=77)
    assert device.resident(compiled, 256, 1024) == 1
    assert asked == [(77, 256, 1024)]
    loaded = LoadedKernel(device, "name", compiled)
    assert loaded.resident(512, 100_000) == 2
    assert compiled.max_dynamic_shared_size_bytes == 100_000  # the driver counts no more than that
    monkeypatch.setattr(cupy.cuda.driver, name, lambda *_: 0)
    assert loaded.resident(1024) == 1


def test_a_driver_that_cannot_say_is_a_failed_launch(cupy, monkeypatch):
    def refuse(*_):
        raise OSError("no")

    device, compiled = CupyDevice(0), SimpleNamespace(address=77)
    device.launch_errors = (OSError,)
    name = "occupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(cupy.cuda.driver, name, refuse, raising=False)
    with pytest.raises(KernelError, match=r"kernel sums on blocks of 64 threads .*: no"):
        LoadedKernel(device, "sums", compiled).resident(64)


def test_another_device_is_made_current_and_the_same_one_is_not(cupy):
    device = CupyDevice(1)
    with device.active():
        assert cupy.driver.device == 1
        with device.active() as nothing:
            assert nothing is None
        assert cupy.driver.device == 1
    assert cupy.driver.device == 0


@pytest.mark.usefixtures("cupy")
def test_addresses():
    arrays = [SimpleNamespace(data=SimpleNamespace(ptr=np.uint64(16 * k))) for k in (5, 3)]
    assert CupyDevice(0).pointers(arrays, write=True) == (80, 48)
    address = CupyDevice(0).pointer(arrays[0])
    assert (type(address), address) == (int, 80)


class OrderedStream(Stream):
    """A stream that says what is queued on it, and nothing else: the host cannot wait for it."""

    def __init__(self, ptr, log):
        super().__init__(ptr)
        self.log = log

    def record(self):
        self.log.append(f"event of {self.ptr}")
        return f"event of {self.ptr}"

    def wait_event(self, event):
        self.log.append(f"{self.ptr} waits for {event}")


def test_a_copy_between_devices_is_ordered_on_both_by_events(cupy, monkeypatch):
    """The source is written before, and its memory used again after; the host waits for neither."""
    log = []
    streams = {0: OrderedStream(50, log), 3: OrderedStream(53, log)}
    current = lambda: streams[cupy.driver.device]  # noqa: E731
    monkeypatch.setattr(cupy.cuda, "get_current_stream", current)
    copy = lambda *numbers: log.append(numbers)  # noqa: E731
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyPeerAsync", copy, raising=False)
    sources, targets = (
        [SimpleNamespace(data=SimpleNamespace(ptr=p), nbytes=n) for p, n in ((at, 8), (at + 8, 24))]
        for at in (1024, 4096)
    )
    carry(CupyDevice(3), sources, CupyDevice(0), targets)
    assert log == [
        "event of 53",
        "50 waits for event of 53",
        (4096, 0, 1024, 3, 8, 50),
        (4104, 0, 1032, 3, 24, 50),
        "event of 50",
        "53 waits for event of 50",
    ]
    assert cupy.driver.device == 0


# Lists of CuPy arrays


class Array:
    """As much of a CuPy array as a list is made of: a NumPy array's properties."""

    def __init__(self, host, device=1):
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=device)
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self.size, self._c_contiguous = host.size, host.flags.c_contiguous


if _host.code is not None:
    _host.code.use_device_arrays(Array)
needs_compiled = pytest.mark.skipif(_host.code is None, reason="nothing is compiled")


def tabled(*hosts):
    """A table of arrays that are written, or ``None``."""
    arrays = [Array(host) for host in hosts]
    table = _host.code.table({"of": arrays}, True)
    if table is not None:
        assert (list(table), table.arrays, table.device) == (arrays, arrays, 1)
        assert table.addresses == tuple(host.ctypes.data for host in hosts)
    return table


@needs_compiled
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_that_share_no_memory_are_a_table(dtype):
    room = np.zeros(20, dtype_named(dtype))
    assert tabled(room[10:16].reshape(2, 3), room[:10], room[16:20].reshape(4, 1))
    assert tabled(room, np.zeros(3, np.float64))
    assert not tabled(room[:11], np.zeros(3, np.float32), room[10:])
    assert not tabled(room, room)
    assert not tabled(room[:10], room[3:5])
    assert not tabled(np.broadcast_to(room[:1], 4))


@needs_compiled
@pytest.mark.parametrize("lay", [lambda a: a[:, ::2], lambda a: a[::-1], np.transpose])
def test_arrays_with_gaps_are_a_table(lay):
    assert tabled(np.zeros(3), lay(np.zeros((3, 4))))


@needs_compiled
def test_pairs_have_one_shape_though_contiguous_arrays_are_known_by_their_size():
    room, whole = np.zeros((4, 6), np.float32), np.zeros((2, 3), np.float32)

    def pairs(own, other):
        tables = [_host.code.table([Array(host)], False) for host in (own, other)]
        return tables[0].pairs_with(tables[1])

    alike = 1 << (4 * 2 + 2)  # float32, twice
    assert pairs(whole, whole.copy()) == pairs(whole, room[::2, ::2]) == alike
    assert pairs(room[::2, ::2], room[1:3, :3]) == pairs(room[::2, ::2], whole) == alike
    for other in (whole.T.copy(), whole.reshape(6), whole[None], room[::2, 1:3].T[:, :2], room.T):
        assert pairs(whole, other) == pairs(other, whole) == -1


@needs_compiled
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, ">f4"])
def test_a_list_with_another_dtype_is_looked_at_one_by_one(dtype):
    assert not tabled(np.zeros(2), np.zeros(2, dtype))


@needs_compiled
def test_arrays_of_two_devices_or_libraries_are_no_table():
    first, second = Array(np.zeros(2)), Array(np.zeros(2), device=0)
    assert _host.code.table([first, second], False) is None
    assert _host.code.table([first, np.zeros(2)], False) is None
    assert _host.code.table([np.zeros(2), first], False) is None


@needs_compiled
def test_lists_that_come_again_are_known_by_all_that_they_are():
    room = np.zeros(24, np.float32)
    like = {"address": room[1:13], "shape": room[:12].reshape(3, 4), "strides": room[::2]}
    like |= {"dtype": room[:6].view(np.float64), "length": room[:11], "itself": room[:12]}

    def known(host, device=1):
        return _host.code.table([Array(host, device)], False).known

    first = known(room[:12])
    # Of arrays without gaps shapes decide nothing.
    same = {name for name, host in like.items() if known(host) is first}
    assert same == {"itself", "shape"}
    assert known(room[:12], device=0) is not first
    assert known(room[:12]) is first
    for k in range(64):  # as many as are kept
        known(room[: k % 8 + 1], device=k)
    assert known(room[:12]) is not first


@needs_cupy
def test_what_cupy_arrays_may_not_be_is_named():
    with idle_cupy() as make:
        grads = [make(np.ones(3, np.float32)) for _ in range(3)]
        gradkit.zero_grad(grads)
        with pytest.raises(TypeError, match=r"grads\[3\] has dtype .*int32"):
            gradkit.grad_norm([*grads, make(np.ones(3, np.int32))])
        with pytest.raises(ValueError, match=r"grads\[1\] and grads\[3\] share memory"):
            gradkit.zero_grad([*grads, grads[1][1:]])


@needs_cupy
@pytest.mark.parametrize("kind", ["cupy", "cupyx", "nccl4py"])
@pytest.mark.parametrize("per", [1, 4])
def test_cupys_arrays_meet_those_of_other_ranks(monkeypatch, kind, per):
    """Nothing is launched; what a communicator is given lies where CuPy's arrays do."""
    given = []

    class Communicator:
        """Any of them."""

        __module__ = {"cupy": "cupy_backends.nccl", "cupyx": "cupyx._comm"}.get(kind, "nccl.core")
        rank, nranks, device = 0, 2, SimpleNamespace(device_id=0)

        def __init__(self):
            self._comm = self

        def device_id(self):
            return 0

        def rank_id(self):
            return 0

        def size(self):
            return 2

        def allGather(self, *numbers):  # noqa: N802
            given.append(numbers[:4])

        def all_gather(self, state, rows, count):
            assert (rows.shape, state.flags.c_contiguous) == ((2, 6), True)
            given.append((state.data.ptr, rows.data.ptr, count, _NCCL_FLOAT64))

        def allgather(self, state, rows, *, stream):  # noqa: ARG002
            self.all_gather(state, rows, state.size)

    names = {"cupy": "NcclCommunicator", "cupyx": "NCCLBackend", "nccl4py": "Communicator"}
    Communicator.__name__ = names[kind]
    with idle_cupy() as make:
        backend = backend_of(make(np.zeros(1)))
        monkeypatch.setattr(groups_device, "backend_on", lambda _: backend)
        monkeypatch.setattr(groups_device.DeviceRanks, "_zeros", lambda *_: make(np.zeros(2)))
        join = distributed.from_cupyx if kind == "cupyx" else distributed.from_nccl
        group = join(Communicator())
        grads = [make(np.ones(3, np.float32)) for _ in range(per)]
        limit, scale = make(np.array(1.0)), make(np.array(0.5, np.float64))
        _, norm = gradkit.clip_by_global_norm(grads, limit, scale=scale, group=group)
        assert (type(norm), norm.shape) == (type(grads[0]), ())
    assert [numbers[2:] for numbers in given] == [(6, _NCCL_FLOAT64)]


# On CuPy itself


@pytest.fixture
def installed():
    return pytest.importorskip("cupy")


def test_memory_of_another_library_becomes_a_cupy_array(installed):
    owner = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = cuda.borrow(owner, owner.ctypes.data, 2, (3, 2), (16, 8), np.dtype(np.float32))
    assert isinstance(view, installed.ndarray)
    assert (view.shape, view.strides, view.dtype) == ((3, 2), (16, 8), np.float32)
    assert (view.data.ptr, view.data.device_id) == (owner.ctypes.data, 2)
    assert view.data.mem._owner is owner
    assert view.data.mem.size == 4 + 2 * 16 + 8


def test_an_allocator_serves_one_thread_until_its_block_ends(installed):
    before, asked = installed.cuda.get_allocator(), []

    def allocate(size):
        asked.append(size)
        return cuda.pointer_of(ROOM, ROOM.ctypes.data, size, 0)

    with installed.cuda.using_allocator(allocate):
        made = installed.empty((3, 5), np.float64)
        assert in_another_thread(installed.cuda.get_allocator) == before
    assert asked == [120]
    assert made.data.mem._owner is ROOM
    assert installed.cuda.get_allocator() == before


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("address", [0, PER_THREAD, 77 << 40])
def test_a_stream_of_another_library_becomes_cupys(address):
    assert cuda._external(address, 0).ptr == address


# What gradkit asks of CuPy, as it is called: (function, positional arguments, keywords).
ASKED = [
    ("RawModule", 0, ("code", "options")),
    ("asarray", 2, ()),
    ("asnumpy", 1, ()),
    ("broadcast_to", 2, ()),
    ("cuda.Device", 1, ()),
    ("cuda.Memory", 1, ()),
    ("cuda.MemoryPointer", 2, ()),
    ("cuda.Stream.is_capturing", 1, ()),
    ("cuda.Stream.record", 1, ()),
    ("cuda.Stream.synchronize", 1, ()),
    ("cuda.Stream.wait_event", 2, ()),
    ("cuda.UnownedMemory", 4, ()),
    ("cuda.alloc", 1, ()),
    ("cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor", 3, ()),
    ("cuda.get_current_stream", 0, ()),
    ("cuda.runtime.deviceSynchronize", 0, ()),
    ("cuda.runtime.getDevice", 0, ()),
    ("cuda.runtime.memcpyPeerAsync", 6, ()),
    ("cuda.runtime.setDevice", 1, ()),
    ("cuda.using_allocator", 1, ()),
    ("empty", 1, ()),
    ("from_dlpack", 1, ()),
    ("full", 3, ()),
    ("ndarray", 2, ()),
]


@pytest.mark.parametrize(("name", "positional", "keywords"), ASKED, ids=[row[0] for row in ASKED])
def test_cupy_takes_what_it_is_asked(installed, name, positional, keywords):
    function = installed
    for part in name.split("."):
        function = getattr(function, part)
    signature_of(function).bind(*[None] * positional, **dict.fromkeys(keywords))


@pytest.mark.filterwarnings(r"ignore:\s*nccl library could not be loaded")
def test_cupyx_takes_what_it_is_asked(installed):  # noqa: ARG001
    from cupyx.distributed import NCCLBackend

    inspect.signature(NCCLBackend.all_gather).bind(*[None] * 4)
    inside = NCCLBackend.__init__.__globals__
    assert _is_a(NCCLBackend.__new__(NCCLBackend), "cupyx", "NCCLBackend")
    if inside["nccl"].available:
        communicator = inside["nccl"].NcclCommunicator
        assert communicator.__module__.partition(".")[0] == "cupy_backends"
        assert inside["nccl"].NCCL_FLOAT64 == _NCCL_FLOAT64


def test_a_device_tells_its_attributes(installed):
    assert hasattr(installed.cuda.Device, "attributes")
    assert hasattr(installed.cuda.Device, "__exit__")


def test_a_kernel_tells_where_the_driver_has_it(installed):
    assert hasattr(installed.RawKernel, "kernel")
    assert hasattr(installed.cuda.function.Function, "ptr")


def signature_of(function):
    """A function's signature, of compiled code from the first line of its text."""
    try:
        return inspect.signature(function)
    except ValueError:
        line = function.__doc__.strip().splitlines()[0]
    inner = re.match(r"\w+(?:\.\w+)*\((.*?)\)( ->|$|\s)", line)[1]
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for text in filter(None, inner.split(", ")):
        if text == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        declared, has_default, _ = text.partition("=")
        default = None if has_default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(declared.split()[-1], kind, default=default))
    return inspect.Signature(parameters)

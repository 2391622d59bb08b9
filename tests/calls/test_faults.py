"""Faults of the host, provoked: one typed error or the stated fallback, never a wrong answer.

docs/guarantees.md lists them all, with those that are tested beside what they concern.
"""

import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._cuda import CudaBackend, list_tables
from gradkit._cuda.launch.kernels import kernel
from gradkit._numpy import lists
from gradkit._open import dispatch
from testbed.emulator import EmulatedDevice
from testbed.emulator.device import ArrayNamespace
from tests.backends import BACKENDS, has_gpu
from tests.bad_input.arguments import Factory, good
from tests.devices.emulated import on_device
from tests.operations import OPERATIONS
from tests.tolerances import DTYPES, assert_same_bits

ROOT = Path(__file__).parents[2]
PACKAGE = str(Path(gradkit.__file__).parent)
IN_PLACE = [name for name, operation in OPERATIONS.items() if operation.writes]


def run(*scripts, **environment):
    """Run scripts, one after the other, in a process of their own and return what they print."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(map(textwrap.dedent, scripts))],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# An interrupted call


class Interrupt:
    """Sends SIGINT at one of the lines of gradkit that the main thread runs through.

    Not at a ``with``: tracing sees a line between a block and its ``__exit__``, where Python
    takes no signals.
    """

    def __init__(self, line):
        self.left = line
        self.where = None

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, _):  # noqa: ARG002
        return self._step if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _step(self, frame, event, _):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_qualname}: {line}"
                signal.raise_signal(signal.SIGINT)
        return self._step


@pytest.fixture(autouse=True)
def listening():
    """Python's own answer to Ctrl-C: a job in the background is started deaf to it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def alike(monkeypatch):
    """Calls of as many lines: where memory comes back, the plan of its list would be found."""
    for cache in (list_tables._plans, list_tables._cuts):
        monkeypatch.setattr(cache, "find", lambda _: None)


def check_interrupts(function, arguments_of, backend, first=False, every=1):
    """Interrupt a call at each line in turn; before one of them it had written. How many there are.

    ``first``: each is the first of its kind; otherwise none is, since that takes more lines.
    ``every``: one of so many lines; what is written in parts takes many.
    """

    def make_arguments():
        a = Factory(backend)
        return a, arguments_of(a)

    call = getattr(gradkit, function)
    for _ in range(3):  # the second still checks numbers that the third finds checked
        a, arguments = make_arguments()
        before = a.memory()
        call(**arguments)
    settled, after, wrote, line = arguments, a.memory(), 0, 0
    while True:
        line += every
        call(**settled)  # so that no call takes other lines because the one before it was cut short
        a, arguments = make_arguments()
        if first:
            dispatch._plans.clear()
        try:
            with Interrupt(line) as interrupt:
                call(**arguments)
        except KeyboardInterrupt:
            pass
        else:
            assert interrupt.where is None, f"the interrupt at {interrupt.where} was lost"
            assert wrote or every > 1  # at the last lines alone
            assert wrote < (line - every) // every
            return line - every
        assert a.memory() in (before, after), f"written in part: interrupted at {interrupt.where}"
        wrote += a.memory() == after


@pytest.mark.guarantee("Ctrl-C")
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name == "clip_grad_adaptive" else ()
        )  # five launches
        for name in IN_PLACE
    ],
)
@pytest.mark.usefixtures("alike")
def test_an_interrupted_call_has_written_all_or_nothing(backend, function):
    """Ctrl-C at every line, or every other; between the norm and the scaling among them."""
    every = 1 if backend.on_host else 2
    assert check_interrupts(function, partial(good, function), backend, every=every) > 20


@pytest.mark.guarantee("Ctrl-C")
@pytest.mark.parametrize("function", ["accumulate_grad", "accumulate_grad_v2"])
@pytest.mark.usefixtures("alike")
def test_a_first_call_is_interrupted_before_all_or_after(backend, function):
    """The first call decides the plan of those that follow."""
    assert check_interrupts(function, partial(good, function), backend, first=True) > 50


def rare_sums(a, dtype, **how):
    """In one buffer with gaps too, which compiled code rounds at random in a copy."""
    buffers = [a(np.arange(1, 7).astype(dtype))[::2], a(np.arange(1, 6).astype(dtype))]
    grads = [a(np.full(n, 0.3, dtype)) for n in (3, 5)]
    return {"buffers": buffers, "grads": grads, "scale": 0.7, **how}


# Ways to write in place that other code takes: functions, and arguments of a factory's arrays.
RARE = {
    "clip of some, others only scaled": (
        "clip_grad_norm",
        lambda a: good("clip_grad_norm", a) | {"clip": [True, False], "scale": 0.5},
    ),
    "step that an array counts": (
        "adamw_update",
        lambda a: good("adamw_update", a) | {"step": a(np.array(3))},
    ),
    "compensated": (
        "accumulate_grads",
        lambda a: rare_sums(a, "f4", compensation=[a(np.zeros(3, "f4")), a(np.zeros(5, "f4"))]),
    ),
    "overwritten": ("accumulate_grads", lambda a: rare_sums(a, "f4", overwrite=True)),
    "rounded at random": (
        "accumulate_grads",
        lambda a: rare_sums(a, DTYPES["bfloat16"], rounding="stochastic"),
    ),
}


@pytest.mark.guarantee("Ctrl-C")
@pytest.mark.parametrize("which", RARE)
@pytest.mark.usefixtures("alike")
def test_rare_writes_are_interrupted_before_all_or_after(backend, which):
    check_interrupts(*RARE[which], backend, every=1 if backend.on_host else 5)


def large(function, a):
    """So many elements that compiled code shares them out."""
    grads = [a(np.full(1 << 17, k, np.float32)) for k in range(1, 5)]
    return {"grads": grads, **OPERATIONS[function].numbers}


def kept(a):
    """Compiled code has no dtype of one byte, and leaves those to NumPy."""
    old, new = ([a(np.full(3, k, t)) for t in ("?", "f4", "i1", "f8")] for k in (0, 1))
    return {"verdict": True, "old": old, "new": new}


LARGE = "clip_grad_norm", "scale_grads", "clip_grad_value", "clip_grad_block_norm"


@pytest.mark.guarantee("Ctrl-C")
@pytest.mark.parametrize(
    ("function", "arguments"),
    [("keep_if", kept), *((name, partial(large, name)) for name in LARGE)],
)
def test_threads_are_not_left_behind_and_masks_are_kept_whole(function, arguments):
    check_interrupts(function, arguments, BACKENDS[0])


@pytest.mark.guarantee("Ctrl-C")
def test_whoever_handles_interrupts_gets_them_afterwards(monkeypatch):
    """Every one, and after the call; and the handler stays the one that it was."""
    seen, grads = [], [np.ones(3), np.ones(3)]

    def handler(number, frame):  # noqa: ARG001
        seen.append([float(g[0]) for g in grads])

    def store(values, target):
        signal.raise_signal(signal.SIGINT)
        target[...] = values

    monkeypatch.setattr(lists, "store", store)
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with gradkit.use_cpu_backend("numpy"):
            gradkit.scale_grads(grads, 0.5)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.guarantee("Ctrl-C")
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no such signal")
@pytest.mark.parametrize("raises", [False, True])
def test_other_signals_are_not_deferred(monkeypatch, raises):
    """A flag that their handler sets does no harm; an exception leaves a list partly written."""
    flags, grads = [], [np.ones(3), np.ones(3)]

    def handler(number, frame):  # noqa: ARG001
        flags.append([float(g[0]) for g in grads])
        if raises:
            raise TimeoutError

    def store(values, target):
        target[...] = values
        if not flags:
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(lists, "store", store)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with (
            gradkit.use_cpu_backend("numpy"),
            pytest.raises(TimeoutError) if raises else nullcontext(),
        ):
            gradkit.scale_grads(grads, 0.5)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert flags == [[0.5, 1.0]]
    assert [float(g[0]) for g in grads] == [0.5, 1.0 if raises else 0.5]


# Memory, compilers and launches that fail on the device


class RefusedError(Exception):
    """A driver's error."""


class FailingMemory:
    """The memory of a device that may have none left."""

    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        if name in ("allocate", "empty"):
            self._device.take("memory", MemoryError("out of device memory"))
        return getattr(self._device.memory, name)


class FailingDevice(EmulatedDevice):
    """Memory, compiler or launches fail once: the first time, the second or whenever it says."""

    launch_errors = (RefusedError,)

    def __init__(self, what, turn):
        super().__init__(multiprocessors=1)
        self.what, self.turn = what, turn
        self.xp = ArrayNamespace(FailingMemory(self))

    def take(self, what, error):
        if what == self.what:
            self.turn -= 1
            if self.turn == 0:
                raise error

    def compile(self, source, options=()):
        self.take("compiler", RuntimeError("error: expected a ';'"))
        module, device = super().compile(source, options), self

        class Module:
            def get_function(self, name):
                launch = module.get_function(name)

                def refused(*arguments, **more):
                    device.take("launch", RefusedError("invalid argument"))
                    launch(*arguments, **more)

                return refused

        return Module()


ERRORS = {
    "memory": MemoryError,
    "compiler": gradkit.KernelError,
    "launch": gradkit.KernelError,
}


class OnDevice:
    """A backend for the factory, on one device."""

    on_host = False

    def __init__(self, device):
        self._cuda = CudaBackend(device)

    def asarray(self, array):
        return on_device(np.array(array), self._cuda)

    memory = staticmethod(BACKENDS[0].memory)


@pytest.mark.guarantee(
    "All or nothing",
    "No after-effects",
    "a kernel does not compile",
    "a launch is refused",
    "out of memory",
)
@pytest.mark.emulated
@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("function", OPERATIONS)
def test_what_fails_on_the_device_is_a_typed_error(function, what):
    """At the first, the second and every further time: inputs are whole, gradients all or none."""
    a = Factory(OnDevice(FailingDevice(what, 0)))
    arguments = good(function, a)
    before = a.memory()
    getattr(gradkit, function)(**arguments)
    after, turn = a.memory(), 0
    assert (after != before) == (function in IN_PLACE)
    while True:
        turn += 1
        device = FailingDevice(what, turn)
        a = Factory(OnDevice(device))
        arguments = good(function, a)
        try:
            getattr(gradkit, function)(**arguments)
        except ERRORS[what]:
            assert a.memory() in (before, after)
        else:
            break
        if a.memory() == before:  # nothing is left behind that another call would stumble on
            getattr(gradkit, function)(**arguments)
            assert a.memory() == after
    assert device.turn > 0
    assert turn > 1 or what == "memory"


@pytest.mark.guarantee("All or nothing")
@pytest.mark.emulated
@pytest.mark.parametrize("what", ["memory", "compiler"])
@pytest.mark.parametrize("addends", [("f4", "f4"), ("f4", "f2"), ("f4", "f8")])
def test_buffers_are_added_to_once_everything_is_there(addends, what):
    """In one launch with its norm, for each pair of dtypes, and with a norm of its own."""

    def arguments(device):
        a = Factory(OnDevice(device))
        buffers = [a(np.ones(300, max(dtype, "f4"))) for dtype in addends]
        grads = [a(np.ones(300, dtype)) for dtype in addends]
        return a, {"buffers": buffers, "grads": grads, "norm_out": a(np.array(7.0))}

    for turn in range(1, 20):
        device = FailingDevice(what, turn)
        a, given = arguments(device)
        before = a.memory()
        try:
            gradkit.accumulate_grads(**given)
        except ERRORS[what]:
            assert a.memory() == before
        else:
            break
    assert device.turn > 0
    assert turn > 1


@pytest.mark.guarantee("All or nothing")
@pytest.mark.emulated
def test_a_long_list_that_finds_no_memory_is_left_alone():
    hosts = [np.full(3, k, np.float32) for k in range(200)]
    for turn in range(1, 9):
        a = Factory(OnDevice(FailingDevice("memory", turn)))
        grads = [a(host) for host in hosts]
        before = a.memory()
        try:
            gradkit.clip_grad_norm(grads, 1.0)
        except MemoryError:
            assert a.memory() == before
        else:
            break
    assert turn > 1
    assert a.memory() != before


# CuPy's own faults


@pytest.mark.guarantee("no driver, or CuPy without a device")
@pytest.mark.skipif(has_gpu(), reason="there is a device")
def test_cupy_without_a_driver():
    """Its arrays can be made around memory, and nothing can be computed."""
    cupy = pytest.importorskip("cupy")
    host = np.ones(8, np.float32)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    array = cupy.ndarray((8,), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    for call in (
        lambda: gradkit.clip_grad_norm([array], 1.0),
        lambda: gradkit.layer_norm(array),
        lambda: gradkit.accumulate_grad(array, array),
    ):
        message = "CuPy is installed, but CUDA device 0 cannot be used: .*nvidia-smi"
        with pytest.raises(gradkit.BackendUnavailableError, match=message):
            call()
    assert_same_bits(host, np.ones(8, np.float32))


@pytest.mark.guarantee("a read-only CuPy cache")
def test_a_cache_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "file").touch()

    class Device(EmulatedDevice):
        def compile(self, source, options=()):  # noqa: ARG002
            (tmp_path / "file" / "cache").mkdir(parents=True)

    with pytest.raises(gradkit.KernelError, match=r"file/cache.*CUPY_CACHE_DIR"):
        kernel(Device(), "zero", "zero_grad", CAPACITY=0)


@pytest.mark.guarantee("a read-only CuPy cache")
def test_a_cupy_that_cannot_make_its_cache_is_a_typed_error(tmp_path):
    """As CuPy 14 does when it is imported; for its own users the import fails already."""
    (tmp_path / "file").touch()
    script = """
        import gradkit
        from gradkit._arrays import cuda
        try:
            cuda.cupy()
        except gradkit.BackendUnavailableError as error:
            print(error)
    """
    (tmp_path / "cupy.py").write_text("import os; os.makedirs(os.environ['CUPY_CACHE_DIR'])")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])  # an installed CuPy comes before
    printed = run(script, CUPY_CACHE_DIR=str(tmp_path / "file" / "cache"), PYTHONPATH=path)
    assert "Not a directory" in printed
    assert "Set CUPY_CACHE_DIR" in printed


# The host's memory, threads, folders and processes

# NumPy's threads would take memory and give it back while a limit is set.
ALONE = {"OPENBLAS_NUM_THREADS": "1"}
LIMITED = """
    import resource
    import numpy as np, gradkit

    def leave(spare):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        size = pages * resource.getpagesize() + spare
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

    grads = [np.full(1 << 21, 2.0, np.float32) for _ in range(4)]
    whole = [g.copy() for g in grads]
    same = lambda a, b: all(map(np.array_equal, a, b))
"""


@pytest.mark.guarantee("out of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
@pytest.mark.parametrize("backend", ["numpy", pytest.param("compiled", marks=BACKENDS[1].marks)])
def test_out_of_memory_leaves_the_gradients_alone(backend):
    """At strides, for which compiled code needs memory too."""
    script = """
        views = [g[::2] for g in grads]
        leave(1 << 20)  # less than four threads or a block of NumPy's take
        for call in (
            lambda: gradkit.clip_grad_norm(views, 1.0),
            lambda: gradkit.clip_by_global_norm(views, 1.0),
            lambda: gradkit.scale_grads(views, 0.5),
            lambda: gradkit.accumulate_grad(views[0], views[1], scale=0.5),
            lambda: gradkit.layer_norm(grads[0].reshape(1024, -1)),
        ):
            try:
                call()
            except MemoryError:
                print("MemoryError")
        leave(1 << 30)
        print(same(grads, whole))
        gradkit.clip_grad_norm(grads, 1.0)
        print(round(float(gradkit.grad_norm(grads)), 6))
    """
    printed = run(LIMITED, script, GRADKIT_CPU=backend, GRADKIT_NUM_THREADS="4", **ALONE)
    assert printed == 5 * "MemoryError\n" + "True\n1.0\n"


@pytest.mark.guarantee("no more threads, or interpreter exit")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
@pytest.mark.skipif(not _host.describe()["compiled"]["available"], reason="no compiled code")
def test_without_further_threads_the_calling_one_does_it_all():
    """And what it did is not done again when there are threads at last."""
    script = """
        import os
        threads = lambda: len(os.listdir("/proc/self/task"))
        gradkit.set_num_threads(4)
        before = threads()
        leave(4 << 20)  # no thread's stack
        norm = float(gradkit.grad_norm(grads))
        gradkit.scale_grads(grads, 0.5)
        halved = [g.copy() for g in grads] if leave(1 << 30) is None else None
        print(threads() == before)
        print(norm == float(gradkit.grad_norm(whole)), same(grads, halved))
        print(all((g == 1.0).all() for g in grads), threads() > before)
    """
    printed = run(LIMITED, script, GRADKIT_CPU="compiled", **ALONE)
    assert printed == "True\nTrue True\nTrue True\n"


@pytest.mark.guarantee("no more threads, or interpreter exit")
def test_at_exit_there_are_no_threads_any_more():
    script = """
        import atexit
        import numpy as np, gradkit
        gradkit.set_num_threads(4)
        grads = [np.ones(1 << 21, np.float32) for _ in range(4)]
        atexit.register(lambda: print(gradkit.grad_norm(gradkit.scale_grads(grads, 2.0), np.inf)))
    """
    assert run(script) == "2.0\n"


@pytest.mark.guarantee("a read-only home")
@pytest.mark.parametrize("home", ["", "/proc/nowhere", "file"])
def test_a_home_that_cannot_be_written(tmp_path, home):
    """Nothing is kept there."""
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "home") if home == "file" else home
    script = """
        import numpy as np, gradkit
        x = np.arange(6.0).reshape(2, 3)
        y, mean, inv_std = gradkit.layer_norm(x)
        gradkit.show_config("dicts")
        print(mean, gradkit.clip_grad_norm([x], 1.0) > 1)
    """
    names = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR", "CUPY_CACHE_DIR")
    assert run(script, **dict.fromkeys(names, folder)) == "[1. 4.] True\n"


@pytest.mark.guarantee("Forked")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_forked_while_threads_are_at_work():
    script = """
        import os, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # that it may deadlock
        import numpy as np, gradkit
        x = np.random.default_rng(0).standard_normal((600, 1100)).astype(np.float32)
        work = lambda: (gradkit.layer_norm(x)[0].tobytes(), float(gradkit.grad_norm(x)))
        expected, stop = work(), threading.Event()
        beside, answers = [], []
        busy = threading.Thread(
            target=lambda: beside.extend(work() == expected for _ in iter(stop.is_set, True))
        )
        busy.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if work() == expected else 1)
            answers.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set(), busy.join()
        print(answers == [0] * 10, all(beside))
    """
    assert run(script) == "True True\n"


class TwoStreams(EmulatedDevice):
    """Threads are on one of two streams each; kernels run one after the other."""

    def __init__(self):
        super().__init__(multiprocessors=1)
        self._own, self._one = threading.local(), threading.Lock()
        self.uploads = []

    @property
    def stream(self):
        return getattr(self._own, "number", 0)

    @stream.setter
    def stream(self, number):
        self._own.number = number

    def upload(self, host):
        self.uploads.append(self.stream)
        return super().upload(host)

    def compile(self, source, options=()):
        module, lock = super().compile(source, options), self._one

        class Module:
            def get_function(self, name):
                launch = module.get_function(name)

                def in_turn(*arguments, **more):
                    with lock:
                        launch(*arguments, **more)

                return in_turn

        return Module()


@pytest.mark.guarantee("Thread-safe", "eight threads on two streams")
@pytest.mark.emulated
def test_eight_threads_on_two_streams():
    """Each list is uploaded once for each stream, and no thread sees another's."""
    device = TwoStreams()
    cuda, together = CudaBackend(device), threading.Barrier(8)
    lists = [[np.full(3, k + n, np.float32) for k in range(100)] for n in range(8)]
    kept = [[on_device(host.copy(), cuda) for host in hosts] for hosts in lists]
    x = on_device(np.arange(60, dtype=np.float32).reshape(4, 15), cuda)
    expected = [float(gradkit.grad_norm(hosts)) for hosts in lists]
    y = np.array(gradkit.layer_norm(x)[0])

    def work(number):
        device.stream = 1 + number % 2
        together.wait()
        for _ in range(5):
            assert float(gradkit.grad_norm(kept[number])) == expected[number]
            assert_same_bits(np.array(gradkit.layer_norm(x)[0]), y)
        gradkit.scale_grads(kept[number], 2.0)
        return [np.array(grad) for grad in kept[number]]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for arrays, hosts in zip(found, lists, strict=True):
        for array, host in zip(arrays, hosts, strict=True):
            assert_same_bits(array, host * 2)
    assert sorted(device.uploads) == 4 * [1] + 4 * [2]

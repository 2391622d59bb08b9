"""The CPU backend's threads: forked children, several callers at once, any number of cores."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradkit
from gradkit import _host
from tests import strategies as draw_
from tests.cpu.openmp import BOTH
from tests.operations import calls, drawn
from tests.tolerances import assert_all_same_bits

COMPILED = gradkit.show_config("dicts")["backends"]["compiled"]["available"]
X = draw_.values((600, 1100), "float32", 1)  # large enough for every strip to have a thread
DY = draw_.values((600, 1100), "float32", 2)
SCALE = draw_.values((1100,), "float32", 3)
LONG = draw_.values((4, 300_000), "float32", 4)


def work():
    """Results of functions that use threads."""
    y, mean, inv_std = gradkit.layer_norm(X, SCALE)
    wide = gradkit.layer_norm(LONG)
    _, channel_mean, channel_inv_std = gradkit.batch_norm(X)
    buffer = X.copy()
    return [
        y,
        *gradkit.layer_norm_grad(DY, X, SCALE, mean, inv_std),
        *gradkit.rms_norm_grad(DY, X, SCALE, inv_std),
        *wide,
        gradkit.layer_norm_grad(LONG, LONG, None, *wide[1:])[0],
        *gradkit.batch_norm_grad(DY, X, SCALE, channel_mean, channel_inv_std),
        *(gradkit.grad_norm([X, DY, LONG], p) for p in (1, 2, 3, np.inf)),
        gradkit.clip_by_global_norm([X, DY], 1.0)[0][1],
        gradkit.accumulate_grad(buffer, DY, scale=0.1),
    ]


@pytest.mark.guarantee("Any number of cores")
@BOTH
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_number_of_cores_does_not_change_the_bits(workers, threads_of):
    expected = work()
    threads_of(workers)
    assert_all_same_bits(work(), expected)


@pytest.mark.guarantee("Thread-safe")
@BOTH
def test_eight_threads_at_once(threads_of):
    expected = work()
    threads_of(3)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(work) for _ in range(16)]
    for job in jobs:
        assert_all_same_bits(job.result(), expected)


@pytest.mark.guarantee("Thread-safe")
def test_threads_share_no_error_state():
    """NumPy's error state is a thread's own: overflow is silent on the workers and here."""
    x = np.clip(LONG, -3, 3) * np.float32(1e38)
    with np.errstate(all="raise"):
        assert np.isfinite(float(gradkit.grad_norm(x)))
        gradkit.clip_grad_norm([x.copy()], np.inf)
        y, mean, inv_std = gradkit.layer_norm(x)
        gradkit.layer_norm_grad(x, x, None, mean, inv_std)
        gradkit.accumulate_grad(x.copy(), x)
        gradkit.scale_grads(x.copy(), 1e300)
        with pytest.raises(FloatingPointError):
            np.float32(1e38) * np.float32(1e38)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("which", ["numpy", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("power", [-30, 30])
def test_the_callers_error_state_is_not_ours(power, mixed, dtype, which):
    """Nothing that overflows or underflows on the way raises or warns in anybody's thread."""

    def make(*spec):
        host = drawn(*spec)
        own = np.full(host.size, 10.0 ** (power if dtype == "float32" else 9 * power))
        own[: 1 if mixed else 0] = 1
        return np.asarray(host * own.reshape(host.shape), host.dtype)

    def work():
        with np.errstate(all="raise"), gradkit.use_cpu_backend(which):
            for call in calls(make, types=(dtype,) * 3).values():
                call()

    work()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def forked():
    """Fork; the child ends in a minute, whatever it waits for."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
    return child


def status_of(child, check):
    """Return a forked child's exit status: its number of threads if all is well."""
    if child == 0:
        try:
            check()
            os._exit(len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


STARTED = 0 if sys.platform != "linux" else 3 if COMPILED else 1
FORKS = pytest.mark.skipif(sys.platform == "win32", reason="no fork")
QUIETLY = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.guarantee("Forked", "a forked child")
@BOTH
@FORKS
@QUIETLY
def test_a_forked_child_computes(threads_of):
    """It inherits the pool's bookkeeping and none of its threads, and starts as many of its own."""
    threads_of(3)
    expected = work()  # the pool has threads now
    child = forked()
    assert status_of(child, lambda: assert_all_same_bits(work(), expected)) == STARTED
    assert_all_same_bits(work(), expected)


def long_norm(times):
    return gradkit.grad_norm([LONG] * (20 * times), 3.0)


def long_gradient(times):
    """Of one row many times, whose ``dx`` is one row too: that takes no memory."""
    x = np.broadcast_to(X[0], (times << 20, X.shape[1]))
    dx = np.lib.stride_tricks.as_strided(np.empty_like(X[0]), x.shape, (0, X.itemsize))
    means, inv_stds = (np.full(len(x), number, np.float32) for number in (0, 1))
    dscale = np.empty_like(SCALE)
    given = x, x, SCALE, means, inv_stds, None, dx, dscale, None
    _host.code.layer_norm_grad(0b1010101010, 1, 0.0, *given)
    return dscale


@pytest.mark.guarantee("Forked")
@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("call", [long_norm, *([long_gradient] if COMPILED else [])])
@FORKS
@QUIETLY
def test_a_call_that_a_signal_forks_goes_on_in_both_processes(call, threads_of):
    """Other threads finish their work before the fork: the child has none of them."""
    threads_of(3)
    forks = []

    def fork(*_):
        forks.append((time.perf_counter(), forked()))

    def work_again():
        assert_all_same_bits([found, call(times)], [expected] * 2)

    previous = signal.signal(signal.SIGALRM, fork)
    try:
        for attempt in range(20):  # until the handler runs long before a call ends
            times = 1 << attempt // 4  # a fast processor needs more work
            expected = call(times)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            begin, found = time.perf_counter(), call(times)
            end = time.perf_counter()
            while not forks:
                time.sleep(0.001)
            at, child = forks.pop()
            assert status_of(child, work_again) == STARTED
            assert_all_same_bits([found], [expected])
            if at < begin + (end - begin) / 2:
                return
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not COMPILED, "no call was long enough"


# The main thread ends the interpreter while another one is in a call.
ENDED_IN_A_CALL = """
import sys, threading, time
import numpy as np, gradkit

gradkit.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((1 << 10, 1 << 11)).astype(np.float32)
calls = {{
    "lists": lambda: gradkit.grad_norm([x, x]),
    "written lists": lambda: gradkit.scale_grads([x], 0.5),
    "exact sums": lambda: gradkit.grad_norm([x], exact=True),
    "rows": lambda: gradkit.rms_norm(x),
    "channels": lambda: gradkit.batch_norm(x.reshape(32, 64, 32, 32)),
}}

def work():
    while True:
        calls[{kind!r}]()

threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
print("done", flush=True)
"""


@pytest.mark.guarantee("no more threads, or interpreter exit")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["lists", "written lists", "exact sums", "rows", "channels"])
def test_a_daemon_thread_in_a_call_when_the_interpreter_ends(kind):
    """Python before 3.14 unwinds a thread that asks for the GIL then, which aborted."""
    for _ in range(3):
        assert output_of(ENDED_IN_A_CALL.format(kind=kind)) == ["done"]


def output_of(program):
    """The lines that a program prints in a process of its own, which ends well and in time."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

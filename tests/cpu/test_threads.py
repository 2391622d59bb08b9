"""The number of threads that a call may use; test_compiled.py has the threads themselves."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

import gradkit
from gradkit import _threads as threads
from gradkit._numpy import floating_point


@pytest.fixture(autouse=True)
def _restored():
    before = gradkit.get_num_threads()
    yield
    gradkit.set_num_threads(before)


def in_a_process(**environment):
    """Return the number of threads that a new process finds in these variables."""
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    code = "import gradkit; print(gradkit.get_num_threads())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
def test_the_environment_chooses():
    default = in_a_process()
    assert 1 <= default <= threads.MOST_BY_DEFAULT
    assert in_a_process(OMP_NUM_THREADS="1") == 1
    assert in_a_process(OMP_NUM_THREADS="1,2") == 1  # one number a level of nesting
    assert in_a_process(OMP_NUM_THREADS="64") == default
    assert in_a_process(OMP_NUM_THREADS="many") == default
    assert in_a_process(GRADKIT_NUM_THREADS="7", OMP_NUM_THREADS="1") == 7
    assert in_a_process(GRADKIT_NUM_THREADS="0") == default
    assert in_a_process(GRADKIT_NUM_THREADS="") == default
    assert in_a_process(GRADKIT_NUM_THREADS=" 4096 ") == 4096
    assert in_a_process(OMP_NUM_THREADS="9" * 5000) == default


def test_no_more_than_openmp_may_have(monkeypatch):
    monkeypatch.delenv("GRADKIT_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    for others, expected in (("1", 1), ("3", 3), ("64", threads.MOST_BY_DEFAULT), ("", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", others)
        assert threads.default() == expected


def flushing(flush, function, *args):
    """A call with the flags of x86-64 for subnormal results and operands set, or as it is."""
    changed = floating_point.current()
    if flush:
        ctypes.cast(ctypes.addressof(changed) + 28, ctypes.POINTER(ctypes.c_uint32))[0] |= 0x8040
    return floating_point.within(changed, function, *args)


def test_what_it_refuses():
    """A number that is refused is not kept, and calls go on as before."""
    gradkit.set_num_threads(3)
    for count in (0, -1, 4097, 2**31 - 1, 2**31, 2**40, -(2**40), np.int64(5000)):
        with pytest.raises(ValueError, match=f"count must be from 1 to 4096, not {count}"):
            gradkit.set_num_threads(count)
    for count in (1.0, "2", None, True):
        with pytest.raises(TypeError, match="count must be an integer"):
            gradkit.set_num_threads(count)
    assert gradkit.get_num_threads() == 3
    assert float(gradkit.grad_norm(np.full(1 << 20, 2.0, np.float32))) == 2048


def test_what_the_environment_may_not_say(monkeypatch):
    for said in ("4097", "99999999999", "9" * 5000, "-1", "1.5", "many"):
        monkeypatch.setenv("GRADKIT_NUM_THREADS", said)
        message = f"GRADKIT_NUM_THREADS must be a number from 1 to 4096, .*, not '{said}'"
        with pytest.raises(ValueError, match=message):
            threads.default()
    for said in ("4096", "0" * 5000 + "4096"):
        monkeypatch.setenv("GRADKIT_NUM_THREADS", said)
        assert threads.default() == 4096

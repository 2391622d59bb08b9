"""Threads that share nothing but gradkit: each call has the bits that it has alone.

They begin in a process that has not called gradkit before. Without the GIL there are more of them.
"""

import itertools
import random
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradkit
from gradkit import _host
from gradkit._open import dispatch
from tests.operations import OPERATIONS, drawn, leaves

FREE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
THREADS, CALLS, PROCESSES = (8, 100, 4) if FREE else (4, 10, 1)
BACKENDS = ("numpy", "compiled")[: 1 + (_host.code is not None)]
# Compiled code releases the GIL, and shares a call out, from 4096 elements on.
SIZES = ({}, {"shape": (60, 90), "lists": (((60, 50), "data"), ((60, 40), "data"))})
MOST = 500  # arrays in a container that another thread changes


def cases(operation):
    """Arguments on each backend, of each variant and two sizes; and a call that is refused."""
    for own, backend in itertools.product(SIZES, BACKENDS):
        for types, variant in itertools.product(operation.types[:2], ("", *operation.variants)):
            yield operation, backend, {"types": types, "variant": variant, **own}
        yield operation, backend, None


def outcome(operation, backend, how):
    """All that a call gives and has written, as hashes of bytes, or its error."""
    given = operation.arguments(drawn, **how or {})
    if how is None:
        given[operation.arrays[0]] = "no array"
    try:
        with gradkit.use_cpu_backend(backend):
            found = operation(**given)
    except (TypeError, ValueError) as error:
        return repr(error)
    arrays = (each for each in leaves([found, given]) if isinstance(each, np.ndarray | np.generic))
    return [hash(each.tobytes()) for each in arrays]


def called(seed, start, every):
    """The outcomes of some cases of an operation, as one thread of several calls them."""
    rng, found = random.Random(seed), []
    start.wait()
    for k in rng.choices(range(len(every)), k=CALLS):
        found.append((k, outcome(*every[k])))
        if rng.random() < 0.02:
            dispatch._plans.clear()
        if rng.random() < 0.02:
            gradkit.set_num_threads(rng.randint(1, 4))
    return found


def check_operation(pool, operation, seed):
    """Call it on all threads at once, then alone."""
    every, start = [*cases(operation)], threading.Barrier(THREADS)
    seeds = [f"{operation.name} {seed} {thread}" for thread in range(THREADS)]
    together = [*pool.map(lambda own: called(own, start, every), seeds)]
    alone = [outcome(*case) for case in every]
    wrong = {k for found in together for k, result in found if result != alone[k]}
    assert not wrong, (operation.name, [every[k][1:] for k in wrong])


def hurried(start, arrays):
    """Results of small calls that are each unlike the one before."""
    start.wait()
    return [gradkit.rms_norm(x)[0] for _ in range(10 * CALLS) for x in arrays]


def check_hurried(pool):
    """Many plans at once, with nothing between the calls."""
    arrays = [drawn("x", (n, 6), "float32") for n in range(1, 6)]
    start = threading.Barrier(THREADS)
    for found in pool.map(lambda _: hurried(start, arrays), range(THREADS)):
        for x, y in zip(arrays * (10 * CALLS), found, strict=True):
            assert y.tobytes() == gradkit.rms_norm(x)[0].tobytes()


def changed(container, add, done):
    """Empty a container and fill it with new arrays, until others are done."""
    while not done.is_set():
        new = {k: np.ones(1) for k in range(MOST)}  # it is full meanwhile
        container.clear()
        add(new)


def counted(container):
    """Norms of arrays of one 1 each: how many arrays a call saw."""
    for _ in range(10 * CALLS):
        try:
            count = float(gradkit.grad_norm(container)) ** 2
        except (RuntimeError, ValueError):  # it has changed between two looks
            continue
        assert round(count) <= MOST, count
        assert abs(count - round(count)) < 1e-9, count


def check_containers(pool):
    """Read containers that another thread changes: a call sees what was there, or raises."""
    keyed, listed, done = {}, [], threading.Event()
    ways = (keyed, keyed.update), (listed, lambda new: listed.extend(new.values()))
    changes = [pool.submit(changed, *way, done) for way in ways]
    try:
        [*pool.map(counted, [keyed, listed, keyed, listed])]
    finally:
        done.set()
    for change in changes:
        change.result()


def main(seed):
    """Work of a new process, whose first calls are at once."""
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(THREADS + 2) as pool:
        for operation in random.Random(seed).sample([*OPERATIONS.values()], len(OPERATIONS)):
            check_operation(pool, operation, seed)
        check_hurried(pool)
        check_containers(pool)
    assert not (FREE and sys._is_gil_enabled())


@pytest.mark.guarantee("Thread-safe")
@pytest.mark.parametrize("seed", range(PROCESSES))
def test_threads_at_once_have_the_bits_of_one(seed):
    """First calls too, while plans are forgotten, threads are set and other calls are refused."""
    command = [sys.executable, "-X", "faulthandler", "-m", __name__, str(100 * seed)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    main(int(sys.argv[1]))

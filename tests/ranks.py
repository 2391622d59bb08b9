"""Ranks for tests: threads of this process that make one call together."""

import math
import threading

import numpy as np

import gradkit
from gradkit import _host, distributed

NAN, INF = math.nan, math.inf
ORDERS = [1, 2, INF, 3, 0.5]
TIMEOUT_S = 60  # while one rank compiles kernels on a busy machine, the others wait


def f(*values):
    return np.array(values, float)


class Pair:
    """Two ranks of which the other says what this one says."""

    rank, size = 0, 2

    def allgather(self, state):
        return np.stack([state, state])


class Counting:
    """A group that remembers how much was sent."""

    def __init__(self, group):
        self.rank, self.size, self._group, self.sent = group.rank, group.size, group, []
        self.wire = self

    def allgather(self, state):
        assert (state.dtype, state.ndim, state.flags.c_contiguous) == (np.float64, 1, True)
        self.sent.append(state.size)
        return self._group.allgather(state)


def together(work, size, *, groups=None):
    """``work(group)`` on every rank at once: what each returned, or the error that it raised.

    On the CPU backend of the caller, which is a context's own. Ranks that wait for one that does
    not come fail the test, but in ``groups`` of the test's own.
    """
    may_wait = groups is not None
    name = "numpy" if _host.backend() is _host.named("numpy", "") else "compiled"
    groups, found = groups or distributed.threads(size, timeout=TIMEOUT_S), [None] * size

    def attempt(rank):
        try:
            with gradkit.use_cpu_backend(name):
                found[rank] = work(groups[rank])
        except BaseException as error:
            found[rank] = error

    threads = [
        threading.Thread(target=attempt, args=(k,), name=f"rank_{k}", daemon=True)
        for k in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank waits without an end"
    late = [e for e in found if isinstance(e, gradkit.RankError) and "timed out" in str(e)]
    assert may_wait or not late, found
    return found


def results(work, size, **options):
    """As ``together``, where no rank may raise."""
    found = together(work, size, **options)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def flat(parts):
    return [g for part in parts for g in part if g is not None]


def bits(norms):
    return {np.asarray(norm).tobytes() for norm in norms}

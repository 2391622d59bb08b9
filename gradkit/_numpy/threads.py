"""Worker threads: strips of work side by side, with the same bits for any number of them.

Work is divided into strips; their number depends on shapes alone. A strip adds up its partial
results in order, and the strips are added in order.
"""

import os
from _queue import SimpleQueue  # of `queue`, whose other half takes longer to import than this
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from gradkit._numpy import floating_point, scratch, tuning

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_WAITING = 64  # helpers whom no thread has taken on: more are for threads that never came


class Helper:
    """Work for another thread, which the caller can take back until one has begun it."""

    __slots__ = ("_begun", "_done", "_error", "_work")

    def __init__(self, work: Callable[[], None]):
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._begun, self._done = allocate_lock(), allocate_lock()
        self._done.acquire()

    def run(self) -> None:
        """Do the work, unless it has been taken back."""
        if not self._begun.acquire(blocking=False):
            return
        work, self._work = self._work, None  # it holds the call's arrays
        try:
            assert work is not None
            work()
        except BaseException as error:
            self._error = error
        finally:
            del work
            self._done.release()

    def end(self) -> None:
        """Take the work back, or wait for its end and raise its error."""
        if self._begun.acquire(blocking=False):
            self._work = None
            return
        self._done.acquire()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which holds this frame, and the call's arrays


class Pool:
    """Threads that wait for helpers.

    Python's own pool waits until a thread that it starts has begun: for ever, if the thread finds
    no memory to begin with. This one waits for no thread that has not begun to work.
    """

    def __init__(self) -> None:
        self.threads = 0
        self._lock = allocate_lock()
        self._waiting: SimpleQueue[Helper | None] = SimpleQueue()

    def help(self, work: Callable[[], None], count: int) -> list[Helper]:
        """Ask for so many helpers: fewer if the system gives no more threads."""
        helpers: list[Helper] = []
        with self._lock:
            while self.threads < count:
                try:
                    start_new_thread(self._serve, ())
                except (MemoryError, RuntimeError):  # no more threads, or the interpreter exits
                    break
                self.threads += 1
            if self._waiting.qsize() < _MOST_WAITING:
                helpers += [Helper(work) for _ in range(min(count, self.threads))]
        try:
            for helper in helpers:
                self._waiting.put(helper)
        except MemoryError:  # the caller takes the others back
            pass
        return helpers

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self.threads):
            self._waiting.put(None)

    def _serve(self) -> None:
        while (helper := self._waiting.get()) is not None:
            helper.run()


_pool = Pool()


def workers() -> int:
    """How many threads one call may use."""
    return _workers


def use_workers(count: int) -> None:
    """Choose it, for the calls that begin after this one."""
    global _workers
    pool = _pool
    _workers = count
    forget_threads()
    pool.close()


def in_strips(
    work: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    elements: int,
    *,
    pays: int = tuning.MANY_PASSES,
    width: int = 1,
    run: int = 1,
) -> list[Result]:
    """``work`` over consecutive strips of the items; the strips' results in order.

    Strips run on threads from ``pays`` elements on, if each item holds enough of them.
    ``width`` is how many numbers a strip accumulates: wide ones get fewer strips. ``run`` is
    how many neighbouring elements a broadcast operand meets at a time. The caller ignores
    floating-point errors (``np.errstate``).
    """
    if not items:
        return []
    count = min(tuning.STRIPS, len(items), max(1, tuning.STRIP_TOTALS // width))
    if count == 1 or elements < max(pays, len(items) * tuning.WORTH_AN_ITEM):
        _shorten_buffers(run)
        return [work(items)]
    bounds = [round(k * len(items) / count) for k in range(count + 1)]
    queue = iter(enumerate(pairwise(bounds)))
    results: dict[int, Result] = {}

    def drain() -> None:
        with np.errstate(all="ignore"):  # NumPy's settings are a thread's own
            _shorten_buffers(run)
            for k, (start, stop) in queue:
                results[k] = work(items[start:stop])

    threads = min(_workers, count)
    scratch.reserve(threads)  # memory that runs out does so before any of them writes
    helpers = _pool.help(_as_here(drain), threads - 1)
    try:
        drain()
    finally:
        for _ in queue:  # after an error the rest is not run, however late a helper starts
            pass
        for helper in helpers:
            helper.end()
    return [results[k] for k in range(count)]


def _as_here(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` on another thread, to the bits that it has on this one."""
    environment = floating_point.current()

    def run() -> None:
        floating_point.enter(environment)
        work()

    return run


def _shorten_buffers(run: int) -> None:
    """Until the caller's ``np.errstate`` ends, which restores the size of NumPy's buffers."""
    if run >= tuning.SHORT_BUFFER:
        np.setbufsize(tuning.SHORT_BUFFER)


def forget_threads() -> None:
    """Start a new pool when one is next needed: of another size, or in a forked child."""
    global _pool
    _pool = Pool()


def _default_workers() -> int:
    """What the environment says, or else what the machine offers."""
    own = os.environ.get("GRADKIT_NUM_THREADS", "")
    if own.isdecimal() and int(own):
        return int(own)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    others = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    limits = (tuning.MOST_WORKERS, cores or 1, int(others) if others.isdecimal() else 0)
    return min(limit for limit in limits if limit)


_workers = _default_workers()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_threads)

"""Worker threads: strips of work side by side, with the same bits for any number of them.

Work is divided into strips; their number depends on shapes alone. A strip adds up its partial
results in order, and the strips are added in order.
"""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gradkit._numpy import floating_point, scratch, tuning

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Item = TypeVar("Item")
Result = TypeVar("Result")

_pool: "ThreadPoolExecutor | None" = None


def workers() -> int:
    """How many threads one call may use."""
    return _workers


def use_workers(count: int) -> None:
    """Choose it, for the calls that begin after this one."""
    global _workers
    pool = _pool
    _workers = count
    forget_threads()
    if pool is not None:
        pool.shutdown(wait=False)


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
    helpers = _started(_as_here(drain), threads - 1)
    try:
        drain()
    finally:
        for _ in queue:  # after an error the rest is not run, however late a helper starts
            pass
        for helper in helpers:
            if not helper.cancel():
                helper.result()
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


def _started(work: Callable[[], None], count: int) -> "list[Future[None]]":
    """Helpers at work on other threads: fewer if the system gives no more threads."""
    helpers: list[Future[None]] = []
    try:
        for _ in range(count):
            helpers.append(_threads().submit(work))
    except RuntimeError:  # "can't start new thread", or the interpreter is shutting down
        pass
    return helpers


def _threads() -> "ThreadPoolExecutor":
    global _pool
    if _pool is None:
        from concurrent.futures import ThreadPoolExecutor  # a fifth of NumPy's own import time

        _pool = ThreadPoolExecutor(max(1, _workers - 1), thread_name_prefix="gradkit")
    return _pool


def forget_threads() -> None:
    """Start a new pool when one is next needed: of another size, or in a forked child."""
    global _pool
    _pool = None


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

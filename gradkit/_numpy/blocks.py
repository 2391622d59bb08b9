"""The one blocking helper: arrays cut into pieces that stay in cache, run side by side.

Every operation of this backend visits its arrays a block at a time and reuses one strip's
worth of scratch, so that working memory is bounded whatever the size of the input. Blocks
are dealt into strips, whose number depends on shapes alone; a strip adds up its partial
results in order and the strips are added in order, so that results have the same bits on
any number of cores.

Threads hand Python's lock around once a NumPy call, which costs more the shorter the calls
are: blocks are as large as the scratch allows rather than as small as the cache.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from gradkit._numpy.casts import narrow, widen

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]
Index: TypeAlias = tuple[slice, ...]
Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 1 << 17  # elements: 0.5 MiB of float32, 1 MiB of float64
SCRATCH = 3 << 20  # bytes of scratch that a strip may have
STRIPS = 8
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
MANY_PASSES = 1 << 18  # elements from which on threads pay where a dozen passes are made
ONE_PASS = 1 << 21  # and where one is
_ACCUMULATED = 1 << 18  # numbers that all strips together may accumulate: 2 MiB
_SHORT_BUFFER = 512  # elements
_ALIGNMENT = 64  # bytes of a cache line, and of the widest vector load

_pool: "ThreadPoolExecutor | None" = None
_spare: list[Array] = []  # scratch that no strip is using


def blocks(shape: tuple[int, ...], limit: int = BLOCK) -> Iterator[Index]:
    """Index tuples of slices that tile ``shape`` in order, at most ``limit`` elements each.

    A block is a run of whole slices along the first axis where one fits, and is cut along
    the next axis where it does not.
    """
    if not shape:
        yield ()
        return
    inner = 1
    for length in shape[1:]:
        inner *= length
    if inner > limit:
        for i in range(shape[0]):
            for rest in blocks(shape[1:], limit):
                yield (slice(i, i + 1), *rest)
    elif inner:
        step = limit // inner
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])),)


def even_step(length: int, most: int) -> int:
    """How many rows a piece gets where it may have ``most``: the strips' shares even out."""
    pieces = -(-length // most)
    if pieces > STRIPS:
        pieces = -(-pieces // STRIPS) * STRIPS
    else:
        pieces = next(n for n in (1, 2, 4, STRIPS) if n >= pieces)
    step = -(-length // pieces)
    return max(1, min(most, -(-step // 8) * 8))  # BLAS takes rows by the four or eight


def matched(*arrays: Array, limit: int = BLOCK) -> Iterator[tuple[Array, ...]]:
    """Views that tile arrays of one shape side by side, a block at a time.

    Arrays that all lie gapless in the same order are walked as one dimension; any other
    layout is walked along its axes, without a copy.
    """
    if arrays[0].size == 0:
        return
    if all(array.flags.c_contiguous for array in arrays):
        arrays = tuple(array.reshape(-1) for array in arrays)
    elif all(array.flags.f_contiguous for array in arrays):
        arrays = tuple(array.T.reshape(-1) for array in arrays)
    if arrays[0].size <= limit:
        yield arrays
        return
    for index in blocks(arrays[0].shape, limit):
        yield tuple(array[index] for array in arrays)


def load(view: Array, dtype: DType, room: Array, shape: tuple[int, ...] = (-1,)) -> Array:
    """A block's values as ``dtype`` in ``shape``: the view itself, or a copy in the room."""
    shaped = view.shape == shape or view.ndim == len(shape) == 1
    if shaped and view.dtype == dtype and _suits_blas(view):
        return view
    copy = room[: view.size].reshape(view.shape)
    widen(view, copy)
    return copy.reshape(shape)


def _suits_blas(view: Array) -> bool:
    """Whether products of the view go through BLAS.

    What NumPy does instead, for a stride of 0 say, is slow and has one running total.
    """
    if not view.flags.aligned:
        return False
    size = view.itemsize
    rows = view.ndim == 2 and view.strides[1] == size and view.strides[0] >= view.shape[1] * size
    return rows or bool(view.flags.c_contiguous)


def store(values: Array, target: Array, room: Array) -> None:
    """Write a block's values into a view of any shape and dtype; spoils them and the room."""
    narrow(values.reshape(target.shape), target, room)


def by_halves(values: Array, few: int = 1) -> Array:
    """``values``, which it spoils, added up along the first axis until only a few are left.

    Equal terms double without an error; one running total of them drifts by a unit for every
    four.
    """
    while len(values) > few:
        half = len(values) // 2
        values[:half] += values[-half:]
        values = values[: len(values) - half]
    return values


@contextmanager
def scratch(count: int, dtype: DType) -> Iterator[list[Array]]:
    """``count`` flat arrays, uninitialised, that share a strip's scratch.

    The memory is kept for the next strip: the first touch of fresh pages takes longer than
    the arithmetic on them.
    """
    try:
        memory = _spare.pop()
    except IndexError:
        memory = _new_scratch()
    room = room_for(count, dtype) * dtype.itemsize
    cuts = range(0, count * room, room)
    try:
        yield [memory[cut : cut + room].view(dtype) for cut in cuts]
    finally:
        if len(_spare) < WORKERS:
            _spare.append(memory)


def _new_scratch() -> Array:
    memory = np.empty(SCRATCH + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :]


def room_for(count: int, dtype: DType) -> int:
    """How many elements each of ``count`` scratch arrays has."""
    return SCRATCH // count // dtype.itemsize // _ALIGNMENT * _ALIGNMENT


def in_strips(
    work: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    elements: int,
    *,
    pays: int = MANY_PASSES,
    width: int = 1,
    run: int = 1,
) -> list[Result]:
    """``work`` over consecutive strips of the items; the strips' results in order.

    Strips run on threads from ``pays`` elements on, if each item holds enough of them.
    ``width`` is how many numbers a strip accumulates: wide ones get fewer strips. ``run`` is
    how many neighbouring elements a broadcast operand meets at a time.
    """
    if not items:
        return []
    count = min(STRIPS, len(items), max(1, _ACCUMULATED // width))
    if count == 1 or elements < pays or elements < len(items) * (BLOCK // 16):
        return [_run(work, items, run)]
    bounds = [round(k * len(items) / count) for k in range(count + 1)]
    queue = iter(enumerate(pairwise(bounds)))
    results: dict[int, Result] = {}

    def drain() -> None:
        for k, (start, stop) in queue:
            results[k] = _run(work, items[start:stop], run)

    threads = min(WORKERS, count)
    while len(_spare) < threads:  # memory that runs out does so before any of them writes
        _spare.append(_new_scratch())
    helpers = _started(drain, threads - 1)
    try:
        drain()
    finally:
        for _ in queue:  # after an error nobody takes the rest, however late a helper starts
            pass
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    return [results[k] for k in range(count)]


def _started(work: Callable[[], None], count: int) -> "list[Future[None]]":
    """Helpers at work on other threads: fewer where the system gives no more threads."""
    helpers: list[Future[None]] = []
    try:
        for _ in range(count):
            helpers.append(_threads().submit(work))
    except RuntimeError:  # "can't start new thread", or the interpreter is shutting down
        pass
    return helpers


def _run(work: Callable[[Sequence[Item]], Result], strip: Sequence[Item], run: int) -> Result:
    """One strip under NumPy's settings for it, which are a thread's own."""
    with np.errstate(all="ignore"):
        if run >= _SHORT_BUFFER:
            # Broadcasting is twice as fast with buffers shorter than the run: NumPy fills a
            # longer one with copies of the broadcast operand first.
            np.setbufsize(_SHORT_BUFFER)
        return work(strip)


def _threads() -> "ThreadPoolExecutor":
    global _pool
    if _pool is None:
        from concurrent.futures import ThreadPoolExecutor  # a fifth of NumPy's own import time

        _pool = ThreadPoolExecutor(max(1, WORKERS - 1), thread_name_prefix="gradkit")
    return _pool


def _forget_threads() -> None:
    """A forked child inherits the pool's bookkeeping but none of its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)

"""The one blocking helper: arrays cut into pieces that stay in cache, run side by side.

Every operation of this backend visits its arrays a block at a time and reuses one block's
worth of scratch, so that working memory is bounded whatever the size of the input. Blocks
are dealt into strips, whose number depends on shapes alone; a strip adds up its partial
results in order and the strips are added in order, so that results have the same bits on
any number of cores.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]
Index: TypeAlias = tuple[slice, ...]
Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK = 1 << 17  # elements: 0.5 MiB of float32, 1 MiB of float64
STRIPS = 8
_ACCUMULATED = 1 << 18  # numbers that all strips together may accumulate: 2 MiB
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)

_pool: ThreadPoolExecutor | None = None


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


def load(view: Array, dtype: DType, scratch: Array, shape: tuple[int, ...] = (-1,)) -> Array:
    """A block's values as ``dtype`` in ``shape``: the view itself, or a copy in the scratch."""
    if view.dtype == dtype and _has_shape(view, shape):
        return view
    copy = scratch[: view.size].reshape(view.shape)
    copy[...] = view
    return copy.reshape(shape)


def _has_shape(view: Array, shape: tuple[int, ...]) -> bool:
    """Whether a shape, in which -1 stands for any length, is the view's."""
    return view.ndim == len(shape) and all(map(lambda n, want: want in (-1, n), view.shape, shape))


def store(values: Array, target: Array) -> None:
    """Write a block's values into a view of any shape and dtype."""
    target[...] = values.reshape(target.shape)


def in_strips(
    work: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    elements: int,
    *,
    width: int = 1,
) -> list[Result]:
    """``work`` over consecutive strips of the items; the strips' results in order.

    Strips run on threads where each item holds enough of the ``elements`` for that to pay.
    ``width`` is how many numbers a strip accumulates: wide ones get fewer strips.
    """
    if not items:
        return []
    count = min(STRIPS, len(items), max(1, _ACCUMULATED // width))
    if count == 1 or elements <= BLOCK or elements < len(items) * (BLOCK // 16):
        return [work(items)]
    bounds = [round(k * len(items) / count) for k in range(count + 1)]
    strips = [items[i:j] for i, j in pairwise(bounds)]
    return list(_threads().map(_quietly(work), strips))


def _quietly(work: Callable[[Sequence[Item]], Result]) -> Callable[[Sequence[Item]], Result]:
    """NumPy's error state is a thread's own: silence it in the workers too."""

    def run(strip: Sequence[Item]) -> Result:
        with np.errstate(all="ignore"):
            return work(strip)

    return run


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="gradkit")
    return _pool


def _forget_threads() -> None:
    """A forked child inherits the pool's bookkeeping but none of its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)

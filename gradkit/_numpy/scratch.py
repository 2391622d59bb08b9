"""Memory for intermediate results: a bounded amount a strip, kept from call to call.

The first touch of fresh pages takes longer than the arithmetic on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradkit._numpy import tuning

_spare: list[np.ndarray[Any, Any]] = []  # that no strip is using


def elements(count: int, dtype: np.dtype[Any]) -> int:
    """How many elements each of ``count`` scratch arrays has."""
    most = tuning.SCRATCH_BYTES // count // dtype.itemsize
    return min(most, tuning.BLAS_THREADS - 1) // tuning.ALIGNMENT * tuning.ALIGNMENT


@contextmanager
def arrays(count: int, dtype: np.dtype[Any]) -> Iterator[list[Any]]:
    """``count`` flat arrays, uninitialised, that share a strip's scratch."""
    try:
        memory = _spare.pop()
    except IndexError:
        memory = _allocate()
    step = elements(count, dtype) * dtype.itemsize
    try:
        yield [memory[at : at + step].view(dtype) for at in range(0, count * step, step)]
    finally:
        if len(_spare) < tuning.MOST_WORKERS:
            _spare.append(memory)


def reserve(count: int) -> None:
    """Have memory for so many strips at once."""
    while len(_spare) < count:
        _spare.append(_allocate())


def _allocate() -> np.ndarray[Any, Any]:
    memory = np.empty(tuning.SCRATCH_BYTES + tuning.ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % tuning.ALIGNMENT :]

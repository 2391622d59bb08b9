"""Arrays that are written in place are written whole, or not at all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from gradkit._numpy.blocks import BLOCK, Array, blocks, part
from gradkit._numpy.interrupts import Uninterrupted

_ROOM = 8 * 8 * BLOCK  # bytes: more than what is computed of a block takes


@contextmanager
def whole() -> Iterator[None]:
    """Have memory for a block before anything is written, and put Ctrl-C off until all is."""
    np.empty(_ROOM, np.uint8)  # or MemoryError
    with Uninterrupted(), np.errstate(all="ignore"):
        yield


def side_by_side(*lists: Sequence[Array]) -> Iterator[tuple[Array, ...]]:
    """Blocks of the arrays of some lists, which have the same shapes."""
    for arrays in zip(*lists, strict=True):
        for index in blocks(arrays[0].shape):
            yield tuple(part(array, index) for array in arrays)


def store(values: Array, target: Array) -> None:
    """``target = values``, float64 numbers that are rounded once."""
    values = np.asarray(values)
    if target.dtype.itemsize == 2 and target.dtype != np.float16:
        # bfloat16's own cast rounds to float32 first. What is not exact there gets an odd last
        # bit, so that it is no tie of bfloat16.
        single = values.astype(np.float32)
        bits = single.view(np.uint32)
        bits -= np.abs(single) > np.abs(values)
        bits |= single != values
        values = single
    target[...] = values

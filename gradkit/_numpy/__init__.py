"""The CPU backend, and the tests' oracle: every operation on NumPy arrays.

The module is a ``gradkit._backend.Backend``: functions take validated arrays, and write into the
outputs that they are given. Files that are named as public modules are hold the operations; the
others say how arrays are cut (``blocks``, ``row_blocks``, ``channels``), summed and rounded.
"""

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
from numpy import empty as empty

from gradkit._backend import Shape, Spec
from gradkit._numpy.accumulation import *
from gradkit._numpy.averaging import *
from gradkit._numpy.batch_normalization import *
from gradkit._numpy.block_clipping import *
from gradkit._numpy.blocks import Array
from gradkit._numpy.exact import exact_sums as exact_sums
from gradkit._numpy.gated_norm import *
from gradkit._numpy.group_normalization import *
from gradkit._numpy.lists import *
from gradkit._numpy.noise import *
from gradkit._numpy.rows import *
from gradkit._numpy.spikes import *
from gradkit._numpy.statistics import *
from gradkit._numpy.steps import *

# Bytes from which on glibc takes memory from the system for each array, and of a huge page.
_LARGE, _HUGE_PAGE = 1 << 25, 1 << 21


def outputs(specs: Sequence[Spec | None]) -> list[Array | None]:
    """New arrays as these specs say, whose contents are undefined; the first is the largest."""
    made: list[Array | None] = []
    for spec in specs:  # in C order without a frame for each, a tenth of a small call
        made.append(
            spec and (spec.allocate(empty) if spec.order else empty(spec.shape, spec.dtype))
        )
    if made and made[0] is not None and made[0].nbytes >= _LARGE:
        made.clear()  # nothing was written to them
        made += [spec and spec.allocate(_on_huge_pages) for spec in specs]
    return made


def _on_huge_pages(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """A new array which, if it is large, has huge pages to itself.

    Linux cuts those into small ones where something else is written before: glibc's header.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return empty(shape, dtype)
    memory = empty((-(-size // _HUGE_PAGE) + 1) * _HUGE_PAGE, np.uint8)
    start = -address(memory) % _HUGE_PAGE
    return memory[start : start + size].view(dtype).reshape(shape)


def scalar(value: Any) -> Array:
    """A NumPy scalar or 0-d array as a 0-d array."""
    return np.asarray(value)


def as_float64(value: Any) -> Array:
    """A number or an array as a float64 array."""
    return np.asarray(value, np.float64)


def address(array: Array) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def read(array: Array) -> Array:
    """The array itself: it is on the host."""
    return array


def takes_memory(call: Any) -> bool:  # noqa: ARG001
    """NumPy computes on its own arrays."""
    return False


def warmup(operations: Iterable[str], dtypes: Set[str]) -> int:  # noqa: ARG001
    """Nothing is compiled here."""
    return 0

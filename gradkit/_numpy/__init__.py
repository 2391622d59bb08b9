"""The CPU backend, and the tests' oracle: every operation on NumPy arrays.

The module is a ``gradkit._backend.Backend``: functions take validated arrays, and write into the
outputs that they are given. Files that are named as public modules are hold the operations; the
others say how arrays are cut (``blocks``, ``row_blocks``, ``channels``), summed and rounded.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
from numpy import empty as empty

from gradkit._backend import Spec
from gradkit._numpy.accumulation import *
from gradkit._numpy.averaging import *
from gradkit._numpy.batch_normalization import *
from gradkit._numpy.block_clipping import *
from gradkit._numpy.blocks import Array
from gradkit._numpy.exact import exact_sums as exact_sums
from gradkit._numpy.gated_norm import *
from gradkit._numpy.group_normalization import *
from gradkit._numpy.lists import *
from gradkit._numpy.rows import *
from gradkit._numpy.spikes import *
from gradkit._numpy.statistics import *
from gradkit._numpy.steps import *
from gradkit._numpy.updates import *


def outputs(specs: Sequence[Spec | None]) -> list[Array | None]:
    """New arrays as these specs say, whose contents are undefined."""
    return [spec and spec.allocate(empty) for spec in specs]


def scalar(value: Any) -> Array:
    """A NumPy scalar or 0-d array as a 0-d array."""
    return np.asarray(value)


def as_float64(value: Any) -> Array:
    """A number or an array as a float64 array."""
    return np.asarray(value, np.float64)


def take(array: Array, places: Array) -> Array:
    """A vector's elements at these places."""
    return array[places]


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

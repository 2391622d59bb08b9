"""Numbers and flags as kernels take them."""

import numpy as np

from gradkit._backend import Array
from gradkit._calls.roles import Number

FLAGS = {False: np.uint32(0), True: np.uint32(1)}
_ONE = np.float64(1)


def either(number: Number) -> tuple[Array | None, np.float64]:
    """An array to read a number from, or none and the number itself."""
    return (None, np.float64(number)) if isinstance(number, float) else (number, _ONE)


def either_flag(flag: Array | bool) -> tuple[Array | None, np.uint32]:
    """The same of a flag."""
    return (None, FLAGS[flag]) if isinstance(flag, bool) else (flag, FLAGS[False])

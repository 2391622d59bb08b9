"""The threads of GNU OpenMP, which calls work on where another library of the process does."""

import ctypes
import sys

import pytest

from gradkit import _host

_FUNCTIONS = "GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads"

_NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)

NEEDS_OPENMP = pytest.mark.skipif(
    _host.code is None or sys.platform != "linux", reason="calls have no threads of other libraries"
)
BOTH = pytest.mark.parametrize(
    "threads_of", ["gradkit", pytest.param("openmp", marks=NEEDS_OPENMP)], indirect=True
)


def use(threads: int) -> None:
    """From now on calls of this thread work on so many of OpenMP's."""
    runtime = ctypes.CDLL("libgomp.so.1")  # which g++ brings
    runtime.omp_set_num_threads(threads)
    runtime.GOMP_parallel(_NOTHING, None, 0, 0)  # they are there now
    found = (ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in _FUNCTIONS)
    _host.code.use_openmp(*(each.value for each in found))

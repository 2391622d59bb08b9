"""CuPy's own arrays without a driver: kernels do nothing, and what is left is the host's work.

CuPy makes arrays of any memory, and asks the driver only for devices, streams and allocations.
Those answers are given here, so that the host's part of a call can be timed, and the code that
talks to CuPy be run, on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from gradkit import _cuda
from gradkit._cuda.launch.device import CupyDevice

_POOL_BYTES = 1 << 26  # that every allocation shares: nobody looks at what is there


class IdleCupyDevice(CupyDevice):
    """A device that neither compiles nor launches."""

    def __init__(self, number: int) -> None:
        import cupy

        self.xp, self.number, self.empty = cupy, number, cupy.ndarray
        self.multiprocessors, self.sharing, self.max_shared_memory = 132, 132, 227 * 1024
        self.clusters, self.parameter_bytes = True, 32764
        self.launch_errors = (RuntimeError,)

    def cuda_stream(self) -> None:  # type: ignore[override]
        """Leave cuDNN out of it."""

    def compile(self, source: str, options: tuple[str, ...]) -> Any:  # noqa: ARG002
        """Stand in for the module too."""
        return self

    def resident(self, kernel: Any, threads: int, shared_mem: int) -> int:  # noqa: ARG002
        """Hold as many as have 64 registers a thread."""
        return 1024 // threads

    def upload(self, host: npt.NDArray[Any]) -> Any:
        """Keep it on the host, where nobody will read it."""
        return _as_cupy(np.ascontiguousarray(host).reshape(-1).view(np.uint8))

    def get_function(self, name: str) -> Callable[..., Any]:  # noqa: ARG002
        """Return a kernel that does nothing."""
        return _launch_nothing


@contextmanager
def idle_cupy() -> Iterator[Callable[[npt.NDArray[Any]], Any]]:
    """Give a function that makes a CuPy array of a host array's own memory."""
    import cupy

    pool = _pointer(np.zeros(_POOL_BYTES, np.uint8))
    stream = SimpleNamespace(ptr=0)  # the legacy default stream, which is never captured

    def current_stream() -> Any:
        return stream

    def current_device() -> int:
        return 0

    def allocate(size: int) -> Any:  # noqa: ARG001
        return pool

    with (  # plain functions: a mock would take longer than what is timed
        mock.patch.object(cupy.cuda, "get_current_stream", new=current_stream),
        mock.patch.object(cupy.cuda.runtime, "getDevice", new=current_device),
        mock.patch.object(_cuda, "CupyDevice", IdleCupyDevice),
        mock.patch.object(_cuda, "backends", {}),
        cupy.cuda.using_allocator(allocate),
    ):
        yield _as_cupy


def _as_cupy(host: npt.NDArray[Any]) -> Any:
    import cupy

    return cupy.ndarray(host.shape, host.dtype, _pointer(host), host.strides)


def _pointer(host: npt.NDArray[Any]) -> Any:
    import cupy

    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.cuda.MemoryPointer(memory, 0)


def _launch_nothing(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> list[Any]:  # noqa: ARG001
    """Ask what is passed by value where it lies, as CuPy does, and launch nothing."""
    return [arg.__array_interface__["data"][0] for arg in args if type(arg) is np.ndarray]

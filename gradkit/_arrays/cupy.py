"""CuPy: the CUDA backend computes on its arrays, on their device's current stream."""

import math
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

from gradkit import _host
from gradkit._arrays import cuda
from gradkit._arrays.base import NOTHING, Framework
from gradkit._backend import Array, Shape
from gradkit._calls.backend import Backend

_device_number = attrgetter("data.device_id")


class CuPy(Framework):
    """``cupy.ndarray``."""

    name = module = "cupy"
    returns_views = True

    def owns(self, kind: type) -> bool:
        ndarray = sys.modules["cupy"].ndarray
        if kind is ndarray and _host.code is not None:
            _host.code.use_device_arrays(kind)
        return issubclass(kind, ndarray)

    def computes_on(self, kind: type) -> bool:
        return True

    def on_one_device(self, views: Iterable[Array]) -> bool:
        return len(set(map(_device_number, views))) == 1

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        return array

    def known_backend(self, device: int) -> Backend | None:
        return cuda.known_backend(device)

    def backend_of(self, view: Array) -> Backend:
        return cuda.backends().backend_of(view)

    def wrap(self, result: Array, like: Any) -> Any:
        return result

    def parts(self, vector: Any, shapes: Iterable[Shape]) -> Iterable[Any]:
        """The same in half the time: CuPy looks for a while at what it is to slice."""
        make, dtype, at = type(vector), vector.dtype, vector.data
        if make is not sys.modules["cupy"].ndarray or not vector.flags.c_contiguous:
            yield from super().parts(vector, shapes)
            return
        for shape in shapes:
            yield make(shape, dtype, at)
            at = at + math.prod(shape) * dtype.itemsize  # `+=` would move that of an array

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        """Switch devices only if another is current, because a switch costs a microsecond."""
        if sys.modules["cupy"].cuda.runtime.getDevice() == like.data.device_id:
            return NOTHING
        return like.device

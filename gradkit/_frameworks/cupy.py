"""CuPy: the CUDA backend computes on its arrays, on their device's current stream."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from operator import add, attrgetter, le
from typing import Any

from gradkit._backend import Array, Backend
from gradkit._frameworks.base import NOTHING, Framework

_contiguous = attrgetter("flags.c_contiguous")
_address, _size = attrgetter("data.ptr"), attrgetter("nbytes")


class CuPy(Framework):
    """``cupy.ndarray``."""

    name = module = "cupy"
    returns_views = True

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def computes_on(self, kind: type) -> bool:  # noqa: ARG002
        return True

    def on_one_device(self, views: Iterable[Array]) -> bool:
        return len({view.data.device_id for view in views}) == 1

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:  # noqa: ARG002
        return array

    def backend_of(self, view: Array) -> Backend:
        from gradkit import _cuda

        return _cuda.backend_of(view)

    def wrap(self, result: Array, like: Any) -> Any:  # noqa: ARG002
        return result

    def known_disjoint(self, arrays: Sequence[Any], views: Sequence[Array]) -> bool:  # noqa: ARG002
        if not all(map(_contiguous, arrays)):
            return False
        starts, sizes = zip(
            *sorted(zip(map(_address, arrays), map(_size, arrays), strict=True)), strict=True
        )
        return all(map(le, map(add, starts, sizes), starts[1:]))

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        """Switch devices only if another is current, because a switch costs a microsecond."""
        if sys.modules["cupy"].cuda.runtime.getDevice() == like.data.device_id:
            return NOTHING
        device: AbstractContextManager[Any] = like.device
        return device

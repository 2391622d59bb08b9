"""CuPy: its arrays are native ones; work runs on their device, on the current stream."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from operator import attrgetter
from typing import Any

from gradkit._frameworks.base import Framework, Native

_gapless = attrgetter("flags.c_contiguous")
_address, _size = attrgetter("data.ptr"), attrgetter("nbytes")


class CuPy(Framework):
    """``cupy.ndarray``."""

    name = module = "cupy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Native:  # noqa: ARG002
        return array

    def wrap(self, native: Native, like: Any) -> Any:  # noqa: ARG002
        return native

    def apart(self, arrays: Sequence[Any]) -> bool:
        if not all(map(_gapless, arrays)):
            return False
        spans = sorted(zip(map(_address, arrays), map(_size, arrays), strict=True))
        return all(start + size <= other for (start, size), (other, _) in pairwise(spans))

    def running(self, like: Any) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = like.device
        return device

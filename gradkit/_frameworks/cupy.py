"""CuPy: its arrays are native ones; work runs on their device, on the current stream."""

import sys
from contextlib import AbstractContextManager
from typing import Any

from gradkit._frameworks.base import Framework, Native


class CuPy(Framework):
    """``cupy.ndarray``."""

    name = module = "cupy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Native:  # noqa: ARG002
        return array

    def wrap(self, native: Native, like: Any) -> Any:  # noqa: ARG002
        return native

    def running(self, like: Any) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = like.device
        return device

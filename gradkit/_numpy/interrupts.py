"""Ctrl-C waits while arrays are written in place, so that none is left written in part.

Handlers of other signals do not wait: what they raise may leave a list written in part.
"""

# The same functions in `signal` make enums of what they return, which takes ten times as long.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any


class Uninterrupted:
    """Puts SIGINT off until a block has run to its end.

    Only in the main thread: Python runs signal handlers in no other one.
    """

    def __enter__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._waiting: list[tuple[int, FrameType | None]] = []
        handler = getsignal(SIGINT)
        if callable(handler):  # else SIGINT is ignored, ends the process or is not Python's
            try:
                signal(SIGINT, self._wait)
                self._handler = handler
            except ValueError:  # not the main thread
                pass

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal(SIGINT, self._handler)
            for call in self._waiting:
                self._handler(*call)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append((number, frame))

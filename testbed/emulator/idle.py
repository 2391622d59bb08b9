"""A device without kernels: what is left of a call is the work of the host."""

from __future__ import annotations

from typing import Any

from .device import EmulatedDevice


class IdleDevice(EmulatedDevice):
    """An emulated device that neither compiles nor launches.

    ``compiled`` lists what a GPU would have compiled: pairs of a source and its options.
    """

    replays = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compiled: list[tuple[str, tuple[str, ...]]] = []

    def compile(self, source: str, options: tuple[str, ...] = ()) -> Any:
        """Return a module of kernels that do nothing; record the source and its options."""
        self.compiled.append((source, options))
        return self

    def pointers(self, arrays: Any, *, write: bool) -> tuple[int, ...]:
        """Return the addresses of arrays; a list that has them is not looked at."""
        known: tuple[int, ...] | None = getattr(arrays, "addresses", None)
        return super().pointers(arrays, write=write) if known is None else known

    def get_function(self, name: str) -> Any:  # noqa: ARG002
        """Return a kernel that does nothing."""
        return launch_nothing


def launch_nothing(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
    """Take a launch's arguments and return."""

"""The kernels of one file for arrays of one shape, and arrays that they can use."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from gradkit._backend import Array
from gradkit._cuda.launch.buffers import AllUsable, contiguous, copy_back, writable_like
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import Launch, Macros, kernel

_Arrays: TypeAlias = Sequence[Array | None]


@dataclass(frozen=True, eq=False)
class Planned:
    """What shapes and dtypes decide about an operation's launches, decided once."""

    device: Device
    file: str
    macros: Macros

    @property
    def vector(self) -> int:
        """How many elements of the data one access moves."""
        raise NotImplementedError

    def usable(self, inputs: _Arrays, outs: _Arrays) -> tuple[_Arrays, _Arrays]:
        """The arrays themselves if kernels can use them; else copies, and what is like the outs."""
        return (inputs, outs) if self._all_usable((*inputs, *outs)) else self.each(inputs, outs)

    def each(self, inputs: _Arrays, outs: _Arrays) -> tuple[_Arrays, _Arrays]:
        """The same, with every array looked at by itself."""
        device = self.device
        read = [contiguous(device, array, self._width(array)) for array in inputs]
        written = [writable_like(device, out, self._width(out)) for out in outs]
        return read, written

    def _width(self, array: Array | None) -> int:
        """How many elements of an array one access moves: vectors have one a channel."""
        return self.vector if array is not None and array.ndim > 1 else 1

    @cached_property
    def _all_usable(self) -> AllUsable:
        return AllUsable()

    def deliver(self, outs: _Arrays, written: _Arrays) -> None:
        """Copy what was not written in its place."""
        for out, made in zip(outs, written, strict=True):
            copy_back(out, made)

    @cached_property
    def _launches(self) -> dict[str, Launch]:
        return {}

    def launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> Launch:
        """The launch of a kernel, which has the same grid and block each time."""
        found = self._launches.get(name)
        if found is None:
            loaded = kernel(self.device, self.file, name, **self.macros)
            found = self._launches[name] = Launch(loaded, grid, block)
        return found

"""The types that everything shares: arrays, their specifications, and lists of gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

FLOAT64 = np.dtype(np.float64)
# Bytes from which on memory of new results on the host is kept for the next ones: what a step frees
# in one piece, the allocator gives back to the system.
LARGE = 1 << 17
Array: TypeAlias = Any  # numpy.ndarray, or cupy.ndarray, which cannot be imported here
# An array on a device, where a plan has said that kernels need no more than where it begins.
Address: TypeAlias = int
Engine: TypeAlias = Literal["cudnn", "cudnn-persistent", "native"]
Shape: TypeAlias = tuple[int, ...]
# The axes of each gradient that a norm sums over, in ascending order. A unit is what it covers.
Axes: TypeAlias = tuple[tuple[int, ...], ...]
Number: TypeAlias = Array | float  # a float, or a 0-d float64 array that is read on its device


class Spec(NamedTuple):
    """An output that a call has.

    ``order``: if the output is new, the shape in which it is allocated, and the transposition
    that makes ``shape`` of it.
    """

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    order: tuple[Shape, tuple[int, ...]] | None = None

    def allocate(self, empty: Callable[[Shape, np.dtype[Any]], Array]) -> Array:
        """A new array of this kind, of memory that ``empty`` gives."""
        if self.order is None:
            return empty(self.shape, self.dtype)
        shape, transposition = self.order
        return empty(shape, self.dtype).transpose(transposition)


class Views(list[Array]):
    """The gradients of one call, as a backend's arrays.

    The backend may keep in ``plan`` what it has computed about them, for its next operation on the
    same list. The plan lives as long as the call.
    """

    plan: Any = None


def picked(views: Sequence[Array], chosen: Iterable[Any]) -> Sequence[Array]:
    """Select gradients of a call."""
    if isinstance(views, list):
        return Views(compress(views, chosen))
    return views.picked(chosen)  # type: ignore[attr-defined]  # compiled code's own table


class OneDevice(NamedTuple):
    """The gradients of a call that lie on one device."""

    positions: tuple[int, ...]  # in the list of all
    views: Views

    def of(self, items: Sequence[Any]) -> list[Any]:
        """Select the items of these gradients, from one for each gradient of the call."""
        return [items[k] for k in self.positions]


class Spread(Sequence[Array]):
    """The gradients of one call, which lie on several devices; on ``devices[0]`` the first.

    ``host``: those in host memory, which may accompany those of one device or more.
    """

    def __init__(
        self, arrays: Sequence[Array], devices: Sequence[OneDevice], host: OneDevice | None = None
    ):
        self._arrays, self.devices, self.host = arrays, devices, host

    @property
    def places(self) -> Sequence[OneDevice]:
        """The devices, and the host if something lies there."""
        return self.devices if self.host is None else (*self.devices, self.host)

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[Array]:
        return iter(self._arrays)

    def __getitem__(self, index: Any) -> Any:
        return self._arrays[index]

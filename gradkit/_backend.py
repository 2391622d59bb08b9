"""The types that everything shares: arrays, their specifications, and lists of gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

FLOAT64 = np.dtype(np.float64)
# Bytes from which on memory of new results on the host is kept for the next ones: what a step frees
# in one piece, the allocator gives back to the system. NumPy asks for huge pages from here on.
LARGE = 1 << 22
Array: TypeAlias = Any  # numpy.ndarray, or cupy.ndarray, which cannot be imported here
# An array on a device, where a plan has said that kernels need no more than where it begins.
Address: TypeAlias = int
Engine: TypeAlias = Literal["cudnn", "cudnn-persistent", "native"]
Shape: TypeAlias = tuple[int, ...]
# The axes of each gradient that a norm sums over, in ascending order. A unit is what it covers.
Axes: TypeAlias = tuple[tuple[int, ...], ...]
Number: TypeAlias = Array | float  # a float, or a 0-d float64 array that is read on its device


_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


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


class Spans(NamedTuple):
    """Where arrays begin and end that are contiguous and share no memory, in their order there."""

    begins: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]

    @classmethod
    def of(cls, starts: Sequence[int], sizes: Sequence[int]) -> "Spans | None":
        """Those of ranges of bytes, unless two of them meet."""
        begins = np.array(starts, np.uint64)
        order = begins.argsort()
        ends = begins + np.array(sizes, np.uint64)
        made = cls(begins[order], ends[order])
        return made if (made.ends[:-1] <= made.begins[1:]).all() else None

    def apart_from(self, begins: Any, ends: Any) -> bool:
        """Whether none meets a range of some others, which may meet each other."""
        begun = self.begins.searchsorted(np.asarray(ends, np.uint64), "left")
        ended = self.ends.searchsorted(np.asarray(begins, np.uint64), "right")
        return bool((begun == ended).all())


class Known:
    """Addresses and layouts of gradients; those that come again are the same object.

    Caches find an object at once, and would compare a thousand addresses anew in each look-up.
    ``disjoint`` is whether the gradients are contiguous and share no memory, once somebody asked;
    then they may have ``spans``.
    """

    __slots__ = ("addresses", "disjoint", "layout", "spans")

    def __init__(self, addresses: tuple[int, ...], layout: tuple[tuple[Any, ...], ...]):
        self.addresses, self.layout = addresses, layout
        self.disjoint: bool | None = None
        self.spans: Spans | None = None


_known = lru_cache(maxsize=64)(Known)


class Borrowed(Sequence[Array]):
    """The gradients of one call in device memory, as addresses and layouts.

    Lists need no more: an array for each of a thousand of another library's gradients takes longer
    than the rest of the call, and so does it to ask arrays twice. ``layout`` has one tuple per
    property of all arrays, which decides everything but where they lie; ``known`` stands for both.
    ``make`` gives the array at a position, for whoever wants arrays; ``own`` are the library's,
    which say what the layout of another library does not tell. ``plan`` is as in ``Views``.
    """

    plan: Any = None

    def __init__(
        self,
        addresses: tuple[int, ...],
        layout: tuple[tuple[Any, ...], ...],
        make: Callable[[int], Array],
        own: Sequence[Any] = (),
    ):
        self.addresses, self.layout = addresses, layout
        self.known = _known(addresses, layout)
        self._make, self._own = make, own
        self._made: list[Array] = []

    @property
    def has_shapes(self) -> bool:
        """Whether the layout has shapes, and not the numbers of elements alone."""
        return len(self.layout) > 2

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each."""
        return self.layout[1] if self.has_shapes else tuple(map(_shape_of, self._own or self))

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """The dtype of each, as its library has it."""
        return self.layout[0] if len(self.layout) > 1 else tuple(map(_dtype_of, self._own or self))

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[Array]:
        if not self._made:
            self._made = list(map(self._make, range(len(self))))
        return iter(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index] if self._made else self._make(index)


def picked(views: Sequence[Array], chosen: Iterable[Any]) -> Sequence[Array]:
    """Those of a call's gradients that are chosen."""
    if not isinstance(views, (list, Borrowed)):  # compiled code's own table
        return views.picked(chosen)  # type: ignore[attr-defined]
    if not isinstance(views, Borrowed) or len(views.layout) == 1:
        return Views(compress(views, chosen))
    places = [*compress(range(len(views)), chosen)]
    addresses, *layout = (tuple([of[k] for k in places]) for of in (views.addresses, *views.layout))
    return Borrowed(addresses, tuple(layout), lambda k: views[places[k]])


class OneDevice(NamedTuple):
    """Those of a call's gradients that lie on one device."""

    positions: tuple[int, ...]  # in the list of all
    views: Views | Borrowed

    def of(self, items: Sequence[Any]) -> list[Any]:
        """Those of a list's items, one for each gradient of the call, that go with these."""
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

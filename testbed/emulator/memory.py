"""The emulator's knowledge of arrays: where their memory lies and who may touch it."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .runtime import SPACES, Runtime, Window

Array = npt.NDArray[Any]

# As cudaMalloc guarantees: a launcher may choose a vectorised path by the address.
ALIGNMENT = 256
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the module names it since Python 3.12


class Extent(NamedTuple):
    """Some memory: the bytes it spans, its first element's address, and what it holds."""

    start: int
    end: int
    origin: int
    itemsize: int
    content: str | tuple[npt.DTypeLike, tuple[int, ...]]

    @classmethod
    def of(cls, array: Array) -> Extent:
        """Return the extent of ``array``: everything between its first and last byte."""
        origin = array.__array_interface__["data"][0]
        content = (array.dtype, array.shape)
        if array.flags.c_contiguous:
            return cls(origin, origin + array.nbytes, origin, array.itemsize, content)
        if array.size == 0:
            return cls(origin, origin, origin, array.itemsize, content)
        reach = [
            stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)
        ]
        below = sum(step for step in reach if step < 0)
        above = sum(step for step in reach if step > 0)
        end = origin + above + array.itemsize
        return cls(origin + below, end, origin, array.itemsize, content)

    @property
    def text(self) -> str:
        """Return the dtype and the shape as text, such as ``float32[4, 8]``."""
        if isinstance(self.content, str):
            return self.content
        dtype, shape = self.content
        return f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"


def owner_of(array: Array) -> Array:
    """Return the array whose life is the memory's: the last one that ``base`` leads to."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Memory:
    """Allocates arrays and keeps the runtime's records of them for as long as they live.

    One object per runtime library, for those records are the process's.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._allocated: set[int] = set()  # ids of the owners of what allocate() gave out
        self._unwritten: dict[int, tuple[int, int]] = {}  # id of the owner -> its range
        self._registered: dict[tuple[int, int], tuple[int, bool]] = {}  # range -> handle, writable
        self._extents: dict[int, Extent] = {}  # by handle
        self._written_owners: set[int] = set()  # ids of owners with a writable registration
        self._next_handle = 0

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an array that no kernel may read before something wrote it; all bytes are 0xFF."""
        array = self.allocate(shape, dtype)
        owner = owner_of(array)
        owner.fill(0xFF)
        extent = Extent.of(array)
        if extent.start != extent.end:
            span = (extent.start, extent.end)
            self._runtime.mark_uninitialised(*span)
            self._unwritten[id(owner)] = span
            weakref.finalize(owner, self._forget_unwritten, id(owner), span).atexit = False
        return array

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an aligned array that counts as written."""
        kind = np.dtype(dtype)
        size = math.prod(_as_shape(shape)) * kind.itemsize
        raw = np.empty(size + ALIGNMENT, np.uint8)
        self._allocated.add(id(raw))
        weakref.finalize(raw, self._allocated.discard, id(raw)).atexit = False
        skip = -raw.__array_interface__["data"][0] % ALIGNMENT
        return raw[skip : skip + size].view(kind).reshape(_as_shape(shape))

    def allocated(self, array: Array) -> bool:
        """Return whether ``array`` lies on this device, and not on the host."""
        return id(owner_of(array)) in self._allocated

    def register(self, array: Array, *, write: bool) -> int:
        """Return the address of ``array``, by which kernels may reach it from now on.

        The last call for the same bytes decides whether they may be written.
        """
        if write and not array.flags.writeable:
            raise ValueError("write=True for an array which NumPy holds to be read-only")
        extent = Extent.of(array)
        key = (extent.start, extent.end)
        if extent.start == extent.end:
            return extent.origin
        owner = owner_of(array)
        handle, writable = self._registered.get(key, (-1, False))
        if handle < 0:
            handle = self._next_handle
            self._next_handle += 1
            forget = functools.partial(self._forget_registered, key, handle, id(owner))
            weakref.finalize(owner, forget).atexit = False
        elif writable == write:
            return extent.origin
        self._registered[key] = (handle, write)
        self._extents[handle] = extent
        if write:
            self._written_owners.add(id(owner))
        tracked = write or self.maybe_unwritten(array) or self.written_elsewhere(array)
        self._runtime.register_window(ctypes.byref(make_window(extent, ~handle, write, tracked)))
        return extent.origin

    def maybe_unwritten(self, array: Array) -> bool:
        """Return whether ``array`` lies in memory that was allocated without content."""
        return id(owner_of(array)) in self._unwritten

    def written_elsewhere(self, array: Array) -> bool:
        """Return whether a kernel could write this memory through a registered address."""
        return id(owner_of(array)) in self._written_owners

    def registered_extent(self, handle: int) -> Extent | None:
        """Return what was registered under ``handle``."""
        return self._extents.get(handle)

    def _forget_unwritten(self, owner: int, span: tuple[int, int]) -> None:
        self._unwritten.pop(owner, None)
        self._runtime.mark_initialised(*span)

    def _forget_registered(self, key: tuple[int, int], handle: int, owner: int) -> None:
        self._registered.pop(key, None)
        self._written_owners.discard(owner)
        self._extents.pop(handle, None)
        self._runtime.unregister_window(*key)


def make_window(
    extent: Extent,
    identity: int,
    writable: bool,
    tracked: bool,
    space: str = "global",
    rank: int = 0,
) -> Window:
    """Return the runtime's record of ``extent``."""
    return Window(
        start=extent.start,
        end=extent.end,
        writable=writable,
        space=SPACES[space],
        tracked=tracked,
        id=identity,
        rank=rank,
    )


def sparse_array(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return zeros that cost only the pages which are touched, however large the array.

    For indices beyond 2^31 and 2^32: see `EmulatedDevice.only_blocks`.
    """
    kind = np.dtype(dtype)
    size = math.prod(_as_shape(shape)) * kind.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    return np.frombuffer(memory, kind).reshape(_as_shape(shape))


def _as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)

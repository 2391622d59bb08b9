"""Starts of the rows of a norm's arrays, for kernels that find them at strides."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.buffers import VECTOR_BYTES, address_of, copied
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.kernels import Macros

_DIMS = 3  # that rows may be counted by
# The kernels' Layout, in kernels/row_starts.cuh.
_LAYOUT = np.dtype(
    [
        ("middle", "i8"),
        ("inner", "i8"),
        ("step", "i8", (5, _DIMS)),
        ("scale_offset", "f8"),
    ]
)

Strides = tuple[Shape | None, ...]  # of several arrays; None for an absent one


class Variant(NamedTuple):
    """Abilities of a kernel beside its plain form, which takes rows without gaps.

    ``strided``: rows at strides. ``further``: a scale with an offset, and samples with parameters
    of their own, as strided kernels have too; ``added``: one more array beside. ``piece``: the
    elements that one access moves, 1 for rows that begin between packs; 0: whole packs. ``odd``:
    rows are not whole packs; at strides, each element is accessed alone.
    """

    strided: bool = False
    further: bool = False
    added: bool = False
    piece: int = 0
    odd: bool = False

    @property
    def macros(self) -> Macros:
        """Macros that it is compiled with; the plain form has none."""
        names = "STRIDED", "FURTHER", "ADDED", "PIECE", "ODD"
        return {name: int(number) for name, number in zip(names, self, strict=True) if number}


PLAIN = Variant()
FURTHER, ADDED = Variant(further=True), Variant(further=True, added=True)


def offset_of(scale_offset: float) -> np.float64:
    """The ``Layout`` of kernels that are further and not strided: -0.0 changes no scale."""
    return np.float64(scale_offset or -0.0)


class Strided(NamedTuple):
    """A kernel's variant and the strides by which it finds the rows of reachable arrays."""

    variant: Variant
    layout: np.ndarray[Any, Any]  # the kernels' ``Layout``, as bytes


class RowStarts:
    """Starts of rows in the arrays of a plan, which have the same strides in each call.

    Kernels reach rows without gaps inside, at strides that three dimensions describe for all arrays
    together.
    """

    def __init__(self, axis: int):
        self._axis = axis
        # By which arrays begin between elements, which hardly any do: those that can be reached.
        self._near: dict[tuple[bool, ...], list[bool]] = {}
        self._strided: dict[tuple[int, Strides], Strided] = {}

    def reachable(
        self, device: Device, read: Sequence[Array | None], written: Sequence[Array | None]
    ) -> tuple[list[Any], list[Any]]:
        """The arrays, but copies and scratch in place of those that kernels cannot reach."""
        every = (*read, *written)
        odd = tuple(
            array is not None and bool(address_of(array) % array.itemsize) for array in every
        )
        near = self._near.get(odd)
        if near is None:
            near = self._near[odd] = self._find(every, odd)
        return (
            [
                array if is_near or array is None else copied(device, array)
                for array, is_near in zip(read, near, strict=False)
            ],
            [
                array if is_near or array is None else scratch(device, array.shape, array.dtype)
                for array, is_near in zip(written, near[len(read) :], strict=True)
            ],
        )

    def _find(self, arrays: Sequence[Array | None], odd: Sequence[bool]) -> list[bool]:
        """Say of each array if it can be reached; an absent one counts as if it could."""
        near = [
            array is None or not (begins_odd or _gaps(array, self._axis))
            for array, begins_odd in zip(arrays, odd, strict=True)
        ]
        first = next(array for array in arrays if array is not None)
        strides = tuple(
            array.strides
            for array, is_near in zip(arrays, near, strict=True)
            if is_near and array is not None
        )
        if _steps(first.shape, self._axis, first.itemsize, strides) is None:
            near = [
                is_near and (array is None or array.flags.c_contiguous)
                for array, is_near in zip(arrays, near, strict=True)
            ]
        return near

    def strided(
        self,
        arrays: Sequence[Array | None],
        vector: int,
        scale_offset: float,
        *,
        added: bool = False,
        odd: bool = False,
    ) -> Strided:
        """Strides of these arrays in packs of ``vector``, in the order of their numbers.

        ``odd``: rows are not whole packs.
        """
        places = 0
        for array in arrays:
            if array is not None:
                places |= address_of(array)
        strides = tuple(None if array is None else array.strides for array in arrays)
        key = places % VECTOR_BYTES, strides
        strided = self._strided.get(key)
        if strided is None:
            first = next(array for array in arrays if array is not None)
            counted = _steps(first.shape, self._axis, first.itemsize, strides)
            assert counted is not None  # the arrays are reachable
            sizes, steps = counted
            starts = key[0] // first.itemsize, *(step for own in steps for step in own)
            between = odd or any(start % vector for start in starts)
            variant = Variant(strided=True, added=added, piece=int(between), odd=odd)
            strided = self._strided[key] = Strided(variant, _layout(sizes, steps, scale_offset))
        return strided


def _layout(sizes: Shape, steps: list[Shape], scale_offset: float) -> np.ndarray[Any, Any]:
    fields = np.zeros((), _LAYOUT)
    _, fields["middle"], fields["inner"] = sizes
    fields["step"][: len(steps)] = steps
    fields["scale_offset"] = offset_of(scale_offset)
    return fields.view(f"V{_LAYOUT.itemsize}")


def _steps(
    shape: Shape, axis: int, size: int, strides: Strides
) -> tuple[Shape, list[Shape]] | None:
    """Three sizes that rows are counted by, and each array's steps along them, in elements.

    ``None`` if it takes more dimensions than that.
    """
    dims: list[tuple[int, Shape]] = []  # outermost first
    for k, length in enumerate(shape[:axis]):
        own = tuple(0 if steps is None else steps[k] // size for steps in strides)
        if length == 1:
            continue
        if dims and all(
            outer == length * step for outer, step in zip(dims[-1][1], own, strict=True)
        ):
            length *= dims.pop()[0]
        dims.append((length, own))
    if len(dims) > _DIMS:
        return None
    dims = [(1, (0,) * len(strides))] * (_DIMS - len(dims)) + dims
    sizes = tuple(length for length, _ in dims)
    return sizes, list(zip(*(own for _, own in dims), strict=True))


def _gaps(array: Array, axis: int) -> bool:
    """True if rows have gaps inside, or do not begin at multiples of the size of an element."""
    size, inner = array.itemsize, math.prod(array.shape[axis:])
    if any(step % size for step in array.strides[:axis]):
        return True
    if not inner:
        return False
    for length, step in zip(array.shape[axis:], array.strides[axis:], strict=True):
        inner //= length
        if length != 1 and step != inner * size:
            return True
    return False

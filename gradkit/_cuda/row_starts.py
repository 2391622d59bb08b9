"""Where the rows of a norm's arrays begin, for kernels that find them at strides."""

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
        ("packed", "u4"),
        ("unused", "u4"),
        ("scale_offset", "f8"),
    ]
)

Strides = tuple[Shape | None, ...]  # of several arrays; None for an absent one


class Variant(NamedTuple):
    """What a kernel can do beside its plain form, which takes rows without gaps.

    ``strided``: rows at strides, and a scale with an offset. ``added``: one more array; such
    kernels are strided too.
    """

    strided: bool = False
    added: bool = False

    @property
    def macros(self) -> Macros:
        """How it is compiled; the plain form has no macro for it."""
        return {name: 1 for name, has in zip(("STRIDED", "ADDED"), self, strict=True) if has}


PLAIN, STRIDED, ADDED = Variant(), Variant(strided=True), Variant(strided=True, added=True)


class RowStarts:
    """Where rows begin in the arrays of a plan, which have the same strides in each call.

    Kernels reach rows without gaps inside, at strides that three dimensions describe for all arrays
    together.
    """

    def __init__(self, axis: int):
        self._axis = axis
        # By which arrays begin between elements, which hardly any do: those that can be reached.
        self._near: dict[tuple[bool, ...], list[bool]] = {}
        self._layouts: dict[tuple[bool, Strides], np.ndarray[Any, Any]] = {}

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
                array if kept or array is None else copied(device, array)
                for array, kept in zip(read, near, strict=False)
            ],
            [
                array if kept or array is None else scratch(device, array.shape, array.dtype)
                for array, kept in zip(written, near[len(read) :], strict=True)
            ],
        )

    def _find(self, arrays: Sequence[Array | None], odd: Sequence[bool]) -> list[bool]:
        """Which arrays can be reached; an absent one counts as if it could."""
        near = [
            array is None or not (begins_odd or _gaps(array, self._axis))
            for array, begins_odd in zip(arrays, odd, strict=True)
        ]
        first = next(array for array in arrays if array is not None)
        strides = tuple(
            array.strides
            for array, kept in zip(arrays, near, strict=True)
            if kept and array is not None
        )
        if _steps(first.shape, self._axis, first.itemsize, strides) is None:
            near = [
                kept and (array is None or array.flags.c_contiguous)
                for array, kept in zip(arrays, near, strict=True)
            ]
        return near

    def layout(self, arrays: Sequence[Array | None], scale_offset: float) -> np.ndarray[Any, Any]:
        """The kernels' ``Layout`` of reachable arrays, in the order of their numbers, as bytes."""
        present = [array for array in arrays if array is not None]
        aligned = all(address_of(array) % VECTOR_BYTES == 0 for array in present)
        key = aligned, tuple(None if array is None else array.strides for array in arrays)
        found = self._layouts.get(key)
        if found is None:
            first = present[0]
            sizes = first.shape, self._axis, first.itemsize
            found = self._layouts[key] = _layout(*sizes, key[1], aligned, scale_offset or -0.0)
        return found


def _layout(
    shape: Shape, axis: int, size: int, strides: Strides, aligned: bool, scale_offset: float
) -> np.ndarray[Any, Any]:
    steps = _steps(shape, axis, size, strides)
    assert steps is not None  # the arrays are reachable
    sizes, of_arrays = steps
    fields = np.zeros((), _LAYOUT)
    _, fields["middle"], fields["inner"] = sizes
    fields["step"][: len(of_arrays)] = of_arrays
    fields["packed"] = aligned and not any(
        step * size % VECTOR_BYTES for own in of_arrays for step in own
    )
    fields["scale_offset"] = scale_offset
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
    """Whether rows have gaps inside, or do not begin at multiples of the size of an element."""
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

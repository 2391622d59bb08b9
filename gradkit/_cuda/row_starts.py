"""Where the rows of a norm's arrays begin, for kernels that find them at strides."""

import math
from collections.abc import Sequence
from functools import lru_cache
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
        ("step", "i8", (4, _DIMS)),
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


def reachable(
    device: Device, axis: int, read: Sequence[Array | None], written: Sequence[Array | None]
) -> tuple[list[Any], list[Any]]:
    """The arrays, but copies and scratch in place of those whose rows kernels cannot reach.

    They reach rows without gaps inside, at strides that three dimensions describe for all arrays
    together.
    """
    present = [array for array in (*read, *written) if array is not None]
    shape, size = present[0].shape, present[0].itemsize
    near = [array for array in present if _has_rows(array, axis)]
    if _steps(shape, axis, size, tuple(array.strides for array in near)) is None:
        near = [array for array in near if array.flags.c_contiguous]
    kept = set(map(id, near))
    return (
        [array if array is None or id(array) in kept else copied(device, array) for array in read],
        [
            array
            if array is None or id(array) in kept
            else scratch(device, array.shape, array.dtype)
            for array in written
        ],
    )


def layout_of(
    axis: int, arrays: Sequence[Array | None], scale_offset: float
) -> np.ndarray[Any, Any]:
    """The kernels' ``Layout`` of reachable arrays, in the order of their numbers, as bytes."""
    present = [array for array in arrays if array is not None]
    aligned = all(address_of(array) % VECTOR_BYTES == 0 for array in present)
    strides = tuple(None if array is None else array.strides for array in arrays)
    first = present[0]
    return _layout(first.shape, axis, first.itemsize, strides, aligned, scale_offset or -0.0)


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
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


def _has_rows(array: Array, axis: int) -> bool:
    """Whether rows have no gaps, and begin at multiples of the size of an element."""
    size = array.itemsize
    if address_of(array) % size or any(step % size for step in array.strides[:axis]):
        return False
    return _is_gapless(array.shape[axis:], array.strides[axis:], size)


@lru_cache(maxsize=4096)
def _is_gapless(shape: Shape, strides: Shape, size: int) -> bool:
    inner = math.prod(shape)
    if not inner:
        return True
    for length, step in zip(shape, strides, strict=True):
        inner //= length
        if length != 1 and step != inner * size:
            return False
    return True

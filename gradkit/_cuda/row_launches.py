"""Launches of norms over rows, which shapes and dtypes decide once a plan."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from gradkit._backend import Shape
from gradkit._cuda.launch.buffers import VECTOR_BYTES, Usable, vector_of
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.grids import column_sums, rows_of
from gradkit._cuda.launch.kernels import Launch
from gradkit._cuda.row_starts import PLAIN, RowStarts, Variant
from gradkit._dtypes import DType, Types, accumulation_name, dtype_named


@dataclass(frozen=True, eq=False)
class RowLaunches:
    """``rows`` rows of ``width`` a sample; one access reads or writes ``vector`` columns.

    Rows of 16 bits and an odd width may be ``odd``, for kernels that find packs in them:
    kernels/chunks.cuh.
    """

    device: Device
    types: Types
    axis: int
    rows: int
    width: int
    vector: int
    samples: int

    @classmethod
    def of(
        cls,
        device: Device,
        types: Types,
        shape: Shape,
        axis: int,
        *,
        samples: int = 1,
        odd_columns: int = 0,
        **more: Any,
    ) -> Self:
        """Launches for arrays of this shape; ``more``: the fields that only these launches have.

        ``odd_columns``: how many a row may have that is odd.
        """
        rows, width = rows_of(shape, axis)
        own = rows // samples if samples else 0
        vector = _vector_of(types[0], width, odd_columns)
        return cls(device, types, axis, own, width, vector, samples, **more)

    @cached_property
    def odd(self) -> bool:
        """True if rows are not whole packs."""
        return bool(self.width % self.vector)

    @cached_property
    def whole(self) -> bool:
        """True if rows are whole packs of as many bytes as one access can move."""
        return self.vector * self.itemsize == VECTOR_BYTES and not self.odd

    @cached_property
    def packs(self) -> int:
        """Number of packs that the threads of a row share."""
        return self.width // self.vector - self.odd

    @cached_property
    def plain(self) -> Variant:
        """Variant for rows without gaps."""
        return Variant(odd=True) if self.odd else PLAIN

    @cached_property
    def itemsize(self) -> int:
        """The bytes of an element of the data."""
        return dtype_named(self.types[0]).itemsize

    @cached_property
    def accumulator(self) -> DType:
        """Dtype of sums over the data."""
        return dtype_named(accumulation_name(self.types[0]))

    @cached_property
    def counts(self) -> tuple[np.int64, np.int64]:
        """Rows and columns."""
        return np.int64(self.rows), np.int64(self.width)

    @cached_property
    def all_usable(self) -> Usable:
        """A call's arrays as kernels take them."""
        return Usable()

    @cached_property
    def starts(self) -> RowStarts:
        """The starts of rows in the arrays of a call."""
        return RowStarts(self.axis)

    def column_sums(self, planes: int) -> Launch:
        """The last kernel of a gradient, which adds partial sums of ``planes`` parameters up."""
        accumulator, parameter = self.accumulator.name, self.types[2]
        return column_sums(self.device, accumulator, parameter, self.width, planes, self.samples)


def _vector_of(name: str, width: int, odd_columns: int) -> int:
    """Largest vector that divides the width; odd 16-bit rows, if long enough, use whole packs."""
    itemsize = dtype_named(name).itemsize
    vector, whole = vector_of(itemsize, width), VECTOR_BYTES // itemsize
    odd = vector == 1 and itemsize == 2 and 2 * whole + 2 <= width // whole and width <= odd_columns
    return whole if odd else vector

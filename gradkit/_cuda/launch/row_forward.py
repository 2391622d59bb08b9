"""The forward passes of layer norm and RMS norm, and the inverse of layer norm, on a GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.buffers import (
    AllUsable,
    all_usable,
    contiguous,
    copy_back,
    vector_of,
    writable_like,
)
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.grids import row_blocks, rows_of
from gradkit._cuda.launch.kernels import Combination, Launch, Macros, kernel, norm_macros
from gradkit._cuda.launch.row_starts import (
    ADDED,
    PLAIN,
    STRIDED,
    Variant,
    layout_of,
    reachable,
)
from gradkit._dtypes import LAYER_NORM_TYPES, DType, Types, dtype_named, float_name

_FORWARD_THREADS = 512  # that work on one row at most
_FORWARD_CHUNKS = 4  # accesses in which a thread reads its part of a row, if registers hold a row
_INVERSE_THREADS = 256


def write_forward(
    device: Device,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
    eps: float,
    y: Array,
    mean: Array | None,
    inv_std: Array,
    *,
    scale_offset: float,
    residual: Array | None = None,
    s: Array | None = None,
) -> None:
    """Layer norm, or RMS norm if ``mean`` is ``None``; ``y`` may be ``x``.

    With a residual, ``s = x + residual`` is written and takes the place of ``x``; it may be either.
    """
    if not x.size:  # an empty row counts as mean 0, variance 0
        inv_std.fill(1 / math.sqrt(eps) if eps else math.inf)
        if mean is not None:
            mean.fill(0)
        return
    centred = mean is not None
    plan = _plan_of(device, x, inv_std, (scale, bias), axis, centred=centred)
    plan.normalize(Data(x, y, residual, s), scale, bias, mean, inv_std, eps, scale_offset)


def write_inverse(
    device: Device,
    y: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    x: Array,
) -> None:
    """``x = (y - bias) / scale / inv_std + mean``; ``x`` may be ``y``."""
    if not x.size:
        return
    plan = _plan_of(device, y, mean, (scale, bias), axis, centred=None)
    plan.invert(y, scale, bias, mean, inv_std, x)


def _plan_of(
    device: Device,
    data: Array,
    statistic: Array,
    parameters: tuple[Array | None, ...],
    axis: int,
    *,
    centred: bool | None,
) -> "_Rows":
    given = (array.dtype for array in parameters if array is not None)
    dtypes = data.dtype, statistic.dtype, next(given, statistic.dtype)
    return _plan(device, data.shape, axis, dtypes, centred)


@lru_cache(maxsize=1024)
def _plan(
    device: Device,
    shape: Shape,
    axis: int,
    dtypes: tuple[DType, DType, DType],
    centred: bool | None,
) -> "_Rows":
    """What shapes and dtypes decide, decided once."""
    data, statistic, parameter = (float_name(dtype) or "" for dtype in dtypes)
    rows, width = rows_of(shape, axis)
    vector = vector_of(dtypes[0].itemsize, width)
    return _Rows(device, (data, statistic, parameter), axis, rows, width, vector, centred)


class Data(NamedTuple):
    """The arrays of a forward pass that have rows, in the order of the kernel's numbers."""

    x: Array
    y: Array
    residual: Array | None
    s: Array | None


@dataclass(frozen=True, eq=False)
class _Rows:
    """``rows`` rows of ``width``; ``vector`` columns are read and written by one access.

    ``centred``: whether the norm has a mean; ``None``: the inverse.
    """

    device: Device
    types: Types
    axis: int
    rows: int
    width: int
    vector: int
    centred: bool | None

    def normalize(
        self,
        data: Data,
        scale: Array | None,
        bias: Array | None,
        mean: Array | None,
        inv_std: Array,
        eps: float,
        scale_offset: float,
    ) -> None:
        """Launch the forward pass on the arrays, or on copies of those that it cannot reach."""
        numbers = *self._counts, np.float64(eps)
        plain = data.residual is None and not scale_offset
        if plain and self._all_usable((data.x, scale, bias, data.y, mean, inv_std)):
            self._forward(data.x, scale, bias, data.y, mean, inv_std, *numbers)
            return
        device, vector, outs = self.device, self.vector, (data.y, data.s, mean, inv_std)
        (x, residual), (y, s) = reachable(
            device, self.axis, (data.x, data.residual), (data.y, data.s)
        )
        scale, bias = (contiguous(device, array, vector) for array in (scale, bias))
        mean, inv_std = (None if out is None else writable_like(device, out) for out in outs[2:])
        if plain and all_usable((x, y), vector):
            self._forward(x, scale, bias, y, mean, inv_std, *numbers)
        else:
            launch = self._strided if residual is None else self._added
            layout = layout_of(self.axis, (x, y, residual, s), scale_offset)
            launch(x, scale, bias, y, mean, inv_std, *numbers, layout, residual, s)
        for out, made in zip(outs, (y, s, mean, inv_std), strict=True):
            if out is not None:
                copy_back(out, made)

    def invert(
        self,
        y: Array,
        scale: Array | None,
        bias: Array | None,
        mean: Array,
        inv_std: Array,
        x: Array,
    ) -> None:
        """Launch the inverse on the arrays, or on copies of them."""
        vectors, statistics = (y, scale, bias), (mean, inv_std)
        if self._all_usable((*vectors, *statistics, x)):
            self._inverse(*vectors, *statistics, x, *self._counts)
            return
        device, vector = self.device, self.vector
        read = [contiguous(device, array, vector) for array in vectors]
        read += [contiguous(device, array) for array in statistics]
        written = writable_like(device, x, vector)
        self._inverse(*read, written, *self._counts)
        copy_back(x, written)

    @cached_property
    def _counts(self) -> tuple[np.int64, np.int64]:
        """Rows and columns."""
        return np.int64(self.rows), np.int64(self.width)

    @cached_property
    def _all_usable(self) -> AllUsable:
        return AllUsable()

    @cached_property
    def _forward(self) -> Launch:
        return self._variant(PLAIN)

    @cached_property
    def _strided(self) -> Launch:
        return self._variant(STRIDED)

    @cached_property
    def _added(self) -> Launch:
        return self._variant(ADDED)

    @cached_property
    def _inverse(self) -> Launch:
        macros = norm_macros(self.types, self.vector)
        found = kernel(self.device, "layer_norm_inverse", "layer_norm_inverse", **macros)
        packs = -(-self.width // self.vector)
        blocks = row_blocks(found, self.rows, packs, _INVERSE_THREADS)
        along = -(-self.width // (blocks.threads * self.vector))
        resident = found.resident(math.prod(blocks.block)) * self.device.multiprocessors
        short = max(1, -(-resident // blocks.count))
        return Launch(found, (blocks.count, min(along, short)), blocks.block)

    def _variant(self, variant: Variant) -> Launch:
        packs = -(-self.width // (_FORWARD_CHUNKS * self.vector))
        chunks = _FORWARD_CHUNKS if packs <= _FORWARD_THREADS else 0
        macros = norm_macros(
            self.types, self.vector, CENTRED=int(bool(self.centred)), CHUNKS=chunks
        )
        found = kernel(self.device, "layer_norm", "layer_norm", **macros, **variant.macros)
        blocks = row_blocks(found, self.rows, packs, _FORWARD_THREADS)
        return Launch(found, (blocks.count,), blocks.block)


def forward_combinations(*, centred: bool, added: bool = False) -> Iterator[Combination]:
    """Every kernel file and its macros that a forward pass can ask for."""
    for macros in _every_macros():
        for chunks in (_FORWARD_CHUNKS, 0):
            for variant in (ADDED,) if added else (PLAIN, STRIDED):
                own = {"CENTRED": int(centred), "CHUNKS": chunks}
                yield "layer_norm", macros | own | variant.macros


def inverse_combinations() -> Iterator[Combination]:
    """Every kernel file and its macros that the inverse can ask for."""
    for macros in _every_macros():
        yield "layer_norm_inverse", macros


def _every_macros() -> Iterator[Macros]:
    for types in LAYER_NORM_TYPES:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            yield norm_macros(types, vector)

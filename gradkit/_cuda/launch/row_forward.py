"""The forward passes of layer norm and RMS norm, and the inverse of layer norm, on a GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.launch.buffers import contiguous, copy_back, vector_of, writable_like
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.grids import RowBlocks, row_blocks, rows_of
from gradkit._cuda.launch.kernels import Combination, LoadedKernel, Macros, kernel, norm_macros
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
) -> None:
    """Layer norm, or RMS norm if ``mean`` is ``None``; ``y`` may be ``x``."""
    if not x.size:  # an empty row counts as mean 0, variance 0
        inv_std.fill(1 / math.sqrt(eps) if eps else math.inf)
        if mean is not None:
            mean.fill(0)
        return
    plan = _plan_of(device, x, inv_std, scale, bias, axis)
    vector = plan.vector
    outs = [out for out in (y, mean, inv_std) if out is not None]
    written = [writable_like(device, out, vector) for out in outs]
    launch, blocks = plan.centred if mean is not None else plan.about_zero
    launch(
        (blocks.count,),
        blocks.block,
        (
            *(contiguous(device, array, vector) for array in (x, scale, bias)),
            written[0],
            None if mean is None else written[1],
            written[-1],
            np.int64(plan.rows),
            np.int64(plan.width),
            np.float64(eps),
        ),
    )
    for out, made in zip(outs, written, strict=True):
        copy_back(out, made)


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
    plan = _plan_of(device, y, mean, scale, bias, axis)
    made = writable_like(device, x, plan.vector)
    launch, grid, block = plan.inverse
    launch(
        grid,
        block,
        (
            *(contiguous(device, array, plan.vector) for array in (y, scale, bias)),
            contiguous(device, mean),
            contiguous(device, inv_std),
            made,
            np.int64(plan.rows),
            np.int64(plan.width),
        ),
    )
    copy_back(x, made)


def _plan_of(
    device: Device,
    data: Array,
    statistic: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
) -> "_Rows":
    parameter = statistic
    if scale is not None:
        parameter = scale
    elif bias is not None:
        parameter = bias
    return _plan(device, data.shape, axis, (data.dtype, statistic.dtype, parameter.dtype))


@lru_cache(maxsize=1024)
def _plan(device: Device, shape: Shape, axis: int, dtypes: tuple[DType, DType, DType]) -> "_Rows":
    """What shapes and dtypes decide, decided once."""
    data, statistic, parameter = (float_name(dtype) or "" for dtype in dtypes)
    rows, width = rows_of(shape, axis)
    vector = vector_of(dtypes[0].itemsize, width)
    return _Rows(device, (data, statistic, parameter), rows, width, vector)


@dataclass(frozen=True, eq=False)
class _Rows:
    """``rows`` rows of ``width``; ``vector`` columns are read and written by one access."""

    device: Device
    types: Types
    rows: int
    width: int
    vector: int

    @cached_property
    def centred(self) -> tuple[LoadedKernel, RowBlocks]:
        """Layer norm's kernel and blocks."""
        return self._forward(centred=True)

    @cached_property
    def about_zero(self) -> tuple[LoadedKernel, RowBlocks]:
        """RMS norm's kernel and blocks."""
        return self._forward(centred=False)

    @cached_property
    def inverse(self) -> tuple[LoadedKernel, tuple[int, int], tuple[int, int]]:
        """The inverse's kernel, grid and block."""
        macros = norm_macros(self.types, self.vector)
        found = kernel(self.device, "layer_norm_inverse", "layer_norm_inverse", **macros)
        packs = -(-self.width // self.vector)
        blocks = row_blocks(found, self.rows, packs, _INVERSE_THREADS)
        along = -(-self.width // (blocks.threads * self.vector))
        resident = found.resident(math.prod(blocks.block)) * self.device.multiprocessors
        short = max(1, -(-resident // blocks.count))
        return found, (blocks.count, min(along, short)), blocks.block

    def _forward(self, *, centred: bool) -> tuple[LoadedKernel, RowBlocks]:
        packs = -(-self.width // (_FORWARD_CHUNKS * self.vector))
        chunks = _FORWARD_CHUNKS if packs <= _FORWARD_THREADS else 0
        macros = norm_macros(self.types, self.vector, CENTRED=int(centred), CHUNKS=chunks)
        found = kernel(self.device, "layer_norm", "layer_norm", **macros)
        return found, row_blocks(found, self.rows, packs, _FORWARD_THREADS)


def forward_combinations(*, centred: bool) -> Iterator[Combination]:
    """Every kernel file and its macros that a forward pass can ask for."""
    for macros in _every_macros():
        for chunks in (_FORWARD_CHUNKS, 0):
            yield "layer_norm", macros | {"CENTRED": int(centred), "CHUNKS": chunks}


def inverse_combinations() -> Iterator[Combination]:
    """Every kernel file and its macros that the inverse can ask for."""
    for macros in _every_macros():
        yield "layer_norm_inverse", macros


def _every_macros() -> Iterator[Macros]:
    for types in LAYER_NORM_TYPES:
        for vector in (1, 16 // dtype_named(types[0]).itemsize):
            yield norm_macros(types, vector)

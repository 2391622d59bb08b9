"""The gradient that layer norm, RMS norm and invertible layer norm share, on a GPU.

Rows that fit into a block's registers are read once; longer ones are read twice. Both ways
leave partial sums over rows behind, which a last kernel adds up. For the longest rows that fit,
sums over rows lie in shared memory, where the device has enough of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradkit._cuda.device import Array, Device, scratch
from gradkit._cuda.layout import (
    RESIDENT_HEAVY,
    RESIDENT_THREADS,
    Macros,
    accumulator,
    contiguous,
    dtype_name,
    room_for,
    row_blocks,
    rows_of,
    settle,
    vector_of,
)
from gradkit._cuda.loading import kernel
from gradkit._dtypes import LAYER_NORM_TYPES, accumulation_name, dtype_named

_LONGEST = 512  # threads that work on one row
_WIDE_THREADS = 256
_SLOTS = 1024  # bytes of shared memory that a kernel takes beside
_PARTIAL_SHARE = 0.1  # of the bytes of dy, x and dx that partial sums may cost


@dataclass(frozen=True)
class Norm:
    """What tells the gradients apart: how xhat is made, and whether the mean counts."""

    from_output: bool
    centred: bool

    @property
    def planes(self) -> int:
        """How many parameter gradients there are."""
        return 2 if self.centred else 1


LAYER = Norm(from_output=False, centred=True)
RMS = Norm(from_output=False, centred=False)
INVERTIBLE = Norm(from_output=True, centred=True)


@dataclass(frozen=True)
class Way:
    """One way to hold a row: ``threads`` threads at most, with ``chunks`` packs each.

    ``shared`` is how many bytes of shared memory the sums over rows take, 0 where they lie in
    registers.
    """

    chunks: int
    threads: int
    shared: int = 0


@dataclass(frozen=True)
class RowGradient:
    """One gradient over ``rows`` rows of ``width``, with its input arrays in C order.

    ``vector`` columns are read and written by one access.
    """

    device: Device
    norm: Norm
    dy: Array
    source: Array
    scale: Array | None
    bias: Array | None
    mean: Array | None
    inv_std: Array
    rows: int
    width: int
    vector: int

    @classmethod
    def of(
        cls,
        device: Device,
        norm: Norm,
        dy: Array,
        source: Array,
        axis: int,
        *,
        inv_std: Array,
        mean: Array | None = None,
        scale: Array | None = None,
        bias: Array | None = None,
    ) -> "RowGradient":
        """The gradient of arrays whose axes from ``axis`` on are normalised."""
        rows, width = rows_of(source.shape, axis)
        vector = vector_of(source, width)
        return cls(
            device,
            norm,
            contiguous(device, dy, vector),
            contiguous(device, source, vector),
            contiguous(device, scale, vector),
            contiguous(device, bias, vector),
            contiguous(device, mean),
            contiguous(device, inv_std),
            rows,
            width,
            vector,
        )

    def run(self, dx: Array, dscale: Array | None, dbias: Array | None = None) -> None:
        """Write the gradients that are wanted; ``dx`` may be ``dy``."""
        outs = (dx, dscale, dbias)
        rooms = [None if out is None else room_for(self.device, out, self.vector) for out in outs]
        partials = None
        if dx.size:
            wanted = dscale is not None or dbias is not None
            partials = self._write_dx(rooms[0], wanted=wanted)
        self._write_parameters(partials, rooms[1], rooms[2])
        for out, room in zip(outs, rooms, strict=True):
            if out is not None:
                settle(out, room)

    def _write_dx(self, dx: Array, *, wanted: bool) -> Array | None:
        """Write dx; the partial sums of dscale and dbias as (planes, blocks, width)."""
        for way in _ways(self.norm, self.dy.dtype.itemsize, self.vector):
            fits = self.width <= way.threads * way.chunks * self.vector
            if fits and way.shared + _SLOTS <= self.device.max_shared_memory:
                return self._in_one_visit(dx, way, wanted=wanted)
        return self._in_two_visits(dx, wanted=wanted)

    def _in_one_visit(self, dx: Array, way: Way, *, wanted: bool) -> Array | None:
        held = way.chunks * self.vector
        packs = _LONGEST if way.shared else -(-self.width // held)
        bytes_held = held * dtype_named(accumulator(self.dy)).itemsize  # of each array
        light = bytes_held <= (32 if self.vector > 1 else 16)  # as BLOCKS in the kernel has it
        room = RESIDENT_THREADS if light else RESIDENT_HEAVY
        blocks = row_blocks(self.device, self.rows, packs, _LONGEST, room)
        count = self._fewer(blocks.count) if wanted else blocks.count
        partials = self._partials(count) if wanted else None
        macros = self._macros() | {"CHUNKS": way.chunks, "LONG": int(way.shared > 0)}
        kernel(self.device, "layer_norm_grad", "layer_norm_grad", **macros)(
            (count,),
            blocks.block,
            (*self._inputs(), dx, partials, np.int64(self.rows), np.int32(self.width)),
            shared_mem=way.shared,
        )
        return partials

    def _in_two_visits(self, dx: Array, *, wanted: bool) -> Array | None:
        tiles = -(-self.width // (_WIDE_THREADS * self.vector))
        sms = self.device.multiprocessors
        resident = RESIDENT_HEAVY // _WIDE_THREADS * sms
        parts = min(tiles, max(1, -(-sms // self.rows)), 32)
        shape = (np.int64(self.rows), np.int64(self.width))
        sums = scratch(self.device, (parts, self.rows, 2), np.float64)
        macros, block = self._macros(), (_WIDE_THREADS, 1)
        kernel(self.device, "layer_norm_grad_wide", "row_sums_of_gradient", **macros)(
            (min(self.rows, resident), parts), block, (*self._inputs(), sums, *shape)
        )
        count = min(self.rows, max(1, resident // tiles))
        count = self._fewer(count, at_least=-(-sms // tiles)) if wanted else count
        partials = self._partials(count) if wanted else None
        kernel(self.device, "layer_norm_grad_wide", "apply_gradient", **macros)(
            (tiles, count),
            block,
            (*self._inputs(), sums, dx, partials, *shape, np.int32(parts)),
        )
        return partials

    def _write_parameters(
        self, partials: Array | None, dscale: Array | None, dbias: Array | None
    ) -> None:
        outs = [out for out in (dscale, dbias) if out is not None]
        if not outs or not self.width:
            return
        count = 0 if partials is None else partials.shape[1]
        macros: Macros = {"ACC_T": accumulator(self.dy), "PARAM_T": dtype_name(outs[0])}
        kernel(self.device, "column_sums", "column_sums", **macros)(
            (-(-self.width // 32), self.norm.planes),
            (32, 32),
            (partials, dscale, dbias, np.int64(count), np.int64(self.width)),
        )

    def _inputs(self) -> tuple[Array | None, ...]:
        return self.dy, self.source, self.scale, self.bias, self.mean, self.inv_std

    def _partials(self, count: int) -> Array:
        shape = (self.norm.planes, count, self.width)
        return scratch(self.device, shape, dtype_named(accumulator(self.dy)))

    def _fewer(self, blocks: int, at_least: int | None = None) -> int:
        """So many blocks that their partial sums cost little beside the arrays themselves.

        But no fewer than keep every multiprocessor at work, which is worth more.
        """
        accumulated = dtype_named(accumulator(self.dy)).itemsize
        each = 2 * self.norm.planes * accumulated  # bytes a column, written and read
        arrays = 3 * self.rows * self.dy.dtype.itemsize
        floor = self.device.multiprocessors if at_least is None else at_least
        return min(blocks, max(floor, int(_PARTIAL_SHARE * arrays / each)))

    def _macros(self) -> Macros:
        parameter = next((a for a in (self.scale, self.bias) if a is not None), self.inv_std)
        types = dtype_name(self.dy), dtype_name(self.inv_std), dtype_name(parameter)
        return _macros(self.norm, types, self.vector)


def combinations() -> Iterator[tuple[str, Macros]]:
    """Every kernel file and its macros that a gradient can ask for."""
    for types in LAYER_NORM_TYPES:
        size = dtype_named(types[0]).itemsize
        for norm in (LAYER, RMS, INVERTIBLE):
            for vector in (1, 16 // size):
                macros = _macros(norm, types, vector)
                yield "layer_norm_grad_wide", macros
                for way in _ways(norm, size, vector):
                    long_row = int(way.shared > 0)
                    yield "layer_norm_grad", macros | {"CHUNKS": way.chunks, "LONG": long_row}
    for accumulated, parameter in {(accumulation_name(t), v) for t, _, v in LAYER_NORM_TYPES}:
        yield "column_sums", {"ACC_T": accumulated, "PARAM_T": parameter}


def _macros(norm: Norm, types: tuple[str, str, str], vector: int) -> Macros:
    data, statistic, parameter = types
    return {
        "DATA_T": data,
        "STAT_T": statistic,
        "PARAM_T": parameter,
        "VEC": vector,
        "FROM_OUTPUT": int(norm.from_output),
        "CENTRED": int(norm.centred),
    }


def _ways(norm: Norm, itemsize: int, vector: int) -> list[Way]:
    """The ways to hold a row, from the shortest rows to the longest.

    A thread holds as many columns as registers allow: columns that come one at a time take
    more of them, and so does a division.
    """
    accumulated = max(4, itemsize)
    unit = vector * accumulated // 4
    most = (16 if vector > 1 else 8 if norm.from_output else 12) // unit
    fewest = 1 if vector > 1 else most // 4
    ways = [Way(fewest, 32), Way(most, _LONGEST)]
    for columns in (32,) if vector > 1 else (16, 28):
        chunks = columns // unit
        shared = norm.planes * chunks * vector * _LONGEST * accumulated
        ways.append(Way(chunks, _LONGEST, shared))
    return ways

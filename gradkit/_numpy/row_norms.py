"""What layer norm, RMS norm and invertible layer norm share: the forward pass and the gradient.

With ``xhat = (x - mean) * inv_std`` (RMS norm: ``x * inv_std``; invertible: ``(y - bias) /
scale``) and ``w = dy * scale``, over the normalised axes::

    dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds     (RMS norm: without mean(w))
    dscale = sum over rows of dy * xhat
    dbias  = sum over rows of dy

The mean is subtracted before anything is multiplied: ``sum(dy * x)`` cancels if the mean is
much larger than the standard deviation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from gradkit._numpy.blocks import Array, DType, Index
from gradkit._numpy.moments import Moments, lost, low_that_counts
from gradkit._numpy.sums import column_sums, row_squares, row_sums
from gradkit._numpy.tiles import Rows, Scattered, SpreadRows

# Fills ``out`` with xhat from a tile of the source, its inv_std, and its row and column index.
Normalize: TypeAlias = Callable[[Array, Array, Index, Index, Array], None]
# The sums over rows of dy * xhat and of dy; ``None`` if not wanted.
Totals: TypeAlias = Sequence[Array | None]
# Gives the tile of a column, again and again.
TileOf: TypeAlias = Callable[[Index], Array]

_FLOAT64 = np.dtype(np.float64)


class RowGradient:
    """The gradient of a norm over rows; norms differ in xhat and in whether mean(w) counts."""

    def __init__(
        self,
        rows: Rows,
        dy: Array,
        source: Array,
        normalize: Normalize,
        scale: Array | None,
        inv_std: Array,
        dx: Array,
        *,
        centred: bool,
        ds: Array | None = None,
        scale_offset: float = 0.0,
    ):
        self.rows, self.normalize, self.centred = rows, normalize, centred
        self.dy, self.source, self.dx = rows.view(dy), rows.view(source), rows.view(dx)
        self.ds = None if ds is None else rows.view(ds)
        self.scale, self.inv_std = rows.per_column(scale), rows.per_row(inv_std)
        self.scale_offset = scale_offset

    def run(self, dscale: Array | None, dbias: Array | None) -> None:
        """Write dx, and the parameter gradients that are wanted."""
        self.dscale, self.dbias = self.rows.per_column(dscale), self.rows.per_column(dbias)
        if self.dx.size == 0:
            self._write_parameters(2 * [np.zeros(self.rows.width)], ())
        elif len(self.rows.columns) == 1:
            self._whole_rows(self.rows.columns[0])
        else:
            self._long_rows()

    def _whole_rows(self, column: Index) -> None:
        """One visit: a tile holds whole rows, so that their means are known at once."""
        rows = self.rows
        if rows.small:
            self._write_parameters(self._whole_tile((), (), rows.small_scratch()), ())
            return

        def strip(indices: Sequence[Index]) -> Totals:
            with rows.scratch() as rooms:
                return _added(self._whole_tile(row, column, rooms) for row in indices)

        self._write_parameters(_added(rows.in_strips(strip, rows.rows, width=rows.width)), column)

    def _whole_tile(self, row: Index, column: Index, rooms: Sequence[Array]) -> Totals:
        tile = _RowTile(self, row, column, rooms)
        of_dy, of_w = tile.column_sums_of_dy(), tile.row_sums_of_w()
        totals, of_product = (tile.column_sums_of_product(), of_dy), tile.row_sums_of_product()
        of_product /= self.rows.divisor
        if of_w is not None:
            of_w /= self.rows.divisor
        tile.write_dx(of_w, of_product)
        return totals

    def _long_rows(self) -> None:
        """Two visits if one row fills several tiles: the rows' means, then the rest."""

        def measure(columns: Sequence[Index]) -> Array:
            sums = np.zeros((2, self.rows.count))
            with self.rows.scratch() as rooms:
                for column in columns:
                    for row, part in self.rows.numbered():
                        tile = _RowTile(self, row, column, rooms)
                        of_w = tile.row_sums_of_w()
                        sums[1, part] += tile.row_sums_of_product()
                        if of_w is not None:
                            sums[0, part] += of_w
            return sums

        def apply(columns: Sequence[Index]) -> None:
            with self.rows.scratch() as rooms:
                for column in columns:
                    self._write_parameters(_added(self._columns(column, means, rooms)), column)

        strips = self.rows.in_strips(measure, self.rows.columns, width=self.rows.count)
        means = sum(strips, np.zeros(())) / self.rows.divisor
        self.rows.in_strips(apply, self.rows.columns)

    def _columns(self, column: Index, means: Array, rooms: Sequence[Array]) -> Iterator[Totals]:
        """Write dx of all rows in some columns; the sums over the rows of each tile."""
        for row, part in self.rows.numbered():
            tile = _RowTile(self, row, column, rooms)
            of_dy = tile.column_sums_of_dy()
            totals = tile.column_sums_of_product(), of_dy
            tile.write_dx(means[0, part] if self.centred else None, means[1, part])
            yield totals

    def _write_parameters(self, totals: Totals, column: Index) -> None:
        for total, gradient in zip(totals, (self.dscale, self.dbias), strict=True):
            if gradient is not None and total is not None:
                gradient[column] = total


class _RowTile:
    """One tile of a gradient: ``dy`` and ``xhat``, and when first asked for, ``dy * xhat``.

    Ask for sums of dy before: the product may take its place.
    """

    __slots__ = ("_product", "dx", "dy", "grad", "index", "inv_std", "room", "scale", "xhat")

    def __init__(self, grad: RowGradient, row: Index, column: Index, rooms: Sequence[Array]):
        rows, index = grad.rows, row + column
        self.grad, self.index, self.dx = grad, index, grad.dx[index]
        self.dy = rows.load(grad.dy[index], rooms[-1])
        shape, size = self.dy.shape, self.dy.size
        self.xhat, self.room = rooms[0][:size].reshape(shape), rooms[1][:size].reshape(shape)
        self._product: Array | None = None
        self.scale = (
            None
            if grad.scale is None
            else rows.column_values(grad.scale[column], grad.scale_offset)
        )
        self.inv_std = rows.row_values(grad.inv_std[row])
        source = rows.load(grad.source[index], rooms[0])
        grad.normalize(source, self.inv_std, row, column, self.xhat)

    def column_sums_of_dy(self) -> Array | None:
        """The sums over rows of dy, if they are wanted."""
        return None if self.grad.dbias is None else column_sums(self.dy)

    def row_sums_of_w(self) -> Array | None:
        """The sums over columns of w; ``None`` in an RMS norm."""
        return row_sums(self.dy, self.scale) if self.grad.centred else None

    def column_sums_of_product(self) -> Array | None:
        """The sums over rows of dy * xhat, if they are wanted."""
        return None if self.grad.dscale is None else column_sums(self._products())

    def row_sums_of_product(self) -> Array:
        """The sums over columns of w * xhat."""
        return row_sums(self._products(), self.scale)

    def _products(self) -> Array:
        if self._product is None:
            self._product = np.multiply(self.dy, self.xhat, self.room)
        return self._product

    def write_dx(self, mean_of_w: Array | None, mean_of_product: Array) -> None:
        """Write ``dx = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds``.

        Overwrites the tile.
        """
        rows, xhat, ds = self.grad.rows, self.xhat, self.grad.ds
        room, other = xhat.reshape(-1), self.room.reshape(-1)
        if rows.reloads:
            self.dy = rows.load(self.grad.dy[self.index], other)
        # dx may be ds, which is read last.
        out = rows.target(self.dx, other) if ds is None else self.room
        if self.scale is None:
            np.copyto(out, self.dy)
        else:
            np.multiply(self.dy, self.scale, out)
        np.multiply(xhat, rows.row_values(mean_of_product), xhat)
        if mean_of_w is not None:
            np.add(xhat, rows.row_values(mean_of_w), xhat)
        np.subtract(out, xhat, out)
        np.multiply(out, self.inv_std, out)
        if ds is not None:
            further = rows.load(ds[self.index], room)
            out = np.add(out, further, rows.target(self.dx, out.reshape(-1)))
        rows.store(out, self.dx, room)


def _added(parts: Iterable[Totals]) -> Totals:
    """Totals added up in order, in the memory of the first."""
    parts = iter(parts)
    totals = next(parts)
    for part in parts:
        for total, more in zip(totals, part, strict=True):
            if total is not None and more is not None:
                total += more
    return totals


def unscale(
    rows: Rows,
    tile: Array,
    scale: Array | SpreadRows | None,
    bias: Array | SpreadRows | None,
    column: Index,
    out: Array,
) -> None:
    """``out = (y - bias) / scale``, for a tile of y; scale and bias are ``per_column``."""
    if bias is None:
        np.copyto(out, tile)
    else:
        np.subtract(tile, rows.column_values(bias[column]), out=out)
    if scale is not None:
        out /= rows.column_values(scale[column])


class Forward:
    """Layer norm, or RMS norm if ``mean`` is ``None``."""

    def __init__(
        self,
        rows: Rows,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        eps: float,
        y: Array,
        mean: Array | None,
        inv_std: Array,
        *,
        scale_offset: float = 0.0,
        residual: Array | None = None,
        s: Array | None = None,
    ):
        """With a residual, ``s = x + residual`` is written and takes the place of ``x``."""
        self.rows, self.eps = rows, eps
        self.x, self.y = rows.view(x), rows.view(y)
        self.residual = None if residual is None else rows.view(residual)
        self.source = self.x if s is None else rows.view(s)
        self.scale, self.bias = rows.per_column(scale), rows.per_column(bias)
        self.scale_offset = scale_offset
        self._outs = mean, inv_std
        self.mean = None if mean is None else rows.per_row(mean)
        self.inv_std = rows.per_row(inv_std)

    def run(self) -> None:
        """Write y, mean and inv_std."""
        if self.x.size:
            self.rows.in_strips(self._strip, self.rows.rows)
            return
        # An empty row counts as mean 0, variance 0.
        mean, inv_std = self._outs
        inv_std.fill(1 / np.sqrt(self.eps) if self.eps else np.inf)
        if mean is not None:
            mean.fill(0)

    def _strip(self, indices: Sequence[Index]) -> None:
        with self.rows.scratch() as (work, room, *_):
            for row in indices:
                if self.residual is not None:
                    self._add(self.residual, row, work, room)
                tile_of = self.rows.loader(self.source, row, room)
                if self.mean is None:
                    self._scale_rows(row, tile_of, work, room)
                else:
                    self._centre_rows(row, tile_of, self.mean, work, room)

    def _scale_rows(self, row: Index, tile_of: TileOf, work: Array, room: Array) -> None:
        rows = self.rows
        square = _mean_square(rows, tile_of, rows.dtype)
        if (gone := lost(square, self.eps)).any():
            square = np.where(gone, _mean_square(rows, tile_of, _FLOAT64), square)
        self.inv_std[row] = inv_std = 1 / np.sqrt(square + self.eps)
        for column in rows.columns:
            self._write_y(tile_of(column), row, column, inv_std, work, room)

    def _centre_rows(
        self, row: Index, tile_of: TileOf, mean: Array | SpreadRows, work: Array, room: Array
    ) -> None:
        rows = self.rows
        moments = _moments(rows, tile_of, work)
        kept = len(rows.columns) == 1  # the deviations from the mean's high piece
        if (gone := lost(moments.variance, self.eps)).any():
            exact = _moments(rows, tile_of, np.empty(work.size))
            moments, kept = moments.replaced(gone, exact), False
        inv_std = 1 / np.sqrt(moments.variance + self.eps)
        mean[row], self.inv_std[row] = moments.mean, inv_std
        high = rows.row_values(moments.high)
        low = low_that_counts(moments.high, moments.low, inv_std)
        for column in rows.columns:
            tile = tile_of(column)
            deviation = work[: tile.size].reshape(tile.shape)
            if not kept:
                np.subtract(tile, high, out=deviation)
            if low is not None:
                deviation -= rows.row_values(low)
            self._write_y(deviation, row, column, inv_std, work, room)

    def _add(self, residual: Array | Scattered, row: Index, work: Array, room: Array) -> None:
        rows = self.rows
        for column in rows.columns:
            index = row + column
            x, further = rows.load(self.x[index], room), rows.load(residual[index], work)
            target = self.source[index]
            rows.store(np.add(x, further, rows.target(target, work)), target, room)

    def _write_y(
        self, tile: Array, row: Index, column: Index, inv_std: Array, work: Array, room: Array
    ) -> None:
        rows, target = self.rows, self.y[row + column]
        out = np.multiply(tile, rows.row_values(inv_std), out=rows.target(target, work))
        if self.scale is not None:
            out *= rows.column_values(self.scale[column], self.scale_offset)
        if self.bias is not None:
            out += rows.column_values(self.bias[column])
        rows.store(out, target, room)


def _mean_square(rows: Rows, tile_of: TileOf, dtype: DType) -> Array:
    """The mean square of each row in float64; squares are of that dtype."""
    squares = (row_squares(tile_of(c).astype(dtype, copy=False)) for c in rows.columns)
    mean: Array = sum(squares, np.zeros(())) / rows.divisor
    return mean


def _moments(rows: Rows, tile_of: TileOf, place: Array) -> Moments:
    """Mean and variance of each row.

    The second pass sums the deviations from the rounded first mean as well as their squares,
    which corrects both results for that rounding. ``place`` has room for one tile, and its
    dtype is the one to compute in. The last tile's deviations are left there.
    """

    def tiles() -> Iterator[Array]:
        for column in rows.columns:
            yield tile_of(column).astype(place.dtype, copy=False)

    total = sum((row_sums(tile, None) for tile in tiles()), np.zeros(()))
    centre = (total / rows.divisor).astype(place.dtype)
    first, second = np.zeros(()), np.zeros(())
    for tile in tiles():
        deviation = place[: tile.size].reshape(tile.shape)
        np.subtract(tile, centre.reshape(-1, 1), out=deviation)
        first = first + row_sums(deviation, None)
        second = second + row_squares(deviation)
    return Moments.about(centre, first / rows.divisor, second / rows.divisor)

"""Layer norm, RMS norm and invertible layer norm on NumPy arrays.

With ``xhat = (x - mean) * inv_std`` (RMS norm: ``x * inv_std``; invertible: ``(y - bias) /
scale``) and ``w = dy * scale``, over the normalised axes::

    dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat))     (RMS norm: without mean(w))
    dscale = sum over rows of dy * xhat
    dbias  = sum over rows of dy

The mean is subtracted before anything is multiplied: ``sum(dy * x)`` cancels where the mean
is much larger than the deviation.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gradkit._numpy.blocks import Array, DType, Index
from gradkit._numpy.tiles import Rows, column_sums, row_squares, row_sums

_TINY = 2.0**-100  # a float32 variance below this has lost digits to underflow

# Fills ``out`` with xhat from a tile of the source and its row and column index.
Normalize = Callable[[Array, Index, Index, Array], None]


@np.errstate(all="ignore")
def layer_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    rows = Rows((dy, x, dx, dscale, dbias), axis, mean.dtype)
    means, deviations = rows.per_row(mean), rows.per_row(inv_std)

    def normalize(tile: Array, row: Index, _: Index, out: Array) -> None:
        np.subtract(tile, rows.row_values(means[row]), out=out)
        out *= rows.row_values(deviations[row])

    _Grad(rows, dy, x, normalize, scale, deviations, dx, centred=True).run(dscale, dbias)


@np.errstate(all="ignore")
def rms_norm_grad(
    dy: Array,
    x: Array,
    scale: Array | None,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
) -> None:
    """``dx`` and ``dscale`` are written (``=``); ``dx`` may be ``dy``."""
    rows = Rows((dy, x, dx, dscale), axis, inv_std.dtype)
    deviations = rows.per_row(inv_std)

    def normalize(tile: Array, row: Index, _: Index, out: Array) -> None:
        np.multiply(tile, rows.row_values(deviations[row]), out=out)

    _Grad(rows, dy, x, normalize, scale, deviations, dx, centred=False).run(dscale, None)


@np.errstate(all="ignore")
def invertible_layer_norm_grad(
    dy: Array,
    y: Array,
    scale: Array | None,
    bias: Array | None,
    inv_std: Array,
    axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
) -> None:
    """As ``layer_norm_grad`` with xhat out of the output; ``dx`` may be ``dy``."""
    rows = Rows((dy, y, dx, dscale, dbias), axis, inv_std.dtype)
    scales, biases = rows.per_column(scale), rows.per_column(bias)

    def normalize(tile: Array, _: Index, column: Index, out: Array) -> None:
        _unscale(rows, tile, scales, biases, column, out)

    deviations = rows.per_row(inv_std)
    _Grad(rows, dy, y, normalize, scale, deviations, dx, centred=True).run(dscale, dbias)


@np.errstate(all="ignore")
def layer_norm_inverse(
    y: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
    axis: int,
    x: Array,
) -> None:
    """``x = (y - bias) / scale / inv_std + mean`` is written; ``x`` may be ``y``."""
    rows = Rows((y, x), axis, mean.dtype)
    scales, biases = rows.per_column(scale), rows.per_column(bias)
    means, deviations = rows.per_row(mean), rows.per_row(inv_std)
    source, target = rows.view(y), rows.view(x)

    def strip(tiles: Sequence[tuple[Index, Index]]) -> None:
        with rows.scratch() as (work, room, *_):
            for row, column in tiles:
                tile = rows.load(source[row + column], work)
                out = rows.target(target[row + column], work)
                _unscale(rows, tile, scales, biases, column, out)
                out /= rows.row_values(deviations[row])
                out += rows.row_values(means[row])
                rows.store(out, target[row + column], room)

    rows.in_strips(strip, rows.tiles())


@np.errstate(all="ignore")
def layer_norm(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    rows = Rows((x, y, mean, inv_std), axis, mean.dtype)
    _forward(rows, x, scale, bias, eps, y, mean, inv_std)


@np.errstate(all="ignore")
def rms_norm(
    x: Array, scale: Array | None, axis: int, eps: float, y: Array, inv_std: Array
) -> None:
    """``y`` and ``inv_std`` are written; ``y`` may be ``x``."""
    rows = Rows((x, y, inv_std), axis, inv_std.dtype)
    _forward(rows, x, scale, None, eps, y, None, inv_std)


class _Grad:
    """The gradient that the three norms share; they differ in xhat and in mean(w)."""

    def __init__(
        self,
        rows: Rows,
        dy: Array,
        source: Array,
        normalize: Normalize,
        scale: Array | None,
        deviations: Array,
        dx: Array,
        *,
        centred: bool,
    ):
        self.rows, self.normalize, self.centred = rows, normalize, centred
        self.dy, self.source, self.dx = rows.view(dy), rows.view(source), rows.view(dx)
        self.scale, self.deviations = rows.per_column(scale), deviations

    def run(self, dscale: Array | None, dbias: Array | None) -> None:
        """Write dx, and the parameter gradients that are wanted."""
        self.dscale, self.dbias = self.rows.per_column(dscale), self.rows.per_column(dbias)
        if self.dx.size == 0:
            self._write_parameters(np.zeros((2, self.rows.width)), (slice(None),))
        elif len(self.rows.columns) == 1:
            self._whole_rows(self.rows.columns[0])
        else:
            self._long_rows()

    def _whole_rows(self, column: Index) -> None:
        """One visit: a tile holds whole rows, so that their means are known at once."""

        def strip(rows: Sequence[Index]) -> Array:
            totals = np.zeros((2, self.rows.width))
            with self.rows.scratch() as rooms:
                for row in rows:
                    tile = _Tile(self, row, column, rooms)
                    totals += tile.column_sums()
                    tile.write_dx(tile.row_sums() / self.rows.width)
            return totals

        strips = self.rows.in_strips(strip, self.rows.rows, width=self.rows.width)
        self._write_parameters(sum(strips, np.zeros(())), column)

    def _long_rows(self) -> None:
        """Two visits where one row fills several tiles: the rows' means, then the rest."""

        def measure(columns: Sequence[Index]) -> Array:
            sums = np.zeros((2, self.rows.count))
            with self.rows.scratch() as rooms:
                for column in columns:
                    for row, part in self.rows.numbered():
                        tile = _Tile(self, row, column, rooms)
                        sums[:, part] += tile.row_sums()
            return sums

        def apply(columns: Sequence[Index]) -> None:
            with self.rows.scratch() as rooms:
                for column in columns:
                    totals = np.zeros(())
                    for row, part in self.rows.numbered():
                        tile = _Tile(self, row, column, rooms)
                        totals = totals + tile.column_sums()
                        tile.write_dx(means[:, part])
                    self._write_parameters(totals, column)

        strips = self.rows.in_strips(measure, self.rows.columns, width=self.rows.count)
        means = sum(strips, np.zeros(())) / self.rows.width
        self.rows.in_strips(apply, self.rows.columns)

    def _write_parameters(self, totals: Array, column: Index) -> None:
        for total, gradient in zip(totals, (self.dscale, self.dbias), strict=True):
            if gradient is not None:
                target = gradient[column]
                target[...] = total.reshape(target.shape)


class _Tile:
    """One tile of a gradient: ``dy``, ``xhat`` and ``dy * xhat``."""

    def __init__(self, grad: _Grad, row: Index, column: Index, rooms: Sequence[Array]):
        self.grad, self.row, self.index = grad, row, row + column
        rows, source = grad.rows, grad.source[self.index]
        self.dy = rows.load(grad.dy[self.index], rooms[-1])
        self.xhat, self.product = (
            room[: self.dy.size].reshape(self.dy.shape) for room in rooms[:2]
        )
        grad.normalize(rows.load(source, rooms[0]), row, column, self.xhat)
        np.multiply(self.dy, self.xhat, out=self.product)
        self.scale = None if grad.scale is None else rows.column_values(grad.scale[column])

    def column_sums(self) -> Array:
        """The sums over rows of dy * xhat and of dy, each zero if nobody wants it."""
        sums = np.zeros((2, self.dy.shape[1]))
        if self.grad.dscale is not None:
            sums[0] = column_sums(self.product)
        if self.grad.dbias is not None:
            sums[1] = column_sums(self.dy)
        return sums

    def row_sums(self) -> Array:
        """The sums over columns of w and of w * xhat; the first is zero in an RMS norm."""
        sums = np.zeros((2, len(self.dy)))
        if self.grad.centred:
            sums[0] = row_sums(self.dy, self.scale)
        sums[1] = row_sums(self.product, self.scale)
        return sums

    def write_dx(self, means: Array) -> None:
        """Write ``dx = inv_std * (w - mean(w) - xhat * mean(w * xhat))``; spoils the tile."""
        rows, target = self.grad.rows, self.grad.dx[self.index]
        out = rows.target(target, self.product.reshape(-1))
        if self.scale is None:
            np.copyto(out, self.dy)
        else:
            np.multiply(self.dy, self.scale, out=out)
        of_w, of_product = (rows.row_values(mean) for mean in means)
        self.xhat *= of_product
        if self.grad.centred:
            self.xhat += of_w
        out -= self.xhat
        out *= rows.row_values(self.grad.deviations[self.row])
        rows.store(out, target, self.xhat.reshape(-1))


def _unscale(
    rows: Rows,
    tile: Array,
    scales: Array | None,
    biases: Array | None,
    column: Index,
    out: Array,
) -> None:
    """``out = (y - bias) / scale``."""
    if biases is None:
        np.copyto(out, tile)
    else:
        np.subtract(tile, rows.column_values(biases[column]), out=out)
    if scales is not None:
        out /= rows.column_values(scales[column])


def _forward(
    rows: Rows,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    eps: float,
    y: Array,
    mean: Array | None,
    inv_std: Array,
) -> None:
    """Layer norm, or RMS norm where ``mean`` is ``None``."""
    scales, biases = rows.per_column(scale), rows.per_column(bias)
    means, deviations = None if mean is None else rows.per_row(mean), rows.per_row(inv_std)
    source, target = rows.view(x), rows.view(y)

    def strip(indices: Sequence[Index]) -> None:
        with rows.scratch() as (work, room, *_):
            for row in indices:
                tile_of = rows.loader(source, row, room)
                centre, variance = moments(tile_of, work)
                factor = 1 / np.sqrt(variance + eps)
                deviations[row] = factor.reshape(deviations[row].shape)
                if means is not None:
                    means[row] = centre.reshape(means[row].shape)
                # The mean in two pieces: rounded to one it is off by half a unit of its last
                # place, which may be much of a deviation.
                high = rows.row_values(centre)
                low = rows.row_values(centre - high[:, 0])
                for column in rows.columns:
                    tile = tile_of(column)
                    out = rows.target(target[row + column], work)
                    if means is None:
                        np.multiply(tile, rows.row_values(factor), out=out)
                    else:
                        np.subtract(tile, high, out=out)
                        out -= low
                        out *= rows.row_values(factor)
                    if scales is not None:
                        out *= rows.column_values(scales[column])
                    if biases is not None:
                        out += rows.column_values(biases[column])
                    rows.store(out, target[row + column], room)

    def moments(tile_of: Callable[[Index], Array], work: Array) -> tuple[Array, Array]:
        def tiles(dtype: DType) -> Iterator[Array]:
            for column in rows.columns:
                yield tile_of(column).astype(dtype, copy=False)

        centre, variance = _moments(tiles, work, rows.width, centred=means is not None)
        lost = eps < _TINY and bool(np.any(variance < _TINY))
        if lost or not np.all(np.isfinite(variance)):  # squares left float32's range
            wide = np.empty(work.size)
            return _moments(tiles, wide, rows.width, centred=means is not None)
        return centre, variance

    if x.size:
        rows.in_strips(strip, rows.rows)
    else:  # an empty row counts as mean 0, variance 0
        deviations.fill(1 / np.sqrt(eps) if eps else np.inf)
        if means is not None:
            means.fill(0)


def _moments(
    tiles: Callable[[DType], Iterator[Array]], work: Array, width: int, *, centred: bool
) -> tuple[Array, Array]:
    """Mean and variance of each row in float64 (about 0, and mean 0, if not ``centred``).

    The second pass sums the deviations from the rounded first mean as well as their squares,
    which corrects both results for that rounding. ``work`` has room for one tile, and its
    dtype is the one to compute in.
    """
    dtype = work.dtype
    if not centred:
        total = sum((row_squares(tile) for tile in tiles(dtype)), np.zeros(()))
        return np.zeros(1), total / width
    total = sum((row_sums(tile, None) for tile in tiles(dtype)), np.zeros(()))
    mean = (total / width).astype(dtype).reshape(-1, 1)
    first, second = np.zeros(()), np.zeros(())
    for tile in tiles(dtype):
        deviation = np.subtract(tile, mean, out=work[: tile.size].reshape(tile.shape))
        first = first + row_sums(deviation, None)
        second = second + row_squares(deviation)
    correction = first / width
    return mean[:, 0] + correction, np.maximum(second / width - correction**2, 0)

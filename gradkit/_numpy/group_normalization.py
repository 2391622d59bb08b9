"""Group norm on NumPy arrays: statistics of each sample's groups of channels.

With ``xhat = (x - mean) * inv_std``, ``w = dy * scale`` and the means over each group::

    dx     = inv_std * (w - mean(w) - xhat * mean(w * xhat))
    dscale = sum over samples and space of dy * xhat
    dbias  = sum over samples and space of dy

The mean is subtracted before anything is multiplied: ``sum(dy * x)`` cancels if the mean is
much larger than the standard deviation.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gradkit._calls.channels import GroupNorm, GroupNormGrad
from gradkit._numpy import tuning
from gradkit._numpy.batch_normalization import cut
from gradkit._numpy.blocks import Array, DType
from gradkit._numpy.groups import Block, Groups
from gradkit._numpy.moments import Moments, lost, low_that_counts

__all__ = ["group_norm", "group_norm_grad"]

_FLOAT64 = np.dtype(np.float64)


@np.errstate(all="ignore")
def group_norm(call: GroupNorm) -> None:
    """Write ``y``, ``mean`` and ``inv_std``; ``y`` may be ``x``."""
    mean, inv_std = call.mean, call.inv_std
    if not call.x.size:  # an empty group counts as mean 0, variance 0
        inv_std.fill(1 / np.sqrt(call.eps) if call.eps else np.inf)
        mean.fill(0)
        return
    for own, part in _parts(call.x, call.channel_axis, mean.shape[1]):
        groups = Groups((call.x, call.y), call.channel_axis, own, part, 2)
        parameters = cut(call.scale, part), cut(call.bias, part)
        _Forward(groups, *parameters, call.eps, mean[:, own], inv_std[:, own]).run()


@np.errstate(all="ignore")
def group_norm_grad(call: GroupNormGrad) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
    gradients = call.dscale, call.dbias
    if not call.x.size:
        for gradient in gradients:
            if gradient is not None:
                gradient.fill(0)
        return
    for own, part in _parts(call.x, call.channel_axis, call.mean.shape[1]):
        groups = Groups((call.dy, call.x, call.dx), call.channel_axis, own, part, 3)
        statistics = call.mean[:, own], call.inv_std[:, own]
        sums = _Gradient(groups, cut(call.scale, part), *statistics).run()
        for gradient, total in zip(gradients, sums, strict=True):
            if gradient is not None:
                gradient[part] = total


def _parts(x: Array, axis: int, groups: int) -> Iterator[tuple[slice, slice]]:
    """Runs of groups, and of their channels, few enough that what is summed for each stays small.

    One group may have more channels.
    """
    width = x.shape[axis] // groups
    step = max(1, tuning.GROUP_COLUMNS // width)
    for start in range(0, groups, step):
        stop = min(start + step, groups)
        yield slice(start, stop), slice(start * width, stop * width)


class _Forward:
    """The forward pass over arrays (x, y)."""

    def __init__(
        self,
        groups: Groups,
        scale: Array | None,
        bias: Array | None,
        eps: float,
        mean: Array,
        inv_std: Array,
    ):
        self.groups, self.eps = groups, eps
        self.x, self.y = groups.arrays
        self.scale, self.bias = groups.parameter(scale), groups.parameter(bias)
        self.mean, self.inv_std = mean, inv_std

    def run(self) -> None:
        """Write y, mean and inv_std."""
        if self.groups.whole:
            self.groups.in_strips(self._groups, self.groups.batches())
            return
        for sample in range(self.groups.samples):
            self._long_sample(self.groups.parts(sample))

    def _groups(self, batches: Sequence[Block]) -> None:
        """One visit: a block has whole groups, so that their statistics are known at once."""
        groups = self.groups
        with groups.scratch() as (work, room):
            for block in batches:
                tile = groups.load(self.x[block.at], room)
                deviation = work[: tile.size].reshape(tile.shape)
                moments = self._moments(tile, block, deviation)
                kept = not groups.last
                if (gone := lost(moments.variance, self.eps)).any():
                    exact = self._moments(tile.astype(_FLOAT64), block, np.empty(tile.shape))
                    moments, kept = moments.replaced(gone, exact), False
                if not kept:
                    _subtract(groups, tile, moments.high, block, deviation)
                inv_std = self._statistics(moments, block)
                self._write(deviation, block, moments, inv_std, work, room)

    def _moments(self, tile: Array, block: Block, deviation: Array) -> Moments:
        """Of a block of whole groups.

        Deviations from the high pieces are written, and stay if channels come first.
        """
        groups, count = self.groups, self.groups.count
        centre = (groups.group_sums(tile) / count).astype(deviation.dtype)
        _subtract(groups, tile, centre, block, deviation)
        of_deviation = groups.group_sums(deviation) / count
        return Moments.about(centre, of_deviation, groups.group_squares(deviation) / count)

    def _long_sample(self, parts: Sequence[Block]) -> None:
        """Three visits if one group fills several blocks."""
        groups, dtype = self.groups, self.groups.dtype
        moments = self._long_moments(parts, dtype)
        if (gone := lost(moments.variance, self.eps)).any():
            moments = moments.replaced(gone, self._long_moments(parts, _FLOAT64))
        inv_std = self._statistics(moments, parts[0])

        def write(strip: Sequence[Block]) -> None:
            with groups.scratch() as (work, room):
                for block in strip:
                    tile = groups.load(self.x[block.at], room)
                    deviation = _deviation(groups, tile, moments.high, block, work)
                    self._write(deviation, block, moments, inv_std, work, room)

        groups.in_strips(write, parts)

    def _long_moments(self, parts: Sequence[Block], dtype: DType) -> Moments:
        groups = self.groups

        def first(block: Block, work: Array, room: Array) -> list[Array]:  # noqa: ARG001
            tile = groups.load(self.x[block.at], room).astype(dtype, copy=False)
            return [groups.column_sums(tile)]

        def second(block: Block, work: Array, room: Array) -> list[Array]:
            tile = groups.load(self.x[block.at], room).astype(dtype, copy=False)
            work = work if dtype == groups.dtype else np.empty(tile.size, dtype)
            deviation = _deviation(groups, tile, centre, block, work)
            of_deviation = groups.column_sums(deviation)
            return [of_deviation, groups.column_sums(np.square(deviation, out=deviation))]

        total = _total(groups, parts, first, 1)
        centre = (groups.over_groups(total) / groups.count).astype(dtype)
        sums = map(groups.over_groups, _total(groups, parts, second, 2))
        return Moments.about(centre, *(part / groups.count for part in sums))

    def _statistics(self, moments: Moments, block: Block) -> Array:
        """Write mean and inv_std of a block's groups; the latter in float64."""
        inv_std: Array = 1 / np.sqrt(moments.variance + self.eps)
        self.mean[block.statistics], self.inv_std[block.statistics] = moments.mean, inv_std
        return inv_std

    def _write(
        self,
        deviation: Array,
        block: Block,
        moments: Moments,
        inv_std: Array,
        work: Array,
        room: Array,
    ) -> None:
        """Write y from ``x`` less the means' high pieces, which is overwritten."""
        groups, view = self.groups, self.y[block.at]
        if (low := low_that_counts(moments.high, moments.low, inv_std)) is not None:
            rest = groups.by_group(deviation)
            rest -= groups.numbers(low, block)
        target = groups.target(view, work, deviation.shape)
        out = groups.by_channel(target)
        if self.scale is None or groups.spread:
            factors = groups.numbers(inv_std, block)
            np.multiply(groups.by_group(deviation), factors, out=groups.by_group(target))
            if self.scale is not None:
                out *= groups.cut(self.scale, block)
        else:
            np.multiply(deviation, groups.products(inv_std, self.scale, block), out=out)
        if self.bias is not None:
            out += groups.cut(self.bias, block)
        groups.store(target, view, room)


class _Gradient:
    """The gradient over arrays (dy, x, dx)."""

    def __init__(self, groups: Groups, scale: Array | None, mean: Array, inv_std: Array):
        self.groups = groups
        self.weights = None if scale is None else scale.astype(np.float64)
        self.scale = groups.parameter(scale)
        self.mean, self.inv_std = mean, inv_std

    def run(self) -> Array:
        """Write dx; the sums of dy * xhat and of dy over each channel."""
        groups, totals = self.groups, np.zeros((2, self.groups.channels))
        if groups.whole:
            for part in groups.in_strips(self._groups, groups.batches(), groups.channels):
                totals += part
        else:
            for sample in range(groups.samples):
                totals += self._long_sample(groups.parts(sample))
        return totals

    def _groups(self, batches: Sequence[Block]) -> Array:
        """One visit: a block has whole groups, so that their means are known at once."""
        totals = np.zeros((2, self.groups.channels))
        with self.groups.scratch() as rooms:
            for block in batches:
                tile = _Tile(self, block, rooms)
                sums = tile.column_sums()
                tile.write_dx(*self._means(sums, block.channels))
                for total, columns in zip(totals, sums, strict=True):
                    total[block.channels] += columns.sum(axis=0)
        return totals

    def _long_sample(self, parts: Sequence[Block]) -> Array:
        """Two visits if one group fills several blocks: its mean, then dx."""
        groups = self.groups

        def measure(block: Block, *rooms: Array) -> list[Array]:
            return _Tile(self, block, rooms).column_sums()

        sums = _total(groups, parts, measure, 2)
        means = self._means(list(sums), slice(None))

        def apply(strip: Sequence[Block]) -> None:
            with groups.scratch() as rooms:
                for block in strip:
                    _Tile(self, block, rooms).write_dx(*means)

        groups.in_strips(apply, parts)
        return sums[:, 0]

    def _means(self, sums: Sequence[Array], channels: slice) -> list[Array]:
        """Each group's means of w * xhat and of w, from the columns' sums of dy * xhat and dy."""
        weighted = sums
        if self.weights is not None:
            weighted = [part * self.weights[channels] for part in sums]
        return [self.groups.over_groups(part) / self.groups.count for part in weighted]


class _Tile:
    """One block of a gradient: ``dy``, ``xhat`` and ``dy * xhat``."""

    __slots__ = ("block", "dx", "dy", "grad", "product", "xhat")

    def __init__(self, grad: _Gradient, block: Block, rooms: Sequence[Array]):
        groups = grad.groups
        dy, x, dx = (array[block.at] for array in groups.arrays)
        self.grad, self.block, self.dx = grad, block, dx
        self.dy = groups.load(dy, rooms[0])
        source = groups.load(x, rooms[1])
        mean, inv_std = grad.mean[block.statistics], grad.inv_std[block.statistics]
        self.xhat = _deviation(groups, source, mean, block, rooms[1])
        by_group = groups.by_group(self.xhat)
        by_group *= groups.numbers(inv_std, block)
        self.product = rooms[2][: source.size].reshape(source.shape)
        np.multiply(self.dy, self.xhat, out=self.product)

    def column_sums(self) -> list[Array]:
        """The sums over each column of dy * xhat and of dy."""
        groups = self.grad.groups
        return [groups.column_sums(self.product), groups.column_sums(self.dy)]

    def write_dx(self, of_product: Array, of_w: Array) -> None:
        """Write ``dx = inv_std * (w - mean(w) - xhat * mean(w * xhat))``; overwrites the tile."""
        grad, groups, block = self.grad, self.grad.groups, self.block
        target = groups.target(self.dx, self.product.reshape(-1), self.product.shape)
        if grad.scale is None:
            np.copyto(target, self.dy)
        else:
            scale = groups.cut(grad.scale, block)
            np.multiply(groups.by_channel(self.dy), scale, out=groups.by_channel(target))
        rest, out = groups.by_group(self.xhat), groups.by_group(target)
        rest *= groups.numbers(of_product, block)
        rest += groups.numbers(of_w, block)
        out -= rest
        out *= groups.numbers(grad.inv_std[block.statistics], block)
        groups.store(target, self.dx, self.xhat.reshape(-1))


def _deviation(groups: Groups, tile: Array, mean: Array, block: Block, room: Array) -> Array:
    """``tile - mean`` in a room, in the room's dtype."""
    deviation = room[: tile.size].reshape(tile.shape)
    _subtract(groups, tile, mean, block, deviation)
    return deviation


def _subtract(groups: Groups, tile: Array, mean: Array, block: Block, out: Array) -> None:
    centre = groups.numbers(mean, block, out.dtype)
    np.subtract(groups.by_group(tile), centre, out=groups.by_group(out))


def _total(
    groups: Groups,
    parts: Sequence[Block],
    sums: Callable[..., list[Array]],
    terms: int,
) -> Array:
    """A sample's sums of every block added up by channel: (terms, 1, channels)."""

    def strip(blocks: Sequence[Block]) -> Array:
        totals = np.zeros((terms, 1, groups.channels))
        with groups.scratch() as rooms:
            for block in blocks:
                for total, part in zip(totals, sums(block, *rooms), strict=True):
                    total[:, block.channels] += part
        return totals

    total = np.zeros((terms, 1, groups.channels))
    for part in groups.in_strips(strip, parts, groups.channels):
        total += part
    return total

"""Batch norm in steps, by our own kernels."""

from functools import partial

import numpy as np

from gradkit._backend import Array, Number
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.channels import combinations_of_steps, launches
from gradkit._cuda.launch.kernels import Combination, first_of, kernel
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.tensor_lists import either
from gradkit._cuda.launch.warmup import asks_for
from gradkit._dtypes import BATCH_NORM_TYPES, accumulation_name, dtype_named, float_of

_FLOAT64 = np.dtype(np.float64)
_COMBINE = "combine_stats"
_THREADS = 128
# Where a step has no scale and bias, they count as arrays of the statistics' dtype.
_BARE = [types for types in BATCH_NORM_TYPES if types[1] == types[2]]
_WIDE = [types for types in _BARE if types[1] == accumulation_name(types[0])]


def _combining() -> list[Combination]:
    return [(_COMBINE, {})]


class SplitBatchNormalization(OnDevice):
    """Launches the kernels of each step."""

    @asks_for(partial(combinations_of_steps, "batch_norm", _WIDE))
    def batch_norm_stats(self, x: Array, channel_axis: int, mean: Array, var: Array) -> None:
        """Write each channel's mean and biased variance, in float64; 0 if it has no elements."""
        if not x.shape[channel_axis]:
            return
        statistic = dtype_named(float_of(x.dtype).accumulation)
        work = launches(self.device, "batch_norm", x, channel_axis, statistic, statistic)
        (data,), written = work.each((work.shape.view(x),), (mean, var))
        partials, centre = work.deviations(data)
        work.steps.finish("finish_stats", partials, centre, *written)
        work.deliver((mean, var), written)

    @asks_for(_combining)
    def combine_stats(
        self, means: Array, variances: Array, counts: Array, mean: Array, var: Array, count: Array
    ) -> None:
        """The statistics of all ranks' channels, from the rows ``means[rank]``, in float64."""
        device, (ranks, channels) = self.device, means.shape
        rows = [contiguous(device, array) for array in (means, variances, counts)]
        outs = mean, var, count
        written = [writable_like(device, out) for out in outs]
        blocks = min(max(1, -(-channels // _THREADS)), device.multiprocessors * 8)
        numbers = np.uint32(ranks), np.int64(channels)
        kernel(device, _COMBINE, _COMBINE)((blocks,), (_THREADS,), (*rows, *numbers, *written))
        for out, made in zip(outs, written, strict=True):
            copy_back(out, made)

    @asks_for(partial(combinations_of_steps, "batch_norm"))
    def batch_norm_apply(
        self,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        mean: Array,
        var: Array,
        channel_axis: int,
        eps: float,
        y: Array,
        saved_mean: Array,
        inv_std: Array,
    ) -> None:
        """As ``batch_norm``, with known statistics in float64; ``y`` may be ``x``."""
        if not x.shape[channel_axis]:
            return
        dtypes = inv_std.dtype, first_of(scale, bias, inv_std).dtype
        work = launches(self.device, "batch_norm", x, channel_axis, *dtypes)
        view = work.shape.view
        outs = view(y), saved_mean, inv_std
        inputs, written = work.each((view(x), scale, bias, mean, var), outs)
        data, *affine, known_mean, known_var = inputs
        exact = work.scratch(2, _FLOAT64)
        known = known_mean, known_var, exact
        work.steps.each_channel("take_stats", *known, *written[1:], last=(np.float64(eps),))
        work.over_channels("normalize", data, *affine, exact, written[0])
        work.deliver(outs, written)

    @asks_for(partial(combinations_of_steps, "batch_norm_grad", _BARE))
    def batch_norm_grad_sums(
        self,
        dy: Array,
        x: Array,
        mean: Array,
        inv_std: Array,
        channel_axis: int,
        sum_dy_xhat: Array,
        sum_dy: Array,
    ) -> None:
        """Write each channel's sums of ``dy * xhat`` and of ``dy``, in float64."""
        if not x.shape[channel_axis]:
            return
        dtypes = mean.dtype, mean.dtype
        work = launches(self.device, "batch_norm_grad", x, channel_axis, *dtypes)
        view = work.shape.view
        outs = sum_dy_xhat, sum_dy
        inputs, written = work.each((view(dy), view(x), mean, inv_std), outs)
        partials = work.partials()
        work.over_channels("sum_channels", *inputs, partials)
        work.steps.finish("finish_sums", partials, *written, counted=False)
        work.deliver(outs, written)

    @asks_for(partial(combinations_of_steps, "batch_norm_grad"))
    def batch_norm_grad_apply(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        mean: Array,
        inv_std: Array,
        sum_dy_xhat: Array,
        sum_dy: Array,
        count: Number,
        channel_axis: int,
        dx: Array,
    ) -> None:
        """Write ``dx`` as ``batch_norm_grad`` does, from sums in float64; it may be ``dy``."""
        if not x.shape[channel_axis]:
            return
        dtypes = mean.dtype, first_of(scale, mean).dtype
        work = launches(self.device, "batch_norm_grad", x, channel_axis, *dtypes)
        view = work.shape.view
        outs = (view(dx),)
        inputs = view(dy), view(x), scale, mean, inv_std, sum_dy_xhat, sum_dy
        (*read, of_product, of_dy), written = work.each(inputs, outs)
        array, number = either(count)
        means = work.scratch(2, work.accumulator)
        counts = contiguous(self.device, array), number
        work.steps.each_channel("take_sums", of_product, of_dy, *counts, means)
        work.over_channels("apply_channels", *read, means, *written)
        work.deliver(outs, written)

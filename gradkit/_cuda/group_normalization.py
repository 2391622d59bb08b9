"""Group norm on a GPU."""

import math
from functools import partial

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.groups import combinations, launches
from gradkit._cuda.launch.kernels import first_of
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for


class GroupNormalization(OnDevice):
    """Launches the kernels of group norm."""

    @asks_for(partial(combinations, "group_norm"))
    def group_norm(
        self,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        channel_axis: int,
        eps: float,
        y: Array,
        mean: Array,
        inv_std: Array,
    ) -> None:
        """Write ``y``, ``mean`` and ``inv_std``, of (samples, groups); ``y`` may be ``x``."""
        if not x.size:  # an empty group counts as mean 0, variance 0
            inv_std.fill(1 / math.sqrt(eps) if eps else math.inf)
            mean.fill(0)
            return
        dtypes = mean.dtype, first_of(scale, bias, mean).dtype
        work = launches(self.device, "group_norm", x, channel_axis, mean.shape[1], *dtypes)
        view = work.layout.view
        outs = view(y), mean, inv_std
        (x, scale, bias), written = work.usable((view(x), scale, bias), outs)
        y, mean, inv_std = written
        partials, centre = work.partials(), work.scratch(1, np.float64)
        exact = work.scratch(2, np.float64)
        work.over_columns("sum_group_deviations", x, None, partials)
        work.over_groups("finish_group_centre", partials, centre)
        work.over_columns("sum_group_deviations", x, centre, partials)
        statistics = partials, centre, exact, mean, inv_std
        work.over_groups("finish_group_moments", *statistics, last=(np.float64(eps),))
        work.over_columns("normalize_groups", x, scale, bias, exact, y)
        work.deliver(outs, written)

    @asks_for(partial(combinations, "group_norm_grad"))
    def group_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        mean: Array,
        inv_std: Array,
        channel_axis: int,
        dx: Array,
        dscale: Array | None,
        dbias: Array | None,
    ) -> None:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
        if not x.size:
            for gradient in (dscale, dbias):
                if gradient is not None:
                    gradient.fill(0)
            return
        dtypes = mean.dtype, first_of(scale, mean).dtype
        work = launches(self.device, "group_norm_grad", x, channel_axis, mean.shape[1], *dtypes)
        view = work.layout.view
        outs = view(dx), dscale, dbias
        inputs = view(dy), view(x), scale, mean, inv_std
        (dy, x, scale, mean, inv_std), written = work.usable(inputs, outs)
        dx, dscale, dbias = written
        partials, means = work.partials(), work.scratch(2, work.accumulator)
        work.over_columns("sum_group_gradient", dy, x, mean, inv_std, partials)
        work.over_groups("finish_group_means", partials, scale, means)
        if dscale is not None:  # and dbias with it
            work.over_parameters("finish_group_parameters", partials, dscale, dbias)
        work.over_columns("apply_group_gradient", dy, x, scale, mean, inv_std, means, dx)
        work.deliver(outs, written)

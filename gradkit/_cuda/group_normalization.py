"""Group norm on a GPU."""

import math
from functools import partial

import numpy as np

from gradkit._backend import Array
from gradkit._calls.channels import GroupNorm, GroupNormGrad
from gradkit._cuda.launch.groups import Launches, combinations, launches
from gradkit._cuda.launch.kernels import types_of
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for


class GroupNormalization(OnDevice):
    """Launches the kernels of group norm."""

    @asks_for(partial(combinations, "group_norm"))
    def group_norm(self, call: GroupNorm) -> None:
        """Write ``y``, ``mean`` and ``inv_std``, of (samples, groups); ``y`` may be ``x``."""
        if not call.x.size:  # an empty group counts as mean 0, variance 0
            call.inv_std.fill(1 / math.sqrt(call.eps) if call.eps else math.inf)
            call.mean.fill(0)
            return
        work = self._launches("group_norm", call, call.scale, call.bias)
        view = work.layout.view
        outs = view(call.y), call.mean, call.inv_std
        (x, scale, bias), written = work.usable((view(call.x), call.scale, call.bias), outs)
        y, mean, inv_std = written
        partials, centre = work.partials(), work.scratch(1, np.float64)
        exact = work.scratch(2, np.float64)
        work.over_columns("sum_group_deviations", x, None, partials)
        work.over_groups("finish_group_centre", partials, centre)
        work.over_columns("sum_group_deviations", x, centre, partials)
        statistics = partials, centre, exact, mean, inv_std
        work.over_groups("finish_group_moments", *statistics, last=(np.float64(call.eps),))
        work.over_columns("normalize_groups", x, scale, bias, exact, y)
        work.deliver(outs, written)

    @asks_for(partial(combinations, "group_norm_grad"))
    def group_norm_grad(self, call: GroupNormGrad) -> None:
        """Write ``dx``, ``dscale`` and ``dbias`` (``=``); ``dx`` may be ``dy``."""
        if not call.x.size:
            for gradient in (call.dscale, call.dbias):
                if gradient is not None:
                    gradient.fill(0)
            return
        work = self._launches("group_norm_grad", call, call.scale)
        view = work.layout.view
        outs = view(call.dx), call.dscale, call.dbias
        inputs = view(call.dy), view(call.x), call.scale, call.mean, call.inv_std
        (dy, x, scale, mean, inv_std), written = work.usable(inputs, outs)
        dx, dscale, dbias = written
        partials, means = work.partials(), work.scratch(2, work.accumulator)
        work.over_columns("sum_group_gradient", dy, x, mean, inv_std, partials)
        work.over_groups("finish_group_means", partials, scale, means)
        if dscale is not None:  # and dbias with it
            work.over_parameters("finish_group_parameters", partials, dscale, dbias)
        work.over_columns("apply_group_gradient", dy, x, scale, mean, inv_std, means, dx)
        work.deliver(outs, written)

    def _launches(
        self, file: str, call: GroupNorm | GroupNormGrad, *parameters: Array | None
    ) -> Launches:
        """What shapes, strides and dtypes decide, decided once for each plan."""
        work: Launches | None = call.plan.launcher
        if work is None:
            types, groups = types_of(call.x, call.mean, *parameters), call.mean.shape[1]
            work = launches(self.device, file, call.x, call.channel_axis, groups, types)
            call.plan.launcher = work
        return work

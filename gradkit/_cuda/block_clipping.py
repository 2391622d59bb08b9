"""Norms and clipping unit by unit, on lists of arrays on a GPU."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from gradkit._backend import Array, Axes, Number
from gradkit._cuda.launch.device import scratch
from gradkit._cuda.launch.numbers import FLAGS, either
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for
from gradkit._cuda.list_norms import PART, norms, order_of
from gradkit._cuda.list_tables import (
    UNIT_KINDS,
    Plan,
    on_lists,
    plan_of,
    run,
    start,
)

_MANY_PARTS = 8  # of a unit: a block joins them rather than a warp
_FEW_THREADS, _MANY_THREADS = 32, 256
_RESIDENT = 8  # blocks for each multiprocessor


class BlockClipping(OnDevice):
    """Launches the kernels that take units."""

    @asks_for(partial(norms, file="unit_norms", kinds=UNIT_KINDS))
    def unit_norms(
        self, grads: Sequence[Array], norm_type: float, axes: Axes, out: Array, *, mean: bool
    ) -> None:
        """``out = (sum |g|^p)^(1/p)`` for each unit of each gradient, or of the mean of |g|^p."""
        plan = plan_of(self.device, grads, axes=axes)
        p, order = np.float64(norm_type), order_of(norm_type)
        threads = joining_threads(plan)
        for table in plan.tables:
            units = table.units.stop - table.units.start
            if not units:
                continue
            parts = scratch(self.device, table.count * PART, np.dtype(np.float64))
            start(self.device, table, "unit_norms", "unit_norm_partials", p, parts, ORDER=order)
            blocks = min(units, self.device.multiprocessors * _RESIDENT)
            launch = table.launch(
                self.device, blocks, threads, "unit_norms", "unit_norm_finish", ORDER=order
            )
            launch(table.argument, p, parts, FLAGS[mean], np.uint32(table.units.stop), out)

    @asks_for(partial(on_lists, "clip_units", UNIT_KINDS))
    def clip_units(
        self,
        grads: Sequence[Array],
        norms: Array,
        max_norm: Number,
        eps: float,
        axes: Axes,
        outs: Sequence[Array],
        *,
        param_norms: Array | None = None,
        least: float = 0.0,
        zero_nonfinite: bool,
    ) -> None:
        """Scale each unit to ``max_norm`` if its norm is larger."""
        plan = plan_of(self.device, grads, outs, axes)
        numbers = (*either(max_norm), param_norms, np.float64(least), np.float64(eps))
        flags = FLAGS[zero_nonfinite], FLAGS[outs is grads]
        run(self.device, plan, "clip_units", "clip_units", norms, *numbers, *flags)


def joining_threads(plan: Plan) -> int:
    """How many threads join a unit's partial results; the list decides, for bits depend on it."""
    units = plan.tables[-1].units.stop
    return _MANY_THREADS if plan.chunks > units * _MANY_PARTS else _FEW_THREADS

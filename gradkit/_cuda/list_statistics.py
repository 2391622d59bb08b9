"""Statistics of each array of a list on a GPU: a partial result a chunk, then a row a gradient."""

import numpy as np

from gradkit._backend import Array
from gradkit._calls.lists import ListStats
from gradkit._cuda.launch.buffers import copy_back, fill, writable_like
from gradkit._cuda.launch.device import Device, workspace
from gradkit._cuda.list_tables import launch, plan_of, steps

_THREADS = 128  # that join partial results, as those of a norm for each gradient
_STATS = 9  # numbers of 8 bytes of a partial result: kernels/grad_stats.cu


def write_stats(device: Device, call: ListStats) -> None:
    """Launch ``grad_stats``."""
    plan = plan_of(device, call.grads)
    for out, is_parts in ((call.stats, False), (call.parts, True)):
        if out is None:
            continue
        if not plan.chunks:
            fill(device, out, 0)
            continue
        target: Array = writable_like(device, out)
        table, outs = plan.table, (None, target) if is_parts else (target, None)
        partials = workspace(device, (table.chunks * _STATS,), np.dtype(np.float64))
        launch(steps(device, table, "grad_stats", "stat_partials", partials))
        blocks = min(table.tensors, device.multiprocessors * (2048 // _THREADS))
        finish = table.launch(device, blocks, _THREADS, "grad_stats", "stat_finish")
        finish(table.argument, partials, *outs)
        copy_back(out, target)

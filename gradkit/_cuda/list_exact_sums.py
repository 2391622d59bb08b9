"""Exact sums of a list on a GPU, in integers: some digits a chunk, then those of each tensor."""

import numpy as np

from gradkit._backend import Array
from gradkit._calls.lists import DIGITS, ExactSums
from gradkit._cuda.launch.device import Device, scratch, workspace
from gradkit._cuda.list_tables import THREADS, launch, plan_of, steps

_FLOAT64 = np.dtype(np.float64)


def sums_of_each(device: Device, call: ExactSums) -> Array:
    """On the device, a row of digits for each gradient."""
    plan = plan_of(device, call.grads)
    sums = scratch(device, (len(call.grads), DIGITS + 1), _FLOAT64)
    if not plan.chunks:
        sums.fill(0)
        return sums
    table, p = plan.table, np.float64(call.norm_type)
    partials = workspace(device, (table.chunks * (DIGITS + 1),), _FLOAT64)
    launch(steps(device, table, "exact_sums", "exact_partials", p, partials))
    blocks = min(table.tensors, device.multiprocessors * (2048 // THREADS))
    finish = table.launch(device, blocks, THREADS, "exact_sums", "exact_finish")
    finish(table.argument, partials, sums)
    return sums

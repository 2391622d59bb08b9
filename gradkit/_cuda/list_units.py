"""Norms and clipping unit by unit, on lists of arrays on a GPU."""

import numpy as np

from gradkit._calls.lists import ClipUnits, UnitNorms
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.kernels import FLAGS, either
from gradkit._cuda.list_norms import PART, order_of
from gradkit._cuda.list_tables import Table, launch, plan_of, steps

_MANY_PARTS = 8  # of a unit: a block joins them rather than a warp
_FEW_THREADS, _MANY_THREADS = 32, 256
_RESIDENT = 8  # blocks for each multiprocessor


def write_unit_norms(device: Device, call: UnitNorms) -> None:
    """Launch ``unit_norms``."""
    plan = plan_of(device, call.grads, axes=call.axes)
    p, order = np.float64(call.norm_type), order_of(call.norm_type)
    table = plan.table
    if not table.units:
        return
    parts = scratch(device, table.chunks * PART, np.dtype(np.float64))
    launch(steps(device, table, "unit_norms", "unit_norm_partials", p, parts, ORDER=order))
    blocks, threads = min(table.units, device.multiprocessors * _RESIDENT), joining_threads(table)
    finish = table.launch(device, blocks, threads, "unit_norms", "unit_norm_finish", ORDER=order)
    finish(table.argument, p, parts, FLAGS[call.mean], np.uint32(table.units), call.norms)


def scale_units(device: Device, call: ClipUnits) -> None:
    """Launch ``clip_units``."""
    plan = plan_of(device, call.grads, call.outs, call.axes)
    least, eps = np.float64(call.least), np.float64(call.eps)
    limits = *either(call.max_norm), call.param_norms, least, eps
    flags = FLAGS[call.zero_nonfinite], FLAGS[call.outs is call.grads]
    launch(steps(device, plan.table, "clip_units", "clip_units", call.norms, *limits, *flags))


def joining_threads(table: Table) -> int:
    """Number of threads that join a unit's partial results: by the list, as bits depend on it."""
    return _MANY_THREADS if table.chunks > table.units * _MANY_PARTS else _FEW_THREADS

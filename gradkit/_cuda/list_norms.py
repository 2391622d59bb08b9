"""The norm of a list of arrays on a GPU: a partial result a chunk or a block, then one for all."""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from gradkit._backend import Array
from gradkit._calls.lists import GradNorm, NormParts
from gradkit._calls.roles import Flags, Norm, Number
from gradkit._cuda.launch.buffers import fill, on_device
from gradkit._cuda.launch.device import Device, scratch, workspace
from gradkit._cuda.launch.kernels import FLAGS, Launch, either
from gradkit._cuda.list_tables import ListPlan, Step, Table, launch, plan_of, steps

PART = 3  # doubles of a partial result: kernels/norm_orders.cuh
SUM_OF_SQUARES = "SumOfSquares"
_ANY_ORDER = "SumOfPowers"
_ORDERS = {1.0: "Sum", 2.0: SUM_OF_SQUARES, math.inf: "Largest"}
_THREADS = {False: 1024, True: 128}  # that join partial results: of one norm, of many
_FLOAT64 = np.dtype(np.float64)


def order_of(norm_type: float) -> str:
    """The arithmetic of a p-norm: a struct in kernels/norm_orders.cuh."""
    return _ORDERS.get(norm_type, _ANY_ORDER)


def norm_steps(device: Device, call: GradNorm) -> list[Step]:
    """What launches ``grad_norm``, with all its memory and kernels made."""
    norm, found_inf = call.norm, call.found_inf
    plan = plan_of(device, call.grads)
    if not plan.chunks:
        return [partial(array.fill, 0) for array in (norm, found_inf) if array is not None]
    p, order = np.float64(call.norm_type), _ORDERS.get(call.norm_type, _ANY_ORDER)
    if len(plan.tables) == 1 and not call.per_tensor:
        return _of_one_table(device, plan.tables[0], p, order, call)
    made = []
    for table, own_steps, parts, count in _partials(device, plan, p, order, call.per_tensor):
        own, found = norm, found_inf
        if call.per_tensor:
            own = Norm(norm[table.tensors])
            found = None if found_inf is None else Flags(found_inf[table.tensors])
        made += own_steps
        made.append(joining(device, table, p, order, parts, count, call.scale, own, found))
    return made


class _Total(NamedTuple):
    """What the norm of one table's tensors is launched with, but for where it is written."""

    partials: Launch
    finish: Launch
    parts: np.uint32  # how many partial results there are
    room: tuple[int]  # doubles that they take

    @classmethod
    def of(cls, device: Device, table: Table, order: str) -> "_Total":
        count = table.blocks
        partials = table.over_chunks(device, "norm", "norm_partials", ORDER=order)
        finish = _finish(device, table, order)
        return cls(partials, finish, np.uint32(count), (count * PART,))


def _of_one_table(
    device: Device, table: Table, p: np.float64, order: str, call: GradNorm
) -> list[Step]:
    """What launches one norm of all of a table's tensors: nearly every list is one table."""
    known: _Total | None = table.launches.get((_Total, order))
    if known is None:
        known = table.launches[_Total, order] = _Total.of(device, table, order)
    fields, parts = table.argument, workspace(device, known.room, _FLOAT64)
    numbers = known.parts, *either(call.scale)
    return [
        partial(known.partials.__call__, fields, p, parts, FLAGS[True]),
        partial(known.finish.__call__, p, parts, *numbers, call.norm, call.found_inf),
    ]


def write_parts(device: Device, call: NormParts) -> None:
    """Launch ``norm_parts``."""
    out, per_tensor = call.parts, call.per_tensor
    plan = plan_of(device, call.grads)
    if not plan.chunks:
        fill(device, out, 0)
        return
    p, order = np.float64(call.norm_type), order_of(call.norm_type)
    if call.copies is None:
        for table, own_steps, parts, count in _partials(device, plan, p, order, per_tensor):
            launch(own_steps)
            own = out[table.tensors] if per_tensor else out
            join(device, table, p, order, parts, count, None, own, per_tensor)
        return
    many, counts = len(call.grads), on_device(device, call.copies)
    each = out if per_tensor else scratch(device, many * PART, _FLOAT64).reshape(-1, PART)
    for table, own_steps, parts, count in _partials(device, plan, p, order, True):
        launch(own_steps)
        mine = table.tensors
        join(device, table, p, order, parts, count, counts[mine], each[mine], True)
    if not per_tensor:
        join(device, plan.tables[0], p, order, each, many, None, out, False)


def _partials(
    device: Device, plan: ListPlan, p: np.float64, order: str, per_tensor: bool
) -> Iterator[tuple[Table, list[Step], Array, int]]:
    """What computes partial results; those to be joined, and how many, with their table.

    One Part for each chunk and one table after the other, or a Part for the chunks of a block
    if nobody asks which tensor it was, and all tables' together with the first.
    """
    counts = [table.count if per_tensor else table.blocks for table in plan.tables]
    parts = scratch(device, sum(counts) * PART, _FLOAT64)
    first, made = 0, []
    for table, count in zip(plan.tables, counts, strict=True):
        own = parts if count == sum(counts) else parts[first * PART :]
        arguments = p, own, FLAGS[not per_tensor]
        own_steps = steps(device, (table,), "norm", "norm_partials", *arguments, ORDER=order)
        if per_tensor:
            yield table, own_steps, own, count
        made += own_steps
        first += count
    if not per_tensor:
        yield plan.tables[0], made, parts, first


def joining(
    device: Device,
    table: Table,
    p: np.float64,
    order: str,
    parts: Array,
    count: int,
    scale: Number,
    norm: Norm,
    found_inf: Flags | None,
) -> Step:
    """What joins ``count`` parts: all into a scalar, or each tensor's into a row of norms."""
    arguments = p, parts, np.uint32(count), *either(scale), norm
    if norm.ndim == 0:
        found = _finish(device, table, order)
        return partial(found.__call__, *arguments, found_inf)
    found = _each(device, table, "norms_finish", order, norm.size, True)
    stride = np.int64(norm.strides[0])
    return partial(found.__call__, table.argument, *arguments, stride, found_inf)


def join(
    device: Device,
    table: Table,
    p: np.float64,
    order: str,
    parts: Array,
    count: int,
    copies: Array | None,
    out: Array,
    per_tensor: bool,
) -> None:
    """As ``joining``, into rows of (hi, lo, scale)."""
    found = _each(device, table, "norm_parts", order, len(out), per_tensor)
    found(table.argument, p, parts, np.uint32(count), FLAGS[per_tensor], copies, out)


def _finish(device: Device, table: Table, order: str) -> Launch:
    """The launch of a block that writes one norm."""
    return table.launch(device, 1, _THREADS[False], "norm", "norm_finish", ORDER=order)


def _each(
    device: Device, table: Table, name: str, order: str, norms: int, per_tensor: bool
) -> Launch:
    """A launch with a block for each norm."""
    threads = _THREADS[per_tensor]
    blocks = min(norms, device.multiprocessors * (2048 // threads))
    return table.launch(device, blocks, threads, "norms", name, ORDER=order)

"""The norm of a list of arrays on a GPU: a partial result a chunk or a block, then one for all."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradkit._backend import Array, Number
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.kernels import Combination
from gradkit._cuda.launch.tensor_lists import FLAGS, KINDS, Table, either, plan_of, start

PART = 3  # doubles of a partial result: kernels/norm_orders.cuh
SUM_OF_SQUARES = "SumOfSquares"
_ORDERS = {1.0: "Sum", 2.0: SUM_OF_SQUARES, math.inf: "Largest"}
_ANY_ORDER = "SumOfPowers"
_THREADS = {False: 1024, True: 128}  # that join partial results: of one norm, of many
_FLOAT64 = np.dtype(np.float64)


def norms(*orders: str) -> Iterator[Combination]:
    """What norms of lists are compiled with, or those of a few orders."""
    for capacity in KINDS:
        for order in orders or (*_ORDERS.values(), _ANY_ORDER):
            yield "norm", {"CAPACITY": capacity, "ORDER": order}


def write_norm(
    device: Device,
    grads: Sequence[Array],
    norm_type: float,
    out: Array,
    per_tensor: bool = False,
    scale: Number = 1.0,
    found_inf: Array | None = None,
) -> None:
    """``Operations.grad_norm``."""
    plan = plan_of(device, grads)
    if not plan.chunks:
        out.fill(0)
        if found_inf is not None:
            found_inf.fill(0)
        return
    p, order = np.float64(norm_type), _ORDERS.get(norm_type, _ANY_ORDER)
    joined = FLAGS[not per_tensor]
    # A Part for each chunk, or for those of a block if nobody asks which tensor it was.
    counts = [table.count if per_tensor else table.blocks for table in plan.tables]
    parts = scratch(device, sum(counts) * PART, _FLOAT64)
    first = 0
    for table, count in zip(plan.tables, counts, strict=True):
        own = parts if count == sum(counts) else parts[first * PART :]
        start(device, table, "norm", "norm_partials", p, own, joined, ORDER=order)
        if per_tensor:
            found = None if found_inf is None else found_inf[table.tensors]
            join_parts(device, table, p, order, own, count, scale, out[table.tensors], found)
        first += count
    if not per_tensor:
        join_parts(device, plan.tables[0], p, order, parts, first, scale, out, found_inf)


def join_parts(
    device: Device,
    table: Table,
    p: np.float64,
    order: str,
    parts: Array,
    count: int,
    scale: Number,
    out: Array,
    found_inf: Array | None,
) -> None:
    """Join ``count`` parts: all of them into a scalar, or each tensor's into a row of norms."""
    per_tensor = out.ndim > 0
    threads = _THREADS[per_tensor]
    blocks = min(out.size, device.multiprocessors * (2048 // threads))
    launch = table.launch(device, blocks, threads, "norm", "norm_finish", ORDER=order)
    numbers = np.uint32(count), FLAGS[per_tensor]
    stride = np.int64(out.strides[0] if per_tensor else 0)
    launch(table.argument, p, parts, *numbers, *either(scale), out, stride, found_inf)

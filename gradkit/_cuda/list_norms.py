"""The norm of a list of arrays on a GPU: a partial result a chunk or a block, then one for all."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from gradkit._backend import Array
from gradkit._calls.lists import GradNorm, NormParts
from gradkit._calls.roles import Flags, Norm, Number
from gradkit._cuda.launch.buffers import fill, on_device
from gradkit._cuda.launch.device import Device, scratch, workspace
from gradkit._cuda.launch.kernels import FLAGS, Launch, either
from gradkit._cuda.list_tables import Step, Table, launch, plan_of, steps

PART = 3  # doubles of a partial result: kernels/norm_orders.cuh
_ANY_ORDER = "SumOfPowers"
_ORDERS = {1.0: "Sum", 2.0: "SumOfSquares", math.inf: "Largest"}
_THREADS = {False: 1024, True: 128}  # that join partial results: of one norm, of many
_FLOAT64 = np.dtype(np.float64)


def order_of(norm_type: float) -> str:
    """The arithmetic of a p-norm: a struct in kernels/norm_orders.cuh."""
    return _ORDERS.get(norm_type, _ANY_ORDER)


def norm_steps(device: Device, call: GradNorm) -> list[Step]:
    """Launches of ``grad_norm``, with memory allocated and kernels compiled."""
    norm, found_inf = call.norm, call.found_inf
    plan = plan_of(device, call.grads)
    if not plan.chunks:
        return [partial(fill, device, out, 0) for out in (norm, found_inf) if out is not None]
    if not call.per_tensor:
        return _one_norm(device, plan.table, call)
    launches, parts = _partials(device, plan.table, call.norm_type, True)
    return [*launches, parts.joining(device, call.scale, norm, found_inf)]


class _Total(NamedTuple):
    """Arguments and kernels for the norm of a table's tensors, without the output."""

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


def _one_norm(device: Device, table: Table, call: GradNorm) -> list[Step]:
    """Launches of one norm of all of a table's tensors, looked up with the table."""
    p, order = np.float64(call.norm_type), _ORDERS.get(call.norm_type, _ANY_ORDER)
    total: _Total | None = table.launches.get((_Total, order))
    if total is None:
        total = table.launches[_Total, order] = _Total.of(device, table, order)
    fields, parts = table.argument, workspace(device, total.room, _FLOAT64)
    numbers = total.parts, *either(call.scale)
    return [
        partial(total.partials.__call__, fields, p, parts, FLAGS[True]),
        partial(total.finish.__call__, p, parts, *numbers, call.norm, call.found_inf),
    ]


def write_parts(device: Device, call: NormParts) -> None:
    """Launch ``norm_parts``."""
    out, per_tensor = call.parts, call.per_tensor
    plan = plan_of(device, call.grads)
    if not plan.chunks:
        fill(device, out, 0)
        return
    table, order, copies = plan.table, call.norm_type, call.copies
    launches, parts = _partials(device, table, order, per_tensor or copies is not None)
    launch(launches)
    if copies is None:
        parts.join(device, None, out, per_tensor)
        return
    many, counts = len(call.grads), on_device(device, copies)
    each = out if per_tensor else scratch(device, many * PART, _FLOAT64).reshape(-1, PART)
    parts.join(device, counts, each, True)
    if not per_tensor:
        NormPartials(table, order, each, many).join(device, None, out, False)


def _partials(
    device: Device, table: Table, norm_type: float, per_tensor: bool
) -> tuple[list[Step], "NormPartials"]:
    """Launches that compute partial results, and the results to be joined.

    A Part for each chunk, or for the chunks of a block if nobody asks which tensor it was.
    """
    count, order = table.chunks if per_tensor else table.blocks, order_of(norm_type)
    parts = scratch(device, count * PART, _FLOAT64)
    arguments = np.float64(norm_type), parts, FLAGS[not per_tensor]
    launches = steps(device, table, "norm", "norm_partials", *arguments, ORDER=order)
    return launches, NormPartials(table, norm_type, parts, count)


class NormPartials(NamedTuple):
    """Partial results of a p-norm of a table's tensors: so many rows (hi, lo, scale)."""

    table: Table
    norm_type: float
    rows: Array
    number: int

    def joining(self, device: Device, scale: Number, norm: Norm, found_inf: Flags | None) -> Step:
        """Launch that joins them: all into a scalar, or each tensor's into a row of norms."""
        arguments = *self._arguments, *either(scale), norm
        if norm.ndim == 0:
            finish = _finish(device, self.table, order_of(self.norm_type))
            return partial(finish.__call__, *arguments, found_inf)
        finish = self._each(device, "norms_finish", norm.size, True)
        stride = np.int64(norm.strides[0])
        return partial(finish.__call__, self.table.argument, *arguments, stride, found_inf)

    def join(self, device: Device, copies: Array | None, out: Array, per_tensor: bool) -> None:
        """The same at once, into rows of (hi, lo, scale)."""
        run = self._each(device, "norm_parts", len(out), per_tensor)
        run(self.table.argument, *self._arguments, FLAGS[per_tensor], copies, out)

    @property
    def _arguments(self) -> tuple[np.float64, Array, np.uint32]:
        return np.float64(self.norm_type), self.rows, np.uint32(self.number)

    def _each(self, device: Device, name: str, norms: int, per_tensor: bool) -> Launch:
        """A launch with a block for each norm."""
        threads, order = _THREADS[per_tensor], order_of(self.norm_type)
        blocks = min(norms, device.multiprocessors * (2048 // threads))
        return self.table.launch(device, blocks, threads, "norms", name, ORDER=order)


def _finish(device: Device, table: Table, order: str) -> Launch:
    """The launch of a block that writes one norm."""
    return table.launch(device, 1, _THREADS[False], "norm", "norm_finish", ORDER=order)

"""Launches that add to gradient buffers on a GPU."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from gradkit import _host
from gradkit._backend import Address, Array
from gradkit._calls.lists import (
    AccumulateGrad,
    AccumulateGrads,
    AccumulateGradV2,
    AdamwUpdate,
    EmaUpdate,
    GradNorm,
    SgdUpdate,
)
from gradkit._calls.roles import Grads, Norm, Seed
from gradkit._cuda.launch.buffers import VECTOR_BYTES
from gradkit._cuda.launch.device import Device, scratch
from gradkit._cuda.launch.kernels import either, either_flag
from gradkit._cuda.list_norms import PART, NormPartials, norm_steps
from gradkit._cuda.list_tables import Counted, ListPlan, Step, launch, plan_of, steps
from gradkit._dtypes import float_name, float_of

_LIST = "accumulate_grads"  # the kernel, and its file
_COMPENSATED, _AT_RANDOM = "accumulate_compensated", "accumulate_at_random"  # so too
_NO_SEED = np.uint64(0)
_dtype_of = attrgetter("dtype")
# Fields of a call that have an entry for each pair.
_PAIRED = {"buffers", "grads", "compensation", "offsets", "averages", "params"}
_PAIRED |= {"moments", "variances", "momenta"}

Pairs = TypeVar("Pairs", AccumulateGrads, AdamwUpdate, EmaUpdate, SgdUpdate)


def add(
    device: Device, name: str, call: AccumulateGrad | AccumulateGradV2, *arguments: Any
) -> None:
    """Launch a kernel of accumulate.cu, which broadcasts the gradient to the buffer's shape."""
    grad: Any = call.grad
    buffer: Any = call.buffer
    if type(grad) is Address:
        table, start = call.plan.launcher
        start(table.at(grad, buffer), *arguments)
        return
    plan = plan_of(device, [grad], [buffer])
    if not plan.table.blocks:
        return
    table = plan.table.alone
    start = table.over_chunks(device, "accumulate", name, **_types(grad, buffer))
    if call.plan.launcher is None and table.capacity and _is_plain(plan):
        call.plan.launcher = table, start
    start(table.argument, *arguments)


def add_lists(device: Device, call: AccumulateGrads) -> None:
    """Launch ``accumulate_grads``: a launch for each pair of dtypes.

    The norm comes from the same launch if there is only one, over arrays that are aligned alike
    and of gradients that are no wider; else it reads the buffers.
    """
    buffers, grads, before = call.buffers, call.grads, []
    if call.grad_norm is not None:
        before = norm_steps(device, GradNorm(grads=grads, norm_type=2.0, norm=call.grad_norm))
    chosen = (*either_flag(call.do_update), *either_flag(call.overwrite), *either(call.scale))
    kinds = kinds_of(grads, buffers)
    launches: list[Step] = []
    plain = call.compensation is None and call.seed is None
    if call.norm is not None and len(kinds) == 1 and plain:
        launches = _with_norm(device, buffers, grads, chosen, call.norm)
    if not launches:
        after = []
        if call.norm is not None:
            after = norm_steps(device, GradNorm(grads=buffers, norm_type=2.0, norm=call.norm))
        lists = [] if call.do_update is False else kinds
        launches = [*_adding(device, call, lists, chosen), *after]
    launch([*before, *launches])


def average_steps(device: Device, call: EmaUpdate) -> Iterator[Step]:
    """Launches of ``ema_update``."""
    if isinstance(call.decay, float) and call.decay == 1:
        return
    kinds = kinds_of(call.params, call.averages)
    for places in kinds:
        alike = call if len(kinds) == 1 else part_of(call, places)
        params, averages = alike.params, alike.averages
        table, types = plan_of(device, params, averages).table, _types(params[0], averages[0])
        yield from steps(device, table, "ema_update", "ema_update", *either(call.decay), **types)


def kinds_of(*lists: Grads) -> list[list[int]]:
    """The places of arrays that agree in the dtypes that each list has there."""
    every = [
        [*map(_dtype_of, each.arrays if isinstance(each, _host.Table) else each)] for each in lists
    ]
    if all(len(set(dtypes)) == 1 for dtypes in every):  # nearly always
        return [[*range(len(every[0]))]]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for k, combination in enumerate(zip(*every, strict=True)):
        kinds.setdefault(combination, []).append(k)
    return [*kinds.values()]


def _adding(
    device: Device, call: AccumulateGrads, lists: Sequence[Sequence[int]], chosen: tuple[Any, ...]
) -> Iterator[Step]:
    """Launches that add lists of pairs; each list has its dtypes."""
    for places in lists:
        yield from _adding_alike(device, call if len(lists) == 1 else part_of(call, places), chosen)


def part_of(call: Pairs, chosen: Sequence[int]) -> Pairs:
    """The same call on some of its arrays."""
    every = {name: getattr(call, name) for name in _PAIRED & call.fields}
    return call.replaced(**{name: [of[k] for k in chosen] for name, of in every.items() if of})


def _adding_alike(device: Device, call: AccumulateGrads, chosen: tuple[Any, ...]) -> Iterator[Step]:
    """Launches that add pairs of one pair of dtypes, or with a third array (further_arrays.cuh)."""
    grads, buffers, rests = call.grads, call.buffers, call.compensation
    types = _types(grads[0], buffers[0])
    if rests is None and call.seed is None:
        table = plan_of(device, grads, buffers).table
        yield from steps(device, table, _LIST, _LIST, *chosen, None, NORM=0, **types)
        return
    sources = Counted(grads, buffers, call.offsets) if rests is None else joined(grads, rests)
    table = plan_of(device, sources, joined(buffers, buffers)).table
    if rests is None:
        seed = either_seed(call.seed)
        yield from steps(device, table, _AT_RANDOM, _AT_RANDOM, *chosen, *seed, **types)
    else:
        device.pointers(rests, write=True)  # an emulator checks what is written
        yield from steps(device, table, _COMPENSATED, _COMPENSATED, *chosen, **types)


def _is_plain(plan: ListPlan) -> bool:
    """True if arrays are aligned, and kernels begin where they do."""
    return not ((plan.starts % VECTOR_BYTES).any() or plan.cut.shifts.any())


def joined(*lists: Grads) -> Grads:
    """All lists as one, without an array for each if they are tables."""
    tables = [each for each in lists if isinstance(each, _host.Table)]
    if len(tables) == len(lists):
        return tables[0].like([array for each in tables for array in each.arrays])
    return [array for each in lists for array in each]


def either_seed(seed: Seed | None) -> tuple[Array | None, np.uint64]:
    """An array to read a seed from, or none and the seed itself."""
    if seed is None or isinstance(seed, int):
        return None, np.uint64(seed or 0)
    return seed, _NO_SEED


def _with_norm(
    device: Device, buffers: Grads, grads: Grads, chosen: tuple[Any, ...], norm: Norm
) -> list[Step]:
    """Launches that add and norm at once, if the norm then has the bits of ``grad_norm``."""
    plan, fits = plan_of(device, grads, buffers), float_of(buffers[0].dtype).addends
    if not (plan.in_step and plan.chunks and float_name(grads[0].dtype) in fits):
        return []
    table = plan.table
    parts = scratch(device, table.blocks * PART, np.dtype(np.float64))
    types = _types(grads[0], buffers[0])
    adding = steps(device, table, _LIST, _LIST, *chosen, parts, NORM=1, **types)
    return [*adding, NormPartials(table, 2.0, parts, table.blocks).joining(device, 1.0, norm, None)]


def _types(grad: Array, buffer: Array) -> dict[str, Any]:
    return {"GRAD": float_name(grad.dtype), "BUFFER": float_name(buffer.dtype)}

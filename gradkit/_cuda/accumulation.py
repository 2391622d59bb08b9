"""Add to gradient buffers, and zero gradients, on a GPU."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from gradkit._backend import Array, Number
from gradkit._calls.lists import GradNorm
from gradkit._cuda.launch.device import scratch
from gradkit._cuda.launch.kernels import Combination, Macros
from gradkit._cuda.launch.numbers import either, either_flag
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for
from gradkit._cuda.list_norms import PART, SUM_OF_SQUARES, joining, norm_steps, norms
from gradkit._cuda.list_tables import (
    ALONE,
    KINDS,
    Step,
    launch,
    plan_of,
    start,
    steps,
)
from gradkit._dtypes import FLOATS, float_name

_LIST = "accumulate_grads"  # the kernel, and its file


def _accumulating() -> Iterator[Combination]:
    for capacity, grad, buffer in product(ALONE, FLOATS, FLOATS):
        yield "accumulate", {"CAPACITY": capacity, "GRAD": grad, "BUFFER": buffer}


def _accumulating_lists() -> Iterator[Combination]:
    for capacity, buffer, norm in product(KINDS, FLOATS, (0, 1)):
        for grad in FLOATS[buffer].addends:
            types: Macros = {"GRAD": grad, "BUFFER": buffer}
            yield _LIST, {"CAPACITY": capacity, "NORM": norm, **types}
    yield from norms(SUM_OF_SQUARES)


class Accumulation(OnDevice):
    """Launches the kernels that add and zero."""

    @asks_for(_accumulating)
    def accumulate_grad(
        self, buffer: Array, grad: Array, do_update: Array | bool, scale: float | None
    ) -> None:
        """``buffer += scale * grad`` (broadcast) if ``do_update``; with a scale, in float64."""
        if do_update is False:
            return
        flag = None if do_update is True else do_update
        factor = np.float64(1 if scale is None else scale)
        self._accumulate("accumulate_grad", buffer, grad, flag, factor)

    @asks_for(_accumulating)
    def accumulate_grad_v2(self, buffer: Array, grad: Array, overwrite: Array | bool) -> None:
        """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
        flag, otherwise = either_flag(overwrite)
        if otherwise and buffer is grad:
            return
        self._accumulate("accumulate_grad_v2", buffer, grad, flag, otherwise)

    @asks_for(_accumulating_lists)
    def accumulate_grads(
        self,
        buffers: Sequence[Array],
        grads: Sequence[Array],
        do_update: Array | bool,
        overwrite: Array | bool,
        scale: Number,
        norm: Array | None,
    ) -> None:
        """``buffers += scale * grads`` or ``buffers = scale * grads``: a launch a pair of dtypes.

        The norm comes from the same launch if there is only one, over arrays that are aligned
        alike; else it reads the buffers.
        """
        chosen = (*either_flag(do_update), *either_flag(overwrite), *either(scale))
        kinds: dict[tuple[Any, Any], list[int]] = {}
        for k, pair in enumerate(zip(grads, buffers, strict=True)):
            kinds.setdefault((pair[0].dtype, pair[1].dtype), []).append(k)
        made: list[Step] = []
        if norm is not None and len(kinds) == 1:
            made = self._with_norm(buffers, grads, chosen, norm)
        if not made:
            after = (
                []
                if norm is None
                else norm_steps(self.device, GradNorm(grads=buffers, norm_type=2.0, norm=norm))
            )
            lists = [] if do_update is False else [*kinds.values()]
            made = [*self._adding(buffers, grads, lists, chosen), *after]
        launch(made)

    def _adding(
        self,
        buffers: Sequence[Array],
        grads: Sequence[Array],
        lists: Sequence[Sequence[int]],
        chosen: tuple[Any, ...],
    ) -> Iterator[Step]:
        """What adds lists of pairs, of which each has its dtypes."""
        for own in lists:
            sources, targets = grads, buffers
            if len(lists) > 1:
                sources, targets = [grads[k] for k in own], [buffers[k] for k in own]
            types = _types(sources[0], targets[0])
            for table in plan_of(self.device, sources, targets).tables:
                yield from steps(self.device, table, _LIST, _LIST, *chosen, None, NORM=0, **types)

    def _with_norm(
        self, buffers: Sequence[Array], grads: Sequence[Array], chosen: tuple[Any, ...], norm: Array
    ) -> list[Step]:
        """What adds and norms in one launch, if the norm then has the bits of ``grad_norm``."""
        plan = plan_of(self.device, grads, buffers)
        if not (plan.in_step and plan.chunks):
            return []
        (table,) = plan.tables
        parts = scratch(self.device, table.blocks * PART, np.dtype(np.float64))
        types = _types(grads[0], buffers[0])
        adding = steps(self.device, table, _LIST, _LIST, *chosen, parts, NORM=1, **types)
        order, p = SUM_OF_SQUARES, np.float64(2)
        return [
            *adding,
            joining(self.device, table, p, order, parts, table.blocks, 1.0, norm, None),
        ]

    def _accumulate(self, name: str, buffer: Array, grad: Array, *arguments: Any) -> None:
        plan = plan_of(self.device, [grad], [buffer])
        for table in plan.tables:
            start(self.device, table.alone, "accumulate", name, *arguments, **_types(grad, buffer))


def _types(grad: Array, buffer: Array) -> dict[str, Any]:
    return {"GRAD": float_name(grad.dtype), "BUFFER": float_name(buffer.dtype)}

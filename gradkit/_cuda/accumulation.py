"""Add to gradient buffers, and zero gradients, on a GPU."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.kernels import Combination
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.tensor_lists import ALONE, on_lists, plan_of, run, start
from gradkit._cuda.launch.warmup import asks_for
from gradkit._dtypes import FLOATS, float_name


def _accumulating() -> Iterator[Combination]:
    for capacity, grad, buffer in product(ALONE, FLOATS, FLOATS):
        yield "accumulate", {"CAPACITY": capacity, "GRAD": grad, "BUFFER": buffer}


class Accumulation(OnDevice):
    """Launches the kernels that add and zero."""

    @asks_for(_accumulating)
    def accumulate_grad(
        self, buffer: Array, grad: Array, do_update: Array | bool, scale: float | None
    ) -> None:
        """``buffer += scale * grad`` (broadcast) if ``do_update``, with one rounding."""
        if do_update is False:
            return
        flag = None if do_update is True else do_update
        factor = np.float64(1 if scale is None else scale)
        self._accumulate("accumulate_grad", buffer, grad, flag, factor)

    @asks_for(_accumulating)
    def accumulate_grad_v2(self, buffer: Array, grad: Array, overwrite: Array | bool) -> None:
        """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""
        known = isinstance(overwrite, bool)
        flag, otherwise = (None, overwrite) if known else (overwrite, False)
        if otherwise and buffer is grad:
            return
        self._accumulate("accumulate_grad_v2", buffer, grad, flag, np.uint32(otherwise))

    @asks_for(partial(on_lists, "zero"))
    def zero_grad(self, grads: Sequence[Array]) -> None:
        """Write +0 over every element, NaN included."""
        run(self.device, plan_of(self.device, grads, grads), "zero", "zero_grad")

    def _accumulate(self, name: str, buffer: Array, grad: Array, *arguments: Any) -> None:
        types = {"GRAD": float_name(grad.dtype), "BUFFER": float_name(buffer.dtype)}
        plan = plan_of(self.device, [grad], [buffer])
        for table in plan.tables:
            start(self.device, table.alone, "accumulate", name, *arguments, **types)

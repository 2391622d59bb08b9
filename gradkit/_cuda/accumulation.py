"""Adding into gradient buffers and zeroing them, on a GPU."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from gradkit._cuda.device import Array, Device
from gradkit._cuda.tensor_lists import KINDS, Macros, plan_of, run
from gradkit._dtypes import FLOATS, float_name


def accumulate_grad(
    device: Device, buffer: Array, grad: Array, do_update: Array | bool, scale: float | None
) -> None:
    """``buffer += scale * grad`` (broadcast) where ``do_update``, with one rounding."""
    if do_update is False:
        return
    flag = None if do_update is True else do_update
    factor = np.float64(1 if scale is None else scale)
    _launch(device, "accumulate_grad", buffer, grad, flag, factor)


def accumulate_grad_v2(device: Device, buffer: Array, grad: Array, overwrite: Array | bool) -> None:
    """``buffer = grad`` where ``overwrite``, else ``buffer += grad``; both broadcast."""
    known = isinstance(overwrite, bool)
    flag, otherwise = (None, overwrite) if known else (overwrite, False)
    if otherwise and buffer is grad:
        return
    _launch(device, "accumulate_grad_v2", buffer, grad, flag, np.uint32(otherwise))


def zero_grad(device: Device, grads: Sequence[Array]) -> None:
    """Write +0 over every element, whatever it was."""
    run(device, plan_of(device, grads, grads), "zero", "zero_grad")


def combinations() -> Iterator[tuple[str, Macros]]:
    """Every kernel file and its macros that these launchers can ask for."""
    for capacity in KINDS:
        yield "zero", {"CAPACITY": capacity}
        for grad, buffer in product(FLOATS, FLOATS):
            yield "accumulate", {"CAPACITY": capacity, "GRAD": grad, "BUFFER": buffer}


def _launch(device: Device, name: str, buffer: Array, grad: Array, *arguments: Any) -> None:
    types = {"GRAD": float_name(grad.dtype), "BUFFER": float_name(buffer.dtype)}
    run(device, plan_of(device, [grad], [buffer]), "accumulate", name, *arguments, **types)

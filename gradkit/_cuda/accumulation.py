"""Adding into gradient buffers and zeroing them, on a GPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradkit._cuda.device import Array, Device
from gradkit._cuda.tensor_lists import plan_of, run
from gradkit._dtypes import float_name


def accumulate_grad(
    device: Device, buffer: Array, grad: Array, do_update: Array | bool, scale: float | None
) -> None:
    """``buffer += scale * grad`` (broadcast) where ``do_update``, with one rounding."""
    if do_update is False:
        return
    flag = None if do_update is True else do_update
    _launch(
        device, "accumulate_grad", buffer, grad, flag, np.float64(1 if scale is None else scale)
    )


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


def _launch(device: Device, name: str, buffer: Array, grad: Array, *arguments: Any) -> None:
    types = {"GRAD": float_name(grad.dtype), "BUFFER": float_name(buffer.dtype)}
    run(device, plan_of(device, [grad], [buffer]), "accumulate", name, *arguments, **types)

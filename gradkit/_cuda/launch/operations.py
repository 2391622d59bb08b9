"""The base class of all CUDA operations."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradkit._backend import Array
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.device import Device, note_others
from gradkit._cuda.launch.kernels import kernel

_THREADS = 256


class OnDevice:
    """Operations on one device, which must be current while they run."""

    def __init__(self, device: Device):
        self.device = device

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        """An array's values on the host, once the current stream has written them."""
        if self.device.capturing():  # CUDA would give up the capture
            raise RuntimeError(
                "this call would synchronise with the device, which is not allowed during graph "
                "capture"
            )
        note_others()
        return self.device.xp.asnumpy(array)

    def write(
        self, of: tuple[str, str], arguments: Iterable[Any], outs: Sequence[Array], threads: int = 1
    ) -> None:
        """Launch a kernel of a file with so many threads or fewer, which takes the outputs last.

        It gets arrays without gaps: of others copies, and what is copied to them.
        """
        device = self.device
        read = [a if isinstance(a, np.generic) else contiguous(device, a) for a in arguments]
        targets = [writable_like(device, out) for out in outs]
        blocks = min(-(-threads // _THREADS), device.multiprocessors * 8)
        block = 1 if threads == 1 else _THREADS
        if blocks:
            kernel(device, *of)((blocks,), (block,), (*read, *targets))
        for out, written in zip(outs, targets, strict=True):
            copy_back(out, written)

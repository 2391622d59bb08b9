"""Running statistics of batch norm on a GPU: one launch, a thread per channel."""

from collections.abc import Iterator

import numpy as np

from gradkit._backend import Array, Number
from gradkit._cuda.launch.buffers import contiguous, copy_back, writable_like
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import Combination, kernel
from gradkit._cuda.launch.tensor_lists import either
from gradkit._dtypes import FLOATS, float_name

_FILE = "running_statistics"
_THREADS = 128


def combinations_of_running() -> Iterator[Combination]:
    """The kernel for running statistics of each dtype."""
    for name in FLOATS:
        yield _FILE, {"STAT_T": name}


def update_running(
    device: Device,
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    count: Number,
    momentum: float,
    next_mean: Array,
    next_var: Array,
) -> None:
    """Write ``next_mean`` and ``next_var``, which may be ``running_mean`` and ``running_var``."""
    channels = running_mean.size
    if not channels:
        return
    read = [contiguous(device, array) for array in (running_mean, running_var, mean, var)]
    outs = next_mean, next_var
    written = [writable_like(device, out) for out in outs]
    array, number = either(count)
    counts = contiguous(device, array), number, np.float64(momentum)
    blocks = min(-(-channels // _THREADS), device.multiprocessors * 8)
    launch = kernel(device, _FILE, "update_running", STAT_T=float_name(running_mean.dtype) or "")
    launch((blocks,), (_THREADS,), (*read, *counts, *written, np.int64(channels)))
    for out, made in zip(outs, written, strict=True):
        copy_back(out, made)

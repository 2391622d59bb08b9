"""Every kernel file with every set of macros that an operation may ask for on any GPU."""

from collections.abc import Container
from functools import cache
from itertools import chain
from typing import NamedTuple

from gradkit._calls.backend import OPERATIONS, names_in
from gradkit._calls.rows import RowOperations
from gradkit._cuda import CudaBackend
from gradkit._cuda.dry_run import DryDevice, asked_by
from gradkit._cuda.launch.kernels import Combination
from gradkit._dtypes import FLOATS
from testbed.emulator import IdleDevice


class Gpu(NamedTuple):
    """What the choice of a kernel depends on."""

    max_shared_memory: int  # of a block
    clusters: bool
    parameter_bytes: int = 32764

    @property
    def idle(self) -> IdleDevice:
        """Such a device, which launches nothing."""
        return IdleDevice(**self._asdict())


# T4, with an old driver too, V100, RTX 4090, A100, and an H100 that takes rows as an A100 does,
# which tests emulate; H100 and RTX 5090.
ON_GPUS = (
    Gpu(64 << 10, clusters=False, parameter_bytes=4096),
    *(Gpu(kib << 10, clusters=False) for kib in (64, 96, 99, 163, 227)),
    *(Gpu(kib << 10, clusters=True) for kib in (227, 99)),
)


@cache
def needed(gpu: Gpu, operation: str) -> tuple[Combination, ...]:
    """What an operation may need for any dtypes on a GPU: a second of work for the widest."""
    return tuple(asked_by(CudaBackend(DryDevice(gpu.idle)), [operation], FLOATS.keys()))


@cache
def combinations(*operations: str) -> tuple[Combination, ...]:
    """What operations (default: all) may need for any dtypes, each combination once."""
    found = {}
    chosen = set(operations or OPERATIONS)
    for gpu in ON_GPUS:
        for file, macros in chain.from_iterable(needed(gpu, name) for name in sorted(chosen)):
            found[file, *sorted(macros.items())] = file, macros
        if gpu.parameter_bytes > 4096:
            chosen &= {*names_in(RowOperations)}  # what holds a long row depends on the GPU
    return tuple(found.values())


def compiles_for(architecture: int, file: str, macros: Container[str]) -> bool:
    """Whether an architecture is given a file with macros of these names.

    From 9.0 on, clusters have the long rows, for which a block has THREADS threads before.
    """
    if file == "layer_norm_grad_cluster" or "CLUSTERED" in macros:
        return architecture >= 90
    return architecture < 90 or "THREADS" not in macros

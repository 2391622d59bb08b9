"""Every kernel file with every set of macros that an operation may ask for on any GPU."""

from functools import cache

from gradkit._calls.backend import OPERATIONS, names_in
from gradkit._calls.rows import RowOperations
from gradkit._cuda import CudaBackend
from gradkit._cuda.dry_run import DryDevice, asked_by
from gradkit._cuda.launch.kernels import Combination
from gradkit._dtypes import FLOATS
from testbed.emulator import IdleDevice

# Of shared memory that a block may have: on a T4, V100, RTX 4090, A100 and H100.
ON_GPUS = tuple(kib << 10 for kib in (64, 96, 99, 163, 227))


@cache
def combinations(*operations: str) -> tuple[Combination, ...]:
    """What operations (default: all) may need for any dtypes, each combination once."""
    found = {}
    chosen = set(operations or OPERATIONS)
    for memory in ON_GPUS:
        backend = CudaBackend(DryDevice(IdleDevice(max_shared_memory=memory)))
        for file, macros in asked_by(backend, chosen, FLOATS.keys()):
            found[file, *sorted(macros.items())] = file, macros
        chosen &= {*names_in(RowOperations)}  # what holds a long row depends on the memory
    return tuple(found.values())

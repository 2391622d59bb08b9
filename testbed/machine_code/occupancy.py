"""Number of a kernel's threads that a multiprocessor holds at once.

The figures are those of "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++
Programming Guide.
"""

from __future__ import annotations

from typing import NamedTuple


class Multiprocessor(NamedTuple):
    """The limits of one compute capability; shared memory in bytes."""

    threads: int
    blocks: int
    shared: int
    registers: int = 65536


MULTIPROCESSORS = {
    70: Multiprocessor(2048, 32, 96 << 10),
    75: Multiprocessor(1024, 16, 64 << 10),
    80: Multiprocessor(2048, 32, 164 << 10),
    86: Multiprocessor(1536, 16, 100 << 10),
    89: Multiprocessor(1536, 24, 100 << 10),
    90: Multiprocessor(2048, 32, 228 << 10),
    100: Multiprocessor(2048, 32, 228 << 10),
    120: Multiprocessor(1536, 24, 100 << 10),
}
_WARP = 32
_REGISTER_UNIT = 8  # of a thread: a warp's registers come in units of 256
_RESERVED = 1024  # bytes of shared memory that the system takes for a block, since sm_80
DEFAULT_BLOCK = 256  # if a kernel has no launch bounds


def resident_threads(arch: int, block: int, registers: int, shared: int) -> int:
    """Return how many threads fit, in blocks of ``block`` threads with ``shared`` bytes each."""
    limits = MULTIPROCESSORS[arch]
    warps = -(-block // _WARP)
    each = max(1, -(-registers // _REGISTER_UNIT)) * _REGISTER_UNIT * _WARP
    by_registers = limits.registers // each // warps
    reserved = _RESERVED if arch >= 80 else 0
    by_shared = limits.shared // (shared + reserved) if shared + reserved else limits.blocks
    return min(limits.blocks, limits.threads // block, by_registers, by_shared) * block

"""Needs of one source on one GPU: registers, shared memory, and registers that spill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .nvrtc import compile_log

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\w+'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelUse:
    """One kernel's use of a multiprocessor; all but ``registers`` in bytes.

    ``shared_bytes`` is static shared memory: dynamic memory is known only at the launch.
    """

    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def spills(self) -> bool:
        """Return whether registers go through memory."""
        return bool(self.spill_stores or self.spill_loads)


@dataclass(frozen=True)
class Report:
    """Resources that the kernels of a source use on ``arch``, by name."""

    arch: int
    kernels: dict[str, KernelUse]


def cupy_options(options: Sequence[str], arch: int) -> tuple[str, ...]:
    """Return what NVRTC is told when ``cupy.RawModule`` compiles with ``options`` for ``arch``."""
    standard = () if any("std=" in option for option in options) else ("-std=c++17",)
    added = ("-ftz=true", f"-arch=sm_{arch}", "--device-as-default-execution-space")
    return (*options, *standard, *added)


def compile_report(source: str, options: Sequence[str], arch: int) -> Report:
    """Return what the kernels of ``source`` use on compute capability ``arch`` (90 for 9.0).

    Raises `NvrtcCompileError` with the compiler's log if it does not compile.
    """
    log = compile_log(source, (*cupy_options(options, arch), "--ptxas-options=-v"))
    return Report(arch, parse_log(log))


def parse_log(log: str) -> dict[str, KernelUse]:
    """Return each kernel's use, read from ptxas's report.

    What functions that were not inlined spill counts to their kernel.
    """
    kernels: dict[str, KernelUse] = {}
    name = None
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
            kernels[name] = KernelUse()
        if name is None:
            continue
        use = kernels[name]
        if frame := _FRAME.search(line):
            stack, stores, loads = map(int, frame.groups())
            use = replace(
                use,
                stack_bytes=use.stack_bytes + stack,
                spill_stores=use.spill_stores + stores,
                spill_loads=use.spill_loads + loads,
            )
        if registers := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            use = replace(
                use, registers=int(registers[1]), shared_bytes=int(shared[1]) if shared else 0
            )
        kernels[name] = use
    return kernels

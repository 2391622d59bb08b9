"""Reads the machine code of the kernels: what each asks of a GPU, with no GPU at hand."""

from .cubin import Kernel, kernels_of
from .loops import Loop, loops_of
from .sass import Instruction, NvdisasmMissingError, disassemble
from .trips import round_trips, steady_trips

__all__ = [
    "Instruction",
    "Kernel",
    "Loop",
    "NvdisasmMissingError",
    "disassemble",
    "kernels_of",
    "loops_of",
    "round_trips",
    "steady_trips",
]

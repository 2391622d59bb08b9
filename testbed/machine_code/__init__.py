"""Reads the machine code of kernels: what each asks of a GPU, with no GPU at hand."""

from .cubin import Kernel, kernels_of
from .loops import Loop, loops_of
from .measure import Measured, Source, compile_kernels, measure
from .sass import Instruction, NvdisasmMissingError, disassemble
from .table import Table, code_row, code_table, differences
from .trips import round_trips, steady_trips

__all__ = [
    "Instruction",
    "Kernel",
    "Loop",
    "Measured",
    "NvdisasmMissingError",
    "Source",
    "Table",
    "code_row",
    "code_table",
    "compile_kernels",
    "differences",
    "disassemble",
    "kernels_of",
    "loops_of",
    "measure",
    "round_trips",
    "steady_trips",
]

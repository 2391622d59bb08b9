"""Compiles the kernels for every supported GPU with no GPU at hand, and reports what they need."""

from .nvrtc import (
    MachineCode,
    NvrtcCompileError,
    NvrtcMissingError,
    compile_machine_code,
    compile_ptx,
    version,
)
from .report import KernelUse, Report, compile_report, cupy_options, parse_log
from .table import (
    ARCHITECTURES,
    Row,
    SpillError,
    checked_table,
    compile_table,
    format_table,
    kept_ptx,
    spills,
)

__all__ = [
    "ARCHITECTURES",
    "KernelUse",
    "MachineCode",
    "NvrtcCompileError",
    "NvrtcMissingError",
    "Report",
    "Row",
    "SpillError",
    "checked_table",
    "compile_machine_code",
    "compile_ptx",
    "compile_report",
    "compile_table",
    "cupy_options",
    "format_table",
    "kept_ptx",
    "parse_log",
    "spills",
    "version",
]

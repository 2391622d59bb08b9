"""The recorded tables of gradkit's kernels: their machine code, and what an element costs."""

from __future__ import annotations

from pathlib import Path

from testbed.machine_code.table import Cells, Judged, Table, code_table

from .executed import Executed

_HERE = Path(__file__).parent
CODE = code_table(_HERE / "code.csv")
EXECUTED = Table(
    _HERE / "executed.csv",
    ("operation", "dtype", "kernel"),
    (
        Judged("instructions", is_more_worse=True, relative=0.03, absolute=0.02),
        Judged("double", is_more_worse=True, relative=0.01, absolute=0.005),
    ),
    ("operation", "dtype", "kernel", "instructions", "double"),
)


def executed_row(counted: Executed) -> Cells:
    """Return what one kernel executes for an element."""
    cells = counted._asdict()
    return {name: c if isinstance(c, str) else f"{c:.2f}" for name, c in cells.items()}

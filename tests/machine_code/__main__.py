"""Measure the machine code of the kernels, and compare it with what is recorded.

``python -m tests.machine_code`` measures everything anew and compares it with what is recorded,
code.csv and executed.csv: the exit status is 1 where a row has become worse. ``--record`` writes
both. ``--nvrtc LIBRARY`` names a second libnvrtc, which CI asks for.

With FILE, a name in kernels/, and MACROS such as DATA_T=bf16, it prints what that file's
kernels need instead. ``--list`` adds the loads, stores, waits and branches themselves.

``--spills`` compiles every combination of macros for every GPU, which takes an hour or two, and
prints each kernel that spills; with FILE those of one file, with ``--sm`` for one GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from testbed.machine_code.show import show
from testbed.machine_code.table import Difference
from testbed.nvrtc import ARCHITECTURES, format_table

from . import census, gate, reach
from .cases import Case
from .tables import CODE, EXECUTED

_COMMAND = "python -m tests.machine_code"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, record or print; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?")
    parser.add_argument("macros", nargs="*")
    parser.add_argument("--sm", type=int, action="append", help="default: 90; may be repeated")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--nvrtc", metavar="LIBRARY")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--spills", action="store_true")
    options = parser.parse_args(arguments)
    if options.spills:
        found = census.report(options.file, options.sm or ARCHITECTURES)
        if found:
            print(format_table(found))
        return 1 if found else 0
    if options.file is None:
        return check(options.nvrtc, record=options.record)
    macros = tuple(sorted(macro.removeprefix("-D") for macro in options.macros))
    case = Case(Path(options.file).stem, macros)
    show(case.source, options.sm or [90], options.list)
    return 0


def check(nvrtc: str | None, *, record: bool) -> int:
    """Measure everything; record it, or say what differs from what is recorded."""
    if nvrtc is None and (record or os.environ.get("CI") == "true"):
        print("machine code: name the NVRTC of CUDA 13 too: make machine-code", file=sys.stderr)
        return 1
    start = time.monotonic()
    found = gate.measured([None] if nvrtc is None else [None, nvrtc])
    rows = ", ".join(f"{len(found[t.path.stem])} rows of {t.path.name}" for t in (CODE, EXECUTED))
    print(f"machine code: {rows} measured in {time.monotonic() - start:.0f} s")
    if record:
        for table in (CODE, EXECUTED):
            table.write(found[table.path.stem])
        reach.write(CODE.read())
        return 0
    return reported(gate.compared(found, partly=nvrtc is None))


def reported(differences: Sequence[Difference]) -> int:
    """Print what differs, what fails last; return the exit status."""
    for difference in sorted(differences, key=lambda each: each.fails):
        print(f"  {'FAILED ' if difference.fails else ''}{difference.text}")
    failed = sum(difference.fails for difference in differences)
    if differences:
        print(f"machine code: {failed} of {len(differences)} differences fail.")
        print("If all of them are meant: make machine-code RECORD=1, and say why in the commit.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

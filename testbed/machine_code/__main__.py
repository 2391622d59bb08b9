"""What the machine code of the kernels holds, and whether it has become worse.

``python -m testbed.machine_code`` measures everything anew and compares it with what is recorded,
code.csv and executed.csv: the exit status is 1 where a row has become worse. ``--record`` writes
both. ``--nvrtc LIBRARY`` names a second libnvrtc, which CI asks for.

With FILE, a name in kernels/, and MACROS such as DATA_T=bf16, it prints what that file's
kernels need instead. With ``--dtype`` the switch of a list kernel knows that dtype only;
``--list`` adds the loads, stores, waits and branches themselves.

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

from testbed.nvrtc import ARCHITECTURES, format_table

from . import census, gate, reach
from .cases import Case, dtype_called
from .measure import Measured, compile_case, measure
from .sass import Instruction, disassemble
from .table import CODE, EXECUTED, Difference

_COMMAND = "python -m testbed.machine_code"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, record or print; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?")
    parser.add_argument("macros", nargs="*")
    parser.add_argument("--sm", type=int, action="append", help="default: 90; may be repeated")
    parser.add_argument("--dtype", type=dtype_called)
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
    show(Case(Path(options.file).stem, macros, options.dtype), options.sm or [90], options.list)
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


def show(case: Case, archs: Sequence[int], listing: bool) -> None:
    """Print what one file's kernels need."""
    for arch in archs:
        for measured in measure(compile_case(case, arch)):
            print(described(measured))
            if listing:
                (code,) = disassemble([measured.compiled.code], arch)
                print("\n".join(filter(None, map(listed, code))))


def described(measured: Measured) -> str:
    """Lay out one kernel's row."""
    c, use = measured.compiled, measured.compiled.use
    wide = "none" if measured.wide is None else f"{measured.wide:.2f}"
    lines = [
        f"{c.case.file} {c.case.title} {c.name} sm_{c.arch}",
        f"  {use.registers} registers, spilled {use.spill_stores} stored {use.spill_loads} loaded, "
        f"stack {use.stack_bytes}, {measured.threads} threads resident (blocks of {c.block}), "
        f"{measured.instructions} instructions",
        f"  loop over the data: {flights(measured.data)}; 16-byte share {wide}",
        f"  innermost of it: {flights(measured.inner)}",
        "  instructions in double precision for each of the widest accesses, at most: "
        + ("none" if measured.double is None else f"{measured.double:.2f}"),
        f"  whole kernel, straight on: {flights(measured.whole)}",
    ]
    for loop, trips in measured.loops:
        place = f"{loop.start:05x}-{loop.end:05x}"
        lines.append(f"  {'  ' * loop.depth}loop {place}: {flights(trips)}")
    return "\n".join(lines)


def flights(trips: list[int] | None) -> str:
    """Say how many round trips there are, and with how many loads in flight."""
    return f"{len(trips)} round trips ({' '.join(map(str, trips))})" if trips else "no round trip"


def listed(instruction: Instruction) -> str:
    """One instruction with its scoreboards, if it has to do with memory or with control."""
    i = instruction
    names = ("LDG", "LD", "STG", "ST", "BRA", "BRX", "BAR", "EXIT", "CALL", "RET")
    if i.name not in names and not i.waited:
        return ""
    released = "" if i.released is None else f"releases {i.released}"
    waited = f"waits {','.join(map(str, sorted(i.waited)))}" if i.waited else ""
    return f"    {i.address:05x} {released:11}{waited:12}{i}"


if __name__ == "__main__":
    sys.exit(main())

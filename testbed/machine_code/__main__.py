"""``python -m testbed.machine_code FILE MACROS... --sm 90``: one kernel file's machine code.

FILE is a name in kernels/, MACROS are such as DATA_T=bf16. With ``--dtype`` the switch of a list
kernel knows that dtype only. ``--list`` adds the loads, stores, waits and branches themselves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .cases import Case, dtype_called
from .measure import Measured, compile_case, measure
from .sass import Instruction, disassemble


def main() -> None:
    """Print what the machine code of one file holds."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.machine_code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file")
    parser.add_argument("macros", nargs="*")
    parser.add_argument("--sm", type=int, action="append", help="default: 90; may be repeated")
    parser.add_argument("--dtype", type=dtype_called)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    macros = tuple(sorted(macro.removeprefix("-D") for macro in options.macros))
    case = Case(Path(options.file).stem, macros, options.dtype)
    for arch in options.sm or [90]:
        for measured in measure(compile_case(case, arch)):
            print(described(measured))
            if options.list:
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
        f"  whole kernel, straight on: {flights(measured.whole)}",
    ]
    for loop, trips in measured.loops:
        place = f"{loop.start:05x}-{loop.end:05x}"
        lines.append(f"  {'  ' * loop.depth}loop {place}: {flights(trips)}")
    return "\n".join(lines)


def flights(trips: list[int]) -> str:
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
    main()

"""Describe the needs of one source's kernels as text."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Measured, Source, compile_kernels, measure
from .sass import Instruction, disassemble


def show(source: Source, archs: Sequence[int], listing: bool) -> None:
    """Print what a source's kernels need; with ``listing`` their accesses and branches too."""
    for arch in archs:
        for measured in measure(compile_kernels(source, arch)):
            print(described(measured))
            if listing:
                (code,) = disassemble([measured.compiled.code], arch)
                print("\n".join(filter(None, map(listed, code))))


def described(measured: Measured) -> str:
    """Return one kernel's row, laid out in lines."""
    c, use = measured.compiled, measured.compiled.use
    wide = "none" if measured.wide is None else f"{measured.wide:.2f}"
    lines = [
        f"{c.name} sm_{c.arch} of {c.source.file} {c.source.title}".rstrip(),
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
    """Return how many round trips there are, and with how many loads in flight, as text."""
    return f"{len(trips)} round trips ({' '.join(map(str, trips))})" if trips else "no round trip"


def listed(instruction: Instruction) -> str:
    """Return an instruction with its scoreboards, or nothing if it neither waits nor branches."""
    i = instruction
    names = ("LDG", "LD", "STG", "ST", "BRA", "BRX", "BAR", "EXIT", "CALL", "RET")
    if i.name not in names and not i.waited:
        return ""
    released = "" if i.released is None else f"releases {i.released}"
    waited = f"waits {','.join(map(str, sorted(i.waited)))}" if i.waited else ""
    return f"    {i.address:05x} {released:11}{waited:12}{i}"

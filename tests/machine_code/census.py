"""Every combination of macros that a launcher can ask for, on every GPU, and whether it spills."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence

from gradkit._cuda.launch.kernels import options_of, source_of
from testbed.nvrtc import ARCHITECTURES, Row, compile_table
from tests.combinations import combinations, compiles_for

Source = tuple[str, Sequence[str]]
_BATCH = 50  # combinations between two lines of progress


def sources(file: str | None = None) -> dict[str, Source]:
    """Return the text and the options of each combination, of one file only if it is named."""
    return {
        " ".join([name, *options_of(macros)[1:]]): (source_of(name), options_of(macros))
        for name, macros in combinations()
        if file in (None, name)
    }


def in_memory(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of kernels of which anything that a register could hold lies in memory."""
    return [row for row in rows if row.use.spills or row.use.stack_bytes]


def compiled(
    chosen: dict[str, Source], archs: Sequence[int] = ARCHITECTURES
) -> Iterator[tuple[int, list[Row]]]:
    """Compile combinations a few at a time: yield how many are done, and their rows.

    What is on disk is not compiled again, so that a run which was interrupted goes on.
    """
    names = list(chosen)
    for first in range(0, len(names), _BATCH):
        batch, rows = names[first : first + _BATCH], []
        for arch in archs:
            sources = {name: chosen[name] for name in batch if _compiles_for(arch, name)}
            rows += compile_table(sources, [arch], workers=os.cpu_count() or 1)
        yield first + len(batch), rows


def _compiles_for(arch: int, name: str) -> bool:
    file, *options = name.split()
    return compiles_for(arch, file, {o.removeprefix("-D").partition("=")[0] for o in options})


def report(file: str | None, archs: Sequence[int] = ARCHITECTURES) -> list[Row]:
    """Compile all, print how it goes, and return the rows that use memory for registers."""
    chosen, found, kernels, start = sources(file), [], 0, time.monotonic()
    for done, rows in compiled(chosen, archs):
        kernels += len(rows)
        found += in_memory(rows)
        print(
            f"spills: {done} of {len(chosen)} combinations for {len(archs)} architectures, "
            f"{kernels} kernels, {len(found)} of them with spills or a stack, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    return found

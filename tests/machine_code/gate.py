"""Measures every row and compares it with what is recorded."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import astuple
from pathlib import Path

import testbed.machine_code
from testbed.machine_code import code_row, compile_kernels, differences, measure
from testbed.machine_code.table import Cells, Difference
from testbed.nvrtc import version
from testbed.nvrtc.table import keep, place_of

from .cases import Case, cases, data_type, is_common
from .executed import operations
from .tables import CODE, EXECUTED, executed_row

ARCHITECTURES = (80, 90, 100, 120)
WHOLE, BEFORE = 90, 80  # the rarer cases have rows of the first, or of the other if not of it
_BIGGEST_FIRST = sorted(ARCHITECTURES, key=lambda arch: arch != WHOLE)
_READER = Path(testbed.machine_code.__file__).parent
# Modules of it that decide what a row holds.
_RECIPE = ("cubin", "loops", "measure", "occupancy", "sass", "table", "trips")
_BATCH = 12  # cases that one run of nvdisasm reads


def measured(libraries: Sequence[str | None]) -> dict[str, list[Cells]]:
    """Measure all rows of both tables, by the tables' names.

    ``libraries`` are NVRTC's: the installed one (None) measures every row, another only common
    bfloat16 for one architecture, which shows whether it compiles differently.
    """
    workers = os.cpu_count() or 1
    with ExitStack() as stack:
        pools = [stack.enter_context(_pool(library, workers)) for library in libraries]
        counts = [
            pools[0].submit(count, number, dtype)
            for number, operation in enumerate(operations())
            for dtype in operation.dtypes
        ]
        codes = [
            pool.submit(read, batch, arch)
            for pool, library in zip(pools, libraries, strict=True)
            for arch in (_BIGGEST_FIRST if library is None else (WHOLE,))
            for batch in batches(arch, other=library is not None)
        ]
        return {CODE.path.stem: _joined(codes), EXECUTED.path.stem: _joined(counts)}


def _joined(parts: Iterable[Future[list[Cells]]]) -> list[Cells]:
    return [row for part in parts for row in part.result()]


def _pool(library: str | None, workers: int) -> ProcessPoolExecutor:
    """Processes that use one NVRTC; each loads it once."""
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_choose,
        initargs=(library,),
    )


def _choose(library: str | None) -> None:
    if library is not None:
        os.environ["GRADKIT_NVRTC_LIBRARY"] = library


def batches(arch: int, *, other: bool = False) -> list[list[Case]]:
    """Return the cases of one architecture, a few at a time; ``other``: for another NVRTC."""
    if other:
        chosen = [case for case in cases() if is_common(case) and data_type(case) != "f32"]
    else:
        chosen = [case for case in cases() if is_common(case) or arch == _only(case)]
    chosen = [case for case in chosen if case.compiles_for(arch)]
    return [chosen[first : first + _BATCH] for first in range(0, len(chosen), _BATCH)]


def _only(case: Case) -> int:
    """Return the architecture that a rarer case has rows of."""
    return WHOLE if case.compiles_for(WHOLE) else BEFORE


def count(number: int, dtype: str) -> list[Cells]:
    """Count what one operation executes; operations are named by their place, to be sent about."""
    operation = list(operations())[number]
    return [executed_row(row) for row in operation.executed(dtype)]


def read(batch: Sequence[Case], arch: int) -> list[Cells]:
    """Measure a few cases; what is on disk is not measured again."""
    rows = {case: kept for case in batch if (kept := _kept(case, arch)) is not None}
    fresh = {case: case.source for case in batch if case not in rows}
    measured = measure([k for source in fresh.values() for k in compile_kernels(source, arch)])
    for case, source in fresh.items():
        found = [each for each in measured if each.compiled.source is source]
        rows[case] = [code_row(each, _nvrtc()) for each in found]
        with suppress(OSError):  # a read-only cache costs time only
            keep(_place(case, arch), json.dumps(rows[case]))
    return [row for case in batch for row in rows[case]]


def _kept(case: Case, arch: int) -> list[Cells] | None:
    try:
        found: list[Cells] = json.loads(_place(case, arch).read_text())
    except (OSError, ValueError):
        return None
    return found


def _place(case: Case, arch: int) -> Path:
    """Path of a case's cached rows, valid as long as neither it nor the reader changes."""
    recipe = [(_READER / f"{module}.py").read_text() for module in _RECIPE]
    content = [*map(str, astuple(case.source)), str(arch), _nvrtc(), *recipe]
    return place_of("\0".join(content), "rows.json")


def _nvrtc() -> str:
    return ".".join(map(str, version()))


def compared(found: dict[str, list[Cells]], *, partly: bool) -> list[Difference]:
    """Compare what was measured with what is recorded.

    If only part of it was measured, rows of another NVRTC than the installed one are let be.
    """
    own = {row["nvrtc"] for row in found[CODE.path.stem]}
    recorded = [row for row in CODE.read() if not partly or row["nvrtc"] in own]
    return [
        *differences(CODE, recorded, found[CODE.path.stem]),
        *differences(EXECUTED, EXECUTED.read(), found[EXECUTED.path.stem]),
    ]

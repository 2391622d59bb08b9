"""Record of the kernels that ran, under their macros, and of the basic blocks of their PTX.

Each process keeps its own record; `collect` makes plain data of it, which `merge` adds up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# {kernel: {title: [(the source's line that a block begins with, reached or not)]}}, as JSON and
# pytest-xdist can carry it
Coverage = dict[str, dict[str, list[tuple[str, int]]]]


@dataclass(frozen=True)
class Ran:
    """A loaded kernel, and the bytes that its library sets when a block runs."""

    kernel: str
    title: str  # what it was compiled as: architecture and macros
    lines: Callable[[], list[str]]  # of the source, that blocks begin with
    covered: ctypes.Array[Any]


_loaded: dict[tuple[str, str, int], Ran] = {}


def record(ran: Ran) -> None:
    """Remember a kernel that was loaded; once, if devices share its library."""
    _loaded.setdefault((ran.kernel, ran.title, ctypes.addressof(ran.covered)), ran)


def collect() -> Coverage:
    """Return what ran in this process so far."""
    found: Coverage = {}
    for ran in _loaded.values():
        flags = [int(reached != 0) for reached in ran.covered]
        blocks = [*zip(ran.lines(), flags, strict=True)]
        merge(found, {ran.kernel: {ran.title: blocks}})
    return found


def merge(total: Coverage, more: Coverage) -> None:
    """Add what ran elsewhere to ``total``."""
    for kernel, titles in more.items():
        for title, blocks in titles.items():
            known = total.setdefault(kernel, {}).setdefault(title, [(ln, 0) for ln, _ in blocks])
            both = zip(known, blocks, strict=True)
            known[:] = [(line, max(one, other)) for (line, one), (_, other) in both]


def summary(coverage: Coverage) -> str:
    """Return a line that says how much ran."""
    runs = [blocks for _, blocks in _ran(coverage)]
    reached, total = sum(n for blocks in runs for _, n in blocks), sum(map(len, runs))
    return f"{len(runs)} kernels with their macros ran, {reached} of {total} basic blocks of PTX"


def unreached(coverage: Coverage) -> dict[str, list[str]]:
    """Return, for each kernel, the source's lines whose blocks ran under no macros at all."""
    found: dict[str, dict[str, int]] = {}
    for kernel, blocks in _ran(coverage):
        lines = found.setdefault(kernel, {})
        for line, reached in blocks:
            lines[line] = max(reached, lines.get(line, 0))
    return {
        kernel: [line for line, reached in lines.items() if not reached]
        for kernel, lines in found.items()
    }


def _ran(coverage: Coverage) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    for kernel, titles in coverage.items():
        for blocks in titles.values():
            if any(reached for _, reached in blocks):
                yield kernel, blocks

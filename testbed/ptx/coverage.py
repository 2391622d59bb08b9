"""Which kernels ran under which macros, and which basic blocks of their PTX.

Each process keeps its own record; `collect` makes plain data of it, which `merge` adds up.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

# {kernel: {title: [reached or not, by block]}}, as JSON and pytest-xdist can carry it
Coverage = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Ran:
    """A loaded kernel, and the bytes that its library sets when a block runs."""

    kernel: str
    title: str  # what it was compiled as: architecture and macros
    blocks: list[tuple[str, int]]
    covered: ctypes.Array[Any]


_loaded: list[Ran] = []


def record(ran: Ran) -> None:
    """Remember a kernel that was loaded."""
    _loaded.append(ran)


def collect() -> Coverage:
    """Return what ran in this process so far."""
    found: Coverage = {}
    for ran in _loaded:
        merge(found, {ran.kernel: {ran.title: [int(reached != 0) for reached in ran.covered]}})
    return found


def merge(total: Coverage, more: Coverage) -> None:
    """Add what ran elsewhere to ``total``."""
    for kernel, titles in more.items():
        for title, blocks in titles.items():
            known = total.setdefault(kernel, {}).setdefault(title, [0] * len(blocks))
            known[:] = [max(pair) for pair in zip(known, blocks, strict=True)]


def summary(coverage: Coverage) -> str:
    """Say in a line how much ran."""
    runs = [blocks for titles in coverage.values() for blocks in titles.values() if any(blocks)]
    reached, total = sum(map(sum, runs)), sum(map(len, runs))
    return f"{len(runs)} kernels with their macros ran, {reached} of {total} basic blocks of PTX"

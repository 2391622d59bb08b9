"""Every source on every supported GPU: a table of what each kernel needs, kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from .nvrtc import compile_ptx, version
from .report import KernelUse, Report, compile_report

# Volta to Blackwell, as CUDA 12.9 compiles for them.
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
_HEADINGS = ("source", "kernel", "sm", "registers", "shared", "stack", "spilled", "reloaded")


class SpillError(AssertionError):
    """A kernel's registers go through memory; the message holds the table of such kernels."""


@dataclass(frozen=True)
class Row:
    """One kernel of one source on one architecture."""

    source: str
    kernel: str
    arch: int
    use: KernelUse

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of the table's headings."""
        return (self.source, self.kernel, str(self.arch), *map(str, astuple(self.use)))


def compile_table(
    sources: Mapping[str, tuple[str, Sequence[str]]],
    archs: Iterable[int] = ARCHITECTURES,
    *,
    workers: int = 2,
) -> list[Row]:
    """Return the kernels of ``{name: (source, options)}`` on each architecture, a row each.

    What is on disk is not compiled again.

    NVRTC compiles in several threads at once. Raises `NvrtcCompileError` for the first source
    that does not compile.
    """
    jobs = [(name, arch) for name in sources for arch in archs]
    with ThreadPoolExecutor(workers) as pool:
        reports = pool.map(lambda job: _kept_report(*sources[job[0]], job[1]), jobs)
        return [
            Row(name, kernel, arch, use)
            for (name, arch), report in zip(jobs, reports, strict=True)
            for kernel, use in report.kernels.items()
        ]


def spills(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of those kernels whose registers go through memory: there should be none."""
    return [row for row in rows if row.use.spills]


def checked_table(
    sources: Mapping[str, tuple[str, Sequence[str]]], archs: Iterable[int] = ARCHITECTURES
) -> str:
    """Return the table of all sources on all architectures; raise `SpillError` if one spills."""
    rows = compile_table(sources, archs)
    if found := spills(rows):
        raise SpillError(f"{len(found)} kernels spill registers:\n{format_table(found)}")
    return format_table(rows)


def format_table(rows: Iterable[Row]) -> str:
    """Return the rows as text in columns, under their headings."""
    lines = [_HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def kept_ptx(source: str, options: Sequence[str]) -> str:
    """Return the PTX of a source, from disk if this NVRTC compiled it before."""
    kept = place_of("\0".join([source, *options, str(version())]), "ptx")
    with suppress(OSError):
        return kept.read_text()
    ptx = compile_ptx(source, options)
    with suppress(OSError):
        keep(kept, ptx)
    return ptx


def _kept_report(source: str, options: Sequence[str], arch: int) -> Report:
    # This package's own text too: another parser or other options make another report.
    recipe = [path.read_text() for path in sorted(Path(__file__).parent.glob("[!t]*.py"))]
    kept = place_of("\0".join([source, *options, str(arch), *recipe]) + str(version()), "json")
    with suppress(OSError, ValueError):
        uses = json.loads(kept.read_text())
        return Report(arch, {name: KernelUse(**use) for name, use in uses.items()})
    report = compile_report(source, options, arch)
    with suppress(OSError):  # a read-only cache costs time, not the report
        keep(kept, json.dumps({name: asdict(use) for name, use in report.kernels.items()}))
    return report


def place_of(content: str, kind: str) -> Path:
    """Return where what was made from ``content`` is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return Path(base, "gradkit-nvrtc", f"{key}.{kind}")


def keep(path: Path, text: str) -> None:
    """Write a file at once, so that nobody reads half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as written:
        written.write(text)
    os.replace(written.name, path)

"""Tables of what was measured, as CSV files: a row a line, and how two states compare."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from .measure import Measured

Cells: TypeAlias = dict[str, str]


class Judged(NamedTuple):
    """A column in which a change may be for the worse."""

    name: str
    is_more_worse: bool
    relative: float = 0.0  # how large a change may be that still passes, of the recorded number
    absolute: float = 0.0  # and beside it


@dataclass(frozen=True)
class Table:
    """One file: the columns that name a row, those that are judged, and those only shown."""

    path: Path
    names: tuple[str, ...]
    judged: tuple[Judged, ...]
    columns: tuple[str, ...]

    def read(self) -> list[Cells]:
        """Return the recorded rows; none if nothing has been recorded."""
        if not self.path.exists():
            return []
        return list(csv.DictReader(self.path.read_text().splitlines()))

    def write(self, rows: Iterable[Cells]) -> None:
        """Record rows, sorted by name."""
        self.path.write_text(self.text(rows))

    def text(self, rows: Iterable[Cells]) -> str:
        """Return the content of the file."""
        written = io.StringIO()
        writer = csv.DictWriter(written, self.columns, lineterminator="\n")
        writer.writeheader()
        named = {self.name_of(row): row for row in rows}
        writer.writerows(named[name] for name in sorted(named, key=_by_number))
        return written.getvalue()

    def name_of(self, row: Cells) -> tuple[str, ...]:
        """Return the cells that tell a row from all others."""
        return tuple(row[column] for column in self.names)


def code_table(path: Path) -> Table:
    """Return the table of machine code that is recorded in ``path``: see `code_row`."""
    return Table(
        path,
        ("file", "macros", "kernel", "sm", "nvrtc"),
        (
            Judged("spilled", is_more_worse=True),
            Judged("stack", is_more_worse=True),
            Judged("threads", is_more_worse=False),
            Judged("trips", is_more_worse=True),
            Judged("inner_loads", is_more_worse=False, relative=0.01),
            Judged("double", is_more_worse=True, relative=0.01),
            Judged("wide", is_more_worse=False, absolute=0.025),
        ),
        (
            *(
                "file",
                "macros",
                "kernel",
                "sm",
                "nvrtc",
                "registers",
                "spilled",
                "stack",
                "threads",
            ),
            *("trips", "in_flight", "inner_loads", "inner_in_flight", "double", "turn", "wide"),
        ),
    )


def code_row(measured: Measured, nvrtc: str) -> Cells:
    """Return the row of one kernel's machine code, made by this release of NVRTC."""
    compiled, use, inner = measured.compiled, measured.compiled.use, measured.inner
    cells: Mapping[str, object] = {
        "file": compiled.source.file,
        "macros": compiled.source.title,
        "kernel": compiled.name,
        "sm": compiled.arch,
        "nvrtc": nvrtc,
        "registers": use.registers,
        "spilled": use.spill_stores + use.spill_loads,
        "stack": use.stack_bytes,
        "threads": measured.threads,
        "trips": "" if measured.data is None else len(measured.data),
        "in_flight": " ".join(map(str, measured.data or [])),
        "inner_loads": f"{sum(inner) / len(inner):.2f}" if inner else "",
        "inner_in_flight": " ".join(map(str, inner)),
        "double": "" if measured.double is None else f"{measured.double:.2f}",
        "turn": "" if measured.turn is None else measured.turn,
        "wide": "" if measured.wide is None else f"{measured.wide:.2f}",
    }
    return {name: str(cell) for name, cell in cells.items()}


def _by_number(name: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cell.zfill(3) if cell.isdigit() else cell for cell in name)


class Difference(NamedTuple):
    """A message about one row; ``fails`` if it must not pass."""

    fails: bool
    text: str


def differences(
    table: Table, recorded: Sequence[Cells], measured: Sequence[Cells]
) -> list[Difference]:
    """Return how all rows differ; what is missing or new fails too, until it is recorded."""
    old = {table.name_of(row): row for row in recorded}
    new = {table.name_of(row): row for row in measured}
    found = []
    for name in sorted(old.keys() | new.keys()):
        title = " | ".join(name)
        if name not in new:
            found.append(Difference(True, f"{title}: recorded, and no longer measured"))
        elif name not in old:
            found.append(Difference(True, f"{title}: measured, and not recorded"))
        else:
            found += [
                Difference(fails, f"{title}: {text}")
                for fails, text in _changes(table, old[name], new[name])
            ]
    return found


def _changes(table: Table, old: Cells, new: Cells) -> list[Difference]:
    """List what is worse or better in one row, and changes of columns that are informational."""
    judged = {column.name: column for column in table.judged}
    found = []
    for name in table.columns:
        before, now = old.get(name, ""), new[name]
        if before != now:
            verdict = _verdict(judged[name], before, now) if name in judged else "changed"
            text = f"{verdict}: {name} {before or 'none'} -> {now or 'none'}"
            found.append(Difference(verdict == "worse", text))
    return found


def _verdict(column: Judged, old: str, new: str) -> str:
    if not new:  # it was measured and can no longer be, for want of a loop or an access
        return "worse"
    if not old:
        return "changed"
    more = float(new) - float(old)
    if abs(more) <= column.absolute + column.relative * abs(float(old)):
        return "changed"
    return "worse" if (more > 0) == column.is_more_worse else "better"

"""``RESULTS.md``: which test killed which mutant, written by a run and read by the next one."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.faults import KINDS

PATH = Path(__file__).with_name("RESULTS.md")
_CUDA = ("kernels/", "gradkit/_cuda/")
_HEAD = """\
# Planted faults, and the tests that find them

Written by `make mutants`. A mutant is gradkit with one piece of one file changed; a test that
fails kills it. The seconds are those of the tests' process. Each row is from the last run of that
mutant, which may be older than the code.

{killed} of {count} killed.

## The kinds of fault that a kernel may have

| | kind | mutants | killed |
|---|---|---|---|
{kinds}

## Every mutant

| mutant | killed by | seconds |
|---|---|---|
{mutants}
"""


class Result(NamedTuple):
    """How one mutant fared."""

    name: str
    killer: str  # the test that failed, or "" if none did
    seconds: float


def read() -> dict[str, Result]:
    """The table that the last run left, by the mutants' names."""
    if not PATH.exists():
        return {}
    table = PATH.read_text().partition("\n|---|---|---|\n")[2]
    found = {}
    for line in table.splitlines():
        name, killer, seconds = (cell.replace(r"\|", "|") for cell in line[2:-2].split(" | "))
        found[name] = Result(name, killer.strip("`"), float(seconds))
    return found


def write(results: Sequence[Result]) -> None:
    """The kinds of fault that a kernel may have, then every mutant."""
    kinds = (
        f"| {number} | {kind} | {len(found := of_kind(kind, results))} | {_killed(found)} |"
        for number, kind in enumerate(KINDS, 1)
    )
    mutants = (
        f"| {_escaped(name)} | `{_escaped(killer)}` | {seconds:.1f} |"
        for name, killer, seconds in results
    )
    PATH.write_text(
        _HEAD.format(
            killed=_killed(results),
            count=len(results),
            kinds="\n".join(kinds),
            mutants="\n".join(mutants),
        )
    )


def of_kind(kind: str, results: Iterable[Result]) -> list[Result]:
    """The mutants of kernels and their launchers that stand for one of ``KINDS``."""
    return [r for r in results if r.name.startswith(_CUDA) and re.search(KINDS[kind], r.name)]


def _killed(results: Sequence[Result]) -> int:
    return sum(bool(result.killer) for result in results)


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")

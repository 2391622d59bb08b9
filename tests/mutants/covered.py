"""Tests that run a mutant's line, as ``plugin.py`` has recorded them."""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutant import ROOT, Mutant

_COMPILE_S = 1.5  # a kernel with one set of macros
# The modules that a call of C++ runs, by how its files' names begin; all call the rest.
_LISTS, _NORMS = ("gradkit/_cpu/lists.py",), "gradkit/_cpu/norms.py"
_ROWS = "gradkit/_calls/rows.py", _NORMS
_CALLERS = {
    "channel": ("gradkit/_calls/channels.py", _NORMS),
    "exact": ("gradkit/_cpu/exact.py",),
    "gates": _ROWS,
    "list": _LISTS,
    "powers": _LISTS,
    "row": _ROWS,
}
_FIRST = 5  # a kernel's cheapest tests, before those that compare the bits of all its results


class Timed(NamedTuple):
    """One test, and about how long it takes."""

    name: str
    cost: float


class Covered:
    """Records of each test: seconds, statements of gradkit, kernels in the emulator."""

    def __init__(self, rows: dict[str, tuple[float, dict[str, str], dict[str, list[str]]]]):
        self._kernels = {name: (seconds, ran) for name, (seconds, _, ran) in rows.items()}
        self._lines = {
            Timed(name, seconds): {file: int(lines, 16) for file, lines in ran.items()}
            for name, (seconds, ran, _) in rows.items()
        }

    def of(self, mutant: Mutant) -> list[Timed]:
        """Those that run the mutant's statement, the cheapest of each function first.

        Then all that run its file: what is decided once and kept shows in those too.
        """
        file = mutant.file
        if file.startswith("kernels/cpu/"):
            name = Path(file).stem
            own = {module for start, module in _CALLERS.items() if name.startswith(start)}
            each = [self._running_all(modules) for modules in own or {*_CALLERS.values()}]
            return _spread(set().union(*each))
        if file.startswith("kernels/"):
            found = self._launching(file)
            bits = [test for test in found if "golden" in test.name]
            if mutant.place.compiled:  # the same on NVRTC's code
                found = [_on_ptx(test) for test in found]
                return [_on_ptx(test) for test in bits] + found
            if "32 bits" not in mutant.rule:  # of which a compiler's warning tells
                found = [test for test in found if self._kernels[test.name][1][file]]
            return found[:_FIRST] + bits + found[_FIRST:]
        names = mutant.place.names or mutant.line.split()[:1]  # of what is outside of functions
        near = self._running([(file, mutant.place.statement)]) or self._running(
            place for name in names for place in self._uses[name]
        )
        return _spread(near) + _spread(set(self._running([(file, None)])).difference(near))

    def _launching(self, file: str) -> list[Timed]:
        """Those that launch a kernel of a file; behind each, those that need no other library."""
        rows = {name: row for name, row in self._kernels.items() if file in row[1]}
        costs = [Timed(n, s + _COMPILE_S * len(ran[file])) for n, (s, ran) in rows.items()]
        left = [test.name for test in _spread(costs)]
        found: list[Timed] = []
        built: set[str] = set()
        while left:
            new = set(rows[left[0]][1][file]) - built
            built |= new
            ready = [name for name in left if built.issuperset(rows[name][1][file])]
            found += [Timed(n, rows[n][0] + _COMPILE_S * len(new) * (n == left[0])) for n in ready]
            left = [name for name in left if not built.issuperset(rows[name][1][file])]
        return found

    def _running(self, places: Iterable[tuple[str, int | None]]) -> list[Timed]:
        masks: dict[str, int] = defaultdict(int)
        for file, line in places:
            masks[file] |= -1 if line is None else 1 << line
        rows = self._lines.items()
        return [t for t, ran in rows if any(ran.get(f, 0) & mask for f, mask in masks.items())]

    def _running_all(self, files: Iterable[str]) -> set[Timed]:
        """Those that run each of some files."""
        return set.intersection(*(set(self._running([(file, None)])) for file in files))

    @cached_property
    def _uses(self) -> dict[str, list[tuple[str, int]]]:
        """The statements in functions that speak of a name."""
        uses = defaultdict(list)
        for path in (ROOT / "gradkit").rglob("*.py"):
            file = path.relative_to(ROOT).as_posix()
            for outer in ast.walk(ast.parse(path.read_text())):
                body = getattr(outer, "body", None)
                for statement in body if isinstance(body, list) else ():
                    for node in ast.walk(statement):
                        name = getattr(node, "id", getattr(node, "attr", None))
                        uses[name].append((file, statement.lineno))
        return uses


def _on_ptx(test: Timed) -> Timed:
    name = test.name.replace("emulated", "ptx").replace("test_all_bits", "test_a_few_bits")
    return Timed(name, test.cost + 5)


def _spread(tests: Iterable[Timed]) -> list[Timed]:
    """The cheapest of each function, cheapest function first; then the second of each."""
    groups = defaultdict(list)
    for test in sorted(tests, key=lambda test: (test.cost, test.name)):
        groups[test.name.partition("[")[0]].append(test)
    return [test for turn in zip_longest(*groups.values()) for test in turn if test is not None]


def load(*folders: Path) -> Covered:
    """Read the records of all workers of ``make test``, and of ``make test-slow`` if it has run."""
    rows = [json.loads(path.read_text()) for f in folders for path in sorted(f.glob("*.json"))]
    if not rows:
        sys.exit(f"{folders[0]} is empty: `make test` records there what each test runs")
    return Covered({name: row for each in rows for name, row in each.items()})

"""One fault: a piece of one file's text, and what it becomes."""

import functools
import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).parent
ROOT = _HERE.parents[1]


class Place(NamedTuple):
    """A place that a rule applies to: ``text[start:end]`` becomes ``new``."""

    rule: str
    start: int
    end: int
    new: str
    statement: int = 0  # the line of the Python statement in a function, or 0 outside of one
    names: tuple[str, ...] = ()  # what that statement outside of functions defines

    @property
    def compiled(self) -> bool:
        """Return whether it shows in NVRTC's code alone."""
        return self.rule.startswith("compiled: ")


class Mutant:
    """A place in a file; ``order`` stays the same while other lines of the file change."""

    def __init__(self, file: str, text: str, place: Place, seen: Counter[str]):
        self.file, self.text, self.place, self.rule = file, text, place, place.rule
        number = text.count("\n", 0, place.start)
        self.line = text[text.rfind("\n", 0, place.start) + 1 :].partition("\n")[0].strip()
        self.key = f"{self.rule}: `{self.line}`"
        seen[self.key] += 1
        self.order = digest(f"{Path(file).name} {self.key} {seen[self.key]}")  # of a sample
        pieces = (" ".join(t.split()) for t in (text[place.start : place.end], place.new))
        self.shown = f"{file}:{number + 1}: {self.rule}: `{'` -> `'.join(pieces)}`"

    @property
    def mutated(self) -> str:
        """The file's text with the fault in it."""
        return self.text[: self.place.start] + self.place.new + self.text[self.place.end :]


def digest(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_order(file: str, text: str, places: Iterable[Place]) -> list[Mutant]:
    """The places of a file as mutants; those of one line and rule are counted."""
    seen: Counter[str] = Counter()
    return [Mutant(file, text, place, seen) for place in sorted(set(places))]


class Equivalent(NamedTuple):
    """Mutants that change nothing which a test could see, and why; ``*`` stands for anything."""

    file: str  # or the end of its path
    rule: str
    line: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        """Return whether a mutant is one of them."""
        found = f"/{mutant.file}\n{mutant.rule}\n{mutant.line}"
        return self._pattern.fullmatch(found) is not None

    @property
    def _pattern(self) -> re.Pattern[str]:
        return _pattern(f"*/{self.file}\n{self.rule}\n{self.line}")


@functools.cache
def _pattern(wanted: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, wanted.split("*"))))


def equivalent() -> list[Equivalent]:
    """Read the places of ``equivalent.toml``."""
    tables = table("equivalent.toml")["equivalent"]
    return [Equivalent(*place, each["reason"]) for each in tables for place in each["places"]]


def by_hand(text: str) -> Iterator[Place]:
    """The places of a file's text that ``by_hand.toml`` names."""
    for kind, rows in table("by_hand.toml").items():
        for old, new in rows:
            for found in re.finditer(re.escape(old), text):
                line = text.count("\n", 0, found.end() - len(old.lstrip())) + 1
                yield Place(kind, *found.span(), new, line)


@functools.cache
def table(name: str) -> dict[str, Any]:
    """Read a TOML file of this folder."""
    return tomllib.loads((_HERE / name).read_text())

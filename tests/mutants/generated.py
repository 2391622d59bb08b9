"""Faults that are made by rule, one for each place in the kernels where the rule applies.

Dropping any barrier, moving any bound by one, narrowing any 64-bit integer and holding any sum
of a norm in the data's dtype must each make a test fail.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.mutants.equivalent import EQUIVALENT

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

# Loops over registers, whose number the compiler knows and holds the index against.
_CONSTANT = (
    r"(?:(?:VEC|OWN|N|B|CHUNKS|PLANES|AT_ONCE|PACKS|O::BATCH)\b|sizeof|2;|8\b"
    r"|(?:Read|Written|Raw<T, N>)::(?:WORDS|EACH)\b)"
)
_SUM = (
    r"((?:\*own|own\.sum\([^)]*\)|(?:own\.)?\b(?:sums|part|totals?))(?:\.\w+|\[[^\]]+\])*) "
    r"(?:\+= ([^;\n]+)|= (fused\([^;\n]+\)));"
)
# What only doubles are added with.
_IN_DOUBLE = re.compile(r"\*own|exactly|deviation|fused\(count|sums\[2 ")


def _in_data_dtype(found: re.Match[str]) -> str:
    """A sum that is rounded to the data's dtype each time."""
    target, added, sum_ = found.groups()
    widen = "to_double" if _IN_DOUBLE.search(found[0]) else "widen"
    return f"{target} = {widen}(narrow<DATA_T>({sum_ or f'{target} + {added}'}));"


_RULES: tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...] = (
    ("no barrier", r"__syncthreads\(\);", ""),
    ("<= for <", rf"(?<=[\w)\]]) < (?!{_CONSTANT})(?=[\w(])", " <= "),
    ("> for >=", r"(?<=[\w)\]]) >= (?=[\w(])", " > "),
    ("int for i64", r"\bi64\b", "int"),
    ("a sum in the data's dtype", _SUM, _in_data_dtype),
)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(file, old text, new text, what) of every place but those in ``EQUIVALENT``."""
    for path in sorted(KERNELS.glob("*.cu*")):
        text = path.read_text()
        for what, found, new in places(text):
            if not any(
                re.fullmatch(file, path.name) and re.fullmatch(pattern, what)
                for _, file, pattern in EQUIVALENT
            ):
                first, last = _once(text, found.start(), found.end())
                changed = text[first : found.start()] + new + text[found.end() : last]
                yield f"kernels/{path.name}", text[first:last], changed, what


def places(text: str) -> Iterator[tuple[str, re.Match[str], str]]:
    """What each fault is, where it is, and what the place becomes."""
    seen: Counter[str] = Counter()
    for rule, pattern, replacement in _RULES:
        for found in re.finditer(pattern, text):
            start = text.rfind("\n", 0, found.start()) + 1
            line = text[start : text.find("\n", found.end())]
            before = text[start : found.start()]
            if "//" in before or "typedef" in before or line.startswith("#"):
                continue
            if rule.startswith("a sum") and "DATA_T" not in text:
                continue
            what = f"{rule}: `{line.strip()}`"
            seen[what] += 1
            number = f" ({seen[what]})" if seen[what] > 1 else ""
            new = replacement(found) if callable(replacement) else found.expand(replacement)
            yield what + number, found, new


def _once(text: str, first: int, last: int) -> tuple[int, int]:
    """The place with as many whole lines around it as make it the only one of its kind."""
    while text.count(text[first:last]) != 1:
        first = text.rfind("\n", 0, max(first - 1, 0)) + 1
        last = text.find("\n", last + 1)
    return first, last

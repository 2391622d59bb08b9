"""Faults in the kernels and in the CPU's C++ by rule: patterns, each place by itself."""

import functools
import re
from collections.abc import Iterator

from tests.mutants.mutant import Place, table

# What no rule changes, but comments.
_SILENT = re.compile(r"\s*(#|typedef|template|static_assert|//|extern|__global__)")


def places(text: str) -> Iterator[Place]:
    """Every place of a kernel's file where a rule applies."""
    for rule, pattern, replacement in rules():
        if "DATA_T" in replacement and "DATA_T" not in text:
            continue
        for found in pattern.finditer(text):
            first = text.rfind("\n", 0, found.end() - 1) + 1
            before = text[first : found.start()] or text[first : found.end()]
            if "//" not in before and not _SILENT.match(text[first : found.end()]):
                yield Place(rule, *found.span(), found.expand(replacement))


@functools.cache
def rules() -> list[tuple[str, re.Pattern[str], str]]:
    """Rules of ``kernel_rules.toml``: each one's name, its pattern, and a match's replacement."""
    read = table("kernel_rules.toml")
    words = re.compile(rf"\b({'|'.join(read['words'])})\b")
    return [
        (rule, re.compile(words.sub(lambda word: read["words"][word[0]], pattern)), replacement)
        for rule, pattern, replacement in read["rules"]
    ]

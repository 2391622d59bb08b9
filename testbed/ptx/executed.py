"""Counts of the instructions that ran, and of those that compute in double precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# They only move bits, whatever the type in their names.
_MOVES = {"ld", "ldu", "mov", "selp", "st"}


class Executed(NamedTuple):
    """Instructions of PTX; ``double`` of them have an operand of type f64 and are no moves.

    An instruction counts whenever its basic block runs, once a thread, also if its guard is false:
    the warp spends its turn on it.
    """

    instructions: int
    double: int

    @classmethod
    def total(cls, runs: Iterable[int], tallies: Iterable[tuple[int, int]]) -> Executed:
        """Return the sum of what so many runs of each block have executed."""
        rows = [(times, *tally) for times, tally in zip(runs, tallies, strict=True)]
        return cls(sum(n * each for n, each, _ in rows), sum(n * each for n, _, each in rows))


def is_double(opcode: str) -> bool:
    """Return whether an opcode computes in double precision, or converts to or from it."""
    name, *modifiers = opcode.split(".")
    return "f64" in modifiers and name not in _MOVES

"""Round trips to memory, as the machine code has them.

A round trip is a wait for a global load while some are in flight. All that is in flight then counts
as arrived: what was issued together comes back together. So `[4, 4]` is two round trips
with four loads each, and `[1] * 8` is eight with nothing in flight beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .sass import Instruction


def round_trips(code: Iterable[Instruction]) -> list[int]:
    """Return how many loads are in flight at each round trip, in the order of the code.

    A straight line: both sides of a branch count, and the body of a loop counts once.
    """
    return [count for _, count in _waits(code)]


def steady_trips(body: Sequence[Instruction]) -> list[int]:
    """Return the same of one turn of a loop that has been running.

    A load that one turn issues and the next waits for, a prefetch, is a trip of the next.
    """
    waits = list(_waits([*body, *body]))
    return [count for place, count in waits if place >= len(body)]


def _waits(code: Iterable[Instruction]) -> Iterable[tuple[int, int]]:
    flying: dict[int, int] = {}  # loads by scoreboard
    for place, instruction in enumerate(code):
        if _waits_for_load(instruction, flying):
            yield place, sum(flying.values())
            flying.clear()
        if instruction.is_global_load and instruction.released is not None:
            flying[instruction.released] = flying.get(instruction.released, 0) + 1


def _waits_for_load(instruction: Instruction, flying: dict[int, int]) -> bool:
    if any(board in flying for board in instruction.waited):
        return True
    return any(flying.get(board, 0) > left for board, left in instruction.left_pending.items())

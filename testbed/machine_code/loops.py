"""The loops of a kernel, found in its machine code.

A loop is a natural one: an edge leads back to a block that every path to it goes through. Code
that the compiler puts out of line, which ends in a branch back into the middle, is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sass import Instruction, branch_target

_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL", "BPT")  # nothing follows them if no guard is false
Code = Sequence[Instruction]


@dataclass(frozen=True)
class Loop:
    """A loop's instructions in the order of their addresses; ``depth`` is 1 if it is in no other.

    Blocks behind its last branch back are left out: they are the rare ones, placed out of line.
    """

    start: int
    end: int  # the address of the last branch back
    depth: int
    body: tuple[Instruction, ...]

    def holds(self, other: Loop) -> bool:
        """Return whether ``other`` lies within this loop."""
        return self is not other and self.start <= other.start and other.end <= self.end


def loops_of(code: Code) -> list[Loop]:
    """Return the loops of a kernel by address, an outer one before those within it."""
    blocks, following = _graph(code)
    found: dict[int, set[int]] = {}  # the blocks of each loop, by its first block
    latches: dict[int, int] = {}
    above = _dominators(following)
    before = _reversed(following)
    for block, successors in enumerate(following):
        for head in successors:
            if _dominates(head, block, above):
                found.setdefault(head, {head}).update(_reaching(block, head, before))
                latches[head] = max(latches.get(head, block), block)
    loops = []
    for head, members in found.items():
        body = [i for block in sorted(members) if block <= latches[head] for i in blocks[block]]
        depth = sum(head in other for other in found.values())
        loops.append(Loop(body[0].address, body[-1].address, depth, tuple(body)))
    return sorted(loops, key=lambda loop: (loop.start, -loop.end))


def _graph(code: Code) -> tuple[list[list[Instruction]], list[list[int]]]:
    """The basic blocks, and the numbers of those that may follow each."""
    targets = {branch_target(i) for i in code if i.name in ("BRA", "JMP")}
    blocks: list[list[Instruction]] = []
    fresh = True
    for instruction in code:
        if fresh or instruction.address in targets:
            blocks.append([])
        blocks[-1].append(instruction)
        fresh = instruction.name in ("BRA", "JMP", *_ENDS)
    starts = {block[0].address: number for number, block in enumerate(blocks)}
    following = [_successors(block[-1], number, starts) for number, block in enumerate(blocks)]
    _join_indirect(code, blocks, following, starts)
    return blocks, following


def _successors(last: Instruction, number: int, starts: dict[int, int]) -> list[int]:
    found = []
    target = branch_target(last) if last.name in ("BRA", "JMP") else None
    if target in starts and target is not None:
        found.append(starts[target])
    always = last.guard is None and (last.name in _ENDS or _is_plain_branch(last))
    if not always and number + 1 < len(starts):
        found.append(number + 1)
    return found


def _is_plain_branch(instruction: Instruction) -> bool:
    """True if a branch is always taken: it may have a second condition among its operands."""
    return instruction.name in ("BRA", "JMP") and "," not in instruction.operands


def _join_indirect(
    code: Code, blocks: list[list[Instruction]], following: list[list[int]], starts: dict[int, int]
) -> None:
    """A branch through a table leads to each block that nothing before it in the code leads to."""
    tables = [k for k, block in enumerate(blocks) if block[-1].name in ("BRX", "JMX")]
    called = {starts[t] for i in code if i.name == "CALL" and (t := branch_target(i)) in starts}
    reached = set[int]()
    for entry in (0, *called):
        reached.update(_postorder(following, entry))
    for block in range(len(blocks)):
        if tables and block not in reached:
            for table in tables:
                following[table].append(block)
            reached.update(_postorder(following, block))


def _reversed(following: list[list[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in following]
    for block, successors in enumerate(following):
        for other in successors:
            before[other].append(block)
    return before


def _dominators(following: list[list[int]]) -> dict[int, int]:
    """The nearest block that every path to a block goes through (Cooper, Harvey and Kennedy)."""
    order = _postorder(following)
    rank = {block: k for k, block in enumerate(order)}
    before = _reversed(following)
    above = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [k for k in before[block] if k in above]
            nearest = known[0]
            for other in known[1:]:
                nearest = _common(nearest, other, above, rank)
            if above.get(block) != nearest:
                above[block], changed = nearest, True
    return above


def _common(a: int, b: int, above: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        if rank[a] < rank[b]:
            a = above[a]
        else:
            b = above[b]
    return a


def _postorder(following: list[list[int]], first: int = 0) -> list[int]:
    """The blocks that can be reached from ``first``, each behind those that it leads to."""
    order, seen, stack = [], {first}, [(first, iter(following[first]))]
    while stack:
        block, rest = stack[-1]
        unseen = next((k for k in rest if k not in seen), None)
        if unseen is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(unseen)
            stack.append((unseen, iter(following[unseen])))
    return order


def _dominates(head: int, block: int, above: dict[int, int]) -> bool:
    if block not in above:  # nothing leads to it
        return False
    while block not in (head, 0):
        block = above[block]
    return block == head


def _reaching(block: int, head: int, before: list[list[int]]) -> set[int]:
    """The blocks from which ``block`` is reached without going through ``head``."""
    found, stack = {head}, [block]
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack += before[at]
    return found

"""Contraction that ptxas may still do: a product and the sum that it goes into become one fma.

NVVM has contracted before. PTX as it stands, and PTX with every such pair contracted, are the two
ends of what a GPU may compute. A product or sum with a rounding of its own (``.rn``) stays.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from .parse import Address, Function, Immediate, Instruction, Label, Operand, Pair, Register, Vector

_KINDS = ("f32", "ftz.f32", "f64")
_PRODUCT = re.compile(rf"\bmul\.({'|'.join(map(re.escape, _KINDS))})\s")
_WITHOUT_RESULT = {"st", "red", "bra", "ret", "exit", "bar", "barrier", "trap", "membar", "fence"}
_ENDS_A_BLOCK = {"bra", "ret", "exit", "call", "bar", "barrier", "trap"}


@dataclass(frozen=True)
class _Product:
    at: int  # of its instruction in the body
    kind: str
    factors: tuple[Operand, Operand]


def may_be_contracted(text: str) -> bool:
    """Return whether a function has a product without a rounding of its own."""
    return bool(_PRODUCT.search(text))


def contract(function: Function) -> int:
    """Return how many pairs were fused: in place, all that may be."""
    return _Contraction(function).run()


def registers_of(operand: Operand) -> list[Register]:
    """Return the registers that an operand names."""
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Address):
        return registers_of(operand.base)
    if isinstance(operand, Pair):
        return [operand.first, operand.second]
    if isinstance(operand, Vector):
        return [item for item in operand.items if isinstance(item, Register)]
    return []


def written_and_read(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Return the names of the registers that an instruction writes, and of those it reads."""
    writes = instruction.opcode.partition(".")[0] not in _WITHOUT_RESULT
    operands = list(instruction.operands)
    results = operands[:1] if writes else []
    written = [r.name for operand in results for r in registers_of(operand)]
    read = [r.name for operand in operands[len(results) :] for r in registers_of(operand)]
    if instruction.guard:
        read.append(instruction.guard.name)
    return written, read


class _Contraction:
    def __init__(self, function: Function) -> None:
        self._function = function
        self._body = function.body
        self._written: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        for statement in self._body:
            if isinstance(statement, Instruction):
                written, read = written_and_read(statement)
                self._written.update(written)
                self._read.update(read)
        self._fused: dict[int, list[Instruction]] = {}  # what stands in an instruction's place
        self._count = 0

    def run(self) -> int:
        products: dict[str, _Product] = {}
        for at, statement in enumerate(self._body):
            if isinstance(statement, Label) or _base(statement) in _ENDS_A_BLOCK:
                products.clear()
                continue
            self._fuse(at, statement, products)
            written, _ = written_and_read(statement)
            for name in written:
                for product in [p for p, known in products.items() if _uses(known, p, name)]:
                    del products[product]
            if self._may_be_fused(statement):
                kind = statement.opcode.partition(".")[2]
                _, a, b = statement.operands
                products[written[0]] = _Product(at, kind, (a, b))
        self._function.body = [
            new for at, old in enumerate(self._body) for new in self._fused.get(at, [old])
        ]
        return self._count

    def _may_be_fused(self, statement: Instruction) -> bool:
        name, _, kind = statement.opcode.partition(".")
        if name != "mul" or kind not in _KINDS or statement.guard:
            return False
        result = written_and_read(statement)[0][0]
        return self._written[result] == 1 and self._read[result] == 1

    def _fuse(self, at: int, statement: Instruction, products: dict[str, _Product]) -> None:
        name, _, kind = statement.opcode.partition(".")
        if name not in ("add", "sub") or kind not in _KINDS or statement.guard:
            return
        result, left, right = statement.operands
        for factor, other, is_left in ((right, left, False), (left, right, True)):
            known = products.get(factor.name) if isinstance(factor, Register) else None
            if known and known.kind == kind:
                del products[factor.name]  # type: ignore[union-attr]
                a, b = known.factors
                made: list[Instruction] = []
                if name == "sub" and is_left:
                    other = self._negated(statement, other, kind, made)
                elif name == "sub":
                    a = self._negated(statement, a, kind, made)
                fma = replace(statement, opcode=f"fma.rn.{kind}", operands=(result, a, b, other))
                self._fused[known.at], self._fused[at] = [], [*made, fma]
                self._count += 1
                return

    def _negated(
        self, at: Instruction, operand: Operand, kind: str, made: list[Instruction]
    ) -> Operand:
        if isinstance(operand, Immediate) and operand.width:
            return replace(operand, value=operand.value ^ 1 << (operand.width - 1))
        width = kind.rpartition(".")[2]
        register = Register(f"minus_{self._count}", width)
        self._function.registers[register.name] = width
        made.append(Instruction(at.line, f"neg.{width}", (register, operand)))
        return register


def _base(statement: Instruction) -> str:
    return statement.opcode.partition(".")[0]


def _uses(product: _Product, name: str, register: str) -> bool:
    factors = [r.name for factor in product.factors for r in registers_of(factor)]
    return register == name or register in factors

"""Machine code as text (SASS) with what the encoding says of scheduling beside it.

Since sm_70 an instruction takes 128 bits, of which 21 are for the scheduler: how long to stall,
which of six scoreboards it releases when its result has arrived, and which it waits for.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

_LINE = re.compile(
    r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*([^;]*?)\s*;"
    r"\s*/\* 0x[0-9a-f]{16} \*/"
)
_UPPER_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_DEPBAR = re.compile(r"SB(\d), 0x([0-9a-f]+)")
_DOUBLE = ("DADD", "DFMA", "DMNMX", "DMUL", "DSETP")
_BYTES = 16  # of an instruction
# Bits of the upper half.
_RELEASED, _WAITED, _NONE = 46, 52, 7


class NvdisasmMissingError(RuntimeError):
    """NVIDIA's disassembler is not installed."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``guard`` is the predicate under which it runs, such as ``!P0``."""

    address: int
    guard: str | None
    opcode: str
    operands: str
    released: int | None  # the scoreboard that its result releases
    waited: frozenset[int]  # the scoreboards that it waits for

    @cached_property
    def name(self) -> str:
        """Return the opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @cached_property
    def left_pending(self) -> dict[int, int]:
        """Return how many loads of each scoreboard may still be in flight after a DEPBAR."""
        found = _DEPBAR.search(self.operands) if self.name == "DEPBAR" else None
        return {int(found[1]): int(found[2], 16)} if found else {}

    @cached_property
    def is_global_load(self) -> bool:
        """Return whether it loads from global memory."""
        return self.name in ("LDG", "LD", "ATOMG", "ATOM")

    @cached_property
    def global_bytes(self) -> int:
        """Return how many bytes of global memory it loads or stores for one thread."""
        if self.name not in ("LDG", "LD", "STG", "ST"):
            return 0
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        words = self.opcode.split(".")
        return next((widths[word] for word in words if word in widths), 4)

    @cached_property
    def is_double(self) -> bool:
        """Return whether it computes in double precision, or converts to or from it."""
        return self.name in _DOUBLE or "F64" in self.opcode.split(".")

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".strip()


def disassemble(codes: Sequence[bytes], arch: int) -> list[list[Instruction]]:
    """Return the instructions of each piece of machine code for ``arch`` (90 for 9.0).

    Addresses begin at 0 in each. All of it takes one run of nvdisasm, whose start takes longer
    than a kernel.
    """
    joined = b"".join(codes)
    if not joined:
        return [[] for _ in codes]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "code").write_bytes(joined)
        command = [nvdisasm(), "-hex", "-ndf", "-b", f"SM{arch}", "code"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr}")
    found = parse(done.stdout)
    if len(found) * _BYTES != len(joined):
        raise RuntimeError(f"{len(found)} instructions read of {len(joined)} bytes of code")
    pieces, first = [], 0
    for code in codes:
        count = len(code) // _BYTES
        pieces.append([_moved(i, first * _BYTES) for i in found[first : first + count]])
        first += count
    return pieces


def parse(text: str) -> list[Instruction]:
    """Return the instructions that ``nvdisasm -hex`` prints: two lines each, one for each half."""
    found = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        read = _LINE.match(line)
        if read is None:
            continue
        upper = _UPPER_HALF.match(following)
        if upper is None:
            raise ValueError(f"no encoding behind {line!r}")
        address, guard, opcode, operands = read.groups()
        released, waited = scheduling(int(upper[1], 16))
        found.append(Instruction(int(address, 16), guard, opcode, operands, released, waited))
    return found


def scheduling(upper: int) -> tuple[int | None, frozenset[int]]:
    """Return the scoreboard that an instruction releases, if any, and those it waits for."""
    released = upper >> _RELEASED & 7
    waited = frozenset(k for k in range(6) if upper >> _WAITED >> k & 1)
    return None if released == _NONE else released, waited


def _moved(instruction: Instruction, by: int) -> Instruction:
    """An instruction with addresses as if its code began ``by`` bytes earlier."""
    i = instruction
    return Instruction(i.address - by, i.guard, i.opcode, _rebased(i, by), i.released, i.waited)


def _rebased(instruction: Instruction, by: int) -> str:
    target = branch_target(instruction)
    if target is None or not by:
        return instruction.operands
    return re.sub(r"0x[0-9a-f]+$", hex(target - by), instruction.operands)


def branch_target(instruction: Instruction) -> int | None:
    """Return where a branch or a call leads, if the instruction says it."""
    if instruction.name not in ("BRA", "CALL", "BSSY", "JMP"):
        return None
    found = re.search(r"0x([0-9a-f]+)$", instruction.operands)
    return int(found[1], 16) if found else None


@cache
def nvdisasm() -> str:
    """Return the path of nvdisasm: ``GRADKIT_NVDISASM``, the package's, or the one on PATH."""
    if named := os.environ.get("GRADKIT_NVDISASM"):
        return named
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(folder).glob("cu*/bin/nvdisasm")):
            return str(path)
    if path_found := shutil.which("nvdisasm"):
        return path_found
    raise NvdisasmMissingError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")

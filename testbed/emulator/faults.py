"""Faults: what went wrong in a kernel, worded for whoever has to mend it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .memory import Extent
from .runtime import NO_WINDOW, Fault

# The order is runtime/fault.h's.
KINDS = (
    "none",
    "out-of-bounds",
    "misaligned",
    "read-only",
    "uninitialised",
    "race",
    "block-race",
    "barrier",
    "shuffle",
    "mask",
    "deadlock",
    "null-pointer",
    "trap",
    "cluster",
    "early",
)
_ACCESSES = ("", "read", "write", "atomic operation")
_AT_BARRIER, _AT_WARP_OP, _DONE = 1, 2, 3

# What a fault of the kind "cluster" is, by its detail: the order is runtime/fault.h's.
_MISUSES = (
    "the shared memory of another block, before a barrier of the cluster: it may not have started",
    "the shared memory of another block, which has ended",
    "ends while another block may still access its shared memory: no barrier of the cluster is "
    "between",
    "at an address mapped to a rank that no block of the cluster has",
    "at an address mapped to another block from outside this block's shared memory",
    "waits at the cluster's barrier without having arrived there",
    "arrives at the cluster's barrier again without having waited there",
    "a block's barrier after some of its threads, and not all, have arrived at the cluster's",
    "too many barriers of a block between two of its cluster",
)

Index = tuple[int, int, int]


class EmulatorFault(AssertionError):  # noqa: N818 - the name that the tests' authors know it by
    """A kernel did what no kernel may do; it was stopped before doing it.

    ``kind`` is one of `KINDS`, or ``"argument"`` or ``"launch"`` for a launch that never began.
    ``kernel``, ``block``, ``thread``, ``array``, ``index`` and ``line`` say where, if known.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        kernel: str = "",
        block: Index | None = None,
        thread: Index | None = None,
        array: str | None = None,
        index: int | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.array = array
        self.index = index
        self.line = line


@dataclass(frozen=True)
class LaunchContext:
    """The kernel, its launch and its source, which a fault's numbers refer to."""

    kernel: str
    grid: Index
    block: Index
    find_line: Callable[[int], int | None]  # that the instruction at an offset came from
    line_text: Callable[[int], str]
    find_window: Callable[[int], tuple[str, Extent] | None]

    def thread_index(self, flat: int) -> Index:
        """Return the index in its block of the thread with this flat number."""
        x, y, _ = self.block
        return flat % x, flat // x % y, flat // (x * y)

    def block_index(self, flat: int) -> Index:
        """Return the index in the grid of the block with this flat number."""
        x, y, _ = self.grid
        return flat % x, flat // x % y, flat // (x * y)


def make_fault(record: Fault, context: LaunchContext) -> EmulatorFault:
    """Return the exception to raise for the runtime's record of a fault."""
    kind = KINDS[record.kind]
    found = None if record.window == NO_WINDOW else context.find_window(record.window)
    array = index = None
    if found is not None:
        array = found[0]
        index = (record.address - found[1].origin) // found[1].itemsize
    line = context.find_line(record.code)
    block, thread = tuple(record.block), tuple(record.thread)
    where = f"kernel {context.kernel}, block {block}, thread {thread}"
    if line is not None:
        where += f", line {line}: {context.line_text(line)}"
    message = f"{_describe(kind, record, context, found)}\n  in {where}"
    return EmulatorFault(
        kind,
        message,
        kernel=context.kernel,
        block=block,
        thread=thread,
        array=array,
        index=index,
        line=line,
    )


def _describe(
    kind: str, record: Fault, context: LaunchContext, found: tuple[str, Extent] | None
) -> str:
    if kind in ("barrier", "shuffle", "mask", "deadlock", "trap"):
        return _describe_waiting(kind, record, context)
    access = f"{_ACCESSES[record.access]} of {record.size} bytes"
    if kind == "early":
        return f"{access if record.access else 'an end or a call'} before griddepcontrol.wait"
    target = _element(record, found)
    if kind == "cluster":
        misuse = _MISUSES[record.detail]
        if not record.access:
            return misuse
        return f"{access} {misuse}" if found is None else f"{access} of {target}, {misuse}"
    if kind == "null-pointer":
        return f"{access} through a null pointer, at address {record.address:#x}"
    if kind == "out-of-bounds":
        return f"{access} outside of every array, at address {record.address:#x}; {target}"
    if kind == "misaligned":
        return f"{access} of {target}, whose address is no multiple of {record.size}"
    if kind == "read-only":
        return f"{access} of {target}, which is an input (const in the kernel's parameters)"
    if kind == "uninitialised":
        return f"{access} of {target}, which nobody has written"
    return f"{access} of {target} {_conflict(record, context)}"


def _element(record: Fault, found: tuple[str, Extent] | None) -> str:
    if found is None:
        return "no array is near"
    name, extent = found
    index, rest = divmod(record.address - extent.origin, extent.itemsize)
    element = f"{name}[{index}]" + (f" (+{rest} bytes)" if rest else "")
    if KINDS[record.kind] != "out-of-bounds":
        return f"{element} ({extent.text})"
    if record.address >= extent.end:
        past = f"{record.address - extent.end} bytes past the end"
    elif record.address < extent.start:
        past = f"{extent.start - record.address} bytes before the start"
    else:
        past = f"over the end: {extent.end - record.address} bytes are left"
    return f"it would be {element}, {past} of {name} ({extent.text})"


def _conflict(record: Fault, context: LaunchContext) -> str:
    other = f"the {_ACCESSES[record.other_access]} by "
    if record.other_thread >= 0:
        other += f"thread {context.thread_index(record.other_thread)}"
    else:
        other += "other threads"
    if record.other_block >= 0:
        other += f" of block {context.block_index(record.other_block)}"
        if KINDS[record.kind] == "race":
            return f"conflicts with {other}: no barrier of the cluster lies between them"
        return f"conflicts with {other}: nothing orders two blocks of one launch"
    if KINDS[record.kind] == "block-race":
        return f"conflicts with {other} of another block: nothing orders two blocks of one launch"
    return f"conflicts with {other}: no barrier lies between them"


def _describe_waiting(kind: str, record: Fault, context: LaunchContext) -> str:
    other = ""
    if record.other_thread >= 0:
        other = f"thread {context.thread_index(record.other_thread)}"
        if record.other_block >= 0:
            other += f" of block {context.block_index(record.other_block)}"
    other_line = context.find_line(record.other_code)
    there = f"line {other_line}" if other_line is not None else "elsewhere"
    if kind == "barrier":
        if record.detail == _DONE:
            return f"waits at a barrier for {other}, which has returned"
        return f"waits at a barrier while {other} waits at another one, {there}"
    if kind == "shuffle":
        return _describe_shuffle(record, other, there)
    if kind == "mask":
        return _describe_mask(record, other, there)
    if kind == "trap":
        return "the kernel called __trap()"
    return "goes on and on without arriving anywhere: does it spin on what nobody will write?"


def _describe_shuffle(record: Fault, other: str, there: str) -> str:
    if not other:
        return f"shuffle with width {record.detail}: a power of two from 1 to 32 is needed"
    if record.other_code and record.other_code != record.code:
        return f"stands at a warp operation while {other} stands at another one, {there}"
    lane = record.other_thread % 32
    return f"shuffle reads from lane {lane}, which takes no part (mask {record.detail:#010x})"


def _describe_mask(record: Fault, other: str, there: str) -> str:
    if not other:
        return f"warp operation whose mask {record.detail:#010x} leaves out the calling lane"
    if record.detail == _AT_BARRIER:
        return f"warp operation waits for {other}, which its mask names and which waits at {there}"
    if record.detail == _AT_WARP_OP:
        return f"warp operation waits for {other}, which waits at another one, {there}"
    return f"warp operation's mask differs from that of {other}, which is {record.detail:#010x}"


def source_line(library: Path, code: int) -> int | None:
    """Return the line of the kernel's source that the instruction at ``code`` came from."""
    found = source_place(library, code)
    return found[1] if found and found[0] == "kernel.cu" else None


def source_place(library: Path, code: int) -> tuple[str, int] | None:
    """Return the file, as the compiler was told it, and the line of the instruction at ``code``."""
    if not code:
        return None
    # A return address: the instruction that called lies before it.
    command = ["addr2line", "-i", "-e", str(library), hex(code - 1)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    # Inlined calls come innermost first: skip those inside the emulator's own headers.
    place = re.search(r"([\w$]+\.(?:cu|ptx)):(\d+)", found)
    return (place[1], int(place[2])) if place else None


def text_of_line(source: str, line: int) -> str:
    """Return a line of a text, counted from 1; empty if there is none."""
    lines = source.splitlines()
    return lines[line - 1].strip() if line <= len(lines) else ""

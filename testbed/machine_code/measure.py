"""One kernel's row: what its machine code takes and how it goes to memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.nvrtc import KernelUse, compile_machine_code, cupy_options, parse_log

from .cubin import kernels_of
from .loops import Loop, loops_of
from .occupancy import DEFAULT_BLOCK, resident_threads
from .sass import Instruction, disassemble
from .trips import round_trips, steady_trips

_WIDE = 16  # bytes of the widest access that every architecture has


@dataclass(frozen=True)
class Source:
    """A CUDA source and how it is compiled; ``file`` and ``title`` name it in tables.

    ``dynamic_shared`` is the shared memory in bytes that a launch asks for.
    """

    file: str
    title: str
    text: str
    options: tuple[str, ...] = ()
    dynamic_shared: int = 0


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code, and what ptxas says that it uses."""

    source: Source
    name: str
    arch: int
    use: KernelUse
    block: int
    code: bytes


@dataclass(frozen=True)
class Measured:
    """Figures of the machine code of one kernel; ``trips`` are loads in flight at each."""

    compiled: Compiled
    instructions: int
    whole: list[int]  # the kernel in a straight line
    data: list[int] | None  # a turn of the outermost loop around the widest accesses, if any
    inner: list[int]  # a turn of the innermost loop with the most of them
    double: float | None  # instructions in double precision for each widest access, at most
    turn: int | None  # instructions of a turn of that innermost loop, on both sides of branches
    wide: float | None  # of the bytes that the data loop moves; None if it moves none
    loops: list[tuple[Loop, list[int]]]

    @property
    def threads(self) -> int:
        """Return how many threads a multiprocessor holds."""
        c = self.compiled
        shared = c.use.shared_bytes + c.source.dynamic_shared
        return resident_threads(c.arch, c.block, c.use.registers, shared)


def compile_kernels(source: Source, arch: int) -> list[Compiled]:
    """Return a source's kernels, compiled to machine code for ``arch`` (90 for 9.0)."""
    options = (*cupy_options(source.options, arch), "--ptxas-options=-v")
    made = compile_machine_code(source.text, options)
    uses = parse_log(made.log)
    return [
        Compiled(source, k.name, arch, uses[k.name], k.max_threads or DEFAULT_BLOCK, k.code)
        for k in kernels_of(made.cubin)
    ]


def measure(compiled: Sequence[Compiled]) -> list[Measured]:
    """Return what the machine code of each kernel shows; all are for one architecture."""
    if not compiled:
        return []
    (arch,) = {each.arch for each in compiled}
    codes = disassemble([each.code for each in compiled], arch)
    return [measured_of(each, code) for each, code in zip(compiled, codes, strict=True)]


def measured_of(compiled: Compiled, code: Sequence[Instruction]) -> Measured:
    """Return what one kernel's instructions show."""
    loops = loops_of(code)
    data, innermost = data_loops(loops)
    accesses = data.body if data else code
    return Measured(
        compiled,
        instructions=sum(i.name != "NOP" for i in code),
        whole=round_trips(code),
        data=steady_trips(data.body) if data else None,
        inner=steady_trips(innermost[0].body) if innermost else [],
        double=max((double_share(loop.body) for loop in innermost), default=None),
        turn=sum(i.name != "NOP" for i in innermost[0].body) if innermost else None,
        wide=wide_share(accesses),
        loops=[
            (loop, steady_trips(loop.body))
            for loop in loops
            if any(i.global_bytes for i in loop.body)
        ],
    )


def data_loops(loops: Sequence[Loop]) -> tuple[Loop | None, list[Loop]]:
    """Return the loop over the data, and the innermost ones in it, that with most accesses first.

    The loop over the data is the outermost one with the widest loads (stores, if a kernel loads
    nothing); the others are those in it, or itself, that hold such loads and no loop that does.
    """
    for of in (_loaded, _moved):
        widest = max((width for loop in loops for width in of(loop)), default=0)
        holding = {loop: of(loop).count(widest) for loop in loops if widest in of(loop)}
        if holding:
            outermost = [a for a in holding if not any(b.holds(a) for b in holding)]
            innermost = [a for a in holding if not any(a.holds(b) for b in holding)]
            data = max(outermost, key=holding.__getitem__)
            within = [a for a in innermost if a == data or data.holds(a)]
            return data, sorted(within, key=lambda loop: -holding[loop])
    return None, []


def _loaded(loop: Loop) -> list[int]:
    return [i.global_bytes for i in loop.body if i.is_global_load]


def _moved(loop: Loop) -> list[int]:
    return [i.global_bytes for i in loop.body if i.global_bytes]


def double_share(body: Sequence[Instruction]) -> float:
    """Return how many instructions compute in double precision for each of the widest accesses.

    Those are loads, if there are any. However often a compiler unrolls a loop, this stays.
    """
    loads = [i.global_bytes for i in body if i.is_global_load]
    sizes = loads or [i.global_bytes for i in body if i.global_bytes]
    return sum(i.is_double for i in body) / sizes.count(max(sizes))


def wide_share(code: Iterable[Instruction]) -> float | None:
    """Return which share of the bytes moves 16 at a time, each instruction counted once."""
    sizes = [i.global_bytes for i in code]
    wide = sum(size for size in sizes if size >= _WIDE)
    return wide / sum(sizes) if any(sizes) else None

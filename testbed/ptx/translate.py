"""One kernel's PTX, and that of the functions it calls, as C++ for machine/machine.h.

An instruction becomes a call of its opcode's function; labels and branches become C's. The
compiler is told each instruction's line in the PTX, so that a fault can name it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from .contract import contract
from .executed import is_double
from .opcodes import OPCODES, WIDTHS, cpp_type
from .parse import (
    Address,
    Function,
    FunctionText,
    Group,
    Immediate,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    UnsupportedPtxError,
    Variable,
    Vector,
)

_Write = Callable[[str, tuple[Operand, ...]], str]  # of an opcode's modifiers and operands
_SPACES = {"global", "shared", "shared::cta", "param", "param::entry", "param::func"} | {
    *("const", "local", "shared::cluster"),
}
_HINTS = {"weak", "volatile", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"} | {
    f"{level}::{what}"
    for level, words in {
        "L1": "evict_normal evict_unchanged evict_first evict_last no_allocate",
        "L2": "evict_normal evict_first evict_last 64B 128B 256B",
    }.items()
    for what in words.split()
}
_DIMENSIONS = {"tid": "thread_index", "ntid": "block_dim", "ctaid": "block_index"} | {
    "nctaid": "grid_dim",
}
_CLUSTER_DIMENSIONS = ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_ORDERS = {"relaxed", "acquire", "release", "acq_rel"}
_SCOPES = {"cta", "gpu", "sys"}
_ATOMICS = {
    **{f"add.{kind}": "ADD" for kind in ("u32", "s32", "u64")},
    **{f"{op}.u{bits}": f"{op.upper()}_UNSIGNED" for op in ("min", "max") for bits in (32, 64)},
    **{f"{op}.s{bits}": f"{op.upper()}_SIGNED" for op in ("min", "max") for bits in (32, 64)},
    **{f"{op}.b{bits}": op.upper() for op in ("and", "or", "xor") for bits in (32, 64)},
    **{f"exch.b{bits}": "EXCHANGE" for bits in (32, 64)},
    **{f"cas.b{bits}": "COMPARE_AND_SWAP" for bits in (32, 64)},
    "inc.u32": "INC",
    "dec.u32": "DEC",
}
_FENCES = {f"membar.{scope}" for scope in ("cta", "gl", "sys")} | {
    f"fence.{order}{scope}" for order in ("", "sc.", "acq_rel.") for scope in _SCOPES
}


@dataclass
class Translation:
    """The C++ of a kernel, and what a launch of it must know."""

    text: str
    max_threads: int
    cluster: tuple[int, int, int]
    parameters: list[tuple[str, int, int]]  # name, size, alignment
    shared: list[tuple[str, int, int]]  # name, offset, size
    static_bytes: int
    blocks: list[tuple[str, int]] = field(default_factory=list)  # function, line of each
    opcodes: dict[str, int] = field(default_factory=dict)
    contracted: int = 0
    tallies: list[tuple[int, int]] = field(default_factory=list)  # of each block: see Executed


def translate(
    module: Module, name: str, *, contracted: bool = False, counted: bool = False
) -> Translation:
    """Return the kernel ``name`` as C++; ``contracted``, with every fusion that ptxas may make.

    If ``counted``, the code counts how often each basic block runs.
    """
    return _Program(module, contracted, counted).translate(name)


def called_from(module: Module, name: str) -> list[FunctionText]:
    """Return the kernel ``name`` and the functions that it calls, itself first."""
    found: dict[str, FunctionText] = {}
    wanted = [name]
    while wanted:
        text = module.functions.get(wanted.pop())
        if text is not None and text.name not in found:
            found[text.name] = text
            wanted += [
                other
                for other in module.functions
                if other != name and re.search(rf"\b{re.escape(other)}\b", text.content)
            ]
    return list(found.values())


class _Program:
    """All that one kernel's translation unit holds."""

    def __init__(self, module: Module, contracted: bool, counted: bool) -> None:
        self.module = module
        self.contracted = contracted
        self.counted = counted
        self.shared: dict[str, tuple[int, int]] = {}  # offset, size
        self.static_bytes = 0
        self.dynamic: set[str] = set()
        self.constants: dict[str, Variable] = {}
        self.blocks: list[tuple[str, int]] = []
        self.tallies: list[tuple[int, int]] = []
        self.opcodes: Counter[str] = Counter()
        self.fused = 0

    def translate(self, name: str) -> Translation:
        texts = called_from(self.module, name)
        functions = [text.parse() for text in texts]
        if self.contracted:
            self.fused = sum(contract(function) for function in functions)
        for function in functions:
            self._place_shared(function)
        writers = [
            _Writer(self, function, text) for function, text in zip(functions, texts, strict=True)
        ]
        bodies = [writer.text() for writer in writers]
        kernel = functions[0]
        parts = [
            '#include "machine.h"\n',
            _exported("u8 ptx_covered", len(self.blocks)),
            *([_exported("u64 ptx_ran", len(self.blocks))] if self.counted else []),
            *(_constant(variable) for variable in self.constants.values()),
            *(f"{writer.prototype()};" for writer in writers),
            *bodies,
            f"EMU_API void emu_invoke_{name}(void** values) {{ ptx_{name}((u8*)values[0]); }}",
        ]
        return Translation(
            "\n".join(parts) + "\n",
            kernel.max_threads,
            kernel.cluster,
            [(p.name, p.size, p.alignment) for p in kernel.parameters],
            [(readable(name), at, size) for name, (at, size) in self.shared.items()],
            self.static_bytes,
            self.blocks,
            dict(self.opcodes),
            self.fused,
            self.tallies,
        )

    def _place_shared(self, function: Function) -> None:
        used = {
            name
            for statement in function.body
            if isinstance(statement, Instruction)
            for name in _symbols(statement)
        }
        for variable in (*function.variables, *self.module.variables.values()):
            if variable.space != "shared" or variable.name not in used:
                continue
            if variable.size == 0:
                self.dynamic.add(variable.name)
            elif variable.name not in self.shared:
                at = self.static_bytes + -self.static_bytes % variable.alignment
                self.shared[variable.name] = at, variable.size
                self.static_bytes = at + variable.size

    @property
    def dynamic_offset(self) -> int:
        """Offset of dynamic shared memory: it begins behind what is static."""
        return self.static_bytes + -self.static_bytes % 16

    def new_block(self, function: str, line: int) -> str:
        """Count one more basic block, and say so when it runs."""
        self.blocks.append((function, line))
        self.tallies.append((0, 0))
        at = len(self.blocks) - 1
        return f"ptx_covered[{at}] = 1;" + (f" ++ptx_ran[{at}];" if self.counted else "")

    def tally(self, opcode: str) -> None:
        """Count an instruction to the block that it stands in."""
        self.opcodes[opcode] += 1
        instructions, double = self.tallies[-1]
        self.tallies[-1] = instructions + 1, double + is_double(opcode)


def _symbols(instruction: Instruction) -> list[str]:
    bases = [o.base if isinstance(o, Address) else o for o in instruction.operands]
    return [base.name for base in bases if isinstance(base, Symbol)]


def _exported(name: str, count: int) -> str:
    return f"EMU_API {name}[{count}];\n{name}[{count}];"


def _constant(variable: Variable) -> str:
    content = ", ".join(map(str, variable.initial or b"\0"))
    return (
        f"alignas({variable.alignment}) static const u8 {_plain(variable.name)}"
        f"[{variable.size}] = {{{content}}};"
    )


def _plain(name: str) -> str:
    return f"v_{name.replace('$', '_')}"


def readable(name: str) -> str:
    """Return the name that a variable has in the source, if it can be told from PTX's."""
    found = re.match(r"_ZZ.*E(\d+)(\w+)$", name)
    return found[2][: int(found[1])] if found else name


class _Writer:
    """Writes one function."""

    def __init__(self, program: _Program, function: Function, text: FunctionText) -> None:
        self.program = program
        self.function = function
        self.source = text
        self.offsets: dict[str, tuple[int, int]] = {}  # of a kernel's parameters: offset, size
        self.parameter_bytes = 0
        self.arrays: dict[str, Variable] = {}  # memory of one thread
        self.seen: set[str] = set()
        self.line = 0
        opcodes = {s.opcode for s in function.body if isinstance(s, Instruction)}
        self.waits = "griddepcontrol.wait" in opcodes  # for the kernel in front of it to end
        self._place_parameters()

    def _place_parameters(self) -> None:
        for variable in self.function.parameters + self.function.returned:
            if not self.function.is_entry:
                self.arrays[variable.name] = variable
                continue
            at = self.parameter_bytes + -self.parameter_bytes % variable.alignment
            self.offsets[variable.name] = at, variable.size
            self.parameter_bytes = at + variable.size
        for variable in self.function.variables:
            if variable.space in ("param", "local"):
                known = self.arrays.get(variable.name)
                if known is None or known.size < variable.size:
                    self.arrays[variable.name] = variable

    def prototype(self) -> str:
        names = [v.name for v in self.function.returned + self.function.parameters]
        passed = ["P"] if self.function.is_entry else [_plain(name) for name in names]
        arguments = ", ".join(f"u8* {name}" for name in passed)
        return f"static void ptx_{self.function.name}({arguments})"

    def text(self) -> str:
        lines = [self.program.new_block(self.function.name, 1)]
        for statement in self.function.body:
            lines += self._statement(statement)
        own = {v.name for v in self.function.returned + self.function.parameters}
        declared = [f"{cpp_type(k)} {n};" for n, k in self.function.registers.items()]
        declared += [
            f"alignas({v.alignment}) u8 {_plain(v.name)}[{v.size}];"
            for v in self.arrays.values()
            if v.name not in own
        ]
        start = [f"{self.prototype()} {{", *declared, "u64 turns = 0; (void)turns;"]
        start += ["bool waited = false;"] if self.waits else []
        return "\n".join([*start, *lines, "}"])

    def _statement(self, statement: Instruction | Label) -> list[str]:
        self.line = statement.line
        if isinstance(statement, Label):
            self.seen.add(statement.name)
            block = self.program.new_block(self.function.name, statement.line)
            return [f"{statement.name}: {block}"]
        self.program.tally(statement.opcode)
        code = self._instruction(statement)
        if statement.guard:
            code = f"if ({self._register(statement.guard)}) {{ {code} }}"
        lines = [f'#line {statement.line} "{self.function.name}.ptx"', code]
        if statement.guard and statement.opcode.startswith(("bra", "ret", "exit")):
            lines.append(self.program.new_block(self.function.name, statement.line + 1))
        return lines

    def _refuse(self, what: str) -> NoReturn:
        self._refuse_at(self.line, what)

    def _refuse_at(self, line: int, what: str) -> NoReturn:
        text = self.source.text.split("\n")[line - 1].strip()
        raise UnsupportedPtxError(
            self.function.name, self.source.line + line - 1, f"{text} ({what})"
        )

    # Operands

    def _register(self, register: Register) -> str:
        return f"!{register.name}" if register.negated else register.name

    def _value(self, operand: Operand, kind: str, *, wider: bool = False) -> str:
        """An operand's bits, as ``kind`` has them; its register may have more if ``wider``."""
        width = WIDTHS[kind]
        if isinstance(operand, Register):
            own = WIDTHS[operand.kind]
            if (own < width or not wider) and own != width and not (kind == "pred" and own == 1):
                self._refuse(f"{operand.name} has {own} bits, not {width}")
            return self._register(operand)
        if isinstance(operand, Immediate):
            return self._number(operand, kind)
        if isinstance(operand, Special):
            return self._special(operand)
        if isinstance(operand, Symbol) and width >= 32:
            return self._symbol(operand)
        return self._refuse("the operand")

    def _number(self, operand: Immediate, kind: str) -> str:
        if kind == "pred":
            return str(int(operand.value != 0))
        if operand.width not in (None, WIDTHS[kind]) or (operand.width is None and kind[0] == "f"):
            self._refuse("the number")
        return f"0x{operand.value & (1 << WIDTHS[kind]) - 1:x}ull"

    def _special(self, operand: Special) -> str:
        name, _, axis = operand.name[1:].partition(".")
        if name in _CLUSTER_DIMENSIONS:
            return f"{name}().{axis}"
        return f"emu_{_DIMENSIONS[name]}().{axis}" if axis else f"{name}()"

    def _symbol(self, symbol: Symbol) -> str:
        name, program = symbol.name, self.program
        if name in self.offsets:
            return f"((u64)P + {self.offsets[name][0]})"
        if name in self.arrays:
            return f"(u64){_plain(name)}"
        if name in program.shared:
            return f"{program.shared[name][0]}ull"
        if name in program.dynamic:
            return f"{program.dynamic_offset}ull"
        variable = program.module.variables.get(name)
        if variable is None or variable.initial is None or variable.space == "shared":
            self._refuse(f"the symbol {name}")
        program.constants[name] = variable
        return f"(u64){_plain(name)}"

    def _store(self, target: Operand, value: str, kind: str, *, wider: bool = False) -> str:
        """Give a register the bits of ``value``, extended to its width."""
        if target is None:
            return f"(void)({value});"
        if not isinstance(target, Register):
            self._refuse("the result")
        self._value(target, kind, wider=wider)
        if kind[0] == "s" and WIDTHS[target.kind] > WIDTHS[kind]:
            value = f"({kind})({value})"
        return f"{target.name} = {value};"

    # Instructions

    def _instruction(self, instruction: Instruction) -> str:
        name, _, rest = instruction.opcode.partition(".")
        special = self._special_instructions()
        plain = {"ret": "return;", "exit": "return;", "trap": "emu_trap();"}
        if instruction.opcode in _FENCES:
            return "emu_fence();"
        if instruction.opcode == "exit" and not self.function.is_entry:
            self._refuse("exit in a function")
        if instruction.opcode in (*plain, "ret.uni") and not instruction.operands:
            return self._waited(0) + plain[name] if plain[name] == "return;" else plain[name]
        if name == "griddepcontrol" and rest in ("wait", "launch_dependents"):
            if not self.function.is_entry:
                self._refuse("in a function")
            return "waited = true;" if rest == "wait" else ";"
        if name in special:
            write, counts = special[name]
            if len(instruction.operands) not in counts:
                self._refuse(f"{len(instruction.operands)} operands")
            return write(rest, instruction.operands)
        return self._compute(instruction.opcode, instruction.operands)

    def _special_instructions(self) -> dict[str, tuple[_Write, tuple[int, ...]]]:
        """Instructions by name: the method that writes each, and how many operands it may have."""
        return {
            "ld": (self._load, (2,)),
            "st": (self._save, (2,)),
            "mov": (self._move, (2,)),
            "bra": (self._branch, (1,)),
            "cvta": (self._convert_address, (2,)),
            "mapa": (self._map_address, (3,)),
            "call": (self._call, (1, 2, 3)),
            "shfl": (self._shuffle, (5,)),
            "vote": (self._vote, (3,)),
            "redux": (self._reduce, (3,)),
            "activemask": (self._active_mask, (1,)),
            "bar": (self._barrier, (1, 3)),
            "barrier": (self._barrier, (0, 1, 3)),
            "atom": (self._atomic, (3, 4)),
            "red": (self._atomic_alone, (2,)),
            "prefetch": (self._prefetch, (1,)),
            "prefetchu": (self._prefetch, (1,)),
            "setp": (self._compare, (3, 4)),
        }

    def _compute(self, spelling: str, operands: tuple[Operand, ...]) -> str:
        opcode = OPCODES.get(spelling)
        if opcode is None:
            self._refuse(f"the opcode {spelling}")
        target, *sources = operands
        if len(sources) != len(opcode.operands):
            self._refuse(f"{len(operands)} operands")
        wider = spelling.startswith("cvt")
        values = [
            self._value(o, k, wider=wider) for o, k in zip(sources, opcode.operands, strict=True)
        ]
        return self._store(
            target, f"{opcode.function}({', '.join(values)})", opcode.result, wider=wider
        )

    def _compare(self, rest: str, operands: tuple[Operand, ...]) -> str:
        """Setp, which may have a second result and a predicate that both are joined with."""
        target, *sources = operands
        words = rest.split(".")
        joined = words.pop(1) if len(words) > 1 and words[1] in ("and", "or", "xor") else ""
        opcode = OPCODES.get(".".join(["setp", *words]))
        if opcode is None or len(sources) != (3 if joined else 2):
            self._refuse(f"the opcode setp.{rest}")
        kinds = (*opcode.operands, "pred")
        values = [self._value(o, k) for o, k in zip(sources, kinds, strict=False)]
        holds = f"{opcode.function}({values[0]}, {values[1]})"
        sign = {"and": "&", "or": "|", "xor": "^", "": ""}[joined]
        other = f" {sign} u8({values[2]})" if joined else ""
        if not isinstance(target, Pair):
            return self._store(target, f"{holds}{other}", "pred")
        first = self._store(target.first, f"holds{other}", "pred")
        return (
            f"{{ const u8 holds = {holds}, fails = u8(!holds){other}; {first} "
            f"{self._store(target.second, 'fails', 'pred')} }}"
        )

    def _branch(self, rest: str, operands: tuple[Operand, ...]) -> str:
        (target,) = operands
        if rest not in ("", "uni") or not isinstance(target, Symbol) or target.name[0] != "L":
            self._refuse("the branch")
        turn = "TURN(); " if target.name in self.seen else ""
        return f"{turn}goto {target.name};"

    def _call(self, rest: str, operands: tuple[Operand, ...]) -> str:
        groups = [operand for operand in operands if isinstance(operand, Group)]
        (callee,) = [o for o in operands if isinstance(o, Symbol)] or [Symbol("?")]
        if rest not in ("", "uni") or callee.name not in self.program.module.functions:
            self._refuse(f"the call of {callee.name}")
        passed = [symbol.name for group in groups for symbol in group.names]
        before = self._waited(0)
        return f"{before}ptx_{callee.name}({', '.join(map(_plain, passed))});"

    def _move(self, kind: str, operands: tuple[Operand, ...]) -> str:
        target, value = operands
        if kind not in WIDTHS or kind in ("f16", "bf16") or WIDTHS[kind] == 8:
            self._refuse(f"the opcode mov.{kind}")
        if isinstance(value, Vector):
            part = self._part(kind, value)
            mask = (1 << WIDTHS[part]) - 1
            joined = " | ".join(
                f"(u64)({self._value(item, part)} & 0x{mask:x}ull) << {i * WIDTHS[part]}"
                for i, item in enumerate(value.items)
            )
            return self._store(target, joined, kind)
        if isinstance(target, Vector):
            part = self._part(kind, target)
            lines = [f"const u64 whole = {self._value(value, kind)};"] + [
                self._store(item, f"{cpp_type(part)}(whole >> {i * WIDTHS[part]})", part)
                for i, item in enumerate(target.items)
                if item is not None
            ]
            return "{ " + " ".join(lines) + " }"
        return self._store(target, self._value(value, kind), kind)

    def _part(self, kind: str, vector: Vector) -> str:
        bits = WIDTHS[kind] // max(1, len(vector.items))
        if len(vector.items) not in (2, 4) or bits not in (16, 32):
            self._refuse("the vector")
        return f"b{bits}"

    def _convert_address(self, rest: str, operands: tuple[Operand, ...]) -> str:
        target, source = operands
        space = rest.removeprefix("to.").removesuffix(".u64")
        if not rest.endswith(".u64") or space not in _SPACES:
            self._refuse(f"the opcode cvta.{rest}")
        value = self._value(source, "u64")
        if space.startswith("shared"):
            function = "shared_offset" if rest.startswith("to.") else "shared_address"
            value = f"{function}({value})"
        return self._store(target, value, "u64")

    def _map_address(self, rest: str, operands: tuple[Operand, ...]) -> str:
        target, address, rank = operands
        space, _, kind = rest.rpartition(".")
        if kind not in ("u32", "u64") or space not in ("", "shared::cluster"):
            self._refuse(f"the opcode mapa.{rest}")
        at, number = self._value(address, kind), self._value(rank, "u32")
        function = "mapped_shared" if space else "mapped"
        return self._store(target, f"{function}({at}, {number})", kind)

    # Memory

    def _waited(self, size: int, access: str = "nothing") -> str:
        """Check that a thread of a kernel that waits has waited, before it accesses or ends."""
        return f"after_wait(waited, {access}, {size}); " if self.waits else ""

    def _load(self, rest: str, operands: tuple[Operand, ...]) -> str:
        target, source = operands
        space, kind, count = self._access(rest)
        pointer = self._pointer(space, source, count * WIDTHS[kind] // 8, write=False)
        items = target.items if isinstance(target, Vector) else (target,)
        if len(items) != count:
            self._refuse("the vector")
        element = cpp_type(kind)
        loads = [
            self._store(item, f"get<{element}>(at, {i})", kind, wider=True)
            for i, item in enumerate(items)
            if item is not None
        ]
        before = self._outside(space, count * WIDTHS[kind] // 8, "reading")
        return f"{{ {before}const u8* const at = {pointer}; {' '.join(loads)} }}"

    def _save(self, rest: str, operands: tuple[Operand, ...]) -> str:
        target, source = operands
        space, kind, count = self._access(rest)
        if space == "const" or "nc" in rest.split("."):
            self._refuse(f"the opcode st.{rest}")
        pointer = self._pointer(space, target, count * WIDTHS[kind] // 8, write=True)
        items = source.items if isinstance(source, Vector) else (source,)
        if len(items) != count:
            self._refuse("the vector")
        element = cpp_type(kind)
        values = [self._value(item, kind, wider=True) for item in items]
        saves = [f"put<{element}>(at, {i}, {value});" for i, value in enumerate(values)]
        before = self._outside(space, count * WIDTHS[kind] // 8, "writing")
        return f"{{ {before}u8* const at = {pointer}; {' '.join(saves)} }}"

    def _outside(self, space: str, size: int, access: str) -> str:
        """`_waited`, of a space that may be the device's memory."""
        return self._waited(size, access) if space in ("generic", "global") else ""

    def _access(self, rest: str) -> tuple[str, str, int]:
        """The space, type and number of elements of ld and st."""
        *words, kind = rest.split(".")
        space, count = "generic", 1
        for word in words:
            if word in _SPACES:
                space = "cluster" if word == "shared::cluster" else word.partition("::")[0]
            elif word in ("v2", "v4", "v8"):
                count = int(word[1])
            elif word not in _HINTS:
                self._refuse(f"the modifier .{word}")
        if kind not in WIDTHS or kind in ("pred", "f16", "bf16") or count * WIDTHS[kind] > 256:
            self._refuse(f"the type .{kind}")
        return space, kind, count

    def _pointer(self, space: str, operand: Operand, size: int, *, write: bool) -> str:
        """The host's address of what stands in brackets, checked here or when it runs."""
        if not isinstance(operand, Address):
            self._refuse("the address")
        base, offset = operand.base, operand.offset
        if isinstance(base, Symbol) and space in ("param", "local"):
            return self._fixed(base.name, offset, size)
        address = f"{self._value(base, self._address_kind(base))} + {offset & (1 << 64) - 1}ull"
        flag = "true" if write else "false"
        if space in ("param", "local"):
            start, length = self._own_memory(space)
            return f"within<{size}>({address}, {flag}, {start}, {length})"
        if space in ("shared", "cluster"):  # addresses in 32 bits wrap
            narrow = isinstance(base, Register) and WIDTHS[base.kind] == 32
            address = f"u32({address})" if narrow else address
        name = "generic" if space == "const" else space
        return f"{name}<{size}>({address}, {flag})"

    def _address_kind(self, base: Operand) -> str:
        return base.kind if isinstance(base, Register) else "u64"

    def _fixed(self, name: str, offset: int, size: int) -> str:
        if name in self.offsets:
            start, length = self.offsets[name]
            text = f"P + {start + offset}"
        elif name in self.arrays:
            start, length = 0, self.arrays[name].size
            text = f"{_plain(name)} + {offset}"
        else:
            self._refuse(f"the symbol {name}")
        if not 0 <= offset <= length - size or (start + offset) % size:
            self._refuse(f"{name} has {length} bytes")
        return text

    def _own_memory(self, space: str) -> tuple[str, int]:
        if space == "param" and self.function.is_entry:
            return "P", self.parameter_bytes
        found = [v for v in self.arrays.values() if v.space == space]
        if len(found) != 1:
            self._refuse(f"an address in one of {len(found)} variables")
        return _plain(found[0].name), found[0].size

    def _atomic(self, rest: str, operands: tuple[Operand, ...]) -> str:
        target, *rest_of = operands
        before, value, after, kind = self._atomic_value(rest, tuple(rest_of))
        return f"{{ {before}{self._store(target, value, kind)} {after}}}"

    def _atomic_alone(self, rest: str, operands: tuple[Operand, ...]) -> str:
        before, value, after, _ = self._atomic_value(rest, operands)
        return f"{{ {before}{value}; {after}}}"

    def _atomic_value(self, rest: str, operands: tuple[Operand, ...]) -> tuple[str, str, str, str]:
        *words, operation, kind = rest.split(".")
        name = _ATOMICS.get(f"{operation}.{kind}")
        unknown = set(words) - _ORDERS - _SCOPES - {"global", "shared", "shared::cta"}
        swap = name == "COMPARE_AND_SWAP"
        if name is None or unknown or len(operands) != 2 + swap:
            self._refuse(f"the opcode {rest}")
        at, *values = operands
        if not isinstance(at, Address):
            self._refuse("the address")
        address = f"{self._value(at.base, self._address_kind(at.base))} + {at.offset}ull"
        is_shared = any(word.startswith("shared") for word in words)
        if is_shared:
            address = f"shared_base() + ({address})"
        first, second = (*(self._value(v, kind) for v in values), "0")[:2]
        new, old = (second, first) if swap else (first, "0")
        size = WIDTHS[kind] // 8
        value = f"atomic(EMU_ATOMIC_{name}, {address}, {size}, {new}, {old})"
        before = self._outside("shared" if is_shared else "generic", size, "reading")
        release = "emu_fence(); " if {"release", "acq_rel"} & set(words) else ""
        acquire = "emu_fence(); " if {"acquire", "acq_rel"} & set(words) else ""
        return before + release, value, acquire, kind

    def _prefetch(self, rest: str, operands: tuple[Operand, ...]) -> str:
        is_known = rest in ("L1", "L2", "global.L1", "global.L2")
        if not is_known or not isinstance(operands[0], Address):
            self._refuse(f"the opcode prefetch.{rest}")
        return ";"

    # Warps and blocks

    def _barrier(self, rest: str, operands: tuple[Operand, ...]) -> str:
        words = [word for word in rest.split(".") if word not in ("cta", "aligned")]
        if words[0] == "cluster":
            return self._cluster_barrier(".".join(words[1:]), operands)
        if words == ["warp", "sync"] and len(operands) == 1:
            return f"emu_warp(EMU_SYNC_WARP, {self._value(operands[0], 'b32')}, 0, 0, 32);"
        reduced = words[0] == "red"
        number = operands[1] if reduced and len(operands) == 3 else operands[0]
        if number != Immediate(0):
            self._refuse("a barrier other than 0")
        if words == ["sync"] and len(operands) == 1:
            return "emu_barrier(0);"
        kinds = {"popc.u32": "u32", "and.pred": "pred", "or.pred": "pred"}
        operation = ".".join(words[1:])
        if not reduced or operation not in kinds or len(operands) != 3:
            self._refuse(f"the opcode bar.{rest}")
        value = f"barrier_{words[1]}({self._value(operands[2], 'pred')})"
        return self._store(operands[0], value, kinds[operation])

    def _cluster_barrier(self, rest: str, operands: tuple[Operand, ...]) -> str:
        arrives = rest in ("arrive", "arrive.release")
        if operands or not (arrives or rest in ("wait", "wait.acquire")):
            self._refuse(f"the opcode barrier.cluster.{rest}")
        return "emu_cluster_arrive();" if arrives else "emu_cluster_wait();"

    def _shuffle(self, rest: str, operands: tuple[Operand, ...]) -> str:
        words = rest.split(".")
        if words[:1] != ["sync"] or words[2:] != ["b32"]:
            self._refuse(f"the opcode shfl.{rest}")
        if words[1] not in ("up", "down", "bfly", "idx"):
            self._refuse(f"the modifier .{words[1]}")
        target, *sources = operands
        value, by, limit, mask = (self._value(source, "b32") for source in sources)
        first, second = (
            (target.first, target.second) if isinstance(target, Pair) else (target, None)
        )
        stored = self._store(first, f"shuffled({value}, from.lane, {mask})", "b32")
        inside = self._store(second, "from.inside", "pred") if second else ""
        return f"{{ const Partner from = partner<{words[1]}>({by}, {limit}); {stored} {inside} }}"

    def _vote(self, rest: str, operands: tuple[Operand, ...]) -> str:
        names = {"sync.ballot.b32": ("ballot", "b32")} | {
            f"sync.{what}.pred": (f"vote_{what}", "pred") for what in ("all", "any", "uni")
        }
        if rest not in names:
            self._refuse(f"the opcode vote.{rest}")
        function, kind = names[rest]
        value, mask = self._value(operands[1], "pred"), self._value(operands[2], "b32")
        return self._store(operands[0], f"{function}({value}, {mask})", kind)

    def _active_mask(self, rest: str, operands: tuple[Operand, ...]) -> str:
        if rest != "b32":
            self._refuse(f"the opcode activemask.{rest}")
        return self._store(operands[0], "activemask()", "b32")

    def _reduce(self, rest: str, operands: tuple[Operand, ...]) -> str:
        words = rest.split(".")
        signed = dict.fromkeys(("add", "min", "max"), ("u32", "s32"))
        kinds = signed | dict.fromkeys(("and", "or", "xor"), ("b32",))
        if len(words) != 3 or words[0] != "sync" or words[2] not in kinds.get(words[1], ()):
            self._refuse(f"the opcode redux.{rest}")
        target, value, mask = operands
        call = f"redux<{words[1]}_all, {words[2]}>"
        return self._store(
            target, f"{call}({self._value(value, 'b32')}, {self._value(mask, 'b32')})", "b32"
        )

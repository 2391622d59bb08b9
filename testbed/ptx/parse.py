"""Reads PTX as NVRTC writes it; whatever is not known is an error, never skipped.

A module is first cut into its functions, which is quick; a function's body is read only once its
kernel is asked for. Registers and labels of nested scopes get names of their own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)
    |(?P<newline>\n)
    |(?P<text>"[^"]*")
    |(?P<number>-?\d\w*)
    |(?P<word>[%$A-Za-z_.][\w$]*(?:(?:\.|::)[\w$]+)*)
    |(?P<mark>[][{}()<>,;:+!@|=])""",
    re.VERBOSE,
)
_CUT = re.compile(r'[{};]|//[^\n]*|"[^"]*"')
_HEADER = re.compile(r"[ \t]*\.(version|target|address_size|file)\b[^\n]*")
_FUNCTION = re.compile(r"\s*(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b")
_DEBUG = re.compile(r"(?:\s|//[^\n]*\n)*\.section\s+\.debug_\w+\s*\{")  # names for debuggers
_INSTRUCTION = re.compile(r"(@!?%\w+\s+)?[a-z]\w*[.;\s]")
_LOCATION = re.compile(r"\.loc[ \t]+\d+[ \t]+(\d+)[^\n]*")
_COMMENT = re.compile(r"//[^\n]*")
_NUMBERED = re.compile(r"(%[\w$]*?)(\d+)$")
SIZES = {"pred": 1} | {f"{k}{bits}": bits // 8 for k in "busf" for bits in (8, 16, 32, 64)}
SPECIAL = {
    f"%{name}.{axis}"
    for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid")
    for axis in "xyz"
} | {
    *("%laneid", "%warpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt"),
    *("%lanemask_ge", "%clock64", "%cluster_ctarank", "%cluster_nctarank"),
    *("%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_nctaid.z"),
}


class UnsupportedPtxError(RuntimeError):
    """PTX that this machine does not know: the message has the function, the line and the text."""

    def __init__(self, function: str, line: int, text: str) -> None:
        super().__init__(f"{function}, line {line} of the PTX: {text}")
        self.function = function
        self.line = line
        self.text = text


@dataclass(frozen=True)
class Register:
    """A register under its name in C++, which no other scope has."""

    name: str
    kind: str
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """A register that the hardware fills in, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A number in the text; of a floating one, the bits of ``width``."""

    value: int
    width: int | None = None


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or parameter, or a function's name."""

    name: str


@dataclass(frozen=True)
class Address:
    """An address in brackets."""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """Operands in braces; None for ``_``, a place that is not wanted."""

    items: tuple[Register | Immediate | None, ...]


@dataclass(frozen=True)
class Pair:
    """Two results, as in ``%r1|%p1``."""

    first: Register
    second: Register


@dataclass(frozen=True)
class Group:
    """Operands in parentheses: what a call passes or gets."""

    names: tuple[Symbol, ...]


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair | Group | None


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``line`` counts from the function's first."""

    line: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None = None


@dataclass(frozen=True)
class Label:
    """A place to branch to."""

    line: int
    name: str


@dataclass(frozen=True)
class Variable:
    """Memory with a name: a parameter, or a variable of any space."""

    name: str
    space: str
    size: int  # in bytes; 0 for the block's dynamic shared memory
    alignment: int
    initial: bytes | None = None


@dataclass
class Function:
    """A kernel, or a function that kernels call, read to the end."""

    name: str
    is_entry: bool
    parameters: list[Variable] = field(default_factory=list)
    returned: list[Variable] = field(default_factory=list)
    max_threads: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)


@dataclass(frozen=True)
class FunctionText:
    """A function as text, and where it begins in the module."""

    name: str
    text: str
    line: int

    @cached_property
    def content(self) -> str:
        """Return the text without comments and source lines, by which its library is kept."""
        return _COMMENT.sub("", _LOCATION.sub("", self.text))

    def source_line(self, line: int) -> int | None:
        """Return the line of the CUDA source that the function's ``line`` was made from."""
        return self._places[line - 1][0]

    def block_source_line(self, line: int) -> int | None:
        """Return the line of the CUDA source that the block from ``line`` on begins with."""
        following = (place for place, is_code in self._places[line - 1 :] if is_code)
        return next(following, None)

    @cached_property
    def _places(self) -> list[tuple[int | None, bool]]:
        """For each line, the line of the CUDA source and whether an instruction is on it."""
        places: list[tuple[int | None, bool]] = []
        found = None
        for text in map(str.strip, self.text.split("\n")):
            location = _LOCATION.match(text)
            if location and int(location[1]):  # 0: of no line in particular
                found = int(location[1])
            places.append((found, bool(_INSTRUCTION.match(text))))
        return places

    def parse(self) -> Function:
        """Return the function, read from its text."""
        return _Reader(self.name, self.text, self.line).function()


@dataclass(eq=False)
class Module:
    """A PTX module: its functions as text, and its variables. Equal only to itself."""

    functions: dict[str, FunctionText] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    @classmethod
    def of(cls, ptx: str) -> Module:
        """Return the module of a text, cut at its top level."""
        ptx = _HEADER.sub("", ptx)
        module = cls()
        start = depth = 0
        for mark in _CUT.finditer(ptx):
            if mark[0] not in "{};":
                continue
            depth += (mark[0] == "{") - (mark[0] == "}")
            if depth:
                continue
            function = _FUNCTION.match(_blank_comments(ptx[start : mark.end()]))
            if mark[0] == "}" and not function and not _DEBUG.match(ptx, start):
                continue  # of a variable's initial value
            if _DEBUG.match(ptx, start):
                start = mark.end()
                continue
            module._add(ptx[start : mark.end()], ptx.count("\n", 0, start) + 1, bool(function))
            start = mark.end()
        if rest := _blank_comments(ptx[start:]).strip():
            line = ptx.count("\n", 0, ptx.index(rest[:1], start)) + 1
            raise UnsupportedPtxError("module", line, rest)
        return module

    def _add(self, text: str, line: int, is_function: bool) -> None:
        blank = len(text) - len(_blank_comments(text).lstrip())
        line += text.count("\n", 0, blank)
        text = text[blank:]
        if not is_function:
            variable = _Reader("module", text, line).variable()
            self.variables[variable.name] = variable
        elif not text.endswith(";"):  # else it is declared here and defined later
            head = _blank_comments(text).partition("{")[0]
            name = _Reader("module", f"{head}{{", line).head().name
            self.functions[name] = FunctionText(name, text, line)


def _blank_comments(text: str) -> str:
    return _COMMENT.sub(lambda comment: " " * len(comment[0]), text)


class _Reader:
    """Goes through the tokens of one function or variable."""

    def __init__(self, name: str, text: str, first_line: int) -> None:
        self._name = name
        self._lines = text.split("\n")
        self._first = first_line
        self._tokens: list[tuple[str, int]] = []
        self._at = 0
        self._scopes: list[_Scope] = []
        self._opened = 0
        self._tokenize(text)

    def _tokenize(self, text: str) -> None:
        line, at = 1, 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                self._tokens.append((text[at], line))
                self._at = len(self._tokens) - 1
                self._refuse()
            at = token.end()
            if token.lastgroup == "newline":
                line += 1
            elif token.lastgroup != "skip":
                self._tokens.append((token[0], line))

    def _refuse(self, why: str = "") -> NoReturn:
        line = self._tokens[min(self._at, len(self._tokens) - 1)][1]
        text = self._lines[line - 1].strip()
        reason = f"{text} ({why})" if why else text
        raise UnsupportedPtxError(self._name, self._first + line - 1, reason)

    # Tokens

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def _line(self) -> int:
        return self._tokens[min(self._at, len(self._tokens) - 1)][1]

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _accept(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self._at += 1
        return True

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            self._refuse(f"{token!r} was expected")

    def _number(self) -> int:
        text = self._peek()
        try:
            value = int(text.rstrip("U"), 0)
        except ValueError:
            self._refuse(f"{text!r} is no integer")
        self._at += 1
        return value

    # Functions and variables

    def head(self) -> Function:
        """Read a function's head."""
        while self._peek() in (".visible", ".weak", ".extern"):
            self._at += 1
        is_entry = self._next() == ".entry"
        returned = [] if is_entry or self._peek() != "(" else self._parameters()
        function = Function(self._next(), is_entry, returned=returned)
        if self._peek() == "(":
            function.parameters = self._parameters()
        while self._peek() not in ("{", ";"):
            directive = self._next()
            if directive in (".maxntid", ".reqntid"):
                function.max_threads = math.prod(self._numbers())
            elif directive == ".reqnctapercluster":
                x, y, z = (*self._numbers(), 1, 1)[:3]
                function.cluster = x, y, z
            elif directive in (".minnctapersm", ".maxnreg"):
                self._number()
            elif directive not in (".noreturn", ".explicitcluster"):
                self._at -= 1
                self._refuse()
        return function

    def _numbers(self) -> list[int]:
        values = [self._number()]
        while self._accept(","):
            values.append(self._number())
        return values

    def _parameters(self) -> list[Variable]:
        self._expect("(")
        found = []
        while not self._accept(")"):
            found.append(self._declared())
            self._accept(",")
        return found

    def function(self) -> Function:
        """Read a whole function."""
        self._function = self.head()
        self._expect("{")
        self._open_scope()
        while self._scopes:
            self._statement()
        return self._function

    def variable(self) -> Variable:
        """Read a variable of the module."""
        while self._peek() in (".visible", ".weak", ".extern"):
            self._at += 1
        found = self._declared()
        self._expect(";")
        return found

    def _declared(self) -> Variable:
        space = self._next()[1:]
        if space not in ("param", "shared", "local", "global", "const"):
            self._at -= 1
            self._refuse()
        alignment = self._number() if self._accept(".align") else 0
        kind = self._next()[1:]
        if kind not in SIZES:
            self._at -= 1
            self._refuse(f"the type {kind!r}")
        if self._accept(".ptr"):
            self._pointer_attributes()
        name, size = self._next(), SIZES[kind]
        if self._accept("["):
            size *= 0 if self._peek() == "]" else self._number()
            self._expect("]")
        initial = self._initial(SIZES[kind], size) if self._accept("=") else None
        return Variable(name, space, size, alignment or SIZES[kind], initial)

    def _pointer_attributes(self) -> None:
        while self._peek() in (".global", ".shared", ".const", ".local"):
            self._at += 1
        if self._accept(".align"):
            self._number()

    def _initial(self, item: int, size: int) -> bytes:
        values = []
        if self._accept("{"):
            while not self._accept("}"):
                values.append(self._immediate().value)
                self._accept(",")
        else:
            values.append(self._immediate().value)
        content = b"".join((v % (1 << 8 * item)).to_bytes(item, "little") for v in values)
        return content.ljust(size, b"\0")

    # Bodies

    def _open_scope(self) -> None:
        self._scopes.append(_Scope(self._opened))
        self._opened += 1
        depth, at = 1, self._at
        while depth and at < len(self._tokens):  # labels may be used before they come
            token = self._tokens[at][0]
            depth += (token == "{") - (token == "}")
            if depth == 1 and self._tokens[at + 1 : at + 2] and self._tokens[at + 1][0] == ":":
                self._scopes[-1].labels.add(token)
            at += 1

    def _statement(self) -> None:
        if self._accept("{"):
            self._open_scope()
        elif self._accept("}"):
            self._scopes.pop()
        elif self._accept(".loc"):
            for _ in range(3):
                self._number()
            while self._peek() in (",", "function_name", "inlined_at"):
                self._skip_inlined()
        elif self._accept(".reg"):
            self._registers()
        elif self._accept(".pragma"):
            self._pragma()
        elif self._peek() in (".shared", ".local", ".param"):
            self._function.variables.append(self._declared())
            self._expect(";")
        elif self._tokens[self._at + 1 : self._at + 2] and self._tokens[self._at + 1][0] == ":":
            self._function.body.append(Label(self._line, self._label(self._next()) or ""))
            self._expect(":")
        else:
            self._instruction()

    def _skip_inlined(self) -> None:
        line = self._line
        while self._line == line:
            self._at += 1

    def _pragma(self) -> None:
        text = self._next()
        if not text.startswith(('"nounroll', '"used_bytes_mask')):
            self._at -= 1
            self._refuse()
        self._expect(";")

    def _registers(self) -> None:
        kind = self._next()[1:]
        if kind not in SIZES:
            self._at -= 1
            self._refuse(f"the type {kind!r}")
        while True:
            name = self._next()
            if self._accept("<"):
                self._scopes[-1].numbered[name] = kind, self._number()
                self._expect(">")
            else:
                self._scopes[-1].named[name] = kind
            if self._accept(";"):
                return
            self._expect(",")

    def _instruction(self) -> None:
        line, guard = self._line, None
        if self._accept("@"):
            guard = self._register(negated=self._accept("!"))
        opcode = self._next()
        if not opcode[:1].isalpha():
            self._at -= 1
            self._refuse()
        operands: list[Operand] = []
        while not self._accept(";"):
            operands.append(self._operand())
            if self._peek() != ";":
                self._expect(",")
        self._function.body.append(Instruction(line, opcode, tuple(operands), guard))

    def _operand(self) -> Operand:
        token = self._peek()
        if token == "[":
            return self._address()
        if token == "{":
            return self._vector()
        if token == "(":
            return self._group()
        if token == "_":
            self._at += 1
            return None
        if token == "!":
            self._at += 1
            return self._register(negated=True)
        if token[:1].isdigit() or token[:1] == "-":
            return self._immediate()
        if token in SPECIAL:
            return Special(self._next())
        return self._named()

    def _named(self) -> Operand:
        token = self._peek()
        if token[:1] != "%" and self._find(token) is None:
            label = self._label(token)
            if label is None and not re.match(r"[$A-Za-z_]", token):
                self._refuse(f"the operand {token!r}")
            self._at += 1
            return Symbol(label or token)
        first = self._register()
        return Pair(first, self._register()) if self._accept("|") else first

    def _immediate(self) -> Immediate:
        token = self._peek()
        if token[:2] in ("0f", "0F", "0d", "0D"):
            width = 32 if token[1] in "fF" else 64
            if len(token) != 2 + width // 4:
                self._refuse(f"the number {token!r}")
            self._at += 1
            return Immediate(int(token[2:], 16), width)
        return Immediate(self._number())

    def _address(self) -> Address:
        self._expect("[")
        base = self._operand()
        if not isinstance(base, (Register, Symbol, Immediate)):
            self._refuse("the address")
        offset = self._number() if self._accept("+") else 0
        self._expect("]")
        return Address(base, offset)

    def _vector(self) -> Vector:
        self._expect("{")
        items: list[Register | Immediate | None] = []
        while not self._accept("}"):
            item = self._operand()
            if item is not None and not isinstance(item, (Register, Immediate)):
                self._refuse("the vector")
            items.append(item)
            self._accept(",")
        return Vector(tuple(items))

    def _group(self) -> Group:
        self._expect("(")
        names = []
        while not self._accept(")"):
            names.append(Symbol(self._next()))
            self._accept(",")
        return Group(tuple(names))

    # Names

    def _register(self, *, negated: bool = False) -> Register:
        found = self._find(self._peek())
        if found is None:
            self._refuse(f"the register {self._peek()!r} is not declared")
        self._at += 1
        self._function.registers[found[0]] = found[1]
        return Register(*found, negated)

    def _find(self, name: str) -> tuple[str, str] | None:
        numbered = _NUMBERED.match(name)
        for scope in reversed(self._scopes):
            unique = f"{name.lstrip('%').replace('$', '_')}_{scope.number}"
            if name in scope.named:
                return unique, scope.named[name]
            if numbered and numbered[1] in scope.numbered:
                kind, count = scope.numbered[numbered[1]]
                if int(numbered[2]) < count:
                    return unique, kind
        return None

    def _label(self, name: str) -> str | None:
        for scope in reversed(self._scopes):
            if name in scope.labels:
                return f"L{name.replace('$', '_')}_{scope.number}"
        return None


@dataclass
class _Scope:
    number: int
    named: dict[str, str] = field(default_factory=dict)
    numbered: dict[str, tuple[str, int]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)

"""What is compiled for the table: each kernel file with macros, and list kernels by dtype."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradkit._cuda.launch.kernels import options_of, source_of
from gradkit._dtypes import FLOATS

_SWITCH = re.compile(r"(switch\s*\([^)]*\)\s*\{\s*)FOR_EACH_DTYPE\((\w+)\)")
_NAMES = {row.cxx: row.name for row in FLOATS.values()}


@dataclass(frozen=True)
class Case:
    """A kernel file and its macros, as -D has them, such as ``DATA_T=bf16``.

    ``dtype`` is the only one in the switch of a list kernel, if there is one: NumPy's name.
    """

    file: str
    macros: tuple[str, ...]
    dtype: str | None = None

    @classmethod
    def of(cls, file: str, dtype: str | None = None, **macros: str | int) -> Case:
        """Make a case of macros as launchers have them."""
        options = (option.removeprefix("-D") for option in options_of(macros)[1:])
        return cls(file, tuple(options), dtype)

    @property
    def title(self) -> str:
        """The dtype and the macros, which tell the case from others of its file."""
        dtypes = [FLOATS[self.dtype].cxx] if self.dtype else []
        return " ".join([*dtypes, *self.macros])

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler is told."""
        return ("-std=c++17", *(f"-D{macro}" for macro in self.macros))

    @property
    def source(self) -> str:
        """The text that is compiled."""
        text = source_of(self.file)
        return only_dtype(text, self.dtype) if self.dtype else text


def only_dtype(source: str, dtype: str) -> str:
    """Return a list kernel's source whose switch over dtypes knows only ``dtype``.

    Four dtypes in one switch give one number of registers and all their loops one after another.
    """
    row = FLOATS[dtype]
    accumulation = FLOATS[row.accumulation].cxx
    case = rf"\g<1>\g<2>({row.code}, {row.cxx}, Real<{accumulation}>)"
    cut, count = _SWITCH.subn(case, source)
    if count != 1:
        raise ValueError(f"{count} switches over dtypes in the source, not one")
    return cut


def dtype_called(name: str) -> str:
    """Return NumPy's name of a dtype, given either its name there or in the kernels."""
    found = _NAMES.get(name, name)
    if found not in FLOATS:
        raise ValueError(f"no dtype {name!r}: there are {', '.join(_NAMES)}")
    return found

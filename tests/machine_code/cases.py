"""Cases of the table: each kernel file with its macros."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradkit._cuda.launch.kernels import Macros, options_of, source_of
from gradkit._cuda.list_tables import CAPACITY, UNIT_CAPACITY
from gradkit._dtypes import FLOATS, accumulation_name, dtype_named
from testbed.machine_code import Source
from tests.combinations import combinations, compiles_for

_NAMES = {row.cxx: row.name for row in FLOATS.values()}


@dataclass(frozen=True)
class Case:
    """A kernel file and its macros, as -D has them, such as ``DATA_T=bf16``."""

    file: str
    macros: tuple[str, ...]

    @classmethod
    def of(cls, file: str, **macros: str | int) -> Case:
        """Make a case of macros as launchers have them."""
        options = (option.removeprefix("-D") for option in options_of(macros)[1:])
        return cls(file, tuple(options))

    @property
    def title(self) -> str:
        """The macros, which tell the case from others of its file."""
        return " ".join(self.macros)

    def compiles_for(self, arch: int) -> bool:
        """Return whether an architecture has what the case needs."""
        return compiles_for(arch, self.file, {macro.partition("=")[0] for macro in self.macros})

    @property
    def source(self) -> Source:
        """The text and the options that are compiled."""
        options = ("-std=c++17", *(f"-D{macro}" for macro in self.macros))
        text = source_of(self.file)
        return Source(self.file, self.title, text, options, dynamic_shared(self.macros))


def dtype_called(name: str) -> str:
    """Return NumPy's name of a dtype, given either its name there or in the kernels."""
    found = _NAMES.get(name, name)
    if found not in FLOATS:
        raise ValueError(f"no dtype {name!r}: there are {', '.join(_NAMES)}")
    return found


def cases() -> list[Case]:
    """Return what the table has rows of: all that launchers ask for, thinned out by dtypes."""
    chosen = [
        Case.of(file, **macros) for file, macros in combinations() if _is_chosen(file, macros)
    ]
    return sorted(chosen, key=lambda case: (case.file, case.title))


def is_common(case: Case) -> bool:
    """Return whether a case is measured on every GPU: most training runs on its kernels.

    The others differ in what one architecture shows as well: float16, float64, accesses of one
    element, uploaded lists, norms that are rarely asked for.
    """
    words = {macro.partition("=")[2] for macro in case.macros}
    rare = {"f16", "f64", "Sum", "Largest", "SumOfPowers"} & words
    odd = {"VEC=1", "VEC=2", "PIECE=1", "CAPACITY=0", "FROM_OUTPUT=1", "LAST=1", "CHUNKS=0"}
    odd = {*odd, "LACKING=1"} & set(case.macros)
    return not rare and not odd and not {"GRAD=bf16", "BUFFER=f32"} <= set(case.macros)


def data_type(case: Case) -> str:
    """Return the dtype of a case's data, as the kernels call it; empty if it has none."""
    values = dict(macro.split("=", 1) for macro in case.macros)
    named = (values[name] for name in ("DATA_T", "GRAD", "PARAM_T", "LIST_T") if name in values)
    return next(named, "")


_ORDERS = {"SumOfSquares": tuple(FLOATS), "SumOfPowers": ("float32",)}  # others: two dtypes
_COMMON = ("bfloat16", "float32")
_OF_ANY = ("keep_if", "norms")  # files that are compiled for no dtype
_UPLOADED = ("norm", "clip_by_norm", "scale")  # files with rows of uploaded lists


def _dtypes(file: str, macros: Macros) -> tuple[str | None, ...]:
    """The dtypes of which a list kernel has rows; a switch over all four has one row of none.

    Its number of registers is the largest, and its loops come one after another.
    """
    if file in _OF_ANY:
        return (None,) if macros["CAPACITY"] == CAPACITY else ()
    order = str(macros.get("ORDER", "SumOfSquares"))
    if macros["CAPACITY"] == UNIT_CAPACITY:  # nearly the same loops
        return _COMMON if order == "SumOfSquares" else ()
    if macros["CAPACITY"] != CAPACITY:  # the same loops, and another table
        return ("bfloat16",) if order == "SumOfSquares" and file in _UPLOADED else ()
    return ("bfloat16",) if file == "zero" else _ORDERS.get(order, _COMMON)


_TYPES = {
    ("bfloat16", "float32", "bfloat16"),
    ("float16", "float32", "float16"),
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
}
_ADDED = {("float16",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")} | {
    *(("float32",) * 2, ("float64",) * 2),
}


def _is_chosen(file: str, macros: Macros) -> bool:
    """True if a combination has rows: one for each kind of code, not for each mix of dtypes."""
    if "PARAM" in macros:  # with moments of the type that is computed with
        alike = macros["STATE"] == accumulation_name(str(macros["PARAM"]))
        kind = macros["GRAD"], macros["PARAM"]
        return macros["CAPACITY"] != 0 and alike and kind in _ADDED
    if "GRAD" in macros:
        return macros["CAPACITY"] != 0 and (macros["GRAD"], macros["BUFFER"]) in _ADDED
    if "CAPACITY" in macros:
        return macros.get("LIST_T") in _dtypes(file, macros)
    if "ACC_T" in macros:
        return macros.get("PARAM_T", macros.get("STAT_T")) != "float16"
    if "DATA_T" not in macros:
        return True
    types = tuple(macros[name] for name in ("DATA_T", "STAT_T", "PARAM_T"))
    is_layer_norm = (macros.get("CENTRED", 1), macros.get("FROM_OUTPUT", 0)) == (1, 0)
    plain = is_layer_norm and not macros.get("LAST", 0)
    if macros.get("THREADS", 512) != 512 and (not plain or types[0] not in _COMMON):
        return False  # the loops of more threads, with more registers
    if macros.get("FURTHER"):
        return types in _TYPES and types[0] in _COMMON and not macros.get("FROM_OUTPUT")
    if macros.get("STRIDED"):  # the loops of plain rows
        added = bool(macros.get("ADDED"))
        in_pieces = macros.get("PIECE", macros["VEC"]) != macros["VEC"]
        return (
            macros["VEC"] == 8
            and types == ("bfloat16", "float32", "bfloat16")
            and (
                (plain and not added)
                if in_pieces
                else plain or (added and not macros.get("FROM_OUTPUT"))
            )
        )
    if int(macros["VEC"]) < 16 // dtype_named(types[0]).itemsize:
        return plain and types == ("bfloat16", "float32", "bfloat16")
    return types in _TYPES and (plain or types[0] in _COMMON)


def dynamic_shared(macros: Iterable[str]) -> int:
    """Return the bytes of shared memory that the launcher asks for."""
    values = dict(macro.split("=", 1) for macro in macros)
    if values.get("LONG", "0") == "0":
        return 0
    planes = 1 + int(values["CENTRED"])
    column = planes * (8 if values["DATA_T"] == "f64" else 4)
    if values["LONG"] == "2":
        column += int(values["PARAM_T"].lstrip("bf")) // 8
    return int(values["CHUNKS"]) * int(values["VEC"]) * int(values["THREADS"]) * column

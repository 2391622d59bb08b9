"""Base of all records: fields by role, and the plan of a call.

A record is a class with a field for each argument, in the order of the public function, and one
for each result. All else follows from the fields and their roles: which shapes and dtypes fit, the
texts of errors, the results and what memory they may share, and the key under which the plan of a
call is found again.
"""

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, dataclass_transform, get_args

import numpy as np

from gradkit._backend import Shape, Spec
from gradkit._calls.roles import Grads, In, InOut, Out, Passing, Rare
from gradkit._dtypes import Types


class Described(NamedTuple):
    """All that a plan may know of an argument: no address and no value."""

    label: str
    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape

    @classmethod
    def of(cls, label: str, array: Any) -> "Described":
        """The description of a backend's array."""
        return cls(label, array.shape, array.dtype, array.strides)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


class Argument(NamedTuple):
    """An array that an operation reads."""

    name: str
    role: Any
    optional: bool  # it may be None


class InPlace(NamedTuple):
    """An array that an operation reads and then writes."""

    name: str
    role: Any
    optional: bool  # it may be None
    instead: str  # what to do with arrays that are never written
    may_be: tuple[str, ...]  # the arguments that it may be


class Result(NamedTuple):
    """An array that an operation writes."""

    name: str
    role: Any
    may_be: tuple[str, ...]  # the arguments whose memory it may have
    if_: str | None  # there is no such result if this argument is None


class Listed(NamedTuple):
    """A list of arrays, as compiled code reads it."""

    name: str
    written: bool
    partner: bool  # whether each array belongs to that at the same place in the first list
    may_be: bool  # and may be the very one
    optional: bool  # it may be None


class Plan:
    """Plan of a call: all that shapes, dtypes, strides and numbers decide, decided once.

    ``results`` are the outputs, ``missing`` those that the caller has no array for, if there are
    any; ``options`` the numbers as checked: an axis as an index; ``changed`` those that a check has
    changed; ``widened`` the arguments that a backend gets in float64; ``backend`` what computes;
    ``gapless`` whether the caller's arrays have elements, without gaps in memory; ``passed`` the
    plain numbers of the last call that no plan depends on, and behind them those that a check has
    changed, by name. A backend keeps in ``launcher`` what it would otherwise decide again in each
    call, and a library that makes results in ``making`` how. ``library``: that of the arrays, if it
    is not NumPy; ``on_host`` whether those are on the host; ``compute`` what computes the plan's
    calls. ``by_name``: calls like it are not planned, but opened argument by argument.
    """

    __slots__ = (
        *("backend", "by_name", "changed", "compute", "gapless", "launcher", "library", "making"),
        *("missing", "on_host", "options", "passed", "results", "widened"),
    )
    backend: Any
    changed: tuple[tuple[str, Any], ...]
    compute: Callable[["Call"], None]
    gapless: bool
    launcher: Any
    library: Any
    making: Any
    missing: Sequence[Spec | None] | None
    on_host: bool
    passed: tuple[Any, ...] | None

    def __init__(
        self,
        results: tuple[Spec | None, ...],
        options: dict[str, Any],
        widened: tuple[str, ...] = (),
    ):
        self.results, self.options, self.widened = results, options, widened
        self.gapless = self.by_name = self.on_host = False
        self.launcher = self.library = self.making = self.passed = None

    def computed_by(self, backend: Any, kind: "type[Call]") -> None:
        """Set the backend that computes calls of a kind."""
        self.backend = backend
        if kind.compute is Call.compute:
            self.compute = getattr(backend, kind.operation)  # a frame less than the method's
        else:
            self.compute = lambda call: call.compute(backend)


class Layout(Protocol):
    """Rules of the shapes and dtypes of a family of operations."""

    def plan(self, call: Any) -> Plan:
        """The plan of a call whose arrays are ``Described``, or the error of one that is wrong."""


def result(
    *, may_be: tuple[str, ...] = (), if_: str | None = None, init: Literal[False] = False
) -> Any:
    """A field for a result, as ``Result`` describes it."""
    assert init is False  # what a type checker reads
    return {"may_be": may_be, "if_": if_}


def partners(*, may_be: bool, instead: str = "") -> Any:
    """A field for a list whose arrays belong to those of the first one, as ``Listed`` says."""
    return {"may_be": may_be, "instead": instead}


def in_place(instead: str, *, may_be: tuple[str, ...] = ()) -> Any:
    """A field for an array that is written in place, as ``InPlace`` describes it."""
    return {"instead": instead, "may_be": may_be}


class Record:
    """Fields by name, which are given by keyword; a value in the class is a field's default.

    Not a dataclass: code generated for each of some forty classes slows the import of gradkit. Here
    it is generated in the first call.
    """

    fields: ClassVar[frozenset[str]]
    _required: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        """Read the fields."""
        cls.fields = frozenset(cls.__annotations__)
        cls._required = frozenset(name for name in cls.fields if name not in vars(cls))

    def __init__(self, **values: Any):
        kind = type(self)
        if not kind._required <= values.keys() <= kind.fields:
            name, wrong = kind.__name__, sorted(values.keys() ^ kind.fields)
            raise TypeError(f"{name} has other fields, or needs more: {', '.join(wrong)}")
        self.__dict__.update(values)
        # From the second call on by code of the class's own, in half the time.
        kind.__init__ = _initializer(sorted(kind._required), sorted(kind.fields - kind._required))  # type: ignore[method-assign]

    def replaced(self, **changed: Any) -> Self:
        """A copy with other values in some fields."""
        return type(self)(**{k: v for k, v in vars(self).items() if k in self.fields} | changed)


def _initializer(required: list[str], others: list[str]) -> Callable[..., None]:
    """A class's ``__init__``; a field that is left out keeps its default."""
    parameters = ", ".join([*required, *(f"{name}=LEFT_OUT" for name in others)])
    body = [f"    self.{name} = {name}" for name in required]
    body += [f"    if {name} is not LEFT_OUT: self.{name} = {name}" for name in others]
    namespace: dict[str, Any] = {"LEFT_OUT": object()}
    exec(f"def __init__(self, *, {parameters}):\n" + "\n".join(body), namespace)
    return namespace["__init__"]


@dataclass_transform(kw_only_default=True, field_specifiers=(result, in_place, partners))
class Call(Record):
    """One call of one operation: arguments, then results, all by name.

    The arrays are the caller's at first. Once the call is opened they are the backend's, numbers
    are checked, results are there to be written, and ``plan`` is set.
    """

    operation: ClassVar[str]  # of a backend: as the class is called, if it does not say
    types: ClassVar[tuple[Types, ...]]
    layout: ClassVar[Layout]
    arguments: ClassVar[tuple[Argument, ...]]
    results: ClassVar[tuple[Result, ...]]
    result_names: ClassVar[tuple[str, ...]]
    in_place: ClassVar[tuple[InPlace, ...]]
    numbers: ClassVar[dict[str, Callable[[Any, Any], Any] | None]]
    passing: ClassVar[dict[str, Callable[[Any, Any], Any]]]
    lists: ClassVar[tuple[Listed, ...]]
    rare: ClassVar[tuple[str, ...]]  # arguments of which no plan knows
    array_names: ClassVar[tuple[str, ...]]  # of arguments, read and written
    optional: ClassVar[frozenset[str]]  # those that may be None
    arrays: ClassVar[Callable[..., tuple[Any, ...]]]
    ordered: ClassVar[Callable[..., tuple[Any, ...]]]  # the same, those that are written first
    ordered_names: ClassVar[tuple[str, ...]]
    passed: ClassVar[Callable[..., tuple[Any, ...]]]  # numbers that no plan depends on
    instead: ClassVar[dict[str, str]]
    # True if arrays may take part in differentiation, and only their values count.
    detaches: ClassVar[bool] = True
    checks_values: ClassVar[bool]
    reads_values: ClassVar[bool] = False  # of arrays, or their dtypes, when it checks them
    options: ClassVar[Callable[..., Any]]  # the numbers and the class, as a plan's key has them
    # Names of what `options`, `passed` and `ordered` read, how many of the last are in place, the
    # lists, names of what must be absent, `detaches` and `reads_values`.
    key_names: ClassVar[tuple[Any, ...]]

    plan: Plan

    def __init_subclass__(cls) -> None:
        """Read the fields."""
        values = vars(cls)
        if "operation" not in values:
            cls.operation = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()
        cls.lists = _lists_of(cls)
        lists = {each.name for each in cls.lists}
        annotations = {
            name: kind for name, kind in cls.__annotations__.items() if name not in lists
        }
        cls.arguments = tuple(
            Argument(name, *_role(kind)) for name, kind in annotations.items() if _wraps(kind, In)
        )
        cls.in_place = tuple(
            InPlace(name, *_role(kind), **values[name])
            for name, kind in annotations.items()
            if _wraps(kind, InOut)
        )
        checked = {
            name: next(iter(getattr(kind, "__metadata__", ())), None)
            for name, kind in annotations.items()
            if not any(_wraps(kind, wrapper) for wrapper in (In, InOut, Out))
        }
        cls.rare = tuple(n for n, each in checked.items() if isinstance(each, Rare))
        cls.passing = {n: each.check for n, each in checked.items() if isinstance(each, Passing)}
        others = {*cls.passing, *cls.rare}
        cls.numbers = {n: check for n, check in checked.items() if n not in others}
        cls.results = tuple(
            Result(name, _role(kind)[0], **values[name])
            for name, kind in annotations.items()
            if _wraps(kind, Out)
        )
        cls.result_names = tuple(result.name for result in cls.results)
        cls.array_names = tuple(
            n for n, kind in annotations.items() if _wraps(kind, In) or _wraps(kind, InOut)
        )
        cls._read_names()
        super().__init_subclass__()

    @classmethod
    def _read_names(cls) -> None:
        """Derive names and readers from the fields."""
        cls.arrays = staticmethod(_values_of(cls.array_names))
        ordered = [*(each.name for each in cls.in_place), *(each.name for each in cls.arguments)]
        cls.ordered, cls.ordered_names = staticmethod(_values_of(ordered)), tuple(ordered)
        cls.passed = staticmethod(_values_of([*cls.passing]))
        fields: list[Argument | InPlace] = [*cls.arguments, *cls.in_place]
        cls.optional = frozenset(field.name for field in fields if field.optional)
        cls.instead = {each.name: each.instead for each in cls.in_place}
        cls.instead |= {e.name: vars(cls)[e.name]["instead"] for e in cls.lists if e.written}
        cls.checks_values = cls.check_values is not Call.check_values
        key = (*cls.numbers, "__class__", "__class__")
        cls.options = staticmethod(attrgetter(*key))
        own_names = key, tuple(cls.passing), cls.ordered_names
        ways = cls.detaches, cls.reads_values
        cls.key_names = *own_names, len(cls.in_place), cls.lists, cls.rare, *ways
        names = {each.name for each in cls.in_place} | {each.name for each in cls.lists}
        for name in (*cls.result_names, *(names & vars(cls).keys())):
            setattr(cls, name, None)

    def described(self, describe: Callable[[str, Any], Described]) -> Self:
        """The same call with descriptions in the place of arrays, as a plan is made for it.

        ``describe`` makes one of an argument's name and array.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        for name in self.array_names:
            array = getattr(self, name)
            if array is not None:
                other.__dict__[name] = describe(name, array)
            elif name not in self.optional:
                raise TypeError(f"{name} is a NoneType; expected an array")
        return other

    def check_values(self, opened: Any) -> None:
        """Raise if values are wrong that can be read without waiting for a device.

        ``opened``: the caller's arrays, of one library.
        """

    def compute(self, backend: Any) -> None:
        """Have a backend write the results."""
        getattr(backend, self.operation)(self)


def _wraps(kind: Any, wrapper: type) -> bool:
    return getattr(kind, "__origin__", None) is wrapper


def _lists_of(record: type) -> tuple[Listed, ...]:
    values = vars(record)
    kinds = {name: kind for name, kind in record.__annotations__.items() if _is_list(kind)}
    return tuple(
        Listed(
            name,
            written=_wraps(kind, InOut),
            partner=k > 0,
            may_be=bool(values.get(name, {}).get("may_be")),
            optional=_role(kind)[1],
        )
        for k, (name, kind) in enumerate(kinds.items())
    )


def _is_list(kind: Any) -> bool:
    if not (_wraps(kind, In) or _wraps(kind, InOut)):
        return False
    (inner,) = get_args(kind)
    return inner == Grads or Grads in get_args(inner)


def _role(kind: Any) -> tuple[Any, bool]:
    """The role in ``In[Scale | None]``, and whether it may be ``None``."""
    (inner,) = get_args(kind)
    roles = get_args(inner) or (inner,)
    return roles[0], NoneType in roles


def _values_of(names: Any) -> Callable[[Call], tuple[Any, ...]]:
    """Return a function of a record that reads fields as a tuple, without a Python frame."""
    if len(names) > 1:
        return attrgetter(*names)
    get = attrgetter(*names) if names else None
    return lambda call: (get(call),) if get else ()

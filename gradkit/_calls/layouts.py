"""How the arrays of a call must fit together, by their roles."""

from collections.abc import Iterable, Sequence
from typing import Any

from gradkit._backend import Shape, Spec
from gradkit._calls import checks, roles
from gradkit._calls.record import Call, Described, Plan
from gradkit._dtypes import DType, accumulation_name, check_combination, dtype_named


class Layout:
    """What layouts have in common; subclasses say which shapes go with the data's."""

    def __init__(self, data: str):
        self.data = data  # the name of the argument whose shape decides

    def statistic(self, call: Any) -> tuple[Shape, str]:
        """The shape of a statistic, and what it means."""
        raise NotImplementedError

    def parameter(self, call: Any) -> tuple[Shape, str]:
        """The shape of a parameter, and what it means."""
        raise NotImplementedError

    def order(self, data: Described) -> Any:  # noqa: ARG002
        """The memory order of results that are like the data; ``None``: C order."""
        return None

    def check_axis(self, call: Any) -> None:
        """Make the axis of a call an index."""
        raise NotImplementedError

    def check_shapes(self, call: Any) -> None:
        """Raise unless the shapes of all arguments fit."""
        source: Described = getattr(call, self.data)
        for array in _of(call, roles.DATA):
            if array is not source:
                checks.shape(array, source.shape, array.label, f"the shape of {source.label}")
        self.check_statistics(call, _of(call, roles.STATISTICS))
        shape, meaning = self.parameter(call)
        for array in _of(call, roles.PARAMETERS):
            checks.shape(array, shape, array.label, meaning)

    def check_statistics(self, call: Any, statistics: Sequence[Described]) -> None:
        """Raise unless statistics have one number for each of what they describe."""
        shape, meaning = self.statistic(call)
        for array in statistics:
            checks.shape(array, shape, array.label, meaning)

    def plan(self, call: Call) -> Plan:
        """The plan of a call whose arrays are ``Described``, or the error of one that is wrong."""
        for name, check in call.numbers.items():
            if check is not None:
                setattr(call, name, check(getattr(call, name), call))
        self.check_axis(call)
        self.check_shapes(call)
        checks.affine(getattr(call, "scale", None), getattr(call, "bias", None))
        data: Described = getattr(call, self.data)
        t, u, v = _types_of(call)
        shapes: dict[Any, tuple[Any, ...]] = {
            **dict.fromkeys(roles.DATA, (data.shape, t, self.order(data))),
            **dict.fromkeys(roles.STATISTICS, (self.statistic(call)[0], u)),
            **dict.fromkeys(roles.PARAMETERS, (self.parameter(call)[0], v)),
        }
        specs = []
        for result in call.results:
            absent = result.if_ is not None and getattr(call, result.if_) is None
            spec = None if absent else Spec(result.name, *shapes[result.role])
            given: Described | None = getattr(call, result.name)
            if given is not None:
                check_result(given, spec)
            specs.append(spec)
        return Plan(tuple(specs), {name: getattr(call, name) for name in call.numbers})


def check_result(given: Described, spec: Spec | None) -> None:
    """Raise unless a result fits into the caller's array."""
    label = given.label
    if spec is None:
        raise ValueError(f"{label} must be None: this call has no such result")
    checks.shape(given, spec.shape, label, f"the shape of {spec.name}")
    if given.dtype != spec.dtype:
        raise TypeError(f"{label} has dtype {given.dtype}; {spec.name} has dtype {spec.dtype}")


class Rows(Layout):
    """M rows of D elements: the axes from ``axis`` on are normalised, as in ONNX."""

    def check_axis(self, call: Any) -> None:
        call.axis = checks.axis_index(call.axis, getattr(call, self.data).ndim)

    def statistic(self, call: Any) -> tuple[Shape, str]:
        return getattr(call, self.data).shape[: call.axis], (
            f"one number per row of {self.data} (ones may follow)"
        )

    def parameter(self, call: Any) -> tuple[Shape, str]:
        data = getattr(call, self.data)
        return data.shape[call.axis :], f"the normalised dimensions of {self.data}"

    def check_statistics(self, call: Any, statistics: Sequence[Described]) -> None:
        shape, _ = self.statistic(call)
        with_ones = shape + (1,) * (getattr(call, self.data).ndim - call.axis)
        super().check_statistics(call, [each for each in statistics if each.shape != with_ones])


def _of(call: Call, wanted: frozenset[Any]) -> list[Described]:
    """The arguments that are present, of some roles."""
    found = (getattr(call, name) for name, role, _ in call.arguments if role in wanted)
    return [array for array in found if array is not None]


def _types_of(call: Call) -> tuple[DType, DType, DType]:
    """(T, U, V) of a call, if its table has them; an absent U or V is what goes with the rest."""
    kinds = [_of(call, wanted) for wanted in (roles.DATA, roles.STATISTICS, roles.PARAMETERS)]
    data, statistics, parameters = kinds
    t = _common(data)
    assert t is not None  # there is always data
    u = _common(statistics) or accumulation_name(t)
    v = _common(parameters) or next((row[2] for row in call.types if row[:2] == (t, u)), t)
    check_combination((t, u, v), call.types, *([each.label for each in kind] for kind in kinds))
    return dtype_named(t), dtype_named(u), dtype_named(v)


def _common(arrays: Iterable[Described]) -> str | None:
    """The one floating dtype of some arguments, by name."""
    first: tuple[str, str] | None = None
    for array in arrays:
        name = checks.floating(array, array.label)
        if first and first[1] != name:
            raise TypeError(
                f"{array.label} has dtype {name} and {first[0]} has dtype {first[1]}; they must "
                "agree"
            )
        first = first or (array.label, name)
    return first[1] if first else None

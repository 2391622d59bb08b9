"""Arguments of the norms: how the shapes and dtypes of a call have to fit together.

Dtypes are written (T, U, V): T of the data, U of the statistics, V of scale and bias.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradkit._backend import Shape, Spec
from gradkit._calls import checks
from gradkit._dtypes import DType, Types, accumulation_name, check_combination, dtype_named
from gradkit._open import memory
from gradkit._open.signatures import Described


class Forward(NamedTuple):
    """The arrays of a forward pass with a mean, as a call has them or as a signature sees them."""

    x: Any
    scale: Any = None
    bias: Any = None


class Gradient(NamedTuple):
    """The arrays of its gradient."""

    dy: Any
    x: Any
    mean: Any
    inv_std: Any
    scale: Any = None


class NormPlan(NamedTuple):
    """A valid call: the axis as an index, and what comes out."""

    axis: int
    outputs: tuple[Spec | None, ...]


class Rows(NamedTuple):
    """An array whose axes from ``axis`` on are normalised: M rows of D elements, as in ONNX."""

    data: Described
    axis: int

    @classmethod
    def of(cls, data: Described, axis: Any) -> "Rows":
        """The rows of an array from an axis on."""
        return cls(data, checks.axis_index(axis, data.ndim))

    @property
    def lead(self) -> Shape:
        """The shape of a statistic."""
        return self.data.shape[: self.axis]

    @property
    def tail(self) -> Shape:
        """The shape of a parameter."""
        return self.data.shape[self.axis :]

    def check(
        self, statistics: Sequence[Described], parameters: Sequence[Described | None]
    ) -> None:
        """Raise unless the shapes of statistics and parameters fit."""
        name = self.data.label
        for statistic in statistics:
            if statistic.shape != self.lead + (1,) * len(self.tail):
                meaning = f"one number per row of {name} (ones may follow)"
                checks.shape(statistic, self.lead, statistic.label, meaning)
        for parameter in parameters:
            if parameter is not None:
                meaning = f"the normalised dimensions of {name}"
                checks.shape(parameter, self.tail, parameter.label, meaning)


class Channels(NamedTuple):
    """An array of which every axis but ``axis`` is summed over."""

    data: Described
    axis: int

    @classmethod
    def of(cls, data: Described, axis: Any) -> "Channels":
        """The channels of an array along an axis."""
        if data.ndim < 2:
            raise ValueError(
                f"x has shape {data.shape}; batch norm needs a batch and a channel axis"
            )
        return cls(data, checks.axis_index(axis, data.ndim, "channel_axis"))

    @property
    def shape(self) -> Shape:
        """The shape of a statistic and of a parameter."""
        return (self.data.shape[self.axis],)

    @property
    def size(self) -> int:
        """The elements per channel."""
        return math.prod(self.data.shape[: self.axis] + self.data.shape[self.axis + 1 :])

    @property
    def order(self) -> tuple[Shape, tuple[int, ...]]:
        """How the data lies in memory, for results that are to lie alike: see ``Spec``."""
        assert self.data.strides is not None
        return memory.in_memory_order(self.data.shape, self.data.strides)

    def check(self, vectors: Sequence[Described | None]) -> None:
        """Raise unless the shapes of statistics and parameters fit."""
        for vector in vectors:
            if vector is not None:
                checks.shape(vector, self.shape, vector.label, "one number per channel of x")


def check_same_shape(array: Described, other: Described) -> None:
    """Raise unless two arguments have one shape."""
    checks.shape(array, other.shape, array.label, f"the shape of {other.label}")


def data_of_gradient(given: Any) -> list[Described]:
    """The data of a gradient over rows; raise unless ``dy`` and ``ds`` have the shape of ``x``."""
    check_same_shape(given.dy, given.x)
    if given.ds is None:
        return [given.dy, given.x]
    check_same_shape(given.ds, given.x)
    return [given.dy, given.x, given.ds]


def types_of(
    table: tuple[Types, ...],
    data: Sequence[Described],
    statistics: Sequence[Described],
    parameters: Sequence[Described | None],
    *,
    statistic: str | None = None,
) -> tuple[DType, DType, DType]:
    """(T, U, V) of a call, if the table has them; an absent U or V is what goes with the rest.

    ``statistic`` is the U of a call that has no statistics among its arguments.
    """
    if parameters:
        checks.affine(parameters[0], parameters[-1])
    t = _common(data)
    assert t is not None  # there is always data
    u = _common(statistics) or statistic or accumulation_name(t)
    v = _common(parameters)
    if v is None:
        v = next((row[2] for row in table if row[:2] == (t, u)), t)
    kinds = (data, statistics, [each for each in parameters if each is not None])
    check_combination((t, u, v), table, *([each.label for each in kind] for kind in kinds))
    return dtype_named(t), dtype_named(u), dtype_named(v)


def _common(arrays: Sequence[Described | None]) -> str | None:
    """The one floating dtype of the arguments that are present, by name."""
    found: tuple[str, str] | None = None
    for array in arrays:
        if array is None:
            continue
        name = checks.floating(array, array.label)
        if found and found[1] != name:
            raise TypeError(
                f"{array.label} has dtype {name} and {found[0]} has dtype {found[1]}; they must "
                "agree"
            )
        found = found or (array.label, name)
    return found[1] if found else None

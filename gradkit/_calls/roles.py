"""The roles that an argument or a result of an operation can have.

A role says which dtype and which shape go with it, and what a type checker tells apart: a ``Mean``
in the place of an ``InvStd`` is an error. Dtypes are written (T, U, V): T of the data, U of the
statistics, V of the parameters.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, NewType, TypeAlias, TypeVar

import numpy as np

from gradkit._backend import Engine
from gradkit._calls import checks

Role = TypeVar("Role")

# A device's arrays too: CuPy's class cannot be imported here, and has NumPy's attributes.
_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# T, in the shape of the data.
Data = NewType("Data", _Array)
# U: one number per row, channel or group.
Mean = NewType("Mean", _Array)
Var = NewType("Var", _Array)
InvStd = NewType("InvStd", _Array)
Statistic: TypeAlias = Mean | Var | InvStd
# V: one number per column or channel.
Scale = NewType("Scale", _Array)
Bias = NewType("Bias", _Array)
Parameter: TypeAlias = Scale | Bias

# One number per channel, of any dtype: running statistics, both of one.
RunningMean = NewType("RunningMean", _Array)
RunningVar = NewType("RunningVar", _Array)
# float64 where a backend computes: one number per channel of a whole batch, of all ranks together.
BatchMean = NewType("BatchMean", _Array)
BatchVar = NewType("BatchVar", _Array)
SumDyXhat = NewType("SumDyXhat", _Array)
SumDy = NewType("SumDy", _Array)
# The same of each rank, in a row of its own, and the elements per channel.
RankMeans = NewType("RankMeans", _Array)
RankVars = NewType("RankVars", _Array)
RankCounts = NewType("RankCounts", _Array)
Count = NewType("Count", _Array)
# Lists: the gradients of one call, and float64 numbers that are on their device.
Grads: TypeAlias = Sequence[_Array]
Norm = NewType("Norm", _Array)  # 0-d, or one for each gradient
Flags = NewType("Flags", _Array)  # of norm's shape: 1 or 0
Numbers = NewType("Numbers", _Array)  # of another meaning, which the record says
Scalar = NewType("Scalar", _Array)  # 0-d
GuardState = NewType("GuardState", _Array)  # of a spike guard
Verdict = NewType("Verdict", _Array)  # 0-d, a bool
Number: TypeAlias = float | Scalar
Flag: TypeAlias = bool | _Array  # the array has one bool, which is read on its device
Seed: TypeAlias = int | _Array  # the array has one integer of 64 bits, read on its device
Step: TypeAlias = int | _Array  # the array has one int64 of the device's, which is counted up
Written: TypeAlias = Annotated[Role, "written"]

DATA = frozenset({Data})
STATISTICS = frozenset({Mean, Var, InvStd})
PARAMETERS = frozenset({Scale, Bias})
RUNNING = frozenset({RunningMean, RunningVar})
TOTALS = frozenset({BatchMean, BatchVar, SumDyXhat, SumDy})
# As arguments, made float64.
WIDE = frozenset({Norm, GuardState})


class Field(Generic[Role]):
    """A field of a record, which type checkers see as what a backend finds there."""

    if TYPE_CHECKING:

        def __get__(self, call: Any, kind: Any) -> Role: ...
        def __set__(self, call: Any, value: Any) -> None: ...


class Checked(Field[Role]):
    """A number: what the caller gave, and once the call is opened what the check made of it."""


class Passing(NamedTuple):
    """Check of a number that is not part of a plan's key; runs on every call."""

    check: Callable[[Any, Any], Any]


class Rare(NamedTuple):
    """An argument of which no plan knows: calls that have it are opened by name."""


def _opened(method: str, label: str) -> Passing:
    """Check by a method of the opened arguments."""
    return Passing(lambda value, opened: getattr(opened, method)(value, label))


def _flag(label: str) -> Passing:
    """Check of a bool, or of an array of one."""
    return Passing(lambda value, opened: value is True or opened.flag(value, label))


# Numbers. Each is behind what makes a checked number of it and of the call; an axis, which depends
# on the data, is checked by the layout.
Axis: TypeAlias = Checked[int]
ChannelAxis: TypeAlias = Checked[int]
NumGroups: TypeAlias = Checked[int]
EngineChoice: TypeAlias = Checked[Engine | None]
Eps: TypeAlias = Annotated[Checked[float], lambda value, _: checks.epsilon(value)]
ScaleOffset: TypeAlias = Annotated[
    Checked[float], lambda value, call: checks.scale_offset(value, call.scale)
]
Momentum: TypeAlias = Annotated[Checked[float], Passing(lambda value, _: checks.weight(value))]
Elements: TypeAlias = Annotated[Checked[float], Passing(lambda value, _: value)]
MaxNorm: TypeAlias = Annotated[Checked[Number], _opened("limit", "max_norm")]
Limit: TypeAlias = Annotated[Checked[Number], _opened("limit", "limit")]
FoundInf: TypeAlias = Annotated[Checked[Scalar | None], _opened("indicator", "found_inf")]
DoUpdate: TypeAlias = Annotated[Checked[Flag], _flag("do_update")]
Overwrite: TypeAlias = Annotated[Checked[Flag], _flag("overwrite")]
Factor: TypeAlias = Annotated[Checked[float | None], Passing(lambda value, _: checks.factor(value))]
Activation: TypeAlias = Annotated[Checked[str], lambda value, _: checks.activation(value)]
NormBeforeGate: TypeAlias = Annotated[
    Checked[bool], lambda value, _: checks.flag(value, "norm_before_gate")
]
Wanted: TypeAlias = Annotated[Checked[tuple[str, ...] | None], checks.wanted]
CastingRule: TypeAlias = Annotated[
    Checked[str], lambda value, _: checks.choice(value, "casting", ("safe", "same_kind"))
]
HostNumbers: TypeAlias = Annotated[Checked[np.ndarray[Any, Any]], Passing(lambda value, _: value)]
Order: TypeAlias = Annotated[Checked[float], lambda value, _: checks.norm_order(value)]
ScaleFactor: TypeAlias = Annotated[Checked[Number], _opened("factor", "scale")]
Exact: TypeAlias = Annotated[Checked[bool], lambda value, _: checks.flag(value, "exact")]
Decay: TypeAlias = Annotated[Checked[Number], _opened("share", "decay")]
Seldom: TypeAlias = Annotated[Checked[Any], Rare()]
# Of an optimiser's step.
StepNumber: TypeAlias = Annotated[Checked[Step], _opened("count", "step")]
LearningRate: TypeAlias = Annotated[Checked[Number], _opened("rate", "lr")]
Beta: TypeAlias = Annotated[Checked[float], Passing(lambda value, _: value)]
UpdateEps: TypeAlias = Annotated[Checked[float], Passing(lambda value, _: checks.epsilon(value))]
MomentumFactor: TypeAlias = Annotated[
    Checked[float], Passing(lambda value, _: checks.size(value, "momentum"))
]
WeightDecay: TypeAlias = Annotated[
    Checked[float], Passing(lambda value, _: checks.size(value, "weight_decay"))
]
GradScale: TypeAlias = Annotated[Checked[Number], _opened("number", "scale")]
StepTaken: TypeAlias = Annotated[Checked[Flag], _flag("verdict")]


class In(Field[Role]):
    """An argument that is read: what the caller gave, and once it is opened a backend's array."""


class InOut(Field[Role]):
    """An argument that is read and then written in place."""


class Out(Field[Role]):
    """A result that is written: new memory, or the caller's own array."""

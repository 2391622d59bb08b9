"""Shapes and dtypes that the arrays of a call must have, by their roles."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gradkit._backend import FLOAT64, Shape, Spec
from gradkit._calls import checks, roles
from gradkit._calls.record import Call, Described, Plan, Result
from gradkit._calls.samples import are_per_sample
from gradkit._dtypes import DType, accumulation_name, check_combination, dtype_named


class NormLayout:
    """Base class of layouts; subclasses say which shapes go with the data's."""

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
        """Make the axis of a call an index, if it has one."""

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
        kinds = self.kinds(call)
        specs = []
        for result in call.results:
            spec = Spec(result.name, *kinds[result.role]) if _has(call, result) else None
            out: Described | None = getattr(call, result.name)
            if out is not None:
                check_result(out, spec)
            specs.append(spec)
        widened = tuple(a.label for a in _of(call, roles.WIDE) if a.dtype != FLOAT64)
        return Plan(tuple(specs), {name: getattr(call, name) for name in call.numbers}, widened)

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:
        """The shape, dtype and memory order of results by role; raise unless dtypes fit."""
        data: Described = getattr(call, self.data)
        t, u, v = _types_of(call, self.deciding(call))
        return {
            **dict.fromkeys(roles.DATA, (data.shape, t, self.order(data))),
            **dict.fromkeys(roles.STATISTICS, (self.statistic(call)[0], u)),
            **dict.fromkeys(roles.PARAMETERS, (self.parameter(call)[0], v)),
        }

    def deciding(self, call: Any) -> list[Described]:
        """The statistics whose dtype is U."""
        return _of(call, roles.STATISTICS)


def _has(call: Any, result: Result) -> bool:
    """Return whether a result is wanted or, by default, whether its argument is there."""
    if (wanted := getattr(call, "wanted", None)) is not None:
        return result.name in wanted
    return result.if_ is None or getattr(call, result.if_) is not None


def check_result(out: Described, spec: Spec | None) -> None:
    """Raise unless a result fits into the caller's array."""
    label = out.label
    if spec is None:
        raise ValueError(f"{label} must be None: this call has no such result")
    checks.shape(out, spec.shape, label, f"the shape of {spec.name}")
    if out.dtype != spec.dtype:
        raise TypeError(f"{label} has dtype {out.dtype}; {spec.name} has dtype {spec.dtype}")


class RowLayout(NormLayout):
    """M rows of D elements: the axes from ``axis`` on are normalised, as in ONNX."""

    def check_axis(self, call: Any) -> None:
        call.axis = checks.axis_index(call.axis, getattr(call, self.data).ndim)

    def statistic(self, call: Any) -> tuple[Shape, str]:
        return getattr(call, self.data).shape[: call.axis], (
            f"one number per row of {self.data} (ones may follow)"
        )

    def parameter(self, call: Any) -> tuple[Shape, str]:
        data = getattr(call, self.data)
        meaning = f"the normalised dimensions of {self.data}"
        if data.ndim - call.axis > 1:
            meaning += f", from axis={call.axis} on (axis=-1: the last alone)"
        return data.shape[call.axis :], meaning

    def check_statistics(self, call: Any, statistics: Sequence[Described]) -> None:
        shape, _ = self.statistic(call)
        with_ones = shape + (1,) * (getattr(call, self.data).ndim - call.axis)
        super().check_statistics(call, [each for each in statistics if each.shape != with_ones])


class SampleLayout(RowLayout):
    """Rows whose scale and bias may belong to a sample: to one index of leading dimensions."""

    def parameter(self, call: Any) -> tuple[Shape, str]:
        data, (shape, meaning) = getattr(call, self.data), super().parameter(call)
        if call.scale is not None and are_per_sample(call.scale.shape, data.shape, call.axis):
            return call.scale.shape, "the shape of scale"
        if call.axis:
            one_each = data.shape[:1] + (1,) * (call.axis - 1) + shape
            if call.scale is None or call.scale.shape == shape:  # it is the bias
                meaning = f"{meaning}; a bias per sample needs a scale per sample, of {one_each}"
            else:
                meaning = f"{meaning}, or one per sample, as in {one_each}"
        return shape, meaning


class ChannelLayout(NormLayout):
    """Every axis but ``channel_axis`` is summed over; a channel has a statistic and a parameter."""

    norm = "batch norm"

    def check_axis(self, call: Any) -> None:
        data: Described = getattr(call, self.data)
        if data.ndim < 2:
            raise ValueError(
                f"{data.label} has shape {data.shape}; {self.norm} needs a batch and a channel axis"
            )
        call.channel_axis = checks.axis_index(call.channel_axis, data.ndim, "channel_axis")

    def statistic(self, call: Any) -> tuple[Shape, str]:
        return self.parameter(call)

    def parameter(self, call: Any) -> tuple[Shape, str]:
        channels = getattr(call, self.data).shape[call.channel_axis]
        return (channels,), f"one number per channel of {self.data}"

    def check_shapes(self, call: Any) -> None:
        data: Described = getattr(call, self.data)
        shape, meaning = self.parameter(call)
        for array in _of(call, roles.PARAMETERS) if self.norm == "batch norm" else ():
            if data.ndim > 2 and array.shape == data.shape[1:]:
                samples, elements = data.shape[0], math.prod(array.shape)
                raise ValueError(
                    f"{array.label} has shape {array.shape}; expected {shape}, {meaning}. For one "
                    f"number per element of a sample, ONNX Runtime's spatial=0, reshape data to "
                    f"({samples}, {elements}) and the rest to ({elements},)"
                )
        super().check_shapes(call)
        _check_running(call, shape)

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:
        totals = dict.fromkeys(roles.TOTALS, (self.parameter(call)[0], FLOAT64))
        return super().kinds(call) | totals

    def deciding(self, call: Any) -> list[Described]:
        """The statistics or, without any, the mean in ``out``, which may be 16-bit."""
        means = [result.name for result in call.results if result.role is roles.Mean]
        statistics = super().deciding(call) or [getattr(call, name) for name in means]
        return [array for array in statistics if array is not None]

    def order(self, data: Described) -> tuple[Shape, tuple[int, ...]] | None:
        """The order of the data: its axes as they lie there, and how to transpose them back."""
        if 0 in data.shape:
            return None
        axes = range(data.ndim)
        order = sorted(axes, key=lambda axis: -abs(data.strides[axis]))
        return tuple(data.shape[axis] for axis in order), tuple(sorted(axes, key=order.__getitem__))


class VectorLayout(NormLayout):
    """Numbers of each channel, of each rank or of all. They fit, because gradkit made them."""

    def check_shapes(self, call: Any) -> None:
        pass

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:
        first: Described = getattr(call, self.data)
        return {
            **dict.fromkeys(roles.RUNNING, (first.shape, first.dtype)),
            **dict.fromkeys(roles.TOTALS, (first.shape[-1:], FLOAT64)),
            roles.Count: ((), FLOAT64),
        }


def _check_running(call: Call, shape: Shape) -> None:
    """Raise unless a call has all of what it moves, or none, and that fits."""
    moved: list[Described | None] = [getattr(call, each.name) for each in call.in_place]
    if not any(moved):
        return
    names = [each.name for each in call.in_place]
    for name, array in zip(names, moved, strict=True):
        if array is None:
            raise TypeError(f"{name} is None; pass {' and '.join(names)}, or neither")
        checks.floating(array, name)
        checks.shape(array, shape, name, "one number per channel")
    mean, var = moved
    if mean is not None and var is not None and mean.dtype != var.dtype:
        raise TypeError(f"{names[1]} has dtype {var.dtype}; {names[0]} has dtype {mean.dtype}")


class GroupLayout(ChannelLayout):
    """Samples, whose channels are in groups; each sample's groups have statistics of their own."""

    norm = "group norm"

    def check_axis(self, call: Any) -> None:
        axis = call.channel_axis
        super().check_axis(call)
        if call.channel_axis == 0:
            raise ValueError(f"channel_axis is {axis}, the axis of the samples; pass another")
        if "num_groups" in call.numbers:
            call.num_groups = groups = checks.integer(call.num_groups, "num_groups")
            ((channels,), _) = self.parameter(call)
            if groups < 1 or channels % groups:
                raise ValueError(
                    f"num_groups is {groups}; it must divide the {channels} channels of {self.data}"
                )

    def deciding(self, call: Any) -> list[Described]:
        return _of(call, roles.STATISTICS)

    def statistic(self, call: Any) -> tuple[Shape, str]:
        groups = call.num_groups if "num_groups" in call.numbers else call.mean.shape[1]
        return (getattr(call, self.data).shape[0], groups), "one number per group of each sample"

    def check_statistics(self, call: Any, statistics: Sequence[Described]) -> None:
        if not statistics:
            return
        first, *others = statistics
        samples, ((channels,), _) = getattr(call, self.data).shape[0], self.parameter(call)
        groups = first.shape[1] if first.ndim == 2 else 0
        if first.shape != (samples, groups) or groups < 1 or channels % groups:
            raise ValueError(
                f"{first.label} has shape {first.shape}; expected ({samples}, groups), where "
                f"groups divides the {channels} channels of {self.data}"
            )
        for other in others:
            checks.shape(other, first.shape, other.label, f"the shape of {first.label}")


def _of(call: Call, accepted: frozenset[Any]) -> list[Described]:
    """The arguments that are present, of some roles."""
    arrays = (getattr(call, name) for name, role, _ in call.arguments if role in accepted)
    return [array for array in arrays if array is not None]


def _types_of(call: Call, statistics: list[Described]) -> tuple[DType, DType, DType]:
    """(T, U, V) of a call, if its table has them; an absent U or V is what goes with the rest."""
    data, parameters = _of(call, roles.DATA), _of(call, roles.PARAMETERS)
    if not parameters:  # the gradient of a bias alone has the dtype of the caller's array
        outs = (getattr(call, each.name) for each in call.results if each.role in roles.PARAMETERS)
        parameters = [out for out in outs if out is not None]
    kinds = data, statistics, parameters
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
            pair = array.label, first[0]
            cast, to = reversed(pair) if pair == ("x", "dy") else pair
            raise TypeError(
                f"{array.label} has dtype {name} and {first[0]} has dtype {first[1]}; they must "
                f"agree: pass {cast}.astype({to}.dtype)"
            )
        first = first or (array.label, name)
    return first[1] if first else None

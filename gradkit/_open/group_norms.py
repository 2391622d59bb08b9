"""Which group norms are valid, and what comes out of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from gradkit._backend import Shape, Spec
from gradkit._calls import checks
from gradkit._dtypes import LAYER_NORM_TYPES
from gradkit._open import memory
from gradkit._open.norms import Forward, Gradient, NormPlan, check_same_shape, types_of
from gradkit._open.signatures import Described, Signatures


class Groups(NamedTuple):
    """An array of samples, whose channels along ``axis`` are in groups."""

    data: Described
    axis: int

    @classmethod
    def of(cls, data: Described, axis: Any) -> "Groups":
        """The samples and channels of an array."""
        if data.ndim < 2:
            raise ValueError(
                f"x has shape {data.shape}; group norm needs a batch and a channel axis"
            )
        index = checks.axis_index(axis, data.ndim, "channel_axis")
        if index == 0:
            raise ValueError(f"channel_axis is {axis}, the axis of the samples; pass another")
        return cls(data, index)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self.data.shape[0]

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return self.data.shape[self.axis]

    @property
    def order(self) -> tuple[Shape, tuple[int, ...]]:
        """How the data lies in memory, for results that are to lie alike: see ``Spec``."""
        assert self.data.strides is not None
        return memory.in_memory_order(self.data.shape, self.data.strides)

    def divided_by(self, num_groups: Any) -> int:
        """The number of groups, if it divides the channels."""
        groups = checks.integer(num_groups, "num_groups")
        if groups < 1 or self.channels % groups:
            raise ValueError(
                f"num_groups is {groups}; it must divide the {self.channels} channels of x"
            )
        return groups

    def check_statistics(self, statistics: Sequence[Described]) -> None:
        """Raise unless statistics have one number per group, the same for all of them."""
        first = statistics[0]
        groups = first.shape[1] if first.ndim == 2 else 0
        if first.shape != (self.samples, groups) or groups < 1 or self.channels % groups:
            raise ValueError(
                f"{first.label} has shape {first.shape}; expected ({self.samples}, groups), where "
                f"groups divides the {self.channels} channels of x"
            )
        for other in statistics[1:]:
            check_same_shape(other, first)

    def check_parameters(self, parameters: Sequence[Described | None]) -> None:
        """Raise unless scale and bias have one number per channel."""
        for parameter in parameters:
            if parameter is not None:
                checks.shape(
                    parameter, (self.channels,), parameter.label, "one number per channel of x"
                )


@partial(Signatures, strides=True)
def plan_forward(given: Forward, num_groups: Any, channel_axis: Any) -> NormPlan:
    """Raise unless a forward pass is valid."""
    groups, parameters = Groups.of(given.x, channel_axis), (given.scale, given.bias)
    shape = groups.samples, groups.divided_by(num_groups)
    groups.check_parameters(parameters)
    t, u, _ = types_of(LAYER_NORM_TYPES, (given.x,), (), parameters)
    y = Spec("y", given.x.shape, t, groups.order)
    return NormPlan(groups.axis, (y, Spec("mean", shape, u), Spec("inv_std", shape, u)))


@partial(Signatures, strides=True)
def plan_gradient(given: Gradient, channel_axis: Any) -> NormPlan:
    """Raise unless a backward pass is valid."""
    groups, statistics = Groups.of(given.x, channel_axis), (given.mean, given.inv_std)
    groups.check_statistics(statistics)
    groups.check_parameters((given.scale,))
    check_same_shape(given.dy, given.x)
    t, _, v = types_of(LAYER_NORM_TYPES, (given.dy, given.x), statistics, (given.scale,))
    dscale = None if given.scale is None else Spec("dscale", (groups.channels,), v)
    dbias = None if given.scale is None else Spec("dbias", (groups.channels,), v)
    return NormPlan(groups.axis, (Spec("dx", given.x.shape, t, groups.order), dscale, dbias))

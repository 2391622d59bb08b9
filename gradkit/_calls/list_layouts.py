"""Layouts of calls whose arrays are numbers about gradients, or two that are added."""

from itertools import product
from typing import Any

import numpy as np

from gradkit._backend import FLOAT64, Shape, Spec
from gradkit._calls import checks, roles
from gradkit._calls.layouts import NormLayout, check_result
from gradkit._calls.record import Plan
from gradkit._dtypes import FLOATS

GUARD_STATE = (3,)  # how many norms a spike guard has seen, their mean and standard deviation


class OfList:
    """Numbers about a list of gradients, all of them together."""

    def __init__(self, *, usual: dict[str, Any]):
        self.usual = usual  # what a planned call has in these fields

    def plan(self, call: Any) -> Plan:
        """The plan of a call; one that is no usual call is opened by name."""
        for name, check in call.numbers.items():
            if check is not None:
                setattr(call, name, check(getattr(call, name), call))
        specs = tuple(Spec("the norm", (), FLOAT64) for _ in call.result_names)
        for name, spec in zip(call.result_names, specs, strict=True):
            if (out := getattr(call, name)) is not None:
                check_result(out, spec)
        plan = Plan(specs, {name: getattr(call, name) for name in call.numbers})
        fields = ((getattr(call, name), value) for name, value in self.usual.items())
        plan.by_name = any(
            type(number) is not type(value) or number != value for number, value in fields
        )
        return plan


class OfPairs(OfList):
    """The same of lists whose arrays belong to those of the first one."""

    def plan(self, call: Any) -> Plan:
        plan = super().plan(call)
        first, *others = [getattr(call, each.name) for each in call.lists]
        for each, other in zip(call.lists[1:], others, strict=True):
            pairs = 0 if other is None else first.pairs_with(other)
            for k, (first_dtype, other_dtype) in enumerate(product(FLOATS, FLOATS)):
                if pairs >> k & 1 and not call.fits(each.name, first_dtype, other_dtype):
                    plan.by_name = True  # which says why
        for array in (getattr(call, each.name) for each in call.in_place):
            if array is not None and (array.shape, array.dtype) != ((), FLOAT64):
                plan.by_name = True
        return plan


class OfUpdates(OfPairs):
    """Parameters, gradients, and what an optimiser keeps: one dtype beside each of parameters'."""

    def plan(self, call: Any) -> Plan:
        plan = super().plan(call)
        first, _, *states = [getattr(call, each.name) for each in call.lists]
        pairs = {first.pairs_with(state) for state in states if state is not None}
        several = any((of >> 4 * k & 15).bit_count() > 1 for of in pairs for k in range(4))
        plan.by_name |= several or len(pairs) > 1
        return plan


class LikeNorm(NormLayout):
    """A float64 result of the shape of an argument."""

    def check_shapes(self, call: Any) -> None:
        checks.floating(getattr(call, self.data), self.data)

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:
        return {roles.Numbers: (getattr(call, self.data).shape, FLOAT64)}


class GuardStep(NormLayout):
    """The state of a spike guard, and numbers of its own."""

    def check_shapes(self, call: Any) -> None:
        if self.data == "state":
            lead = self.lead(call)
            checks.shape(call.state, (*lead, *GUARD_STATE), "state", "what spike_guard_init makes")
            meaning = "one norm per state" if lead else "the norm of all gradients together"
            checks.shape(call.norm, lead, "norm", meaning)
            checks.floating(call.norm, "norm")

    def lead(self, call: Any) -> Shape:
        """Return the shape of the states: their number, or () for one."""
        if self.data == "state":
            return tuple(call.state.shape[:1]) if call.state.ndim == 2 else ()
        return () if call.count is None else (call.count,)

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:
        lead = self.lead(call)
        return {roles.GuardState: ((*lead, *GUARD_STATE), FLOAT64), roles.Scalar: (lead, FLOAT64)}


class Judgement(NormLayout):
    """A bool for one norm."""

    def check_shapes(self, call: Any) -> None:
        checks.shape(call.norm, (), "norm", "the norm of all gradients together")
        checks.floating(call.norm, "norm")

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:  # noqa: ARG002
        return {roles.Verdict: ((), np.dtype(bool))}


class Addition(NormLayout):
    """A gradient that is added to a buffer, to whose shape it broadcasts."""

    def check_shapes(self, call: Any) -> None:
        buffer, grad = call.buffer, call.grad
        into, addend = checks.floating(buffer, "buffer"), checks.floating(grad, "grad")
        accepted = FLOATS[into].addends if call.casting == "safe" else tuple(FLOATS)
        if addend not in accepted:
            raise TypeError(
                f"grad has dtype {addend} and the buffer {into}, which would lose precision; "
                f'accepted: {", ".join(accepted)}, or any with casting="same_kind"'
            )
        extra = buffer.ndim - grad.ndim
        if extra < 0 or any(
            length not in (1, wanted)
            for length, wanted in zip(grad.shape, buffer.shape[extra:], strict=True)
        ):
            raise ValueError(
                f"grad has shape {grad.shape}, which does not broadcast to the buffer's "
                f"{buffer.shape}"
            )
        compensation = getattr(call, "compensation", None)
        if compensation is not None:
            if compensation.dtype != buffer.dtype:
                raise TypeError(
                    f"compensation has dtype {compensation.dtype}; expected the buffer's {into}"
                )
            checks.shape(compensation, buffer.shape, "compensation", "the shape of the buffer")

    def kinds(self, call: Any) -> dict[Any, tuple[Any, ...]]:  # noqa: ARG002
        return {}

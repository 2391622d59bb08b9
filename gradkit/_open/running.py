"""Running statistics that a batch norm moves in place."""

from typing import Any, NamedTuple

from gradkit._backend import Array, Running, Shape, Spec
from gradkit._calls import checks
from gradkit._open.call import Call
from gradkit._open.outputs import Outputs

_FEW = "the unbiased variance needs two or more"


class Moved(NamedTuple):
    """The running statistics of one call."""

    running: Running
    outputs: Outputs

    def done(self) -> None:
        """Tell the caller's library that its arrays have been written."""
        self.outputs.results()


def moved_of(
    call: Call[Any],
    running_mean: Any,
    running_var: Any,
    momentum: float,
    shape: Shape,
    results: list[Array],
) -> Moved | None:
    """What a forward pass is to move, if anything; ``results``: what else it writes."""
    if running_mean is None and running_var is None:
        return None
    given = {"running_mean": running_mean, "running_var": running_var}
    for label, array in given.items():
        if array is None:
            raise TypeError(f"{label} is None; pass running_mean and running_var, or neither")
    if call.framework.immutable:
        raise TypeError(
            f"running_mean is a {call.framework.name} array, whose memory is never written; "
            "update_running_statistics returns new arrays"
        )
    dtype = call.view(running_mean, "running_mean", write=True).dtype
    specs = Spec("mean", shape, dtype), Spec("running_mean", shape, dtype)
    outputs = call.moved(given, specs, results)
    checks.floating(outputs.views[0], "running_mean")
    mean, var = outputs.views
    return Moved(Running(mean, var, momentum), outputs)


def weight_of(momentum: Any) -> float:
    """The weight of one batch."""
    weight = checks.real(momentum, "momentum")
    if not 0 <= weight <= 1:
        raise ValueError(f"momentum must be from 0 to 1, not {weight}")
    return weight


def check_elements(count: float, said: str) -> None:
    """Raise if a batch has elements, but too few for an unbiased variance."""
    if 0 < count <= 1:
        raise ValueError(f"{said}; {_FEW}")

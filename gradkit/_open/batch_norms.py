"""Which batch norms are valid, and what comes out of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gradkit._backend import Array, Spec
from gradkit._calls import checks
from gradkit._dtypes import BATCH_NORM_TYPES
from gradkit._open.norms import (
    Channels,
    Forward,
    Gradient,
    NormPlan,
    check_same_shape,
    types_of,
)
from gradkit._open.signatures import Signatures


@partial(Signatures, strides=True)
def plan_forward(given: Forward, channel_axis: int, statistic: str | None) -> NormPlan:
    """Raise unless a forward pass is valid; ``statistic`` is as in ``types_of``."""
    channels, parameters = Channels.of(given.x, channel_axis), (given.scale, given.bias)
    channels.check(parameters)
    t, u, _ = types_of(BATCH_NORM_TYPES, (given.x,), (), parameters, statistic=statistic)
    y = Spec("y", given.x.shape, t, channels.order)
    mean, inv_std = (Spec(name, channels.shape, u) for name in ("mean", "inv_std"))
    return NormPlan(channels.axis, (y, mean, inv_std))


@partial(Signatures, strides=True)
def plan_gradient(given: Gradient, channel_axis: int) -> NormPlan:
    """Raise unless a backward pass is valid."""
    channels, statistics = Channels.of(given.x, channel_axis), (given.mean, given.inv_std)
    channels.check((given.scale, *statistics))
    check_same_shape(given.dy, given.x)
    t, _, v = types_of(BATCH_NORM_TYPES, (given.dy, given.x), statistics, (given.scale,))
    dscale = None if given.scale is None else Spec("dscale", channels.shape, v)
    dbias = None if given.scale is None else Spec("dbias", channels.shape, v)
    return NormPlan(channels.axis, (Spec("dx", given.x.shape, t, channels.order), dscale, dbias))


def statistic_of(view: Callable[..., Array], out: Any) -> str | None:
    """The dtype of the mean in ``out``, if there is one: it may be 16-bit."""
    if not isinstance(out, tuple) or len(out) != 3 or out[1] is None:
        return None
    return checks.floating(view(out[1], "out[1]", write=True), "out[1]")

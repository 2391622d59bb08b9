"""Scale and bias per sample: each leading index of the data has a row of parameters of its own."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradkit._backend import Shape
from gradkit._calls import roles


def are_per_sample(scale: Shape, data: Shape, axis: int) -> bool:
    """True if a scale has leading dimensions of the data, then ones, then the normalised ones.

    Compilers trace this with batches of any size: only dimensions that must agree are compared.
    """
    if len(scale) != len(data):
        return False
    k = axis
    while k and scale[k - 1] == 1:
        k -= 1
    return scale[:k] == data[:k] and scale[axis:] == data[axis:]


def lead_of(call: Any) -> Shape:
    """The dimensions of a call's scale in front of the normalised ones; () if samples share it."""
    if call.scale is None:
        return ()
    return call.scale.shape[: call.axis - getattr(call, call.layout.data).ndim]


def sample_count(call: Any) -> int:
    """Return the number of scales of a call."""
    return math.prod(lead_of(call))


def samples_of(call: Any, lead: Shape) -> Iterator[Any]:
    """The calls of single samples, on views; they share a plan, which is the call's."""
    depth = max((k + 1 for k, length in enumerate(lead) if length != 1), default=0)
    fields = (*call.arguments, *call.results)
    arrays = [(each.name, each.role, getattr(call, each.name)) for each in fields]
    for index in np.ndindex(lead[:depth]):
        data, parameters = (*index, ...), (*index, *(0,) * (call.axis - depth), ...)
        views = {
            name: array[parameters if role in roles.PARAMETERS else data]
            for name, role, array in arrays
            if array is not None
        }
        sample = call.replaced(**views, axis=call.axis - depth)
        sample.plan = call.plan
        yield sample

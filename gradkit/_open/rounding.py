"""Random rounding of 16-bit arrays: its seed, and the count of elements that random bits are of."""

from itertools import accumulate, islice
from typing import Any

from gradkit._calls import checks
from gradkit._open import trees
from gradkit._open.gradients import Gradients


def at_random(into: Gradients, settings: Any, compensation: Any = None) -> dict[str, Any]:
    """The fields of a backend's record that say how to round at random; none if to nearest.

    ``settings``: the rounding, the seed and the offsets, or ``None``.
    """
    if settings is None:
        return {}
    rounding, seed, offsets = settings
    if checks.choice(rounding, "rounding", ("nearest", "stochastic")) == "nearest":
        return {}
    if compensation is not None:
        raise ValueError(
            'rounding is "stochastic", but compensation keeps what rounding to nearest drops'
        )
    for name, view in into.named():
        if view.dtype.itemsize != 2:
            raise TypeError(
                f'{name} has dtype {view.dtype}; rounding="stochastic" is for float16 and bfloat16'
            )
    number = into.seed(seed, "seed")
    if not isinstance(number, int):
        into.refuse_overlap(number, "seed")
    return {"seed": number, "offsets": _offsets(into, offsets)}


def _offsets(into: Gradients, offsets: Any) -> list[int]:
    """The number of each buffer's first element, from which the others are counted."""
    offsets = trees.plain(offsets)
    if isinstance(offsets, (dict, list)):
        per_buffer = trees.spread(offsets, into.tree, "offsets", "buffers")
        return [checks.offset(one, "offsets") for one in per_buffer]
    sizes = accumulate(
        (view.size for view in into.views), initial=checks.offset(offsets, "offsets")
    )
    return [checks.offset(one, "offsets") for one in islice(sizes, len(into.views))]

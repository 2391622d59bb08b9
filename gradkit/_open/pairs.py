"""Two containers of arrays that belong to each other, leaf by leaf, of which one is written."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeAlias

from gradkit._calls import checks
from gradkit._dtypes import float_of
from gradkit._open import memory, trees
from gradkit._open.given import check_device, refuse_mixture, same_device
from gradkit._open.gradients import Gradients

# Of the dtypes of an array that is written and of its partner: why they do not fit, if so.
WhyNot: TypeAlias = Callable[[Any, Any], str | None]
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")


def in_order_of(written: Gradients, others: Any) -> Any:
    """The arrays of dicts in the order of those that are written, which may be another."""
    if written.tree is written.arrays:  # a plain list
        return others
    return trees.in_order_of(written.tree, trees.freeze(others))


def check_pairs(
    written: Gradients,
    others: Gradients,
    labels: tuple[str, str],
    why: WhyNot,
    *,
    may_be: bool = True,
) -> None:
    """Raise unless each array has a partner of its shape, and of a dtype that fits.

    ``labels``: what errors call ``others`` and ``written``. ``may_be``: a partner may be the very
    array that is written; any other overlap is an error.
    """
    flat = written.tree is written.arrays and others.tree is others.arrays
    if len(written.arrays) != len(others.arrays) or not flat:
        trees.check_structure(others.names(), written.names(), *labels)
    if not written.arrays:
        return
    if others.framework is not written.framework:
        refuse_mixture(others.name(0), others.framework, written.name(0), written.framework)
    if not same_device(others.views[0], written.views[0]):
        check_device(others.views[0], others.name(0), written.views[0], written.name(0))
    into, given = ([*map(_dtype_of, each.views)] for each in (written, others))
    kinds = [*zip(into, given, strict=True)]
    for pair in dict.fromkeys(kinds):
        reason = why(*pair)
        if reason is not None:
            k = kinds.index(pair)
            found = f"{others.name(k)} has dtype {pair[1]} and {written.name(k)} {pair[0]}"
            raise TypeError(f"{found}{reason}")
    wanted = [*map(_shape_of, written.views)]
    if wanted != [*map(_shape_of, others.views)]:
        for k, (other, shape) in enumerate(zip(others.views, wanted, strict=True)):
            checks.shape(other, shape, others.name(k), f"the shape of {written.name(k)}")
    check_apart(written, others, may_be=may_be)


def why_lossy(written: Any, other: Any) -> str | None:
    """Why an array cannot hold another without losing precision, by their dtypes."""
    accepted = float_of(written).addends
    if float_of(other).name in accepted:
        return None
    return f", which would lose precision; accepted: {', '.join(accepted)}"


def check_apart(written: Gradients, others: Gradients, *, may_be: bool = False) -> None:
    """Raise if arrays that are written share memory with others; ``may_be`` as in check_pairs."""
    backend = written.backend
    for k, place in memory.meetings(backend, written.views, others.views):
        views = written.views[k], others.views[place]
        own = may_be and k == place and memory.same_elements(backend, *views)
        if not own and memory.overlap(backend, *views):
            raise ValueError(f"{others.name(place)} overlaps {written.name(k)}; pass a copy")

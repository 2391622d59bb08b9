"""Two containers of arrays that belong to each other, leaf by leaf, of which one is written."""

from collections.abc import Callable
from itertools import chain
from operator import eq, is_
from typing import Any, TypeAlias

from gradkit import _host
from gradkit._calls import checks
from gradkit._dtypes import FLOATS, float_of
from gradkit._open import memory, trees
from gradkit._open.arguments import check_device, refuse_mixture, same_device
from gradkit._open.gradients import Gradients

# Of the dtypes of an array that is written and of its partner: why they do not fit, if so.
WhyNot: TypeAlias = Callable[[Any, Any], str | None]


def in_order_of(written: Gradients, others: Any) -> Any:
    """The arrays of dicts in the order of those that are written, which may be another."""
    if written.is_flat:
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
    if _fit(written, others, why, may_be):
        return
    if not _have_like_places(written, others):
        trees.check_structure(others.names(), written.names(), *labels)
    if not written.arrays:
        return
    if others.framework is not written.framework:
        refuse_mixture(others.name(0), others.framework, written.name(0), written.framework)
    if not same_device(others.views[0], written.views[0]):
        check_device(others.views[0], others.name(0), written.views[0], written.name(0))
    kinds = [*zip(written.dtypes(), others.dtypes(), strict=True)]
    for kind in dict.fromkeys(kinds):
        k = kinds.index(kind)
        pair = written.views[k].dtype, others.views[k].dtype
        reason = why(*pair)
        if reason is not None:
            dtypes = f"{others.name(k)} has dtype {pair[1]} and {written.name(k)} {pair[0]}"
            raise TypeError(f"{dtypes}{reason}")
    if not all(map(eq, written.shapes(), others.shapes())):
        for k, (other, view) in enumerate(zip(others.views, written.views, strict=True)):
            checks.shape(other, view.shape, others.name(k), f"the shape of {written.name(k)}")
    check_apart(written, others, may_be=may_be)


_NAMES = tuple(FLOATS)


def _fit(written: Gradients, others: Gradients, why: WhyNot, may_be: bool) -> bool:
    """True if a quick look shows that there is nothing to raise."""
    into, partners = written.views, others.views
    if not (isinstance(into, _host.Table) and isinstance(partners, _host.Table)):
        return False
    pairs: int = _host.code.fitting(into, partners, may_be)
    return pairs >= 0 and all(
        why(dtype, other) is None
        for k, dtype in enumerate(_NAMES)
        for n, other in enumerate(_NAMES)
        if pairs >> (4 * k + n) & 1
    )


def _have_like_places(written: Gradients, others: Gradients) -> bool:
    """True if a quick look shows that two containers have the same structure."""
    into, partners = written.tree, others.tree
    if len(written.arrays) != len(others.arrays):
        return False
    if into is written.arrays or partners is others.arrays:
        return into is written.arrays and partners is others.arrays
    flat = type(into) is type(partners) is dict and [*into] == [*partners]
    return flat and all(
        map(is_, chain(into.values(), partners.values()), chain(written.arrays, others.arrays))
    )


def why_unlike(written: Any, other: Any) -> str | None:
    """Why an array of another dtype cannot stand beside one."""
    return None if written == other else "; they must agree"


def why_lossy(written: Any, other: Any) -> str | None:
    """Why an array cannot hold another without losing precision, by their dtypes."""
    accepted = float_of(written).addends
    if float_of(other).name in accepted:
        return None
    return f", which would lose precision; accepted: {', '.join(accepted)}"


def check_apart(written: Gradients, others: Gradients, *, may_be: bool = False) -> None:
    """Raise if arrays that are written share memory with others; ``may_be`` as in check_pairs."""
    into, partners = written.views, others.views
    tables = isinstance(into, _host.Table) and isinstance(partners, _host.Table)
    if tables and _host.code.apart(into, partners):
        return
    backend = written.backend
    for k, place in memory.meetings(backend, written.views, others.views):
        views = written.views[k], others.views[place]
        is_same = may_be and k == place and memory.same_elements(backend, *views)
        if not is_same and memory.overlap(backend, *views):
            raise ValueError(f"{others.name(place)} overlaps {written.name(k)}; pass a copy")

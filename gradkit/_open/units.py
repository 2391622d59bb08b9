"""Clipping units by norms of their own: which elements make one, their limits, and the call."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradkit import _host
from gradkit._arrays import is_array
from gradkit._backend import FLOAT64, Axes, Shape, Spec
from gradkit._calls import checks
from gradkit._calls.lists import ClipUnits, UnitNorms
from gradkit._calls.roles import Grads, Norm, Number
from gradkit._open import trees
from gradkit._open.clipping import apart_from, policy_of, raise_if_nonfinite, twins
from gradkit._open.given import known_framework
from gradkit._open.gradients import Gradients
from gradkit._open.memory import Named
from gradkit._open.results import Results
from gradkit._typing import Along, Axis

_SMALLEST_NORM = 1e-6  # of a gradient's unit, in adaptive clipping's division
_PLAIN = {int, type(None)}


class UnitRule(NamedTuple):
    """How norms are taken, and what they mean."""

    order: float
    mean: bool
    axis: Axis
    eps: float
    policy: str


class UnitLimits(NamedTuple):
    """What units are clipped to: ``common * max(size, least)``, or ``common`` without sizes.

    ``params`` gives the parameters whose sizes count, by name.
    """

    common: Number
    sizes: Norm | None = None
    least: float = 0.0
    params: Callable[[], Named] = tuple


class UnitShapes(NamedTuple):
    """What one norm covers, gradient by gradient."""

    axes: Axes
    shapes: list[Shape]  # of each gradient's norms

    @property
    def total(self) -> int:
        """The number of units."""
        return sum(map(math.prod, self.shapes))


LimitsOf: TypeAlias = Callable[[Gradients, UnitShapes], UnitLimits]


def block_rule(norm_type: Any, rms: bool, axis: Axis, eps: Any, nonfinite: str) -> UnitRule:
    order, mean = checks.norm_order(norm_type), checks.flag(rms, "rms")
    return UnitRule(order, mean, axis, checks.epsilon(eps), policy_of(nonfinite))


def adaptive_rule(axis: Axis, nonfinite: str) -> UnitRule:
    return UnitRule(2.0, False, axis, _SMALLEST_NORM, policy_of(nonfinite))


def clip_each(
    grads: Any, rule: UnitRule, limits_of: LimitsOf, outs: tuple[Any, Any], *, instead: str = ""
) -> tuple[Any, Any]:
    """Clip gradients, in place or to the first of ``outs``; return what holds them, and the norms.

    ``instead``: what to do if they cannot be written in place; without it they never are.
    """
    group = Gradients(grads, instead=instead)
    group.refuse_shards("their blocks lie on several ranks")
    out, norms_out = outs
    with group.on_stream():
        units = _units(group, rule.axis)
        limits = limits_of(group, units)
        clipped = (
            None if instead else twins(group, out, apart=() if out is None else limits.params())
        )
        apart: Named = ()
        if norms_out is not None:
            apart = [*limits.params(), *(() if clipped is None else apart_from(clipped))]
        norms = group.outputs(norms_out, (Spec("the norms", (units.total,), FLOAT64),), apart=apart)
        _clip(group, units, rule, limits, norms, (group if clipped is None else clipped).views)
        if clipped is None:
            group.wrote()
            tree = group.tree
        else:
            results = clipped.results()
            tree = group.rebuilt(results) if out is None else out
        return tree, _in_place_of(group, units, norms, norms_out)


def _units(group: Gradients, axis: Axis) -> UnitShapes:
    """What the caller's axis makes of each gradient."""
    asked, shapes = tuple(group.each(axis, "axis")), tuple(group.shapes())
    kinds = {*map(type, asked)}
    if tuple in kinds:
        kinds = {type(n) for one in asked for n in (one if type(one) is tuple else (one,))}
    if kinds <= _PLAIN:  # True is 1 to a cache
        with suppress(TypeError, ValueError):
            return _known_units(asked, shapes, ("",) * len(asked))
    return _units_of(asked, shapes, tuple(group.names()))


def _units_of(asked: Sequence[Along], every: Sequence[Shape], names: Sequence[str]) -> UnitShapes:
    """The same of gradients of these shapes and names."""
    axes, shapes = [], []
    for one, shape, name in zip(asked, every, names, strict=True):
        own = _along(one, len(shape), name)
        axes.append(own)
        shapes.append(tuple(n for k, n in enumerate(shape) if k not in own))
    return UnitShapes(tuple(axes), shapes)


_known_units = lru_cache(maxsize=64)(_units_of)


def _along(asked: Along, ndim: int, name: str) -> tuple[int, ...]:
    label = f"axis for {name}"
    every = tuple(range(ndim))
    if asked is None:
        return every
    given = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    for one in given:
        checks.integer(one, label)
    if ndim < 2:
        return every
    found = sorted(checks.axis_index(one, ndim, label) for one in given)
    if len(set(found)) < len(found):
        raise ValueError(f"{label} is {given}, which names an axis twice")
    return tuple(found)


def _table_like(group: Gradients, params: list[Any]) -> Any:
    """A table of parameters, if there clearly is one of each gradient's shape."""
    own: Any = group.views
    table = _host.code.table(params, False) if isinstance(own, _host.Table) else None
    fits = table is not None and table.device == own.device and own.pairs_with(table) >= 0
    return table if fits else None


def _params(group: Gradients, params: Any) -> tuple[Grads, Callable[[], Named]]:
    """The parameter of each gradient, and what gives them by name."""
    flat = type(params) is list and group.is_flat
    if flat and len(params) == len(group.arrays) and group.are_views(params):
        views = _table_like(group, [*params])
        if views is not None:
            return views, lambda: [*zip(trees.names(params, "params"), views, strict=True)]
    held = []
    tree = trees.freeze(params)
    partners = trees.partners(group.tree, tree, "grads", "params")
    for (name, param), view in zip(partners, group.views, strict=True):
        own = group.view(param, name, detach=True)
        checks.floating(own, name)
        checks.shape(own, view.shape, name, "the shape of its gradient")
        held.append((name, own))
    return [own for _, own in held], lambda: held


def adaptive_limits(
    group: Gradients, units: UnitShapes, *, params: Any, clipping: Any, least: float
) -> UnitLimits:
    """The limit of each unit, from the norm of the same unit of the parameters."""
    ratio, (held, named) = group.limit(clipping, "clipping"), _params(group, params)
    if not (isinstance(ratio, float) and math.isfinite(ratio)):
        least = max(least, math.ulp(0.0))  # so that inf clips nothing: inf * 0 is NaN
    norms = group.backend.empty((units.total,), FLOAT64)
    group.backend.unit_norms(
        UnitNorms(grads=held, norm_type=2.0, axes=units.axes, mean=False, norms=norms)
    )
    return UnitLimits(ratio, Norm(norms), least, named)


def given_limits(group: Gradients, units: UnitShapes, *, max_norm: Any) -> UnitLimits:
    """The caller's limit for all units, or one for each."""
    if is_array(max_norm) and getattr(max_norm, "shape", None):
        view = group.argument(max_norm, "max_norm")
        checks.floating(view, "max_norm")
        checks.shape(view, (units.total,), "max_norm", "one limit per unit")
        if type(view) is np.ndarray and not (view >= 0).all():
            raise ValueError("max_norm must be at least 0 for each unit")
        each = [(slice(None), group.backend.as_float64(view))]
    elif callable(max_norm) or isinstance(max_norm, (Mapping, list)):
        ends = [*accumulate(map(math.prod, units.shapes), initial=0)]
        pairs = zip(group.each(max_norm, "max_norm"), group.names(), strict=True)
        found = [group.limit(one, f"max_norm for {name}") for one, name in pairs]
        each = [(slice(*ends[k : k + 2]), limit) for k, limit in enumerate(found)]
    else:
        return UnitLimits(group.limit(max_norm, "max_norm"))
    # Memory of its own, which is read while gradients are written.
    limits = group.backend.empty((units.total,), FLOAT64)
    for where, limit in each:
        limits[where] = limit
    return UnitLimits(1.0, Norm(limits), -math.inf)


def _clip(
    group: Gradients,
    units: UnitShapes,
    rule: UnitRule,
    limits: UnitLimits,
    norms: Results,
    outs: Any,
) -> None:
    """Write the norms and the clipped gradients; nothing if an error is raised."""
    backend, wanted = group.backend, norms.views[0]
    own = backend.empty(wanted.shape, FLOAT64)
    backend.unit_norms(
        UnitNorms(
            grads=group.views, norm_type=rule.order, axes=units.axes, mean=rule.mean, norms=own
        )
    )
    if rule.policy == "raise":
        raise_if_nonfinite(group, own)
    backend.clip_units(
        ClipUnits(
            grads=group.views,
            norms=own,
            max_norm=limits.common,
            eps=rule.eps,
            axes=units.axes,
            zero_nonfinite=rule.policy == "zero",
            outs=outs,
            param_norms=limits.sizes,
            least=limits.least,
        )
    )
    wanted[...] = own


def _in_place_of(group: Gradients, units: UnitShapes, norms: Results, out: Any) -> Any:
    """The caller's structure with norms where gradients were."""
    if out is not None:
        norms.results()  # tells the library that they were written
    found = norms.views[0]
    each = known_framework(found, "norms").parts(found, units.shapes)
    return group.rebuilt(each if group.framework.returns_views else map(group.wrap, each))

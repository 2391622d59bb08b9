"""Clipping units by norms of their own: which elements make one, their limits, and the call."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from gradkit import _host
from gradkit._arrays import is_array
from gradkit._backend import FLOAT64, Axes, Shape, Spec, Views
from gradkit._calls import checks
from gradkit._calls.lists import ClipUnits, GradNorm, UnitNorms
from gradkit._calls.roles import Grads, Norm, Number
from gradkit._open import trees
from gradkit._open.arguments import known_framework
from gradkit._open.clipping import apart_from, policy_of, raise_if_nonfinite, twins
from gradkit._open.gradients import Beside, Gradients
from gradkit._open.memory import Named
from gradkit._open.results import Results
from gradkit._typing import Along, Axis

SMALLEST_NORM = 1e-6  # of a gradient's unit, in adaptive clipping's division
_PLAIN = {int, type(None)}


class UnitRule(NamedTuple):
    """The rule by which norms are taken and applied."""

    order: float
    mean: bool
    eps: float
    policy: str


class UnitLimits(NamedTuple):
    """Limits of units: ``common * max(size, least)``, or ``common`` without sizes.

    ``params`` gives the parameters whose sizes count, by name.
    """

    common: Number
    sizes: Norm | None = None
    least: float = 0.0
    params: Callable[[], Named] = tuple


class Partition(Protocol):
    """Gradients cut into units, or put together to blocks, each with a norm of its own."""

    def norms(self, group: Gradients, rule: UnitRule) -> Norm:
        """All norms that the call gives, in memory of their own."""

    def clipped_by(self, group: Gradients, norms: Norm) -> tuple[Norm, Axes]:
        """The norms that elements are clipped by, as ``ClipUnits`` has them."""

    def returned(self, group: Gradients, norms: Results, out: Any) -> Any:
        """The norms as the caller gets them."""


class UnitShapes(NamedTuple):
    """Shapes of the units that share a norm, gradient by gradient."""

    axes: Axes
    shapes: list[Shape]  # of each gradient's norms

    @property
    def total(self) -> int:
        """The number of units."""
        return sum(map(math.prod, self.shapes))

    def norms(self, group: Gradients, rule: UnitRule) -> Norm:
        """The norms of all units."""
        numbers = self.axes, self.total, rule.order
        return norms_of_units(group.backend, group.views, *numbers, mean=rule.mean)

    def clipped_by(self, group: Gradients, norms: Norm) -> tuple[Norm, Axes]:  # noqa: ARG002
        """The same, and the axes of a unit."""
        return norms, self.axes

    def returned(self, group: Gradients, norms: Results, out: Any) -> Any:
        """The caller's structure with norms where gradients were."""
        if out is not None:
            norms.results()  # tells the library that they were written
        vector = norms.views[0]
        each = known_framework(vector, "norms").parts(vector, self.shapes)
        return group.rebuilt(each if group.framework.returns_views else map(group.wrap, each))


def norms_of_units(
    backend: Any, grads: Grads, axes: Axes, total: int, order: float = 2.0, *, mean: bool = False
) -> Norm:
    """The norms of so many units, in new memory."""
    norms = Norm(backend.empty((total,), FLOAT64))
    backend.unit_norms(UnitNorms(grads=grads, norm_type=order, axes=axes, mean=mean, norms=norms))
    return norms


def check_key(key: Any, name: str) -> None:
    """Raise unless it can be the key of a gradient's block."""
    if key is None or not isinstance(key, Hashable):
        raise TypeError(f"blocks for {name} must be a key such as a string, not {key!r}")


def norms_of_blocks(backend: Any, grads: Grads, order: float, places: Any, count: int) -> Norm:
    """The norms of ``count`` blocks, of gradients each of which belongs to the one at its place."""
    each = Norm(backend.empty(places.shape, FLOAT64))
    backend.grad_norm(GradNorm(grads=grads, norm_type=order, norm=each, per_tensor=True))
    together = backend.take(each, np.argsort(places, kind="stable"))
    ends = accumulate(np.bincount(places, minlength=count), initial=0)
    vectors = Views(together[slice(*run)] for run in pairwise(ends))
    norms = Norm(backend.empty((count,), FLOAT64))
    backend.grad_norm(GradNorm(grads=vectors, norm_type=order, norm=norms, per_tensor=True))
    return norms


UnitsOf: TypeAlias = Callable[[Gradients], Any]  # a Partition
LimitsOf: TypeAlias = Callable[[Gradients, Any], UnitLimits]  # of the same units


def block_rule(norm_type: Any, rms: bool, eps: Any, nonfinite: str) -> UnitRule:
    order, mean = checks.norm_order(norm_type), checks.flag(rms, "rms")
    return UnitRule(order, mean, checks.epsilon(eps), policy_of(nonfinite))


def adaptive_rule(nonfinite: str) -> UnitRule:
    return UnitRule(2.0, False, SMALLEST_NORM, policy_of(nonfinite))


def clip_each(
    grads: Any,
    rule: UnitRule,
    units_of: UnitsOf,
    limits_of: LimitsOf,
    outs: tuple[Any, Any],
    *,
    instead: str = "",
    beside: Beside | None = None,
) -> tuple[Any, Any]:
    """Clip gradients, in place or to the first of ``outs``; return what holds them, and the norms.

    ``instead``: what to do if they cannot be written in place; without it they never are.
    """
    group = Gradients(grads, instead=instead, beside=beside)
    out, norms_out = outs
    with group.on_stream():
        units: Partition = units_of(group)
        limits = limits_of(group, units)
        clipped = (
            None if instead else twins(group, out, apart=() if out is None else limits.params())
        )
        computed = units.norms(group, rule)
        apart: Named = ()
        if norms_out is not None:
            apart = [*limits.params(), *(() if clipped is None else apart_from(group, clipped))]
        specs, label = (Spec("the norms", computed.shape, FLOAT64),), "out" if instead else "out[1]"
        norms = group.outputs(norms_out, specs, apart=apart, label=label)
        if rule.policy == "raise":
            raise_if_nonfinite(group, computed)
        by, axes = units.clipped_by(group, computed)
        call = ClipUnits(
            grads=group.views,
            norms=by,
            max_norm=limits.common,
            eps=rule.eps,
            axes=axes,
            zero_nonfinite=rule.policy == "zero",
            outs=(group if clipped is None else clipped).views,
            param_norms=limits.sizes,
            least=limits.least,
        )
        group.backend.clip_units(call)
        norms.views[0][...] = computed
        if clipped is None:
            group.wrote()
            tree = group.tree
        else:
            results = clipped.results()
            tree = group.rebuilt(results) if out is None else out
        return tree, units.returned(group, norms, norms_out)


def units_along(group: Gradients, axis: Axis) -> UnitShapes:
    """Return the units of each gradient for the caller's axis."""
    group.refuse_shards("their blocks lie on several ranks")
    axes, shapes = tuple(group.each(axis, "axis")), tuple(group.shapes())
    kinds = {*map(type, axes)}
    if tuple in kinds:
        kinds = {type(n) for one in axes for n in (one if type(one) is tuple else (one,))}
    if kinds <= _PLAIN:  # True is 1 to a cache
        with suppress(TypeError, ValueError):
            return _cached_units(axes, shapes, ("",) * len(axes))
    return units_of_shapes(axes, shapes, tuple(group.names()))


def units_of_shapes(
    axis: Sequence[Along], every: Sequence[Shape], names: Sequence[str]
) -> UnitShapes:
    """The same of gradients of these shapes and names."""
    axes, shapes = [], []
    for one, shape, name in zip(axis, every, names, strict=True):
        along = _along(one, len(shape), name)
        axes.append(along)
        shapes.append(tuple(n for k, n in enumerate(shape) if k not in along))
    return UnitShapes(tuple(axes), shapes)


_cached_units = lru_cache(maxsize=64)(units_of_shapes)


def _along(axis: Along, ndim: int, name: str) -> tuple[int, ...]:
    label = f"axis for {name}"
    every = tuple(range(ndim))
    if axis is None:
        return every
    # An iterator would give the next gradient no axes.
    is_one = not isinstance(axis, Collection) or getattr(axis, "shape", None) == ()
    axes: tuple[Any, ...] = (axis,) if is_one else tuple(axis)  # type: ignore[arg-type]
    for one in axes:
        checks.integer(one, label)
    if ndim < 2:
        return every
    sorted_axes = sorted(checks.axis_index(one, ndim, label) for one in axes)
    if len(set(sorted_axes)) < len(sorted_axes):
        raise ValueError(f"{label} is {axes}, which names an axis twice")
    return tuple(sorted_axes)


def _table_like(group: Gradients, params: list[Any]) -> Any:
    """A table of parameters, if there clearly is one of each gradient's shape."""
    views: Any = group.views
    table = _host.code.table(params, False) if isinstance(views, _host.Table) else None
    fits = table is not None and table.device == views.device and views.pairs_with(table) >= 0
    return table if fits else None


def _params(group: Gradients, params: Any) -> tuple[Grads, Callable[[], Named]]:
    """The parameter of each gradient, and what gives them by name."""
    flat = type(params) is list and group.is_flat
    if flat and len(params) == len(group.arrays) and group.are_views(params):
        views = _table_like(group, [*params])
        if views is not None:
            return views, lambda: [*zip(trees.names(params, "params"), views, strict=True)]
    named = []
    tree = trees.freeze(params)
    partners = trees.partners(group.tree, tree, "grads", "params")
    for (name, param), view in zip(partners, group.views, strict=True):
        array = group.view(param, name, detach=True)
        checks.floating(array, name)
        checks.shape(array, view.shape, name, "the shape of its gradient")
        named.append((name, array))
    return [array for _, array in named], lambda: named


def adaptive_limits(
    group: Gradients, units: UnitShapes, *, params: Any, clipping: Any, least: float
) -> UnitLimits:
    """The limit of each unit, from the norm of the same unit of the parameters."""
    ratio, (arrays, named) = group.limit(clipping, "clipping"), _params(group, params)
    if not (isinstance(ratio, float) and math.isfinite(ratio)):
        least = max(least, math.ulp(0.0))  # so that inf clips nothing: inf * 0 is NaN
    sizes = norms_of_units(group.backend, arrays, units.axes, units.total)
    return UnitLimits(ratio, sizes, least, named)


def limits_of(group: Gradients, units: UnitShapes, *, max_norm: Any) -> UnitLimits:
    """The caller's limit for all units, or one for each."""
    max_norm = trees.plain(max_norm)
    if callable(max_norm) or isinstance(max_norm, (dict, list)):
        return limits_of_each(group, units, group.each(max_norm, "max_norm"))
    if not (is_array(max_norm) and getattr(max_norm, "shape", None)):
        return UnitLimits(group.limit(max_norm, "max_norm"))
    view = group.argument(max_norm, "max_norm")
    checks.floating(view, "max_norm")
    checks.shape(view, (units.total,), "max_norm", "one limit per unit")
    if type(view) is np.ndarray and not (view >= 0).all():
        raise ValueError("max_norm must be at least 0 for each unit")
    # Memory of its own, which is read while gradients are written.
    limits = group.backend.empty((units.total,), FLOAT64)
    limits[...] = group.backend.as_float64(view)
    return UnitLimits(1.0, Norm(limits), -math.inf)


def limits_of_each(group: Gradients, units: UnitShapes, values: Iterable[Any]) -> UnitLimits:
    """The limits of units, from one for each gradient: numbers, of which some may be in arrays."""
    pairs = zip(values, group.names(), strict=True)
    each = [group.limit(one, f"max_norm for {name}") for one, name in pairs]
    ends = [*accumulate(map(math.prod, units.shapes), initial=0)]
    on_host = [limit if isinstance(limit, float) else 0.0 for limit in each]
    limits = group.backend.as_float64(np.repeat(on_host, np.diff(ends)))
    for k, limit in enumerate(each):
        if not isinstance(limit, float):
            limits[slice(*ends[k : k + 2])] = limit
    return UnitLimits(1.0, Norm(limits), -math.inf)

"""Blocks of gradients, each with one norm: of the gradients given here, or on all ranks."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gradkit import _numpy
from gradkit._backend import FLOAT64, Axes
from gradkit._calls.lists import NormParts
from gradkit._calls.roles import Norm, Numbers
from gradkit._dtypes import float_of
from gradkit._open.clipping import Rule
from gradkit._open.gradients import Gradients
from gradkit._open.results import Results
from gradkit._open.units import (
    UnitLimits,
    UnitRule,
    UnitShapes,
    check_key,
    clip_each,
    limits_of,
    limits_of_each,
    norms_of_blocks,
    units_along,
)
from gradkit._ranks.named_rows import Names, of_all
from gradkit._ranks.norms import Ranks, Wanted, beside, compile_for, copies_of, ownership_of

_PART = 3  # numbers of a row of `NormParts`


class Blocks:
    """The blocks of a call's gradients, as a ``Partition``.

    ``keys`` are those of ``norms``: over ranks the keys of all.
    """

    def __init__(self, group: Gradients, blocks: Any, wanted: Wanted, ranks: Ranks):
        if not (callable(blocks) or isinstance(blocks, (Mapping, list))):
            raise TypeError(
                "blocks must be a function of a gradient's name and array, or a dict or list of "
                f"keys like grads, not {type(blocks).__qualname__}"
            )
        self.each = [*group.each(blocks, "blocks")]
        for key, name in zip(self.each, group.names(), strict=True):
            check_key(key, name)
            if not (ranks.collective.alone or type(key) in (str, int)):
                raise TypeError(
                    f"blocks gives {key!r} for {name}; over a group, keys are strings or integers"
                )
        self.keys: Names = tuple(dict.fromkeys(self.each))
        self.wanted, self._ranks = wanted, ranks

    def norms(self, group: Gradients, rule: UnitRule) -> Norm:
        """The norm of each block."""
        copies_of(group, self._ranks)  # which refuses parts without a group
        if not self._ranks.collective.alone:
            return self._of_ranks(group, rule)
        return norms_of_blocks(
            group.backend, group.views, rule.order, self._places(), len(self.keys)
        )

    def clipped_by(self, group: Gradients, norms: Norm) -> tuple[Norm, Axes]:
        """Each gradient's block's norm, and all of its axes."""
        axes = tuple(tuple(range(len(shape))) for shape in group.shapes())
        return Norm(group.backend.take(norms, self._places())), axes

    def returned(self, group: Gradients, norms: Results, out: Any) -> Any:  # noqa: ARG002
        """The norms by key."""
        each = group.framework.parts(norms.results()[0], [()] * len(self.keys))
        return dict(zip(self.keys, each, strict=True))

    def _places(self) -> Any:
        """The place of each gradient's key among the keys."""
        place = {key: k for k, key in enumerate(self.keys)}
        return np.array([place[key] for key in self.each], np.int64)

    def _of_ranks(self, group: Gradients, rule: UnitRule) -> Norm:
        """The same over ranks, which send a row for each block that any of them has."""
        backend, order, places = group.backend, rule.order, self._places()
        parts = Numbers(backend.empty((len(places), _PART), FLOAT64))
        backend.norm_parts(
            NormParts(grads=group.views, norm_type=order, parts=parts, per_tensor=True)
        )
        own = np.array(backend.read(parts))
        dtypes = frozenset(float_of(view.dtype).name for view in group.views)
        compile_for(backend, "clip_units", dtypes)  # type: ignore[arg-type]  # can be hashed

        def rows() -> Any:
            copies, shared = copies_of(group, self._ranks), own.copy()
            if copies is not None and np.isfinite(order):
                shared[:, :2] /= np.array(copies)[:, np.newaxis]
            return _numpy.joined_parts(shared, places, len(self.keys), order)

        call, owned = self._call_text(group), ownership_of(group, self._ranks)
        self.keys, every = of_all(self._ranks.collective, call, self.keys, rows, owned)
        norms = np.empty(len(self.keys))
        _numpy.norm_of_ranks(every, 1.0, order, norms, None)
        return Norm(backend.as_float64(norms))

    def _call_text(self, group: Gradients) -> str:
        """The call, as all ranks must make it."""

        def number(limit: Any) -> float:
            checked = group.limit(limit, "max_norm")
            return checked if isinstance(checked, float) else float(group.backend.read(checked))

        most = self.wanted.max_norm
        if not isinstance(most, Mapping):
            return self.wanted.as_text(max_norm=number(most))
        each = sorted((repr(key), number(limit)) for key, limit in most.items())
        return self.wanted.as_text(max_norm=dict(each))  # type: ignore[arg-type]


class Cut(NamedTuple):
    """Units along axes, or blocks, which ranks may share: each has a norm of its own."""

    function: str  # which is asked for it
    axis: Any
    blocks: Any
    ranks: Ranks


def clip_cut(
    grads: Any, max_norm: Any, rule: UnitRule, cut: Cut, outs: tuple[Any, Any], *, instead: str = ""
) -> tuple[Any, Any]:
    """``clip_each`` of units, or of blocks, whose norms come by key."""
    function, axis, blocks, ranks = cut
    if blocks is None:
        is_one = isinstance(ranks.replicas, (int, np.integer)) and ranks.replicas == 1
        if not (ranks.collective.missing and is_one):
            raise ValueError(
                f"group and replicas go with blocks, and replicas is {ranks.replicas!r}; pass "
                "blocks=lambda name, grad: name for a norm of each gradient"
            )
        limits, units = partial(limits_of, max_norm=max_norm), partial(units_along, axis=axis)
        first = {"out": outs[1], "max_norm": max_norm}  # of an empty list
        return clip_each(grads, rule, units, limits, outs, instead=instead, beside=lambda: first)
    if rule.mean or axis is not None:
        raise ValueError("axis and rms cut single gradients; leave them out with blocks")
    if outs[1] is not None and not ranks.collective.alone:
        raise ValueError("out takes no norms over a group, whose ranks may have further blocks")
    wanted = Wanted(function, Rule(rule.order, rule.eps, rule.policy), 1.0, max_norm=max_norm)
    blocks_of = partial(Blocks, blocks=blocks, wanted=wanted, ranks=ranks)
    near = partial(beside, ranks, outs[1], None)
    return clip_each(grads, rule, blocks_of, _limits, outs, instead=instead, beside=near)


def _limits(group: Gradients, blocks: Blocks) -> UnitLimits:
    """The limit of each gradient's block."""
    most, each = blocks.wanted.max_norm, UnitShapes((), [()] * len(blocks.each))
    if isinstance(most, Mapping):
        missing = [key for key in blocks.keys if key not in most]
        if missing:
            raise ValueError(f"max_norm has no limit for the block {missing[0]!r}")
        return limits_of_each(group, each, [most[key] for key in blocks.each])
    if callable(most) or isinstance(most, list) or getattr(most, "shape", None):
        raise TypeError(
            "max_norm must be a real number, or with blocks a dict of them by key, not "
            f"{type(most).__qualname__}"
        )
    return limits_of(group, each, max_norm=most)

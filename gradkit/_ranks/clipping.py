"""Clip gradients by the norm of all: of those given here, or of those of all ranks."""

from functools import partial
from itertools import chain, compress
from operator import not_
from typing import Any, NamedTuple

from gradkit._calls import checks
from gradkit._calls.lists import ClipByNorm
from gradkit._calls.roles import Grads
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._open.clipping import NORM, Rule, apart_from, twins
from gradkit._open.gradients import Gradients
from gradkit._ranks.device_norms import Factors
from gradkit._ranks.norms import Ranks, Wanted, beside, flags_of, on_all, take_norm


class Clip(NamedTuple):
    """A clip that is asked for: of which gradients, by which norm, written where."""

    wanted: Wanted
    clip: Any
    count: Any
    found_inf: Any
    norm_out: Any


def clip_all(
    grads: Any, asked: Clip, ranks: Ranks, out: Any = None, *, instead: str = ""
) -> tuple[Any, Any]:
    """Clip gradients to ``out``, or in place; return what holds them, and the norm.

    ``instead``: what to do if they cannot be written in place; without it they never are.
    """
    near = partial(beside, ranks, asked.norm_out, asked.found_inf)
    several = asked.clip is None and asked.count is None
    held = Gradients(grads, instead=instead, beside=near, several=several)
    some, counts = (
        None if said is None else _chosen(held, said, label)
        for said, label in ((asked.clip, "clip"), (asked.count, "count"))
    )
    counted = held if counts is None else held.picked(counts)
    with held.on_stream():
        wanted, flags = asked.wanted.of(held), flags_of(held, asked.found_inf, ())
        if not several:
            wanted = wanted._replace(choices=_Choices(held, ranks, some, counts))
        apart = flags.named() if flags else []
        clipped = None if instead else twins(held, out, apart=apart)
        further = () if clipped is None else apart_from(clipped)
        norm = held.outputs(asked.norm_out, (NORM,), apart=chain(further, apart))
        factors = take_norm(counted, wanted, ranks, norm, flags)
        clip_by(held, factors, (held if clipped is None else clipped).views, wanted.rule, some)
        if clipped is None:
            held.wrote()
            return held.tree, norm.results()[0]
        results = clipped.results()
        return held.rebuilt(results) if out is None else out, norm.results()[0]


class _Choices(NamedTuple):
    """Which gradients are clipped, and which count.

    As text, that of the gradients which all ranks hold: of their others ranks know nothing.
    """

    held: Gradients
    ranks: Ranks
    clip: Any
    count: Any

    def __str__(self) -> str:
        """The names of those that are not clipped, or do not count."""
        names = on_all(self.held, self.ranks)
        said = ""
        for label, chosen in (("clip", self.clip), ("count", self.count)):
            left = sorted(filter(None, compress(names, map(not_, chosen or ()))))
            said += f", {label} is False for {', '.join(left)}" if left else ""
        return said


def clip_by(
    held: Gradients, factors: Factors, outs: Grads, rule: Rule, some: list[bool] | None = None
) -> None:
    """Clip all gradients, or some: the others are only scaled."""
    call = ClipByNorm(
        grads=held.views,
        norm=factors.norm,
        max_norm=factors.limit,
        scale=factors.scale,
        eps=rule.eps,
        zero_nonfinite=rule.policy == "zero",
        outs=outs,
    )
    if some is None:
        held.backend.clip_by_norm(call)
        return
    with Uninterrupted():
        call.clip_some(held.backend, some)


def _chosen(held: Gradients, said: Any, label: str) -> list[bool]:
    """Of each gradient whether it is meant."""
    flat = type(said) is list and held.is_flat and len(said) == len(held.arrays)
    if flat and {bool}.issuperset(map(type, said)):
        return said
    each = [*held.each(said, label)]
    if {bool}.issuperset(map(type, each)):
        return each
    names = held.names()
    return [checks.flag(one, f"{label} for {next(names)}") for one in each]

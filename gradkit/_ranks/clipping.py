"""Clip gradients by the norm of all: of those given here, or of those of all ranks."""

from functools import partial
from itertools import chain, compress
from operator import not_
from typing import Any, NamedTuple

from gradkit._calls import checks
from gradkit._calls.lists import ClipByNorm
from gradkit._calls.roles import Grads
from gradkit._numpy.interrupts import Uninterrupted
from gradkit._open import trees
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
    grads: Any, options: Clip, ranks: Ranks, out: Any = None, *, instead: str = ""
) -> tuple[Any, Any]:
    """Clip gradients to ``out``, or in place; return what holds them, and the norm.

    ``instead``: what to do if they cannot be written in place; without it they never are.
    """
    near = partial(beside, ranks, options.norm_out, options.found_inf)
    several = options.clip is None and options.count is None
    gradients = Gradients(grads, instead=instead, beside=near, several=several)
    some, counts = (
        None if choice is None else _chosen(gradients, choice, label)
        for choice, label in ((options.clip, "clip"), (options.count, "count"))
    )
    counted = gradients if counts is None else gradients.picked(counts)
    with gradients.on_stream():
        wanted, flags = options.wanted.of(gradients), flags_of(gradients, options.found_inf, ())
        if not several:
            wanted = wanted._replace(choices=_Choices(gradients, ranks, some, counts))
        apart = flags.named() if flags else []
        clipped = None if instead else twins(gradients, out, apart=apart)
        label = "out" if instead else "out[1]"
        further = chain(() if clipped is None else apart_from(gradients, clipped), apart)
        norm = gradients.outputs(options.norm_out, (NORM,), apart=further, label=label)
        factors = take_norm(counted, wanted, ranks, norm, flags)
        clip_by(
            gradients, factors, (gradients if clipped is None else clipped).views, wanted.rule, some
        )
        if clipped is None:
            gradients.wrote()
            return gradients.tree, norm.results()[0]
        results = clipped.results()
        return gradients.rebuilt(results) if out is None else out, norm.results()[0]


class _Choices(NamedTuple):
    """The gradients that are clipped, and those that count.

    As text, that of the gradients which all ranks hold: of their others ranks know nothing.
    """

    gradients: Gradients
    ranks: Ranks
    clip: Any
    count: Any

    def __str__(self) -> str:
        """The names of those that are not clipped, or do not count."""
        names = on_all(self.gradients, self.ranks)
        text = ""
        for label, chosen in (("clip", self.clip), ("count", self.count)):
            excluded = sorted(filter(None, compress(names, map(not_, chosen or ()))))
            text += f", {label} is False for {', '.join(excluded)}" if excluded else ""
        return text


def clip_by(
    gradients: Gradients, factors: Factors, outs: Grads, rule: Rule, some: list[bool] | None = None
) -> None:
    """Clip all gradients, or some: the others are only scaled."""
    call = ClipByNorm(
        grads=gradients.views,
        norm=factors.norm,
        max_norm=factors.limit,
        scale=factors.scale,
        eps=rule.eps,
        zero_nonfinite=rule.policy == "zero",
        outs=outs,
    )
    if some is None:
        gradients.backend.clip_by_norm(call)
        return
    with Uninterrupted():
        call.clip_some(gradients.backend, some)


def _chosen(gradients: Gradients, choice: Any, label: str) -> list[bool]:
    """Return a bool for each gradient: from a list, a container, or a function."""
    flat = type(choice) is list and gradients.is_flat and len(choice) == len(gradients.arrays)
    if flat and {bool}.issuperset(map(type, choice)):
        return choice
    each = [*gradients.each(trees.plain(choice), label)]
    if {bool}.issuperset(map(type, each)):
        return each
    names = gradients.names()
    return [checks.flag(one, f"{label} for {next(names)}") for one in each]

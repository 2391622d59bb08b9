"""The norm of all gradients of a call: those given here, or those of all ranks."""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from gradkit import _numpy
from gradkit._arrays import is_array
from gradkit._backend import FLOAT64, Shape, Spec, Spread
from gradkit._calls import checks
from gradkit._calls.backend import Backend
from gradkit._calls.lists import GradNorm, NormParts
from gradkit._calls.roles import Flags, Norm
from gradkit._dtypes import float_name, float_of
from gradkit._open import trees
from gradkit._open.arguments import refuse_write
from gradkit._open.clipping import NORM, Rule, raise_if_nonfinite
from gradkit._open.gradients import Gradients
from gradkit._open.results import Results
from gradkit._open.shards import ownership_in, replicas_in
from gradkit._ranks.collective import Collective
from gradkit._ranks.device_norms import Factors, RankSums, queue_norm
from gradkit._ranks.ownership import Ownership

_FOUND_INF = "found_inf"
# Operations of a norm; one over ranks runs more than ``grad_norm``.
RUN_BY_NORMS = "grad_norm", "norm_parts", "rank_state", "join_ranks", "exact_sums"
_PART = 3  # numbers of a norm that ranks exchange: `NormParts`
_PUBLIC = {"policy": "nonfinite"}  # how callers know a field
# Fields that other texts cover: `per_tensor` tells how many numbers a call has.
_LEFT_OUT = {"function", "rule", "order", "per_tensor", "then", "choices"}


class Wanted(NamedTuple):
    """The norm that a call asks for, and the limit of a clip by it.

    ``scale`` and ``max_norm`` are the caller's until gradients are opened. Ranks agree on every
    field but ``then``: a new one takes part by itself.
    """

    function: str
    rule: Rule
    scale: Any
    per_tensor: bool = False
    then: str = ""  # the operation that takes it
    max_norm: Any = math.inf
    choices: Any = ""  # as text: of gradients that all ranks hold, which are treated otherwise

    def __str__(self) -> str:
        """Arguments that all ranks must share, but for numbers, which a device may have."""
        return self.as_text(scale=1.0, max_norm=math.inf)

    def as_text(self, **numbers: float) -> str:
        """The same with these numbers. What is left out has its default."""
        fields = {**self.rule._asdict(), **self._asdict(), **numbers}
        if self.rule.eps < 0:
            fields |= {"eps": -self.rule.eps, "eps_mode": "add"}
        others = (
            f", {_PUBLIC.get(name, name)}={value!r}"
            for name, value in fields.items()
            if name not in _LEFT_OUT and value != _DEFAULTS.get(name)
        )
        return f"{self.function}(norm_type={self.rule.order}{''.join(others)}){self.choices}"

    @property
    def is_queued(self) -> bool:
        """True if no host needs the norm, so that numbers may stay on devices."""
        return not (self.per_tensor or self.rule.exact or self.rule.policy == "raise")

    def of(self, gradients: Gradients) -> "Wanted":
        """The same of gradients that are open."""
        limit = gradients.limit(self.max_norm, "max_norm")
        return self._replace(max_norm=limit, scale=gradients.factor(self.scale, "scale"))


_DEFAULTS = {**Rule._field_defaults, **Wanted._field_defaults, "scale": 1.0}


class Ranks(NamedTuple):
    """The group over which a norm is taken, if any, and how."""

    collective: Collective
    replicas: Any = 1


def norm_of(
    grads: Any, wanted: Wanted, ranks: Ranks, found_inf: Any, out: Any
) -> tuple[Gradients, Any]:
    """The gradients, opened, and the norm of all or a vector of each one's."""
    near = partial(beside, ranks, out, found_inf)
    gradients = Gradients(grads, beside=near, several=True)
    spec = Spec("the norm", (len(gradients.arrays),), FLOAT64) if wanted.per_tensor else NORM
    with gradients.on_stream():
        opened, flags = wanted.of(gradients), flags_of(gradients, found_inf, spec.shape)
        norm = gradients.outputs(out, (spec,), apart=flags.named() if flags else ())
        take_norm(gradients, opened, ranks, norm, flags)
        return gradients, norm.results()[0]


def flags_of(gradients: Gradients, found_inf: Any, shape: Shape) -> Results | None:
    """Open ``found_inf``, which says whether elements are NaN or infinite."""
    if found_inf is None:
        return None
    refuse_write(gradients.framework, _FOUND_INF, "test whether grad_norm(grads, inf) is finite")
    if not is_array(found_inf):
        kind = type(found_inf).__qualname__
        raise TypeError(f"{_FOUND_INF} must be a float32 array that is written to, not {kind}")
    view = gradients.view(found_inf, _FOUND_INF)
    if view.dtype != bool and float_name(view.dtype) is None:
        raise TypeError(
            f"{_FOUND_INF} has dtype {view.dtype}, and is written to; pass zeros of float32"
        )
    wanted = view.shape if shape == () and view.shape == (1,) else shape
    return gradients.outputs(found_inf, (Spec("the norm", wanted, view.dtype),), label=_FOUND_INF)


def beside(ranks: Ranks, out: Any, found_inf: Any) -> dict[str, Any]:
    """Arrays that show the library and device of an empty list of gradients."""
    return {"group.faults": ranks.collective.beside, "out": out, "found_inf": found_inf}


def take_norm(
    gradients: Gradients, wanted: Wanted, ranks: Ranks, norm: Results, flags: Results | None
) -> Factors:
    """Write the norm and whether an element is not finite; nothing on an error.

    Return what a clip is to use.
    """
    collective, replicas = ranks.collective, ranks.replicas
    factors = Factors(norm.views[0], wanted.max_norm, wanted.scale)
    new_flags = None if flags is None else _new_flags(gradients, flags, factors.norm, ranks)
    once = gradients.is_flat and type(replicas) is int and replicas == 1
    copies = None if once else copies_of(gradients, ranks)
    if wanted.rule.exact:
        from gradkit._ranks import exact_norms  # with `fractions`, which few calls need

        exact_norms.check(gradients, wanted.rule.order)
    call = _Taking(gradients, wanted, ranks, copies, new_flags)
    if collective.alone and wanted.rule.policy != "raise" and not wanted.rule.exact:
        call.write_own(factors.norm)
    else:
        factors = call.write_of_all(factors, fresh=norm.fresh)
    if flags is not None:
        flags.views[0][...] = new_flags
        flags.results()  # tells the library that they were written
    return factors


def _new_flags(gradients: Gradients, flags: Results, norm: Norm, ranks: Ranks) -> Flags:
    """Make float64 flags for a backend; the caller's have other dtypes."""
    new_flags = gradients.backend.empty(norm.shape, FLOAT64)
    collective = ranks.collective
    if collective.on_device or collective.has_both:  # devices may find that nothing is written
        new_flags[...] = flags.views[0].reshape(new_flags.shape)
    return Flags(new_flags)


class _Taking(NamedTuple):
    """A norm while it is taken. ``found_inf``: what says whether elements are not finite."""

    gradients: Gradients
    wanted: Wanted
    ranks: Ranks
    copies: Sequence[int] | None
    found_inf: Flags | None

    def again(self) -> "_Taking":
        """The same, now that ranks have found out what they hold."""
        return self._replace(copies=copies_of(self.gradients, self.ranks))

    def write_of_all(self, factors: Factors, *, fresh: bool) -> Factors:
        """Write the norm over ranks, or one that must be finite. ``fresh``: its memory is new."""
        gradients, wanted, ranks, *_ = self
        collective = ranks.collective
        if wanted.then and not collective.alone:
            dtypes = frozenset(float_of(view.dtype).name for view in gradients.views)
            compile_for(gradients.backend, wanted.then, dtypes)  # type: ignore[arg-type]  # can be hashed
        if not (collective.has_both and wanted.is_queued):
            return self.write_over(factors, fresh=fresh)
        among = self.between_devices()
        again = self.again()
        if among is None:
            return again.write_over(factors, fresh=fresh)
        with among:
            others = again._replace(ranks=ranks._replace(collective=among))
            return others.write_over(factors, fresh=fresh)

    def write_over(self, factors: Factors, *, fresh: bool) -> Factors:
        """The same over a group that is chosen."""
        gradients, wanted, ranks, copies, found_inf = self
        collective, order = ranks.collective, wanted.rule.order
        owned = ownership_of(gradients, ranks)
        ownership = "" if owned is None else f", ownership {owned.serial}"
        sums = RankSums(f"{wanted}{ownership}", order, copies, found_inf)  # devices compare numbers
        if collective.on_device and wanted.is_queued:
            return queue_norm(gradients, collective, sums, factors, fresh=fresh)
        # The rest may raise, and an error must not change the caller's arrays: norm comes last.
        result = Norm(gradients.backend.empty(factors.norm.shape, FLOAT64))
        if wanted.rule.exact:
            self.write_exact(result)
        elif collective.alone:
            self.write_own(result)
        elif collective.on_device and not wanted.per_tensor:
            unsure = factors._replace(norm=result)
            queue_norm(gradients, collective, sums, unsure, fresh=True)
            collective.check()
        else:
            self.write_of_group(result)
        if wanted.rule.policy == "raise":
            raise_if_nonfinite(gradients, result)
        factors.norm[...] = result
        return factors

    def between_devices(self) -> Collective | None:
        """The group on devices, if it has one and hosts find that all gradients lie on devices.

        So the hosts wait for each other, and for no device.
        """
        device: Any = getattr(self.gradients.backend, "device", None)
        here = device is not None and not isinstance(self.gradients.views, Spread)
        rows = np.empty((0, 1))
        while not len(rows):
            rows = self.gathered(f"{self.wanted}, where", np.array([float(here)]))
        if device is None or not rows.all():
            return None
        return self.ranks.collective.between_devices(device.number)

    def write_own(self, norm: Norm) -> None:
        """The norm of the gradients given here."""
        wanted = self.wanted
        self.gradients.backend.grad_norm(
            GradNorm(
                grads=self.gradients.views,
                norm_type=wanted.rule.order,
                norm=norm,
                per_tensor=wanted.per_tensor,
                scale=wanted.scale,
                found_inf=self.found_inf,
            )
        )

    def write_of_group(self, norm: Norm) -> None:
        """Sums travel, not norms: what ranks add up has lost nothing but its own rounding."""
        gradients, wanted, _, copies, found_inf = self
        backend, order, each = gradients.backend, wanted.rule.order, wanted.per_tensor
        parts = backend.empty((norm.size, _PART), FLOAT64)
        backend.norm_parts(
            NormParts(
                grads=gradients.views, norm_type=order, parts=parts, per_tensor=each, copies=copies
            )
        )
        numbers = self.numbers()
        call = wanted.as_text(**numbers)
        if each:  # each norm is that of one gradient on all ranks
            call += f" of {', '.join(gradients.names())}"
        rows = self.gathered(call, np.array(backend.read(parts)).reshape(-1))
        if not len(rows):
            self.again().write_of_group(norm)
            return
        every = np.ascontiguousarray(rows).reshape(len(rows), norm.size, _PART)
        total = np.empty(norm.shape)
        nonfinite = None if found_inf is None else np.empty(norm.shape)
        _numpy.norm_of_ranks(every, numbers["scale"], order, total, nonfinite)
        norm[...] = backend.as_float64(total)
        if found_inf is not None:
            found_inf[...] = backend.as_float64(nonfinite)

    def write_exact(self, norm: Norm) -> None:
        """The same from exact sums, which are joined exactly and rounded once."""
        from gradkit._ranks import exact_norms

        order, collective = self.wanted.rule.order, self.ranks.collective
        sums = exact_norms.own_of(self.gradients, order, self.copies)
        numbers, heads = self.numbers(), sums.head()[None]
        if not collective.alone:
            heads = self.gathered(self.wanted.as_text(**numbers), sums.head())
            if not len(heads):
                self.again().write_exact(norm)
                return
        states = exact_norms.exchanged(sums, heads, collective)
        norm[...], nonfinite = exact_norms.norm_of(states, order, abs(numbers["scale"]))
        if self.found_inf is not None:
            self.found_inf[...] = nonfinite

    def gathered(self, call: str, state: Any) -> Any:
        """A row from each rank; none if one did not know yet what ranks hold: now all do."""
        owned, collective = ownership_of(self.gradients, self.ranks), self.ranks.collective
        rows = collective.gather(call, state, 0.0 if owned is None else owned.serial)
        if owned is not None and not len(rows):
            owned.exchange(collective)
        return rows

    def numbers(self) -> dict[str, float]:
        """Numbers of the call, read from the device if they are there, which waits."""
        read = self.gradients.backend.read
        named = {"scale": self.wanted.scale, "max_norm": self.wanted.max_norm}
        return {k: v if isinstance(v, float) else float(read(v)) for k, v in named.items()}


@cache
def compile_for(backend: Backend, operation: str, dtypes: frozenset[str]) -> None:
    """While an error is still one of all ranks."""
    backend.warmup((operation,), dtypes)


def copies_of(gradients: Gradients, ranks: Ranks) -> list[int] | None:
    """Number of ranks that hold each gradient; None if each is on one."""
    collective, replicas = ranks
    if collective.missing:
        gradients.refuse_shards("pass group")
    if _is_one(replicas):
        replicas = 1 if gradients.is_flat else replicas_in(gradients.tree)
        if _is_one(replicas):
            return None
    numbers = trees.spread(trees.plain(replicas), gradients.tree, "replicas", "grads")
    copies = [checks.integer(one, "replicas") for one in numbers]
    for name, count in zip(gradients.names(), copies, strict=True):
        if not 1 <= count <= collective.size:
            most = (
                "there is no group"
                if collective.missing
                else f"the group's size is {collective.size}"
            )
            raise ValueError(f"replicas of {name} is {count}, but {most}")
    return copies if set(copies) - {1} else None


def on_all(gradients: Gradients, ranks: Ranks) -> list[str]:
    """Names of the gradients that all ranks hold, or hold parts of; "" for others."""
    owned = ownership_of(gradients, ranks)
    if owned is None:
        copies = copies_of(gradients, ranks) or []
        return ["a copy" if count == ranks.collective.size else "" for count in copies]
    present = zip(owned.parts, owned.places, owned.on_all, strict=True)
    return [part.name if everywhere else "" for part, place, everywhere in present if place]


def ownership_of(gradients: Gradients, ranks: Ranks) -> Ownership | None:
    """Ownership of the ranks' parts, if the norm depends on it."""
    by_caller = gradients.is_flat or not _is_one(ranks.replicas)
    owned: Ownership | None = None if by_caller else ownership_in(gradients.tree)
    members = ranks.collective.rank, ranks.collective.size
    if owned is not None and owned.members != members:
        raise ValueError("group is not the one that was passed to shards_of")
    return owned


def _is_one(replicas: Any) -> bool:
    return type(replicas) is int and replicas == 1

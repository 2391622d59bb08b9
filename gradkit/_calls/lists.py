"""Operations on lists of gradients, and on the numbers that go with them.

A record has what one backend needs for one step of a public function: arrays are the backend's own,
numbers are checked, and results are there to be written. ``grads`` may be ``Views``, a table
or, on a backend of several devices, ``Spread``; their norms are float64.
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Protocol, TypeAlias, dataclass_transform

from gradkit._backend import Axes, picked
from gradkit._calls import checks, list_layouts, roles
from gradkit._calls.record import Call, Record, in_place, partners, result
from gradkit._calls.roles import Checked, Grads, In, InOut, Out, Seldom, Written
from gradkit._dtypes import FLOATS, accumulation_name


@dataclass_transform(kw_only_default=True)
class ListCall(Record):
    """One step of a call, with all fields by name; ``Written`` are those that it writes."""


class GradNorm(ListCall):
    """``norm = |scale| * (sum |g|^p)^(1/p)`` over all gradients, or one norm per gradient.

    ``found_inf``, contiguous float64 of norm's shape, becomes 1 where an element is NaN or
    infinite, and 0 elsewhere.
    """

    grads: Grads
    norm_type: float
    norm: Written[roles.Norm]
    per_tensor: bool = False
    scale: roles.Number = 1.0
    found_inf: Written[roles.Flags | None] = None


# What to do with parameters that cannot be written.
_NEW_ARRAYS = "compute new ones, in JAX by gradkit.jax.{}"

_POLICY = ("propagate", "raise", "zero")
Policy: TypeAlias = Annotated[
    Checked[str], lambda value, _: checks.choice(value, "nonfinite", _POLICY)
]
_USUAL = {"nonfinite": "propagate", "exact": False, "replicas": 1}


class TotalNorm(Call):
    """The norm of ``scale * grads``, all taken together: the fields of ``GradNorm``, and options.

    ``group``: of those of all its ranks, of which so many have copies as ``replicas`` says.
    """

    grads: In[Grads]
    norm_type: roles.Order
    scale: roles.ScaleFactor
    nonfinite: Policy
    exact: roles.Exact
    replicas: Checked[Any]
    group: Seldom
    found_inf: Seldom

    norm: Out[roles.Norm] = result()

    layout = list_layouts.OfList(usual=_USUAL)
    operation = "grad_norm"
    per_tensor = False


class ClipByTotalNorm(Call):
    """The same, by which gradients are clipped in place: the fields of ``ClipByNorm`` too.

    ``clip`` and ``count`` say which gradients, if not all.
    """

    grads: InOut[Grads] = in_place("use clip_by_global_norm, which returns new gradients")
    max_norm: roles.MaxNorm
    norm_type: roles.Order
    scale: roles.ScaleFactor
    eps_mode: Checked[str]
    eps: Annotated[Checked[float], lambda eps, call: checks.signed_epsilon(eps, call.eps_mode)]
    nonfinite: Policy
    exact: roles.Exact
    replicas: Checked[Any]
    group: Seldom
    found_inf: Seldom
    clip: Seldom
    count: Seldom

    norm: Out[roles.Norm] = result()

    layout = list_layouts.OfList(usual=_USUAL)
    per_tensor = zero_nonfinite = False
    outs = property(attrgetter("grads"))  # what is written

    def compute(self, backend: "ListOperations") -> None:
        backend.grad_norm(self)  # type: ignore[arg-type]
        backend.clip_by_norm(self)  # type: ignore[arg-type]


class NormParts(ListCall):
    """The sums of ``GradNorm`` before the root: for each norm a row (hi, lo, scale).

    A row stands for ``(hi + lo) * scale^p``; for p = infinity ``hi`` is the norm. ``hi`` is
    finite if all elements are. ``parts`` are contiguous. ``copies``: each gradient's sum is
    divided by its number.
    """

    grads: Grads
    norm_type: float
    parts: Written[roles.Numbers]
    per_tensor: bool = False
    copies: Sequence[int] | None = None


# The sums of `ExactSums` are whole numbers of 2^LEAST_BIT, in digits of so many bits.
DIGITS, DIGIT_BITS, LEAST_BIT = 22, 32, -320


class ExactSums(ListCall):
    """``sum |g|`` or, for ``norm_type`` 2, ``sum g^2``, without any rounding.

    ``rows`` has each gradient's row of ``sums``: its digits, the least significant first, and the
    sum of magnitudes that are not finite. ``sums`` are in host memory. No gradient is float64.
    """

    grads: Grads
    norm_type: float
    rows: Sequence[int]
    sums: Written[roles.Numbers]


# What `ListStats` gives of a gradient: norm, largest magnitude, mean, zeros, what is not finite.
STATS = 5
# What it adds up: squares and elements, each as (hi, lo, scale); the largest magnitude, zeros, what
# is not finite, all elements.
STATS_PART = 10


class ListStats(ListCall):
    """For each gradient a row of ``stats``, or of ``parts`` what it is computed from.

    Of no elements all statistics are 0. ``parts`` are contiguous; a ``hi`` is finite if all
    elements are.
    """

    grads: Grads
    stats: Written[roles.Numbers | None] = None
    parts: Written[roles.Numbers | None] = None


class RankState(ListCall):
    """``state = (0, digest, numbers, hi, lo, scale of the sums)``, the last 3 as ``NormParts``.

    It stands for a rank that did not fail, whose call has that digest. ``numbers`` stands for the
    values of ``scale`` and ``max_norm``: ranks with the same ones have the same. ``state`` is
    contiguous. What ``JoinRanks`` runs is compiled here, before ranks exchange anything.
    """

    grads: Grads
    norm_type: float
    digest: float
    scale: roles.Number = 1.0
    max_norm: roles.Number = math.inf
    copies: Sequence[int] | None = None
    state: Written[roles.Numbers]


class JoinRanks(ListCall):
    """The norm of all ranks' gradients, from a row of ``RankState`` for each.

    ``factors = (norm, scale, max_norm)``, for ``ClipByNorm``. If a rank's first number is not 0,
    its digest is not ``digest`` or its numbers are not ``scale`` and ``max_norm``, then ``norm``
    (NaN if ``fresh``) and ``found_inf`` stay as they are, ``factors = (0, 1, inf)``, which clip
    nothing, and ``faults[rank]`` becomes 1, 2 or 3, if it was 0. All are contiguous but for
    ``states``.
    """

    states: roles.Numbers
    digest: float
    norm_type: float
    scale: roles.Number
    max_norm: roles.Number
    fresh: bool
    norm: Written[roles.Norm]
    found_inf: Written[roles.Flags | None]
    faults: Written[roles.Numbers]
    factors: Written[roles.Numbers]


class ClipByNorm(ListCall):
    """``outs = grads * (scale * coefficient of norm)``; ``norm`` is that of scale * grads.

    A coefficient of 0 gives 0 for every finite gradient, whatever the scale. ``zero_nonfinite``:
    zeros if the norm or the scale is not finite. ``outs`` may be ``grads``.
    """

    grads: Grads
    norm: roles.Norm
    max_norm: roles.Number
    eps: float
    scale: roles.Number = 1.0
    zero_nonfinite: bool
    outs: Written[Grads]

    def clip_some(self, backend: Any, some: Sequence[bool]) -> None:
        """Clip those that are chosen; the others are only scaled."""
        plain = type(self.scale) is float and self.scale == 1 and not self.zero_nonfinite
        others = [] if plain and self.outs is self.grads else [not one for one in some]
        for chosen in filter(None, (some, others)):
            grads = picked(self.grads, chosen)
            outs = grads if self.outs is self.grads else picked(self.outs, chosen)
            part = self.replaced(grads=grads, outs=outs)
            if chosen is some:
                backend.clip_by_norm(part)
            elif self.zero_nonfinite:  # of which an infinite limit leaves all else
                backend.clip_by_norm(part.replaced(max_norm=math.inf))
            else:
                backend.scale_grads(ScaleGrads(grads=grads, coefficient=self.scale, outs=outs))


class ScaleGrads(ListCall):
    """``outs = grads * coefficient``; 1 keeps every bit. ``outs`` may be ``grads``."""

    grads: Grads
    coefficient: roles.Number
    outs: Written[Grads]


class ClipGradValue(ListCall):
    """``outs = min(max(grads, -clip_value), clip_value)``; NaN stays NaN."""

    grads: Grads
    clip_value: float
    outs: Written[Grads]


class ZeroGrad(ListCall):
    """+0 over every element, NaN included."""

    grads: Written[Grads]


class UnitNorms(ListCall):
    """``norms = (sum |g|^p)^(1/p)`` for each unit; ``mean``: of the mean of |g|^p.

    ``norms`` is a contiguous vector of all units: gradient by gradient, in C order. The norm of no
    elements is 0.
    """

    grads: Grads
    norm_type: float
    axes: Axes
    mean: bool
    norms: Written[roles.Norm]


class ClipUnits(ListCall):
    """``outs = grads * coefficient`` with the norm of each element's unit.

    Its limit is ``max_norm``, or with ``param_norms``, contiguous as ``norms``,
    ``max_norm * max(param_norm, least)``. ``zero_nonfinite``: zeros where the norm is not finite.
    """

    grads: Grads
    norms: roles.Norm
    max_norm: roles.Number
    param_norms: roles.Norm | None = None
    least: float = 0.0
    eps: float
    axes: Axes
    zero_nonfinite: bool
    outs: Written[Grads]


class AccumulateGrads(ListCall):
    """If ``do_update``, each ``buffer += scale * grad``, or ``= scale * grad`` to overwrite.

    With a scale of 0 gradients have no weight, and are not read for it: buffers and compensation
    keep every bit, or are +0 to overwrite.

    ``norm`` becomes the 2-norm of the buffers after that, with the bits of ``GradNorm``, and
    ``grad_norm`` that of the gradients as they arrive, without ``scale``.

    ``compensation``, of the buffers' dtypes and shapes, keeps what buffers drop: in float64
    ``change = compensation + scale * grad``, ``buffer' = round(buffer + change)`` and
    ``compensation' = round(buffer + change - buffer')``, or 0 if ``buffer'`` is not finite. To
    overwrite, both were -0. There gradients may broadcast.

    With a ``seed``, of 64 bits, 16-bit buffers are rounded up or down at random, from float64:
    ``gradkit/_numpy/at_random.py`` says how. The counter of an element is its gradient's offset
    plus its index in C order.
    """

    buffers: Written[Grads]
    grads: Grads
    do_update: roles.Flag
    overwrite: roles.Flag
    scale: roles.Number
    norm: Written[roles.Norm | None]
    grad_norm: Written[roles.Norm | None] = None
    compensation: Written[Grads | None] = None
    seed: roles.Seed | None = None
    offsets: Sequence[int] = ()


class AccumulateLists(Call):
    """The fields of ``AccumulateGrads``, and options.

    ``at_random``: rounding, seed and offsets, if it is not to nearest.
    """

    buffers: InOut[Grads] = in_place("compute buffer + scale * grad for each pair")
    grads: In[Grads] = partners(may_be=True)
    compensation: InOut[Grads | None] = partners(
        may_be=False, instead="compute buffer + scale * grad for each pair"
    )
    casting: roles.CastingRule
    scale: roles.ScaleFactor
    overwrite: roles.Overwrite
    do_update: roles.DoUpdate
    norm: InOut[roles.Norm | None] = in_place("leave norm_out=None")
    grad_norm: InOut[roles.Norm | None] = in_place("leave grad_norm_out=None")
    at_random: Seldom

    layout = list_layouts.OfPairs(usual={})
    operation = "accumulate_grads"
    seed, offsets = None, ()

    def fits(self, name: str, buffer: str, other: str) -> bool:
        """Return whether dtypes go together."""
        if name == "compensation":
            return buffer == other
        return self.casting == "same_kind" or other in FLOATS[buffer].addends


class ClipCoefficient(Call):
    """``coefficient = min(1, max_norm / max(norm, eps))``; a NaN norm stays NaN.

    A negative ``max_norm`` in an array gives NaN. With an ``eps`` below 0 it is
    ``min(1, max_norm / (norm - eps))``, here and in ``ClipByNorm``.
    """

    norm: In[roles.Norm]
    max_norm: roles.MaxNorm
    eps: Checked[float]

    coefficient: Out[roles.Numbers] = result()

    layout = list_layouts.LikeNorm("norm")


class AccumulateGrad(Call):
    """``buffer += scale * grad`` (broadcast) if ``do_update``; with a scale, in float64.

    A scale of 0 leaves the buffer as it is. With a ``compensation`` it is ``AccumulateGrads`` of
    one pair.
    """

    buffer: InOut[roles.Data] = in_place("compute buffer + grad", may_be=("grad",))
    grad: In[roles.Data]
    casting: roles.CastingRule
    do_update: roles.DoUpdate
    scale: roles.Factor
    compensation: InOut[roles.Data | None] = in_place("compute buffer + grad")

    layout, detaches = list_layouts.Addition("buffer"), False

    def compute(self, backend: "ListOperations") -> None:
        if self.compensation is None:
            backend.accumulate_grad(self)
        else:
            backend.accumulate_grads(
                AccumulateGrads(
                    buffers=[self.buffer],
                    grads=[self.grad],
                    do_update=self.do_update,
                    overwrite=False,
                    scale=1.0 if self.scale is None else self.scale,
                    norm=None,
                    compensation=[self.compensation],
                )
            )


class AccumulateGradV2(Call):
    """``buffer = grad`` if ``overwrite``, else ``buffer += grad``; both broadcast."""

    buffer: InOut[roles.Data] = in_place(
        "take grad itself, or compute buffer + grad", may_be=("grad",)
    )
    grad: In[roles.Data]
    casting: roles.CastingRule
    overwrite: roles.Overwrite

    layout, detaches = list_layouts.Addition("buffer"), False


class SpikeGuardUpdate(Call):
    """The state after a norm, and the limit for it.

    Or of k norms, each with its row of ``state``.

    ``clips``: the limit of a spike is below that of other norms, because it is clipped to it.
    """

    state: In[roles.GuardState]
    norm: In[roles.Norm]
    decay: Checked[float]
    threshold: Checked[float]
    warmup: Checked[int]
    clips: Checked[bool]

    next_state: Out[roles.GuardState] = result(may_be=("state",))
    max_norm: Out[roles.Scalar] = result()

    layout = list_layouts.GuardStep("state")
    reads_values = True

    def check_values(self, opened: Any) -> None:
        accepted = opened.framework.widest(opened.like)
        if self.state.dtype != accepted:
            raise TypeError(f"state has dtype {self.state.dtype}; accepted: {accepted}")


class SpikeGuardInit(Call):
    """A state with a host array's values, of another array's type and on its device."""

    like: In[roles.Data]
    values: roles.HostNumbers
    count: Checked[int | None]

    state: Out[roles.GuardState] = result()

    layout = list_layouts.GuardStep("like")

    def compute(self, backend: Any) -> None:
        self.state[...] = backend.as_float64(self.values)


class StepVerdict(Call):
    """``verdict = norm is finite and at most limit, and found_inf is 0``: one bool.

    A backend gets a float64 array, of a bool that the caller has on the host too.
    """

    norm: In[roles.Norm]
    limit: roles.Limit
    found_inf: roles.FoundInf

    verdict: Out[roles.Verdict] = result()

    layout = list_layouts.Judgement("norm")

    def compute(self, backend: Any) -> None:
        if self.found_inf is not None:
            self.found_inf = backend.as_float64(self.found_inf)
        backend.step_verdict(self)


class KeepIf(ListCall):
    """If ``verdict``, ``old = new`` byte for byte; elements are of 1, 2, 4 or 8 bytes."""

    verdict: roles.Flag
    new: Grads
    old: Written[Grads]


class EmaUpdate(ListCall):
    """Each ``average = decay * average + (1 - decay) * param``; ``params`` may be ``averages``.

    Computed in the accumulation dtype of the average, from the end that is nearer: 1 keeps every
    bit, and 0 copies.
    """

    averages: Written[Grads]
    params: Grads
    decay: roles.Number


class AverageLists(Call):
    """The fields of ``EmaUpdate``."""

    averages: InOut[Grads] = in_place("compute decay * average + (1 - decay) * param for each pair")
    params: In[Grads] = partners(may_be=True)
    decay: roles.Decay

    layout = list_layouts.OfPairs(usual={})
    operation = "ema_update"

    def fits(self, name: str, average: str, param: str) -> bool:  # noqa: ARG002
        """Return whether an average holds a parameter exactly."""
        return param in FLOATS[average].addends


class AdamwUpdate(ListCall):
    """If ``verdict``, one step of AdamW, in the accumulation dtype of each parameter.

    With ``g = scale * grad``, ``m += (1 - beta1) * (g - m)``, ``v = beta2 * v + (1 - beta2) * g^2``
    and ``param -= rate * m / (root * sqrt(v) + eps) + lr * weight_decay * param``, in which
    ``rate = lr / (1 - beta1^step)`` and ``root = 1 / sqrt(1 - beta2^step)``.
    ``gradkit/_numpy/updates.py`` has each operation in its order; all backends give its bits.

    ``step`` is the step's number, or an int64 array that is counted up first. With a ``seed``,
    16-bit parameters are rounded at random, as ``AccumulateGrads`` does; moments never are.
    """

    params: Written[Grads]
    grads: Grads
    moments: Written[Grads]
    variances: Written[Grads]
    step: roles.Step
    lr: roles.Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: roles.Number
    verdict: roles.Flag
    seed: roles.Seed | None = None
    offsets: Sequence[int] = ()


class SgdUpdate(ListCall):
    """If ``verdict``, one step of SGD, in the accumulation dtype of each parameter.

    With ``d = scale * grad + weight_decay * param`` and ``m = momentum * m + d``, of which there
    may be none, ``param -= lr * m``, or with ``nesterov`` ``param -= lr * (d + momentum * m)``.
    Rounded as by ``AdamwUpdate``.
    """

    params: Written[Grads]
    grads: Grads
    momenta: Written[Grads | None] = None
    lr: roles.Number
    momentum: float
    nesterov: bool
    weight_decay: float
    scale: roles.Number
    verdict: roles.Flag
    seed: roles.Seed | None = None
    offsets: Sequence[int] = ()


def goes_with_param(name: str, param: str, other: str) -> bool:
    """Return whether a gradient's or a state's dtype goes with a parameter's."""
    accepted = FLOATS[param].addends if name == "grads" else (param,)
    return other in (*accepted, accumulation_name(param))


class AdamwLists(Call):
    """The fields of ``AdamwUpdate``, and options.

    ``at_random``: rounding and seed, if it is not to nearest.
    """

    params: InOut[Grads] = in_place(_NEW_ARRAYS.format("adamw_update"))
    grads: In[Grads] = partners(may_be=False)
    moments: InOut[Grads] = partners(may_be=False, instead=_NEW_ARRAYS.format("adamw_update"))
    variances: InOut[Grads] = partners(may_be=False, instead=_NEW_ARRAYS.format("adamw_update"))
    step: roles.StepNumber
    lr: roles.LearningRate
    beta1: roles.Beta
    beta2: roles.Beta
    eps: roles.UpdateEps
    weight_decay: roles.WeightDecay
    scale: roles.GradScale
    verdict: roles.StepTaken
    at_random: Seldom

    layout = list_layouts.OfUpdates(usual={})
    operation = "adamw_update"
    seed, offsets = None, ()
    fits = staticmethod(goes_with_param)


class SgdLists(Call):
    """The fields of ``SgdUpdate``, and options as in ``AdamwLists``."""

    params: InOut[Grads] = in_place(_NEW_ARRAYS.format("sgd_update"))
    grads: In[Grads] = partners(may_be=False)
    momenta: InOut[Grads | None] = partners(may_be=False, instead=_NEW_ARRAYS.format("sgd_update"))
    lr: roles.LearningRate
    momentum: roles.MomentumFactor
    nesterov: Annotated[Checked[bool], lambda value, _: checks.flag(value, "nesterov")]
    weight_decay: roles.WeightDecay
    scale: roles.GradScale
    verdict: roles.StepTaken
    at_random: Seldom

    layout = list_layouts.OfUpdates(usual={})
    operation = "sgd_update"
    seed, offsets = None, ()
    fits = staticmethod(goes_with_param)


class ListOperations(Protocol):
    """A backend's functions on lists: each writes the results of its call."""

    def zero_grad(self, call: ZeroGrad) -> None:
        """Gradients of +0."""

    def grad_norm(self, call: GradNorm) -> None:
        """One norm of all gradients, or one per gradient."""

    def norm_parts(self, call: NormParts) -> None:
        """Partial sums of norms."""

    def grad_stats(self, call: ListStats) -> None:
        """Statistics of each gradient."""

    def exact_sums(self, call: ExactSums) -> None:
        """Sums that are rounded nowhere, in host memory."""

    def rank_state(self, call: RankState) -> None:
        """One rank's part of an exchange about its gradients."""

    def join_ranks(self, call: JoinRanks) -> None:
        """The norm of all ranks' gradients, and what clips them."""

    def clip_coefficient(self, call: ClipCoefficient) -> None:
        """The coefficient of a clip."""

    def clip_by_norm(self, call: ClipByNorm) -> None:
        """Gradients times the coefficient, which is computed in the same pass."""

    def scale_grads(self, call: ScaleGrads) -> None:
        """Gradients times one number."""

    def clip_grad_value(self, call: ClipGradValue) -> None:
        """Gradients clamped to both sides of zero."""

    def unit_norms(self, call: UnitNorms) -> None:
        """One norm for each unit."""

    def clip_units(self, call: ClipUnits) -> None:
        """Units times their coefficients."""

    def accumulate_grad(self, call: AccumulateGrad) -> None:
        """A buffer and one more gradient."""

    def accumulate_grad_v2(self, call: AccumulateGradV2) -> None:
        """A buffer and one more gradient, or that alone."""

    def accumulate_grads(self, call: AccumulateGrads) -> None:
        """Buffers and one more gradient each, and their norm."""

    def spike_guard_update(self, call: SpikeGuardUpdate) -> None:
        """One step of a spike guard."""

    def step_verdict(self, call: StepVerdict) -> None:
        """The verdict on a step."""

    def keep_if(self, call: KeepIf) -> None:
        """Copies, or nothing."""

    def ema_update(self, call: EmaUpdate) -> None:
        """Averages nearer to parameters."""

    def adamw_update(self, call: AdamwUpdate) -> None:
        """Parameters after a step of AdamW, and its moments."""

    def sgd_update(self, call: SgdUpdate) -> None:
        """Parameters after a step of SGD, and their momenta."""

"""The norms over channels: batch norm and group norm.

With ``xhat = (x - mean) * inv_std``, statistics of each channel or of each sample's groups of
channels, and a scale and a bias for each channel.
"""

from math import prod
from typing import Any, Protocol

from gradkit._backend import Address, Engine
from gradkit._calls import checks, engines
from gradkit._calls.layouts import ChannelLayout, GroupLayout, VectorLayout
from gradkit._calls.record import Call, in_place, result
from gradkit._calls.roles import (
    BatchMean,
    BatchVar,
    Bias,
    ChannelAxis,
    Count,
    Data,
    Elements,
    EngineChoice,
    Eps,
    In,
    InOut,
    InvStd,
    Mean,
    Momentum,
    NumGroups,
    Out,
    RankCounts,
    RankMeans,
    RankVars,
    RunningMean,
    RunningVar,
    Scale,
    SumDy,
    SumDyXhat,
    Var,
    Wanted,
)
from gradkit._dtypes import BATCH_NORM_TYPES, LAYER_NORM_TYPES

MOMENTUM = 0.1  # by default
_NEW = "compute on NumPy arrays, or call gradkit.jax.batch_norm, which returns new ones"


class ChannelOperations(Protocol):
    """Norms over channels of a backend: each function writes the results of its call."""

    def batch_norm(self, call: "BatchNorm") -> Engine:
        """``y = xhat * scale + bias`` and each channel's statistics; return the engine.

        Running statistics, if there are any, move as by ``update_running_statistics``.
        """

    def batch_norm_grad(self, call: "BatchNormGrad") -> Engine:
        """``dx = inv_std * scale * (dy - dbias / n - xhat * dscale / n)``; return the engine.

        ``dscale = sum(dy * xhat)`` and ``dbias = sum(dy)`` over the n elements of a channel.
        """

    def batch_norm_inference(self, call: "BatchNormInference") -> Engine:
        """``y = (x - mean) / sqrt(var + eps) * scale + bias``; return the engine."""

    def batch_norm_inference_grad(self, call: "BatchNormInferenceGrad") -> None:
        """``dx = dy / sqrt(var + eps) * scale``, ``dscale`` and ``dbias``."""

    def update_running_statistics(self, call: "UpdateRunningStatistics") -> None:
        """``next = (1 - momentum) * running + momentum * batch``, the variance unbiased.

        If ``count`` is at most 1, nothing moves. A weight of 0 leaves out what it weighs.
        """

    def batch_norm_stats(self, call: "BatchNormStats") -> None:
        """Each channel's ``mean`` and biased ``var``; 0 if it has no elements."""

    def combine_stats(self, call: "CombineStats") -> None:
        """The statistics of all ranks' channels, from the rows ``means[rank]``.

        Rows whose count is 0 are ignored; if all are, ``mean``, ``var`` and ``total`` are 0.
        """

    def batch_norm_apply(self, call: "BatchNormApply") -> None:
        """As ``batch_norm``, with known statistics: ``saved_mean`` is ``mean``, rounded."""

    def batch_norm_grad_sums(self, call: "BatchNormGradSums") -> None:
        """Each channel's sums of ``dy * xhat`` and of ``dy``."""

    def batch_norm_grad_apply(self, call: "BatchNormGradApply") -> None:
        """``dx`` as ``batch_norm_grad`` has it, from the sums over ``count`` elements."""

    def group_norm(self, call: "GroupNorm") -> None:
        """``y = xhat * scale + bias``, and the statistics of each sample's groups."""

    def group_norm_grad(self, call: "GroupNormGrad") -> None:
        """``dx = inv_std * (w - mean(w) - xhat * mean(w * xhat))`` with ``w = dy * scale``.

        Means are over a group. ``dscale = sum(dy * xhat)``, ``dbias = sum(dy)`` over all else.
        """


class BatchNorm(Call):
    """A batch norm in training mode."""

    # Where compiled code keeps the biased variance too, of the dtype of the mean.
    var = None

    x: In[Data]
    scale: In[Scale | None]
    bias: In[Bias | None]
    channel_axis: ChannelAxis
    eps: Eps
    running_mean: InOut[RunningMean | None] = in_place(_NEW)
    running_var: InOut[RunningVar | None] = in_place(_NEW)
    momentum: Momentum
    engine: EngineChoice

    y: Out[Data] = result(may_be=("x",))
    mean: Out[Mean] = result()
    inv_std: Out[InvStd] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        engines.check(self.x, self.engine)
        check_momentum(self.momentum, self.running_mean)

    def compute(self, backend: ChannelOperations) -> None:
        # Kernels are given addresses of arrays like those of an earlier call.
        x: Any = self.x
        if type(x) is not Address and x.shape[self.channel_axis]:
            checks.enough(elements(x, self.channel_axis), "x has one element per channel")
        engines.ran(backend.batch_norm(self))


class BatchNormGrad(Call):
    """The gradient of a batch norm in training mode."""

    dy: In[Data]
    x: In[Data]
    scale: In[Scale | None]
    mean: In[Mean]
    inv_std: In[InvStd]
    channel_axis: ChannelAxis
    engine: EngineChoice
    wanted: Wanted = None  # type: ignore[assignment]

    dx: Out[Data | None] = result(may_be=("dy",))
    dscale: Out[Scale | None] = result(if_="scale")
    dbias: Out[Bias | None] = result(if_="scale")

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        engines.check(self.x, self.engine)

    def compute(self, backend: ChannelOperations) -> None:
        engines.ran(backend.batch_norm_grad(self))


class BatchNormInference(Call):
    """A batch norm by running statistics."""

    x: In[Data]
    scale: In[Scale | None]
    bias: In[Bias | None]
    mean: In[Mean]
    var: In[Var]
    channel_axis: ChannelAxis
    eps: Eps
    engine: EngineChoice

    y: Out[Data] = result(may_be=("x",))

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        engines.check(self.x, self.engine)

    def compute(self, backend: ChannelOperations) -> None:
        engines.ran(backend.batch_norm_inference(self))


class BatchNormInferenceGrad(Call):
    """The gradient of a batch norm by running statistics, which are constants."""

    dy: In[Data]
    x: In[Data]
    scale: In[Scale | None]
    mean: In[Mean]
    var: In[Var]
    channel_axis: ChannelAxis
    eps: Eps
    wanted: Wanted = None  # type: ignore[assignment]

    dx: Out[Data | None] = result(may_be=("dy",))
    dscale: Out[Scale | None] = result(if_="scale")
    dbias: Out[Bias | None] = result(if_="scale")

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def compute(self, backend: ChannelOperations) -> None:
        backend.batch_norm_inference_grad(self)
        engines.ran("native")


class UpdateRunningStatistics(Call):
    """Running statistics, moved towards those of one batch."""

    running_mean: In[RunningMean]
    running_var: In[RunningVar]
    mean: In[BatchMean]
    var: In[BatchVar]
    count: Elements
    momentum: Momentum

    next_mean: Out[RunningMean] = result(may_be=("running_mean",))
    next_var: Out[RunningVar] = result(may_be=("running_var",))

    layout = VectorLayout("running_mean")


class BatchNormStats(Call):
    """The statistics of one rank's part of a batch."""

    x: In[Data]
    channel_axis: ChannelAxis

    mean: Out[BatchMean] = result()
    var: Out[BatchVar] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class CombineStats(Call):
    """The statistics of the whole batch, from those of all ranks' parts."""

    means: In[RankMeans]
    variances: In[RankVars]
    counts: In[RankCounts]

    mean: Out[BatchMean] = result()
    var: Out[BatchVar] = result()
    total: Out[Count] = result()

    layout = VectorLayout("means")


class BatchNormApply(Call):
    """A batch norm by the statistics of the whole batch."""

    x: In[Data]
    scale: In[Scale | None]
    bias: In[Bias | None]
    mean: In[BatchMean]
    var: In[BatchVar]
    channel_axis: ChannelAxis
    eps: Eps

    y: Out[Data] = result(may_be=("x",))
    saved_mean: Out[Mean] = result()
    inv_std: Out[InvStd] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class BatchNormGradSums(Call):
    """The sums over one rank's part of a batch that a gradient needs."""

    dy: In[Data]
    x: In[Data]
    mean: In[Mean]
    inv_std: In[InvStd]
    channel_axis: ChannelAxis

    sum_dy_xhat: Out[SumDyXhat] = result()
    sum_dy: Out[SumDy] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class BatchNormGradApply(Call):
    """The gradient of a batch norm, from the sums over the whole batch."""

    dy: In[Data]
    x: In[Data]
    scale: In[Scale | None]
    mean: In[Mean]
    inv_std: In[InvStd]
    sum_dy_xhat: In[SumDyXhat]
    sum_dy: In[SumDy]
    count: Elements
    channel_axis: ChannelAxis

    dx: Out[Data] = result(may_be=("dy",))

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class GroupNorm(Call):
    """A group norm."""

    x: In[Data]
    num_groups: NumGroups
    scale: In[Scale | None]
    bias: In[Bias | None]
    channel_axis: ChannelAxis
    eps: Eps

    y: Out[Data] = result(may_be=("x",))
    mean: Out[Mean] = result()
    inv_std: Out[InvStd] = result()

    types, layout = LAYER_NORM_TYPES, GroupLayout("x")


class GroupNormGrad(Call):
    """The gradient of a group norm."""

    dy: In[Data]
    x: In[Data]
    scale: In[Scale | None]
    mean: In[Mean]
    inv_std: In[InvStd]
    channel_axis: ChannelAxis
    wanted: Wanted = None  # type: ignore[assignment]

    dx: Out[Data | None] = result(may_be=("dy",))
    dscale: Out[Scale | None] = result(if_="scale")
    dbias: Out[Bias | None] = result(if_="scale")

    types, layout = LAYER_NORM_TYPES, GroupLayout("x")


def check_momentum(momentum: Any, running_mean: Any) -> None:
    """Raise if it was passed without running statistics."""
    default = isinstance(momentum, float) and momentum == MOMENTUM
    if running_mean is None and not default:
        raise ValueError(
            f"momentum is {momentum}, but there are no running statistics, which it is for; pass "
            "running_mean and running_var"
        )


def elements(data: Any, axis: int) -> int:
    """Number of elements of each channel; the axis may be counted from the end."""
    shape = list(data.shape)
    del shape[axis]
    return prod(shape)

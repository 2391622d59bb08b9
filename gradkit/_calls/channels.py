"""The norms over channels: batch norm and group norm.

With ``xhat = (x - mean) * inv_std``, statistics of each channel or of each sample's groups of
channels, and a scale and a bias for each channel.
"""

from math import prod
from typing import Any, Protocol

from gradkit._backend import Address, Engine
from gradkit._calls import checks, engines, roles
from gradkit._calls.layouts import ChannelLayout, GroupLayout, VectorLayout
from gradkit._calls.record import Call, in_place, result
from gradkit._calls.roles import In, InOut, Out
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

    x: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    channel_axis: roles.ChannelAxis
    eps: roles.Eps
    running_mean: InOut[roles.RunningMean | None] = in_place(_NEW)
    running_var: InOut[roles.RunningVar | None] = in_place(_NEW)
    momentum: roles.Momentum
    engine: roles.EngineChoice

    y: Out[roles.Data] = result(may_be=("x",))
    mean: Out[roles.Mean] = result()
    inv_std: Out[roles.InvStd] = result()

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

    dy: In[roles.Data]
    x: In[roles.Data]
    scale: In[roles.Scale | None]
    mean: In[roles.Mean]
    inv_std: In[roles.InvStd]
    channel_axis: roles.ChannelAxis
    engine: roles.EngineChoice
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy",))
    dscale: Out[roles.Scale | None] = result(if_="scale")
    dbias: Out[roles.Bias | None] = result(if_="scale")

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        engines.check(self.x, self.engine)

    def compute(self, backend: ChannelOperations) -> None:
        engines.ran(backend.batch_norm_grad(self))


class BatchNormInference(Call):
    """A batch norm by running statistics."""

    x: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    mean: In[roles.Mean]
    var: In[roles.Var]
    channel_axis: roles.ChannelAxis
    eps: roles.Eps
    engine: roles.EngineChoice

    y: Out[roles.Data] = result(may_be=("x",))

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def check_values(self, opened: Any) -> None:  # noqa: ARG002
        engines.check(self.x, self.engine)

    def compute(self, backend: ChannelOperations) -> None:
        engines.ran(backend.batch_norm_inference(self))


class BatchNormInferenceGrad(Call):
    """The gradient of a batch norm by running statistics, which are constants."""

    dy: In[roles.Data]
    x: In[roles.Data]
    scale: In[roles.Scale | None]
    mean: In[roles.Mean]
    var: In[roles.Var]
    channel_axis: roles.ChannelAxis
    eps: roles.Eps
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy",))
    dscale: Out[roles.Scale | None] = result(if_="scale")
    dbias: Out[roles.Bias | None] = result(if_="scale")

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")

    def compute(self, backend: ChannelOperations) -> None:
        backend.batch_norm_inference_grad(self)
        engines.ran("native")


class UpdateRunningStatistics(Call):
    """Running statistics, moved towards those of one batch."""

    running_mean: In[roles.RunningMean]
    running_var: In[roles.RunningVar]
    mean: In[roles.BatchMean]
    var: In[roles.BatchVar]
    count: roles.Elements
    momentum: roles.Momentum

    next_mean: Out[roles.RunningMean] = result(may_be=("running_mean",))
    next_var: Out[roles.RunningVar] = result(may_be=("running_var",))

    layout = VectorLayout("running_mean")


class BatchNormStats(Call):
    """The statistics of one rank's part of a batch."""

    x: In[roles.Data]
    channel_axis: roles.ChannelAxis

    mean: Out[roles.BatchMean] = result()
    var: Out[roles.BatchVar] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class CombineStats(Call):
    """The statistics of the whole batch, from those of all ranks' parts."""

    means: In[roles.RankMeans]
    variances: In[roles.RankVars]
    counts: In[roles.RankCounts]

    mean: Out[roles.BatchMean] = result()
    var: Out[roles.BatchVar] = result()
    total: Out[roles.Count] = result()

    layout = VectorLayout("means")


class BatchNormApply(Call):
    """A batch norm by the statistics of the whole batch."""

    x: In[roles.Data]
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    mean: In[roles.BatchMean]
    var: In[roles.BatchVar]
    channel_axis: roles.ChannelAxis
    eps: roles.Eps

    y: Out[roles.Data] = result(may_be=("x",))
    saved_mean: Out[roles.Mean] = result()
    inv_std: Out[roles.InvStd] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class BatchNormGradSums(Call):
    """The sums over one rank's part of a batch that a gradient needs."""

    dy: In[roles.Data]
    x: In[roles.Data]
    mean: In[roles.Mean]
    inv_std: In[roles.InvStd]
    channel_axis: roles.ChannelAxis

    sum_dy_xhat: Out[roles.SumDyXhat] = result()
    sum_dy: Out[roles.SumDy] = result()

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class BatchNormGradApply(Call):
    """The gradient of a batch norm, from the sums over the whole batch."""

    dy: In[roles.Data]
    x: In[roles.Data]
    scale: In[roles.Scale | None]
    mean: In[roles.Mean]
    inv_std: In[roles.InvStd]
    sum_dy_xhat: In[roles.SumDyXhat]
    sum_dy: In[roles.SumDy]
    count: roles.Elements
    channel_axis: roles.ChannelAxis

    dx: Out[roles.Data] = result(may_be=("dy",))

    types, layout = BATCH_NORM_TYPES, ChannelLayout("x")


class GroupNorm(Call):
    """A group norm."""

    x: In[roles.Data]
    num_groups: roles.NumGroups
    scale: In[roles.Scale | None]
    bias: In[roles.Bias | None]
    channel_axis: roles.ChannelAxis
    eps: roles.Eps

    y: Out[roles.Data] = result(may_be=("x",))
    mean: Out[roles.Mean] = result()
    inv_std: Out[roles.InvStd] = result()

    types, layout = LAYER_NORM_TYPES, GroupLayout("x")


class GroupNormGrad(Call):
    """The gradient of a group norm."""

    dy: In[roles.Data]
    x: In[roles.Data]
    scale: In[roles.Scale | None]
    mean: In[roles.Mean]
    inv_std: In[roles.InvStd]
    channel_axis: roles.ChannelAxis
    wanted: roles.Wanted = None  # type: ignore[assignment]

    dx: Out[roles.Data | None] = result(may_be=("dy",))
    dscale: Out[roles.Scale | None] = result(if_="scale")
    dbias: Out[roles.Bias | None] = result(if_="scale")

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

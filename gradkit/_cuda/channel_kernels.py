"""The kernels of norms over channels, by the roles of the arrays that they take.

Those are a kernel's first parameters, in their order; numbers, which the launchers add, follow.
"""

from typing import Any, Generic, NewType, TypeAlias, TypeVarTuple

import numpy as np

from gradkit._calls.roles import (
    BatchMean,
    BatchVar,
    Bias,
    Count,
    Data,
    InvStd,
    Mean,
    RankCounts,
    RankMeans,
    RankVars,
    RunningMean,
    RunningVar,
    Scale,
    SumDy,
    SumDyXhat,
    Var,
)

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Arrays = TypeVarTuple("Arrays")

# Between two launches: two sums of each share of every column, or its moments, and what is made of
# all shares: of moments, the mean in two numbers and 1 / std, unrounded; of a gradient, two means.
Partials = NewType("Partials", _Array)
Parts = NewType("Parts", _Array)
Exact = NewType("Exact", _Array)
Means = NewType("Means", _Array)


class Named(str, Generic[*Arrays]):
    """A kernel's name, by which type checkers know the roles of the arrays that it takes."""


# batch_norm.cu
channel_moments = Named[Data, Parts]("channel_moments")
normalize = Named[Data, Scale | None, Bias | None, Exact, Data]("normalize")
# batch_norm_grad.cu
sum_channels = Named[Data, Data, Mean, InvStd, Partials]("sum_channels")
finish_channels = Named[Partials, Scale | None, Bias | None, Means]("finish_channels")
apply_channels = Named[Data, Data, Scale | None, Mean, InvStd, Means, Data | None]("apply_channels")
# batch_norm_inference.cu
infer = Named[Data, Scale | None, Bias | None, Mean, Var, Data]("infer")
# batch_norm_inference_grad.cu
infer_gradient = Named[Data, Data, Scale | None, Mean, Var, Data | None, Partials | None](
    "infer_gradient"
)
finish_parameters = Named[Partials, Scale | None, Bias | None]("finish_parameters")
# batch_norm_steps.cu
take_stats = Named[BatchMean, BatchVar, Exact, Mean, InvStd]("take_stats")
finish_sums = Named[Partials, SumDyXhat, SumDy]("finish_sums")
take_sums = Named[SumDyXhat, SumDy, np.float64, Means]("take_sums")
# batch_statistics.cu
finish_moments = Named[
    Parts,
    BatchMean | None,
    BatchVar | None,
    Exact | None,
    Mean | None,
    InvStd | None,
    RunningMean | None,
    RunningVar | None,
    RunningMean | None,
    RunningVar | None,
]("finish_moments")
update_running = Named[
    RunningMean,
    RunningVar,
    BatchMean,
    BatchVar,
    np.float64,
    np.float64,
    RunningMean,
    RunningVar,
    np.int64,
]("update_running")
# combine_stats.cu
combine_stats = Named[
    RankMeans, RankVars, RankCounts, np.uint32, np.int64, BatchMean, BatchVar, Count
]("combine_stats")
# group_norm.cu
column_moments = Named[Data, Parts]("column_moments")
finish_group_moments = Named[Parts, Exact, Mean, InvStd]("finish_group_moments")
normalize_groups = Named[Data, Scale | None, Bias | None, Exact, Data]("normalize_groups")
# group_norm_held.cu
held_group_norm = Named[Data, Scale | None, Bias | None, Data, Mean, InvStd]("held_group_norm")
# group_norm_grad.cu
sum_group_gradient = Named[Data, Data, Mean, InvStd, Partials]("sum_group_gradient")
finish_group_means = Named[Partials, Scale | None, Means]("finish_group_means")
finish_group_parameters = Named[Partials, Scale | None, Bias | None]("finish_group_parameters")
apply_group_gradient = Named[Data, Data, Scale | None, Mean, InvStd, Means, Data | None](
    "apply_group_gradient"
)
# group_norm_grad_held.cu
held_group_gradient = Named[Data, Data, Scale | None, Mean, InvStd, Partials | None, Data | None](
    "held_group_gradient"
)

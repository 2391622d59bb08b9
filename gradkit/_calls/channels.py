"""The norms over channels: batch norm and group norm.

With ``xhat = (x - mean) * inv_std``, statistics of each channel or of each sample's groups of
channels, and a scale and a bias for each channel.
"""

from typing import Protocol

from gradkit._calls.layouts import Groups
from gradkit._calls.record import Call, result
from gradkit._calls.roles import (
    Bias,
    ChannelAxis,
    Data,
    Eps,
    In,
    InvStd,
    Mean,
    NumGroups,
    Out,
    Scale,
)
from gradkit._dtypes import LAYER_NORM_TYPES


class ChannelOperations(Protocol):
    """What a backend computes of norms over channels; each writes the results of its call."""

    def group_norm(self, call: "GroupNorm") -> None:
        """``y = xhat * scale + bias``, and the statistics of each sample's groups."""

    def group_norm_grad(self, call: "GroupNormGrad") -> None:
        """``dx = inv_std * (w - mean(w) - xhat * mean(w * xhat))`` with ``w = dy * scale``.

        Means are over a group. ``dscale = sum(dy * xhat)``, ``dbias = sum(dy)`` over all else.
        """


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

    types, layout = LAYER_NORM_TYPES, Groups("x")

    def compute(self, backend: ChannelOperations) -> None:
        backend.group_norm(self)


class GroupNormGrad(Call):
    """The gradient of a group norm."""

    dy: In[Data]
    x: In[Data]
    scale: In[Scale | None]
    mean: In[Mean]
    inv_std: In[InvStd]
    channel_axis: ChannelAxis

    dx: Out[Data] = result(may_be=("dy",))
    dscale: Out[Scale | None] = result(if_="scale")
    dbias: Out[Bias | None] = result(if_="scale")

    types, layout = LAYER_NORM_TYPES, Groups("x")

    def compute(self, backend: ChannelOperations) -> None:
        backend.group_norm_grad(self)

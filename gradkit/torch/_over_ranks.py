"""Batch norm over ranks for autograd: both passes are calls that all ranks make together."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import gradkit
from gradkit._open.foreign import close_to_dynamo
from gradkit.distributed import Group
from gradkit.torch._autograd import tell_of_tensors


class BatchNormOverRanks(torch.autograd.Function):
    """Normalise by the statistics of all ranks' batches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        running: dict[str, Any],
        eps: float,
        group: Group,
    ) -> Tensor:
        """Write running statistics, and keep what the gradient needs."""
        y, mean, inv_std = gradkit.batch_norm(x, scale, bias, eps=eps, group=group, **running)
        ctx.save_for_backward(x, scale, mean, inv_std)
        ctx.group = group
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> Any:
        """The gradient of this rank's part of the batch."""
        x, scale, mean, inv_std = ctx.saved_tensors
        needed = zip(("dscale", "dbias"), ctx.needs_input_grad[1:3], strict=True)
        gradients = gradkit.batch_norm_grad(
            dy,
            x,
            scale,
            mean,
            inv_std,
            group=ctx.group,
            wanted=("dx", *(name for name, each in needed if each)),
        )
        return *gradients, None, None, None


def batch_norm_over_ranks(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    momentum: float | Tensor,
    eps: float,
    group: Group,
) -> Tensor:
    """Batch norm in training. A momentum on the device is read, as other numbers are."""
    mean, var = running
    weight = float(momentum) if isinstance(momentum, Tensor) else momentum
    moved: dict[str, Any] = {"running_mean": mean, "running_var": var, "momentum": weight}
    try:
        return BatchNormOverRanks.apply(x, scale, bias, moved, eps, group)
    except (TypeError, ValueError) as error:
        tell_of_tensors(error)
        raise


close_to_dynamo([batch_norm_over_ranks])

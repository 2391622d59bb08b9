"""Statistics of a model's gradients by parameter names."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import gradkit
from gradkit._open.foreign import answers
from gradkit.distributed import Group, Names, PlainOfEach, shards_of
from gradkit.torch._list_operators import LocalGrads
from gradkit.torch.clipping import refuse_names, spread

__all__ = ["grad_stats"]


@answers
def grad_stats(
    parameters: torch.nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
    *,
    group: Group | None = None,
    names: Names | None = None,
    plain: PlainOfEach | None = None,
) -> "gradkit.GradStats[Tensor]":
    """Norm, largest magnitude, mean, zeros and non-finite elements of each parameter's gradient.

    By the names of ``model.named_parameters()``, in one pass over the gradients' memory. Nothing
    waits for the device until a number is looked at, unless gradients are spread over ranks.

    Parameters
    ----------
    parameters : torch.nn.Module, or iterable of (name, Tensor) pairs or of Tensor
        Those without a gradient are left out. Tensors without names are called by their positions.
        Gradients are never written. Those that are DTensors are spread over the ranks of their
        mesh, which make the call together.
    group : gradkit.distributed.Group, optional
        As in :func:`clip_grad_norm_`: all ranks of the model, however it is cut. Each rank gets the
        names of all.
    names, plain
        With ``group``: as in :func:`gradkit.distributed.shards_of`.

    Returns
    -------
    gradkit.GradStats
        Its ``table`` is a float64 Tensor of shape (k, 5) on the gradients' device. For logs:
        ``as_dict()``, which is one copy to the host.

    Raises
    ------
    TypeError, ValueError, RankError
        As :func:`clip_grad_norm_`; two parameters have one name.

    References
    ----------
    :func:`gradkit.grad_stats`, which runs.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model(torch.tensor([3.0, -4.0])).backward()
    >>> gradkit.torch.grad_stats(model).as_dict()
    {'weight': {'norm': 5.0, 'max': 4.0, 'mean': -0.5, 'zeros': 0, 'nonfinite': 0}}
    """
    source: Any = parameters
    if isinstance(source, torch.nn.Module):
        source = source.named_parameters()
    listed = [source] if isinstance(source, Tensor) else list(source)
    named = [each if isinstance(each, tuple) else (str(k), each) for k, each in enumerate(listed)]
    if group is None:
        refuse_names(names, plain)
        grads: Any = gradkit.named_grads_of(named)
        values = {name: grad.detach() for name, grad in grads.items()}
        gradients = spread([tensor for _, tensor in named], values, "the gradient of {!r}")
    else:
        gradients = LocalGrads(shards_of(named, group=group, names=names, plain=plain), group)
    stats = gradkit.grad_stats(gradients.grads, group=gradients.group)
    return gradkit.GradStats(stats.names, torch.as_tensor(stats.table))  # NumPy's of no gradients

"""Norms that PyTorch differentiates and compiles, as functions.

Names and arguments are those of ``torch.nn.functional``. What differs from it:

- Statistics of 16-bit data are float32, and sums keep gradkit's bounds for any mean and deviation.
- Results have the input's dtype, under ``torch.autocast`` too.
- ``eps`` is at least 0.
- Gradients exist to the first order, in reverse mode.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradkit._calls.channels import check_momentum
from gradkit.distributed import Group
from gradkit.torch import _operators
from gradkit.torch._autograd import Norm, recorded, refuse_nested
from gradkit.torch._over_ranks import batch_norm_over_ranks

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "gated_rms_norm",
    "group_norm",
    "instance_norm",
    "invertible_layer_norm",
    "invertible_rms_norm",
    "layer_norm",
    "rms_norm",
]


@recorded
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale_offset: float = 0.0,
) -> Tensor:
    """Layer norm over the last dimensions, as ``torch.nn.functional.layer_norm``.

    Parameters
    ----------
    input : Tensor of shape (*rows, *normalized_shape)
        float16, bfloat16, float32 or float64, on the CPU or a CUDA device.
    normalized_shape : sequence of int
        The last dimensions of ``input``, over which each row is normalised.
    weight, bias : Tensor of shape ``normalized_shape``, or one per sample, optional
        Of the input's dtype; also float32 for 16-bit input, and 16-bit for float32 input. *Per
        sample*: both have leading dimensions of the input, then ones in front of
        ``normalized_shape``, such as (B, 1, D) for an input of shape (B, T, D).
    eps : float
        Added to the variance; at least 0.
    scale_offset : float
        Added to ``weight`` in the dtype of sums: 1 for a weight that is stored as its distance from
        1. Not 0 only with ``weight``.

    Returns
    -------
    Tensor of the input's shape and dtype, contiguous

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`gradkit.layer_norm_grad` does not list.
    ValueError
        Incompatible shapes; ``eps`` negative; ``scale_offset`` without ``weight``.
    NotImplementedError
        A second derivative, or one in forward mode, is computed.

    References
    ----------
    :func:`gradkit.layer_norm` and :func:`gradkit.layer_norm_grad`, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x = torch.tensor([[1.0, 3.0], [5.0, 5.0]], requires_grad=True)
    >>> y = gradkit.torch.layer_norm(x, (2,), eps=0.0625)
    >>> y.detach().round(decimals=3)
    tensor([[-0.9700,  0.9700],
            [ 0.0000,  0.0000]])
    >>> y[0, 0].backward()
    >>> x.grad.round(decimals=4)
    tensor([[ 0.0285, -0.0285],
            [ 0.0000,  0.0000]])
    """
    axis, scale = _axis(input, normalized_shape), _scale(input, weight, bias, scale_offset)
    return _operators.LAYER_NORM(input, scale, bias, axis, eps, scale_offset)


@recorded
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``s = input + residual``, and ``s``, in one pass forward and one backward.

    ``s`` is rounded to its dtype before it is normalised, so that the results are those of the
    addition followed by :func:`layer_norm`. Both results are differentiable.

    Parameters
    ----------
    input, residual : Tensor of shape (*rows, *normalized_shape)
        Of one dtype, which is as in :func:`layer_norm`; ``residual`` also float32 for 16-bit
        ``input``, as under ``torch.autocast``, which takes a pass more over ``input`` and ``y``.
    normalized_shape, weight, bias, eps, scale_offset
        As in :func:`layer_norm`.

    Returns
    -------
    y, s : Tensor of the input's shape, contiguous
        ``y`` has the input's dtype, ``s`` that of ``residual``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`layer_norm`.

    References
    ----------
    :func:`gradkit.add_layer_norm` and :func:`gradkit.layer_norm_grad` with ``ds``, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])
    >>> gradkit.torch.add_layer_norm(x, residual, (2,), eps=0.0)
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    axis, scale = _axis(input, normalized_shape), _scale(input, weight, bias, scale_offset)
    how = scale, bias, axis, eps, scale_offset
    return _of_sum(_operators.ADD_LAYER_NORM, input, residual, *how)


@recorded
def invertible_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm that keeps its output for the backward pass instead of its input.

    The next layer keeps the output anyway, so that the input need not stay in memory.

    Parameters
    ----------
    input, normalized_shape, weight, bias, eps
        As in :func:`layer_norm`, but not per sample. No element of ``weight`` may be 0 or
        subnormal.

    Returns
    -------
    Tensor of the input's shape and dtype, contiguous
        Not to be written in place before the backward pass.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`layer_norm`; in the backward pass on the CPU, a zero or subnormal in ``weight``.

    References
    ----------
    :func:`gradkit.invertible_layer_norm_grad`.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x = torch.tensor([[1.0, 2.0, 6.0]], requires_grad=True)
    >>> gradkit.torch.invertible_layer_norm(x, (3,))[0, 0].backward()
    >>> x.grad.round(decimals=4)
    tensor([[ 0.1763, -0.2204,  0.0441]])
    """
    axis = _axis(input, normalized_shape)
    scale = _scale(input, weight, bias)
    return _operators.INVERTIBLE_LAYER_NORM(input, scale, bias, axis, eps, 0.0)


@recorded
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scale_offset: float = 0.0,
) -> Tensor:
    """RMS norm over the last dimensions, as ``torch.nn.functional.rms_norm``.

    Parameters
    ----------
    input : Tensor of shape (*rows, *normalized_shape)
        float16, bfloat16, float32 or float64, on the CPU or a CUDA device.
    normalized_shape : sequence of int
        The last dimensions of ``input``, over which each row is normalised.
    weight : Tensor of shape ``normalized_shape``, or one per sample, optional
        As in :func:`layer_norm`. The product is rounded once.
    eps : float, optional
        Added to the mean square; at least 0. Default: the distance from 1 to the next number of
        the dtype that sums have, float32 (float64 for float64 input).
    scale_offset : float
        As in :func:`layer_norm`: 1 for Gemma's weights.

    Returns
    -------
    Tensor of the input's shape and dtype, contiguous

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`layer_norm`.

    References
    ----------
    :func:`gradkit.rms_norm` and :func:`gradkit.rms_norm_grad`, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> gradkit.torch.rms_norm(torch.tensor([[3.0, 4.0]]), (2,), eps=0.0).round(decimals=4)
    tensor([[0.8485, 1.1314]])
    """
    axis, floor = _axis(input, normalized_shape), _floor(eps, input)
    return _operators.RMS_NORM(input, weight, axis, floor, scale_offset)


@recorded
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scale_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``s = input + residual``, and ``s``, in one pass forward and one backward.

    ``s`` is rounded to its dtype before it is normalised, so that the results are those of the
    addition followed by :func:`rms_norm`. Both results are differentiable.

    Parameters
    ----------
    input, residual : Tensor of shape (*rows, *normalized_shape)
        Of one dtype, which is as in :func:`rms_norm`; ``residual`` also float32 for 16-bit
        ``input``, as under ``torch.autocast``, which takes a pass more over ``input`` and ``y``.
    normalized_shape, weight, eps, scale_offset
        As in :func:`rms_norm`.

    Returns
    -------
    y, s : Tensor of the input's shape, contiguous
        ``y`` has the input's dtype, ``s`` that of ``residual``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`layer_norm`.

    References
    ----------
    :func:`gradkit.add_rms_norm` and :func:`gradkit.rms_norm_grad` with ``ds``, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x, residual = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]])
    >>> y, s = gradkit.torch.add_rms_norm(x, residual, (2,), eps=0.0)
    >>> y.round(decimals=4), s
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    axis, floor = _axis(input, normalized_shape), _floor(eps, input)
    how = weight, axis, floor, scale_offset
    return _of_sum(_operators.ADD_RMS_NORM, input, residual, *how)


@recorded
def invertible_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    scale_offset: float = 0.0,
) -> Tensor:
    """RMS norm that keeps its output for the backward pass instead of its input.

    Parameters
    ----------
    input, normalized_shape, weight, eps, scale_offset
        As in :func:`rms_norm`, but not per sample. No element of ``weight + scale_offset`` may be
        0 or subnormal.

    Returns
    -------
    Tensor of the input's shape and dtype, contiguous
        Not to be written in place before the backward pass.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`layer_norm`; in the backward pass on the CPU, a zero or subnormal in
        ``weight + scale_offset``.

    References
    ----------
    :func:`gradkit.invertible_rms_norm_grad`; NVIDIA's Apex: ``FusedRMSNorm`` with
    ``memory_efficient=True``.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    >>> gradkit.torch.invertible_rms_norm(x, (2,), eps=0.0)[0, 0].backward()
    >>> x.grad.round(decimals=4)
    tensor([[ 0.1810, -0.1358]])
    """
    axis, floor = _axis(input, normalized_shape), _floor(eps, input)
    return _operators.INVERTIBLE_RMS_NORM(input, weight, axis, floor, scale_offset)


@recorded
def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    scale_offset: float = 0.0,
) -> Tensor:
    """RMS norm with an activated gate: ``rms_norm(input) * act(gate)``, or of their product.

    Parameters
    ----------
    input, gate : Tensor of shape (*rows, *normalized_shape)
        Of one dtype, which is as in :func:`rms_norm`; also views of one projection, which are not
        copied.
    normalized_shape, weight, eps, scale_offset
        As in :func:`rms_norm`, but not per sample.
    activation : "silu" (alias "swish") or "sigmoid"
        Of the gate.
    norm_before_gate : bool
        The product with the gate follows the norm; if false, ``input * act(gate)`` is normalised.

    Returns
    -------
    Tensor of the input's shape and dtype, contiguous

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`layer_norm`; ValueError also for another ``activation``.

    References
    ----------
    :func:`gradkit.gated_rms_norm` and :func:`gradkit.gated_rms_norm_grad`, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x, gate = torch.tensor([[3.0, 4.0, 0.0, 1.0]]).chunk(2, dim=-1)
    >>> gradkit.torch.gated_rms_norm(x, gate, (2,), eps=0.0).round(decimals=4)
    tensor([[0.0000, 0.8271]])
    """
    axis, floor = _axis(input, normalized_shape), _floor(eps, input)
    refuse_nested(gate, "gate")
    how = scale_offset, activation, norm_before_gate
    return _operators.GATED_RMS_NORM(input, gate, weight, axis, floor, *how)


@recorded
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group norm: statistics of each sample's groups, as ``torch.nn.functional.group_norm``.

    Parameters
    ----------
    input : Tensor of shape (N, C, ...)
        float16, bfloat16, float32 or float64, on the CPU or a CUDA device, in any memory layout.
    num_groups : int
        Divides C; a group has C / num_groups adjacent channels.
    weight, bias : Tensor of shape (C,), optional
        Of the input's dtype; also float32 for 16-bit input, and 16-bit for float32 input.
    eps : float
        Added to the variance; at least 0.

    Returns
    -------
    Tensor of the input's shape and dtype, with its axes in the same order in memory

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`gradkit.group_norm_grad` does not list.
    ValueError
        Incompatible shapes; fewer than two dimensions; ``num_groups`` does not divide the channels;
        ``eps`` negative.
    NotImplementedError
        A second derivative, or one in forward mode, is computed.

    References
    ----------
    :func:`gradkit.group_norm` and :func:`gradkit.group_norm_grad`, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x = torch.tensor([[1.0, 3.0, 5.0, 5.0]], requires_grad=True)
    >>> y = gradkit.torch.group_norm(x, 2, eps=0.0625)
    >>> y.detach().round(decimals=3)
    tensor([[-0.9700,  0.9700,  0.0000,  0.0000]])
    >>> y[0, 0].backward()
    >>> x.grad.round(decimals=4)
    tensor([[ 0.0285, -0.0285,  0.0000,  0.0000]])
    """
    refuse_nested(input, "input")
    scale = _scale(input, weight, bias)
    return _operators.GROUP_NORM(input, scale, bias, num_groups, eps, 1)


@recorded
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Instance norm: a group norm of one channel a group, as that of ``torch.nn.functional``.

    Parameters
    ----------
    input : Tensor of shape (N, C, ...)
        As in :func:`group_norm`.
    running_mean, running_var : Tensor of shape (C,), optional
        **Written in place** if ``use_input_stats``: they move as those of :func:`batch_norm`,
        towards the mean over samples of each sample's statistics.
    weight, bias : Tensor of shape (C,), optional
        As in :func:`group_norm`; with running statistics, as in :func:`batch_norm`.
    use_input_stats : bool
        Normalise each sample by its own statistics. Otherwise all by the running ones, as
        :func:`batch_norm` does outside of training.
    momentum : float
        From 0 to 1: the weight of this batch in the running statistics, for which alone it is.
    eps : float
        Added to the variance; at least 0.

    Returns
    -------
    Tensor of the input's shape and dtype, with its axes in the same order in memory
        With running statistics that move: contiguous.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`group_norm`; ValueError also for one element per channel and sample, and as
        :func:`batch_norm` with running statistics.

    References
    ----------
    :func:`gradkit.group_norm` and :func:`gradkit.group_norm_grad`, which run;
    :func:`gradkit.batch_norm`, of each sample's channels as channels, with running statistics.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x = torch.tensor([[[1.0, 3.0], [5.0, 5.0]]])
    >>> gradkit.torch.instance_norm(x, eps=0.0625).round(decimals=3)
    tensor([[[-0.9700,  0.9700],
             [ 0.0000,  0.0000]]])
    """
    refuse_nested(input, "input")
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if input.ndim < 2 or prod(input.shape[2:]) == 1:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; expected (N, C, ...) with more than one "
            "element per channel and sample"
        )
    if running_mean is None and running_var is None:
        check_momentum(momentum, None)
        return group_norm(input, input.shape[1] or 1, weight, bias, eps)  # of no channels too
    samples, channels = input.shape[:2]
    x = input.reshape(1, samples * channels, *input.shape[2:])
    running = running_mean, running_var
    mean, var, scale, shift = (
        None if t is None else t.repeat(samples) for t in (*running, weight, bias)
    )
    y = batch_norm(x, mean, var, scale, shift, True, momentum, eps)
    if input.numel():
        with torch.no_grad():
            for old, new in zip(running, (mean, var), strict=True):
                if old is not None and new is not None:
                    old.copy_(new.view(samples, channels).mean(0))
    return y.view(input.shape)


@recorded
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    group: Group | None = None,
) -> Tensor:
    """Batch norm of each channel, as ``torch.nn.functional.batch_norm``.

    Parameters
    ----------
    input : Tensor of shape (N, C, ...)
        float16, bfloat16, float32 or float64, on the CPU or a CUDA device, in any memory layout.
    running_mean, running_var : Tensor of shape (C,), optional
        **Written in place** if ``training``: ``(1 - momentum) * running + momentum * batch``, with
        the batch's mean and its unbiased variance. A batch without elements changes nothing.
    weight, bias : Tensor of shape (C,), optional
        Of the input's dtype, or float32 for 16-bit input.
    training : bool
        Normalise by the statistics of the batch; otherwise by the running ones, which are constants
        then.
    momentum : float, or 0-d Tensor
        From 0 to 1: the weight of the batch in the running statistics, for which alone it is.
    eps : float
        Added to the variance; at least 0.
    group : gradkit.distributed.Group, optional
        In training, statistics are those of the batches of all its ranks, such as ``from_torch()``:
        they make this call together, and the backward pass too, which gives each the gradient of
        its part. Parts may differ in size. The gradients of weight and bias are the rank's own, as
        those of ``torch.nn.SyncBatchNorm``. Ranks wait for each other, and for the device.

    Returns
    -------
    Tensor of the input's shape and dtype, with its axes in the same order in memory

    Raises
    ------
    TypeError
        A combination of dtypes that :func:`gradkit.batch_norm_grad` does not list; one of
        ``running_mean`` and ``running_var`` without the other.
    ValueError
        Incompatible shapes; fewer than two dimensions; ``training`` with one element per channel,
        or otherwise without running statistics; ``momentum`` not from 0 to 1, or in training
        without running statistics; ``eps`` negative.
    RankError
        With ``group``: another rank failed, or makes another call.
    NotImplementedError
        A second derivative, or one in forward mode, is computed.

    References
    ----------
    :func:`gradkit.batch_norm`, :func:`gradkit.batch_norm_inference` and their gradients, which run.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> x = torch.tensor([[1.0, 10.0], [3.0, 10.0]])
    >>> mean, var = torch.zeros(2), torch.ones(2)
    >>> gradkit.torch.batch_norm(x, mean, var, training=True, momentum=0.5)
    tensor([[-1.0000,  0.0000],
            [ 1.0000,  0.0000]])
    >>> mean, var
    (tensor([1., 5.]), tensor([1.5000, 0.5000]))
    """
    refuse_nested(input, "input")
    if input.ndim < 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; expected (N, C, ...)")
    scale = _scale(input, weight, bias)
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("running_mean and running_var are needed if training is false")
        return _operators.BATCH_NORM_INFERENCE(
            input, scale, bias, running_mean, running_var, eps, 1
        )
    if group is not None:
        running = running_mean, running_var
        return batch_norm_over_ranks(input, scale, bias, running, momentum, eps, group)
    if input.numel() == input.shape[1] > 0:
        raise ValueError(
            f"input has shape {tuple(input.shape)}: one element per channel has no variance"
        )
    running = running_mean, running_var
    if running_var is None:
        check_momentum(momentum, running_mean)
    if not isinstance(momentum, Tensor):
        return _operators.BATCH_NORM(input, scale, bias, *running, momentum, eps, 1)
    # It is not read on the host: with a momentum of 1 the batch's own statistics come.
    batch = [None if old is None else old.to(torch.float64, copy=True) for old in running]
    y: Tensor = _operators.BATCH_NORM(input, scale, bias, *batch, 1.0, eps, 1)
    with torch.no_grad():
        for old, new in zip(running, batch, strict=True):
            if old is not None and new is not None:
                weight, before = momentum.double(), old.double()
                moved = torch.where(weight == 1, new, torch.lerp(before, new, weight))
                old.copy_(torch.where(weight == 0, before, moved))
    return y


def _of_sum(norm: Norm, input: Tensor, residual: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """The norm of a sum and the sum, which has the residual's dtype, if that is the wider."""
    wide = getattr(residual, "dtype", None) == torch.float32
    if not (wide and input.dtype in (torch.float16, torch.bfloat16)):
        return norm(input, residual, *how)
    y, s = norm(input.float(), residual, *how)
    return y.to(input.dtype), s


def _axis(input: Tensor, normalized_shape: Sequence[int]) -> int:
    """The first normalised dimension, counted from the end."""
    refuse_nested(input, "input")
    if isinstance(normalized_shape, (int, Tensor)):
        kind = type(normalized_shape).__qualname__
        raise TypeError(
            f"normalized_shape must be a tuple of the last dimensions of input, such as "
            f"{tuple(input.shape[-1:])}, not {kind}"
        )
    wanted = tuple(normalized_shape)
    if not wanted or input.shape[-len(wanted) :] != wanted:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; its last dimensions must be "
            f"normalized_shape, {wanted}"
        )
    return -len(wanted)


def _floor(eps: float | None, input: Tensor) -> float:
    """The ``eps`` that an RMS norm adds to the mean square."""
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps


def _scale(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float = 0.0
) -> Tensor | None:
    """The weight, or ones beside a bias whose gradient by itself would have another dtype or shape.

    A gradient without a scale has the input's dtype, and none is per sample.
    """
    if weight is not None or bias is None:
        return weight
    if offset:
        raise ValueError(f"scale_offset is {offset}, but weight is None; pass a weight")
    alike = bias.dtype == input.dtype and bias.ndim < input.ndim
    return None if alike else torch.ones_like(bias)

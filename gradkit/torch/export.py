"""gradkit's operators in terms of PyTorch's, for exporters and runtimes that know no others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradkit.torch import _operators as norms

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's norms in the place of gradkit's operators, in a program that was exported.

    For ``run_decompositions`` of a ``torch.export.ExportedProgram``, which what converts or runs
    the program then takes as one with PyTorch's norms: ``torch.onnx.export``, for one. The sums of
    :class:`AddLayerNorm` and :class:`AddRMSNorm` and ``scale_offset`` become additions. 16-bit
    data are computed in float32, and rounded once.

    Batch norm is there in evaluation mode only: call ``model.eval()`` before exporting. Gradients
    have no decomposition.

    Returns
    -------
    dict
        Of an operator, ``torch.ops.gradkit.layer_norm.default`` for one, the function that
        computes its results.

    See Also
    --------
    restore_norms : turns modules back into PyTorch's, for ``torch.jit.script``.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = torch.nn.Sequential(gradkit.torch.RMSNorm(4, eps=1e-6, scale_offset=1.0))
    >>> program = torch.export.export(model, (torch.ones(2, 4),))
    >>> program = program.run_decompositions(gradkit.torch.decompositions())
    >>> "gradkit" in str(program.graph)
    False
    """
    found: dict[Any, Callable[..., Any]] = {
        norms.LAYER_NORM: _layer_norm,
        norms.INVERTIBLE_LAYER_NORM: _layer_norm,
        norms.ADD_LAYER_NORM: _added(_layer_norm),
        norms.RMS_NORM: _rms_norm,
        norms.INVERTIBLE_RMS_NORM: _rms_norm,
        norms.ADD_RMS_NORM: _added(_rms_norm),
        norms.GATED_RMS_NORM: _gated_rms_norm,
        norms.GROUP_NORM: _group_norm,
        norms.BATCH_NORM_INFERENCE: _batch_norm_inference,
    }
    return {norm.overload: function for norm, function in found.items()}


# Statistics, which an exported program does not use, are left to PyTorch as it needs none: tensors
# without elements.


def _layer_norm(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    axis: int,
    eps: float,
    scale_offset: float = 0.0,
) -> tuple[Tensor, ...]:
    wide = _wide(x)
    y = functional.layer_norm(
        x.to(wide), x.shape[axis:], _scale(scale, wide, scale_offset), _to(bias, wide), eps
    )
    return y.to(x.dtype), x.new_empty(0), x.new_empty(0)


def _rms_norm(
    x: Tensor, scale: Tensor | None, axis: int, eps: float, scale_offset: float = 0.0
) -> tuple[Tensor, ...]:
    wide = _wide(x)
    y = functional.rms_norm(x.to(wide), x.shape[axis:], _scale(scale, wide, scale_offset), eps)
    return y.to(x.dtype), x.new_empty(0)


def _gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    scale: Tensor | None,
    axis: int,
    eps: float,
    scale_offset: float = 0.0,
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> tuple[Tensor, ...]:
    wide = _wide(x)
    factor = (functional.silu if activation == "silu" else torch.sigmoid)(gate.to(wide))
    source = x.to(wide) if norm_before_gate else x.to(wide) * factor
    y = functional.rms_norm(source, x.shape[axis:], _scale(scale, wide, scale_offset), eps)
    return (y * factor if norm_before_gate else y).to(x.dtype), x.new_empty(0)


def _added(norm: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def added(x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, ...]:
        s = x + residual
        y, *statistics = norm(s, *args)
        return y, s, *statistics

    return added


def _group_norm(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    channel_axis: int = 1,
) -> tuple[Tensor, ...]:
    wide = _wide(x)
    y = functional.group_norm(
        x.to(wide).movedim(channel_axis, 1), num_groups, _to(scale, wide), _to(bias, wide), eps
    )
    return y.movedim(1, channel_axis).to(x.dtype), x.new_empty(0), x.new_empty(0)


def _batch_norm_inference(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    channel_axis: int = 1,
) -> Tensor:
    wide = _wide(x)
    known = mean.to(wide), var.to(wide), _to(scale, wide), _to(bias, wide)
    y = functional.batch_norm(x.to(wide).movedim(channel_axis, 1), *known, eps=eps)
    return y.movedim(1, channel_axis).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None else t.to(dtype)


def _scale(scale: Tensor | None, dtype: torch.dtype, offset: float) -> Tensor | None:
    return _to(scale, dtype) if scale is None or not offset else scale.to(dtype) + offset

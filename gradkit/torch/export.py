"""gradkit's operators in terms of PyTorch's, for exporters, runtimes and compilers.

Those know no others, or know PyTorch's better.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gradkit.torch import _operators as norms
from gradkit.torch._autograd import Norm
from gradkit.torch._records import checked_call_of

__all__ = ["decomposed_inductor", "decompositions"]

Maybe: TypeAlias = Tensor | None


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
    decomposed_inductor : the same for ``torch.compile``.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = torch.nn.Sequential(gradkit.torch.RMSNorm(4, eps=1e-6, scale_offset=1.0))
    >>> program = torch.export.export(model, (torch.ones(2, 4),))
    >>> program = program.run_decompositions(gradkit.torch.decompositions())
    >>> "gradkit" in str(program.graph)
    False
    """
    functions: dict[Any, Callable[..., Any]] = {
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
    return {norm.overload: _of_arguments(norm, function) for norm, function in functions.items()}


def decomposed_inductor(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile by inductor with PyTorch's norms in the place of gradkit's: a backend.

    For ``torch.compile(model, backend=gradkit.torch.decomposed_inductor)``. Inductor cannot see
    into gradkit's operators; PyTorch's it fuses with their neighbours, forward and backward.
    Accuracy, bits and derivatives are then PyTorch's, and results have the layouts of gradkit's
    operators. Every function and module of ``gradkit.torch`` is replaced, batch norm in training
    and residual norms too; the model itself is not changed.

    Parameters
    ----------
    graph : torch.fx.GraphModule
        From ``torch.compile``. **Written in place.**
    inputs : sequence
        From ``torch.compile``.
    mode, options : optional
        Those of ``torch.compile``, as for its own backend.

    Returns
    -------
    callable
        The compiled graph.

    See Also
    --------
    decompositions : the same for exported programs.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.GELU())
    >>> model = gradkit.torch.replace_norms(model)
    >>> compiled = torch.compile(model, backend=gradkit.torch.decomposed_inductor)
    """
    from torch import _inductor  # takes a second to import

    for module in graph.modules():  # blocks under checkpoints are graphs of their own
        if isinstance(module, torch.fx.GraphModule):
            for overload, function in replacements().items():
                for node in module.graph.find_nodes(op="call_function", target=overload):
                    node.target = function
            module.recompile()
    chosen = {**_inductor.list_mode_options(mode or "default"), **(options or {})}
    return _inductor.compile(graph, list(inputs), options=chosen)


def replacements() -> dict[Any, Callable[..., Any]]:
    """The decompositions, and that of batch norm in training, which an exporter might not know."""
    of_batch_norm = _of_arguments(norms.BATCH_NORM, _batch_norm)
    return {norms.BATCH_NORM.overload: of_batch_norm, **decompositions()}


def _of_arguments(norm: Norm, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function of a call, as one that takes what the norm's operator takes."""
    checked_call, arguments = checked_call_of(norm), norm.overload._schema.arguments

    @wraps(function)
    def replaced(*args: Any, **named: Any) -> Any:
        others = [named.get(a.name, a.default_value) for a in arguments[len(args) :]]
        return function(checked_call([*args, *others]))

    return replaced


# A call is the record of the operator's. Statistics, which a program does not use, are left to
# PyTorch as it needs none: tensors without elements.


def _layer_norm(call: Any) -> tuple[Tensor, ...]:
    x = call.x
    y = _of_rows(call, functional.layer_norm, _scale(call), _to(call.bias, _wide(x)))
    return y.to(x.dtype), x.new_empty(0), x.new_empty(0)


def _rms_norm(call: Any) -> tuple[Tensor, ...]:
    x = call.x
    return _of_rows(call, functional.rms_norm, _scale(call)).to(x.dtype), x.new_empty(0)


def _of_rows(call: Any, norm: Callable[..., Tensor], *affine: Maybe) -> Tensor:
    """A norm of PyTorch, which has no scale and no bias per sample: those follow it."""
    x, shape = call.x.to(_wide(call.x)), call.x.shape[call.axis :]
    if call.scale is None or call.scale.ndim == len(shape):
        return norm(x, shape, *affine, eps=call.eps)
    scale, *bias = affine
    y = norm(x, shape, eps=call.eps) * scale
    return y if not bias or bias[0] is None else y + bias[0]


def _gated_rms_norm(call: Any) -> tuple[Tensor, ...]:
    x, wide = call.x, _wide(call.x)
    act = functional.silu if call.activation == "silu" else torch.sigmoid
    factor = act(call.gate.to(wide))
    source = x.to(wide) if call.norm_before_gate else x.to(wide) * factor
    y = functional.rms_norm(source, x.shape[call.axis :], _scale(call), call.eps)
    return (y * factor if call.norm_before_gate else y).to(x.dtype), x.new_empty(0)


def _added(norm: Callable[[Any], tuple[Tensor, ...]]) -> Callable[[Any], tuple[Tensor, ...]]:
    def added(call: Any) -> tuple[Tensor, ...]:
        call.x = s = (call.x + call.residual).contiguous()
        y, *statistics = norm(call)
        return y, s, *statistics

    return added


def _group_norm(call: Any) -> tuple[Tensor, ...]:
    x, axis, wide = call.x, call.channel_axis, _wide(call.x)
    affine = _to(call.scale, wide), _to(call.bias, wide)
    y = functional.group_norm(x.to(wide).movedim(axis, 1), call.num_groups, *affine, call.eps)
    return _laid_out(call, y.movedim(1, axis)), x.new_empty(0), x.new_empty(0)


def _batch_norm_inference(call: Any) -> Tensor:
    x, axis, wide = call.x, call.channel_axis, _wide(call.x)
    vectors = call.mean.to(wide), call.var.to(wide), _to(call.scale, wide), _to(call.bias, wide)
    y = functional.batch_norm(x.to(wide).movedim(axis, 1), *vectors, eps=call.eps)
    return _laid_out(call, y.movedim(1, axis))


def _batch_norm(call: Any) -> tuple[Tensor, ...]:
    x, axis, wide = call.x, call.channel_axis, _wide(call.x)
    running = call.running_mean, call.running_var
    moved = [None if t is None else t.to(wide, copy=True) for t in running]
    y = functional.batch_norm(
        x.to(wide).movedim(axis, 1),
        *(*moved, _to(call.scale, wide), _to(call.bias, wide)),
        training=True,
        momentum=call.momentum,
        eps=call.eps,
    )
    new = [
        x.new_empty(0) if t is None or old is None else t.to(old.dtype)
        for t, old in zip(moved, running, strict=True)
    ]
    return _laid_out(call, y.movedim(1, axis)), x.new_empty(0), x.new_empty(0), *new


def _laid_out(call: Any, y: Tensor) -> Tensor:
    """``y`` with the dtype and the order of axes in memory that the operator gives it."""
    y = y.to(call.x.dtype)
    order = call.plan.results[0].order
    if order is None:
        return y.contiguous()
    _, transposition = order
    as_it_lies = sorted(range(y.ndim), key=transposition.__getitem__)
    return y.permute(as_it_lies).contiguous().permute(transposition)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _to(t: Maybe, dtype: torch.dtype) -> Maybe:
    return t if t is None else t.to(dtype)


def _scale(call: Any) -> Maybe:
    scale = _to(call.scale, _wide(call.x))
    return scale + call.scale_offset if call.scale_offset else scale

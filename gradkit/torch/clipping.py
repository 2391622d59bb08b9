"""Clipping of parameters' gradients, with the names and signatures of ``torch.nn.utils``.

What differs from PyTorch:

- A total norm is float64, so that it does not overflow, and a plain tensor, of DTensors too.
- The coefficient is ``min(1, max_norm / max(norm, 1e-6))``, not ``max_norm / (norm + 1e-6)``:
  gradients whose norm does not exceed ``max_norm`` keep every bit. :func:`gradkit.clip_grad_norm`
  has PyTorch's formula too: ``eps_mode="add"``.
- ``norm_type`` is above 0.
- ``foreach`` has no effect: all gradients are taken together.

Inside ``torch.compile`` they are operators, with ``fullgraph=True`` too. What these do not take
leaves the graph: DTensors, ``group``, ``clip`` and ``count``, and a call without gradients.

Gradients that are DTensors are spread over the ranks of their mesh, which make the call together;
see :mod:`gradkit.distributed`. Without ``group`` all of them are on one mesh, of one dimension or
of all processes. With ``group``, :func:`clip_grad_norm_` takes gradients on any meshes, plain
tensors and pipeline stages.

DTensors of partial sums, as sequence parallelism gives norm weights, count as their totals, which
an all-reduce adds up in memory of its own; then they are scaled, and stay partial sums.
"""

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

import gradkit
from gradkit._open.foreign import answers, norm_comes
from gradkit._ranks.torch import added_up, local_of, shard_of
from gradkit._typing import Chosen, EpsMode, NonFinite
from gradkit.distributed import Group, Names, PlainOfEach, ShardedGrads, from_torch, shards_of
from gradkit.gradients import grads_by_name
from gradkit.torch._list_operators import (
    LocalGrads,
    clip_by_norm_call,
    clip_value_call,
    clip_with_norm_call,
    in_graphs,
    is_sharded,
    norm_by,
    plain_of,
    total_norm_call,
)

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]

Tensors: TypeAlias = Tensor | Iterable[Tensor]
Parameters: TypeAlias = Tensors | Iterable[tuple[str, Tensor]]
Grads: TypeAlias = list[Tensor] | dict[Any, Tensor]  # by position or by name


@in_graphs(total_norm_call)
@answers
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001
    *,
    scale: float | Tensor = 1.0,
    nonfinite: NonFinite | None = None,
    found_inf: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """The p-norm of all tensors taken together, as ``torch.nn.utils.get_total_norm``.

    Parameters
    ----------
    tensors : Tensor or iterable of Tensor
        Gradients, not parameters. Never written.
    norm_type : float
        p: above 0, or infinity.
    error_if_nonfinite : bool
        Raise an error if the norm is NaN or infinite; waits for the device.
    foreach
        No effect.
    scale, nonfinite, found_inf, exact
        As in :func:`gradkit.grad_norm`.

    Returns
    -------
    0-d float64 Tensor
        0 if there are no tensors.

    Raises
    ------
    RuntimeError
        The norm is not finite and ``error_if_nonfinite`` is true.
    NonFiniteNormError
        The norm is not finite and ``nonfinite="raise"``.
    TypeError, ValueError
        As :func:`gradkit.grad_norm`; DTensors beside plain tensors, or on several meshes.

    References
    ----------
    :func:`gradkit.grad_norm`, which runs.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> gradkit.torch.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5., dtype=torch.float64)
    """
    all_tensors = listed(tensors, "tensors")
    gradients = spread(all_tensors, [*map(plain_of, all_tensors)], "tensors[{}]")
    return norm_by(
        gradkit.grad_norm,
        gradients,
        norm_type=norm_type,
        error=error_if_nonfinite,
        scale=scale,
        nonfinite=nonfinite,
        found_inf=found_inf,
        exact=exact,
    )


@in_graphs(clip_by_norm_call)
@answers
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001
    *,
    scale: float | Tensor = 1.0,
    nonfinite: NonFinite | None = None,
    found_inf: Tensor | None = None,
    clip: Chosen = None,
    count: Chosen = None,
    eps_mode: EpsMode = "max",
    group: Group | None = None,
    names: Names | None = None,
    plain: PlainOfEach | None = None,
    exact: bool = False,
) -> Tensor:
    """Clip gradients by their total norm, as ``torch.nn.utils.clip_grad_norm_``.

    Parameters
    ----------
    parameters : Tensor, or iterable of Tensor or of (name, Tensor) pairs
        Their ``grad`` is **written in place**; those without one are skipped. Of
        ``model.named_parameters()`` errors say names. With ``group``, pass that: by their names
        ranks know copies of one parameter.
    max_norm : float, or 0-d Tensor
        At least 0; such as the limit of a :class:`gradkit.SpikeGuard`.
    norm_type : float
        p: above 0, or infinity.
    error_if_nonfinite : bool
        Raise an error if the norm is NaN or infinite, and write nothing; waits for the device.
        Not together with ``nonfinite``.
    foreach
        No effect.
    scale, nonfinite, found_inf, clip, count, eps_mode
        As in :func:`gradkit.clip_grad_norm`: ``1 / loss_scale`` in the same pass, what happens to
        a norm that is not finite, where that is written, whose gradients are clipped and whose
        count, and PyTorch's formula. ``nonfinite="zero"`` does not wait for the device.
    group : gradkit.distributed.Group, optional
        All ranks of the model, which make this call together: ``from_torch()``. However the model
        is cut, every gradient counts once, and the call is one collective once ranks know, from
        the first one, who holds what.
    names, plain
        With ``group``: as in :func:`gradkit.distributed.shards_of`. ``plain`` says what tensors
        are that are no DTensors.
    exact : bool
        As in :func:`gradkit.grad_norm`: however the model is cut, the norm has the same bits.

    Returns
    -------
    0-d float64 Tensor
        The norm before clipping, with the same bits on all ranks; 0 if there are no gradients.

    Raises
    ------
    RuntimeError
        The norm is not finite and ``error_if_nonfinite`` is true. Nothing is written.
    NonFiniteNormError
        The norm is not finite and ``nonfinite="raise"``. Nothing is written.
    TypeError, ValueError
        As :func:`gradkit.clip_grad_norm` and :func:`gradkit.distributed.shards_of`; without
        ``group``, DTensors beside plain tensors, or on several meshes.
    RankError
        With ``group``: another rank failed, or ranks hold parts that do not fit together.

    References
    ----------
    :func:`gradkit.clip_grad_norm`, which runs.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradkit.torch.clip_grad_norm_([weight], max_norm=1.0)
    tensor(5., dtype=torch.float64)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    >>> gradkit.torch.clip_grad_norm_([("weight", weight)], 1.0, scale=0.5, nonfinite="zero")
    tensor(0.5000, dtype=torch.float64)
    >>> weight.grad
    tensor([0.3000, 0.4000])
    """
    if group is not None:
        gradients = _spread_over(parameters, group, names, plain)
    else:
        refuse_names(names, plain)
        if isinstance(parameters, Generator):
            parameters = list(parameters)
            if not parameters:
                warnings.warn(
                    "parameters is a generator that gives none, perhaps because it has been used "
                    "up: nothing is clipped",
                    stacklevel=4,  # behind two decorators
                )
        gradients = spread(*_with_grads(parameters))
    if gradients.partial and clip is not None:
        raise ValueError(
            "clip does not go with DTensors of partial sums; take "
            "grad.redistribute(placements=[Replicate()]) in their place"
        )
    how: dict[str, Any] = {"scale": scale, "eps_mode": eps_mode}
    norm = norm_by(
        gradkit.clip_grad_norm,
        gradients,
        max_norm,
        norm_type=norm_type,
        error=error_if_nonfinite,
        nonfinite=nonfinite,
        found_inf=found_inf,
        clip=clip,
        count=count,
        exact=exact,
        **how,
    )
    if gradients.partial:  # whose totals have been clipped in memory of their own
        how["nonfinite"] = "zero" if nonfinite == "zero" else "propagate"
        gradkit.clip_grads_with_norm(gradients.partial, norm, max_norm=max_norm, **how)
    return norm


@norm_comes(2)
@in_graphs(clip_with_norm_call)
def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    total_norm: Tensor | float,
    foreach: bool | None = None,  # noqa: ARG001
) -> None:
    """Clip gradients by a norm that is known, as ``torch.nn.utils.clip_grads_with_norm_``.

    Parameters
    ----------
    parameters : Tensor, or iterable of Tensor or of (name, Tensor) pairs
        Their ``grad`` is **written in place**; those without one are skipped.
    max_norm : float, or 0-d Tensor
        At least 0.
    total_norm : 0-d Tensor, or float
        As :func:`get_total_norm` returns it, or PyTorch's, on any device. A number only by
        keyword, so that it is not taken for ``max_norm``: :func:`gradkit.clip_grads_with_norm`
        takes the two in the other order.
    foreach
        No effect.

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.clip_grads_with_norm`.

    References
    ----------
    :func:`gradkit.clip_grads_with_norm`, which runs.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradkit.torch.clip_grads_with_norm_([weight], 1.0, torch.tensor(10.0))
    >>> weight.grad
    tensor([0.3000, 0.4000])
    """
    grads = local(_with_grads(parameters)[1], partial=True)
    norm: Any = total_norm
    if isinstance(norm, Tensor):
        norm = norm.full_tensor() if is_sharded(norm) else norm
        norm = norm.detach().to(next((grad.device for _, grad in items(grads)), None))
    gradkit.clip_grads_with_norm(grads, norm, max_norm=max_norm)


@in_graphs(clip_value_call)
@answers
def clip_grad_value_(
    parameters: Parameters,
    clip_value: float,
    foreach: bool | None = None,  # noqa: ARG001
) -> None:
    """Clamp every element of gradients, as ``torch.nn.utils.clip_grad_value_``.

    Parameters
    ----------
    parameters : Tensor, or iterable of Tensor or of (name, Tensor) pairs
        Their ``grad`` is **written in place**; those without one are skipped. NaN stays NaN.
    clip_value : float
        At least 0.
    foreach
        No effect.

    Raises
    ------
    TypeError, ValueError
        As :func:`gradkit.clip_grad_value`.

    References
    ----------
    :func:`gradkit.clip_grad_value`, which runs.

    Examples
    --------
    >>> import torch, gradkit.torch
    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([-3.0, 0.5, 2.0])
    >>> gradkit.torch.clip_grad_value_([weight], 1.0)
    >>> weight.grad
    tensor([-1.0000,  0.5000,  1.0000])
    """
    gradkit.clip_grad_value(local(_with_grads(parameters)[1]), float(clip_value))


def refuse_names(names: Names | None, plain: PlainOfEach | None) -> None:
    """Raise if a call without a group has what only one with a group takes."""
    if not (names is None and plain is None):
        raise ValueError("names and plain are for ranks that find out what they hold: pass group")


_GRADIENT = "the gradient of parameters[{!r}]"


def spread(tensors: Sequence[Tensor], grads: Grads, label: str = _GRADIENT) -> LocalGrads:
    """Gradients, and the ranks of the mesh that tensors are on: parameters, or the gradients.

    A rank without gradients knows its ranks by its parameters. ``label``: what an error calls the
    gradient that has a key.
    """
    sharded = [is_sharded(tensor) for tensor in tensors]
    if not any(sharded):
        return LocalGrads(grads, None)
    if not all(sharded):
        raise ValueError(
            "some tensors are DTensors and some are not, which do not say on how many ranks they "
            "lie; pass model.named_parameters(), group and plain to clip_grad_norm_"
        )
    totals = added_up(dict(items(grads)))
    parts = {k: shard_of(totals.get(k, grad), label.format(k)) for k, grad in items(grads)}
    shards = ShardedGrads(
        {k: part for k, (part, _) in parts.items()},
        {k: copies for k, (_, copies) in parts.items()},
    )
    meshes = [tensor.device_mesh for tensor in tensors]  # type: ignore[attr-defined]
    partial = [local_of(grad) for k, grad in items(grads) if k in totals]
    return LocalGrads(shards, _group_of(meshes), partial)


def _spread_over(
    parameters: Any, group: Group, names: Names | None, plain: PlainOfEach | None
) -> LocalGrads:
    """The same of parameters that ranks of a group hold, who find out what."""
    tree = parameters
    if not isinstance(tree, (Tensor, Mapping)):
        tree = [*tree]
    partial: list[Tensor] = []
    if isinstance(tree, list):
        leaves = dict(tree) if all(map(_is_pair, tree)) else dict(enumerate(tree))
        grads = {key: getattr(leaf, "grad", None) for key, leaf in leaves.items()}
        totals = added_up({key: grad for key, grad in grads.items() if grad is not None})
        if totals:
            tree, partial = leaves | totals, [local_of(grads[key]) for key in totals]
    return LocalGrads(shards_of(tree, group=group, names=names, plain=plain), group, partial)


def _group_of(meshes: Sequence[Any]) -> Group:
    """The ranks of a mesh that all gradients are on."""
    mesh = meshes[0]
    if any(other != mesh for other in meshes[1:]):
        reason = "are on several device meshes"
    elif mesh.ndim == 1:
        return from_torch(mesh.get_group())
    elif mesh.size() == torch.distributed.get_world_size():
        return from_torch()
    else:
        reason = f"are on a mesh of {mesh.ndim} dimensions that not all processes belong to"
    raise ValueError(
        f"the DTensors {reason}; pass model.named_parameters(), and the group of all ranks of the "
        "model, to clip_grad_norm_"
    )


def listed(tensors: Tensors, label: str = "parameters") -> list[Tensor]:
    """Tensors in a list, and an error for a model or for pairs in their place."""
    if isinstance(tensors, Tensor):
        return [tensors]
    as_list = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    for kind in set(map(type, as_list)):
        if not issubclass(kind, Tensor):
            content = "(name, parameter) pairs" if kind is tuple else f"a {kind.__qualname__}"
            wanted = "model.parameters()"
            instead = f"gradkit.grads_of({wanted})" if label == "tensors" else wanted
            raise TypeError(f"{label} holds {content}; pass {instead}")
    return as_list


def parameters_in(parameters: Tensors) -> list[Tensor]:
    """Parameters in a list; an error for gradients in their place, or if one is there twice."""
    as_list = listed(parameters)
    gradkit.grads_of(as_list)  # which raises it
    return as_list


def _with_grads(parameters: Parameters) -> tuple[list[Tensor], Grads]:
    """Parameters and their gradients: by name those of pairs, by position all others."""
    source: Any = parameters
    if not isinstance(source, Tensor) and isinstance(source, Iterable):
        source = [*source]
        if source and all(map(_is_pair, source)):
            named = grads_by_name(source, "parameters", "grad")
            return [p for _, p in source], {name: plain_of(grad) for name, grad in named.items()}
    as_list = parameters_in(source)
    grads = {k: plain_of(p.grad) for k, p in enumerate(as_list) if p.grad is not None}
    return as_list, by_position(grads, len(as_list))


def by_position(grads: dict[int, Tensor], count: int) -> Grads:
    """Gradients as errors name them. A list opens sooner, and has the same positions if whole."""
    return [*grads.values()] if len(grads) == count else grads


def items(grads: Grads) -> Iterable[tuple[Any, Tensor]]:
    """Each gradient behind its position, or its name."""
    return grads.items() if isinstance(grads, dict) else enumerate(grads)


def _is_pair(each: Any) -> bool:
    return type(each) is tuple and len(each) == 2 and isinstance(each[0], str)


def local(grads: Grads, *, partial: bool = False) -> Grads:
    """Each gradient's own memory on this rank. ``partial``: that of partial sums too."""

    def own_of(key: Any, grad: Tensor) -> Tensor:
        if not is_sharded(grad):
            return grad
        return local_of(grad) if partial else shard_of(grad, _GRADIENT.format(key))[0]  # type: ignore[no-any-return]

    parts = {k: own_of(k, grad) for k, grad in items(grads)}
    return parts if isinstance(grads, dict) else [*parts.values()]

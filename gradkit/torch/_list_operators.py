"""Clipping inside ``torch.compile``: operators that write lists of gradients.

A compiler gets an operator, which runs what the function runs on plain tensors. Numbers are tensors
of an operator: those of Python are in host memory. DTensors, and what an operator does not take,
leave the graph.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

import gradkit
from gradkit._open.foreign import close_to_dynamo
from gradkit._typing import NonFinite
from gradkit.distributed import Group
from gradkit.torch._autograd import define

Function = TypeVar("Function", bound=Callable[..., Any])


class LocalGrads(NamedTuple):
    """Gradients as gradkit's norms take them, and the ranks that they are spread over."""

    grads: Any
    group: Group | None
    partial: Sequence[Tensor] = ()  # this rank's partial sums, of which ``grads`` has the totals


def norm_by(
    function: Any,
    gradients: LocalGrads,
    *limit: Any,
    norm_type: float,
    error: bool,
    nonfinite: NonFinite | None = None,
    **options: Any,
) -> Tensor:
    """A norm by gradkit's function, as a tensor. ``error``: PyTorch's, if it is not finite."""
    if nonfinite is None:
        policy = "raise" if error else "propagate"
    elif error:
        raise ValueError(f"pass error_if_nonfinite or nonfinite={nonfinite!r}, not both")
    else:
        policy = nonfinite
    try:
        norm = function(
            gradients.grads, *limit, norm_type, nonfinite=policy, group=gradients.group, **options
        )
    except gradkit.NonFiniteNormError as cause:
        if nonfinite is not None:
            raise
        raise RuntimeError(str(cause)) from cause
    return torch.as_tensor(norm)  # NumPy's, if there are no gradients


def in_graphs(prepare: Callable[..., Callable[[], Any] | None]) -> Callable[[Function], Function]:
    """Let compilers call an operator in the place of a function, which they do not trace.

    ``prepare`` takes the function's arguments, and returns that call, or ``None`` if it has none.
    """

    def decorated(function: Function) -> Function:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            call = prepare(*args, **kwargs) if is_compiling() else None
            return function(*args, **kwargs) if call is None else call()

        close_to_dynamo([function])
        return cast(Function, called)

    return decorated


def total_norm_call(
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001
    *,
    scale: float | Tensor = 1.0,
    nonfinite: str | None = None,
    found_inf: Tensor | None = None,
    exact: bool = False,
) -> Callable[[], Any] | None:
    """The operator of ``get_total_norm``, with its arguments."""
    listed = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    if not listed or any(map(is_sharded, listed)):
        return None
    options = _order(norm_type), error_if_nonfinite, _scale(scale), nonfinite, exact
    grads = [*map(plain_of, listed)]
    if found_inf is None:
        return partial(torch.ops.gradkit.get_total_norm, grads, *options)
    return partial(torch.ops.gradkit.get_total_norm_found_inf, grads, *options, found_inf)


def clip_by_norm_call(
    parameters: Any,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001
    *,
    scale: float | Tensor = 1.0,
    nonfinite: str | None = None,
    found_inf: Tensor | None = None,
    eps_mode: str = "max",
    exact: bool = False,
    **others: Any,
) -> Callable[[], Any] | None:
    """The operator of ``clip_grad_norm_``, with its arguments."""
    grads, names = _gradients(parameters)
    if not grads or any(other is not None for other in others.values()):
        return None
    options = error_if_nonfinite, _scale(scale), nonfinite, found_inf, eps_mode, exact
    operands = grads, names, _limit(max_norm), _order(norm_type)
    return partial(torch.ops.gradkit.clip_grad_norm_, *operands, *options)


def clip_with_norm_call(
    parameters: Any,
    max_norm: float | Tensor,
    total_norm: float | Tensor,
    foreach: bool | None = None,  # noqa: ARG001
) -> Callable[[], Any] | None:
    """The operator of ``clip_grads_with_norm_``, with its arguments."""
    grads, names = _gradients(parameters)
    if not grads or (isinstance(total_norm, Tensor) and is_sharded(total_norm)):
        return None
    operands = grads, names, _limit(max_norm), _number(total_norm)
    return partial(torch.ops.gradkit.clip_grads_with_norm_, *operands)


def clip_value_call(
    parameters: Any,
    clip_value: float,
    foreach: bool | None = None,  # noqa: ARG001
) -> Callable[[], Any] | None:
    """The operator of ``clip_grad_value_``, with its arguments."""
    grads, names = _gradients(parameters)
    return partial(torch.ops.gradkit.clip_grad_value_, grads, names, clip_value) if grads else None


def _gradients(parameters: Any) -> tuple[list[Tensor], list[str]]:
    """Gradients, and their names if parameters are pairs; none of what no operator takes.

    Names that occur twice are an error, which the function itself raises.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    named = [each if type(each) is tuple else ("", each) for each in listed]
    with_grad = [(name, plain_of(p.grad)) for name, p in named if p.grad is not None]
    grads = [grad for _, grad in with_grad]
    names = [name for name, _ in with_grad if name]
    misnamed = names and len({name for name, _ in named}) < len(named)
    return ([] if misnamed or any(map(is_sharded, grads)) else grads), names


def is_sharded(tensor: Tensor) -> bool:
    """True if it is a DTensor."""
    return hasattr(tensor, "placements")


def plain_of(grad: Tensor) -> Tensor:
    """A gradient whose values are meant, also if it can be differentiated again."""
    return grad.detach() if grad.requires_grad else grad


def _number(number: float | Tensor) -> Tensor:
    """A tensor, which a compiler makes of any number: ``torch.full`` is compiled for each anew."""
    if isinstance(number, Tensor):
        return number
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def _limit(number: float | Tensor) -> Tensor:
    """A limit for an operator, to which a number is as a tensor, whose value nothing checks."""
    if not isinstance(number, Tensor) and not number >= 0:
        raise ValueError(f"max_norm must be at least 0, not {number}")
    return _number(number)


def _scale(number: float | Tensor) -> Tensor:
    if not isinstance(number, Tensor) and not -inf < number < inf:
        raise ValueError(f"scale must be finite, not {number}")
    return _number(number)


def _order(norm_type: float | str) -> float:
    return inf if norm_type == "inf" else norm_type  # type: ignore[return-value]


# What the operators run


def _named(grads: list[Tensor], names: list[str]) -> Any:
    return dict(zip(names, grads, strict=True)) if names else grads


def _total_norm(
    tensors: list[Tensor],
    norm_type: float,
    error: bool,
    scale: Tensor,
    nonfinite: Any,
    exact: bool,
    found_inf: Tensor | None = None,
) -> Tensor:
    options = {"scale": scale, "nonfinite": nonfinite, "found_inf": found_inf, "exact": exact}
    gradients = LocalGrads(tensors, None)
    return norm_by(gradkit.grad_norm, gradients, norm_type=norm_type, error=error, **options)


def _clip_by_norm(
    grads: list[Tensor],
    names: list[str],
    max_norm: Tensor,
    norm_type: float,
    error: bool,
    scale: Tensor,
    nonfinite: Any,
    found_inf: Tensor | None,
    eps_mode: str,
    exact: bool,
) -> Tensor:
    options = {"scale": scale, "nonfinite": nonfinite, "found_inf": found_inf, "exact": exact}
    return norm_by(
        gradkit.clip_grad_norm,
        LocalGrads(_named(grads, names), None),
        max_norm,
        norm_type=norm_type,
        error=error,
        eps_mode=eps_mode,
        **options,
    )


def _clip_with_norm(
    grads: list[Tensor], names: list[str], max_norm: Tensor, total_norm: Tensor
) -> None:
    norm = total_norm.to(grads[0].device)
    gradkit.clip_grads_with_norm(_named(grads, names), norm, max_norm=max_norm)


def _clip_value(grads: list[Tensor], names: list[str], clip_value: float) -> None:
    gradkit.clip_grad_value(_named(grads, names), clip_value)


def _norm_like(grads: list[Tensor], *_: Any) -> Tensor:
    return grads[0].new_empty((), dtype=torch.float64)


def _nothing(*_: Any) -> None:
    """The fake kernel of an operator without results."""


_LIST = "Tensor(a!)[] grads, str[] names"
_TOTAL = "Tensor[] tensors, float norm_type, bool error, Tensor scale, str? nonfinite, bool exact"
# Of an operator that may write something, and does not, Inductor makes no code: hence two of these.
for _schema, _run, _describe in (
    (f"get_total_norm({_TOTAL}) -> Tensor", _total_norm, _norm_like),
    (
        f"get_total_norm_found_inf({_TOTAL}, Tensor(a!) found_inf) -> Tensor",
        _total_norm,
        _norm_like,
    ),
    (
        f"clip_grad_norm_({_LIST}, Tensor max_norm, float norm_type, bool error, Tensor scale, "
        "str? nonfinite, Tensor(b!)? found_inf, str eps_mode, bool exact) -> Tensor",
        _clip_by_norm,
        _norm_like,
    ),
    (
        f"clip_grads_with_norm_({_LIST}, Tensor max_norm, Tensor total_norm) -> ()",
        _clip_with_norm,
        _nothing,
    ),
    (f"clip_grad_value_({_LIST}, float clip_value) -> ()", _clip_value, _nothing),
):
    define(_schema, _run, _describe)

"""Operators and differentiable norms, made of records of calls."""

import re
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradkit._backend import Spec
from gradkit._calls.record import Call, Described
from gradkit._dtypes import dtype_named
from gradkit._open.dispatch import run
from gradkit.torch._autograd import Kept, Norm, Operator, operator

_INTEGERS = {"axis", "channel_axis", "num_groups"}
# What compilers keep of an operator names its arguments by position: one that is new comes last.
_LAST = {"ds"}
_DEFAULTS = {"ds": None, "scale_offset": 0.0}
_gradients: dict[type[Call], Operator] = {}


def norm_of(name: str, forward: type[Call], gradient: type[Call], **instead: str) -> Norm:
    """The differentiable norm with such a forward pass and such a gradient.

    The gradient finds what it needs under its own names among the inputs and the results of the
    forward pass; ``instead`` has the names of what is called otherwise there. A norm that gives a
    sum ``s`` takes the gradient of that as ``ds``.
    """
    names = [*_names(forward), *forward.result_names]
    wanted = [n for n in _names(gradient) if n not in ("dy", "ds")]
    pick: Any = itemgetter(*(names.index(instead.get(n, n)) for n in wanted))
    tensors = sum(n not in gradient.numbers for n in wanted)

    def keep(inputs: Any, results: Any) -> Kept:
        found = pick((*inputs, *results))
        return found[:tensors], found[tensors:]

    if gradient not in _gradients:
        own = re.sub(r"(?<!^)(?=[A-Z])", "_", gradient.__name__).lower()
        _gradients[gradient] = _operator(own, gradient, last=True)
    return Norm(
        _operator(name, forward),
        _gradients[gradient],
        keep,
        residual="s" in forward.result_names,
        past="ds" in _names(gradient),
    )


def _operator(name: str, kind: type[Call], *, last: bool = False) -> Operator:
    """The operator that runs calls of a kind: tensors, then numbers, then what is seldom there."""
    names = _names(kind)

    defaults = {name: value for name, value in _DEFAULTS.items() if name in names}

    def call_of(args: Any) -> Call:  # PyTorch leaves out defaults at the end
        return kind(**(defaults | dict(zip(names, args, strict=False))))

    def compute(*args: Any) -> Any:
        return run(call_of(args))

    def describe(*args: Any) -> tuple[Tensor, ...]:
        call = call_of(args).described(_described)
        return tuple(_like(args[0], spec) for spec in call.layout.plan(call).results)

    return operator(_schema(name, kind), compute, describe, last=last)


def _schema(name: str, kind: type[Call]) -> str:
    optional = {argument.name for argument in kind.arguments if argument.optional}
    parts = []
    for own in _names(kind):
        if own in kind.numbers:
            part = f"{'int' if own in _INTEGERS else 'float'} {own}"
        else:
            part = f"Tensor{'?' * (own in optional)} {own}"
        parts.append(f"{part}={_DEFAULTS[own]}" if own in _DEFAULTS else part)
    results = ", ".join("Tensor" for _ in kind.results)
    return f"{name}({', '.join(parts)}) -> ({results})"


def _names(kind: type[Call]) -> list[str]:
    names = [argument.name for argument in kind.arguments if argument.name not in _LAST]
    return [*names, *kind.numbers, *(a.name for a in kind.arguments if a.name in _LAST)]


def _described(label: str, tensor: Tensor) -> Described:
    dtype: Any = str(tensor.dtype).removeprefix("torch.")
    dtype = dtype_named(dtype) if dtype == "bfloat16" else np.dtype(dtype)
    steps = tuple(step * dtype.itemsize for step in tensor.stride())
    return Described(label, tuple(tensor.shape), dtype, steps)


def _like(first: Tensor, spec: Spec | None) -> Tensor:
    """A tensor without memory, as a result looks like; one without elements for an absent one."""
    if spec is None:
        return first.new_empty(0)
    dtype = getattr(torch, str(spec.dtype))

    def empty(shape: Any, _: Any) -> Any:
        return first.new_empty(shape, dtype=dtype)

    if spec.order is None:
        return empty(spec.shape, dtype)
    shape, transposition = spec.order
    return empty(shape, dtype).permute(transposition)

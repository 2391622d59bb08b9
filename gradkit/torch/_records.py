"""Operators and differentiable norms, made of records of calls."""

import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradkit._calls.record import Call, Described, Plan
from gradkit._dtypes import dtype_named
from gradkit._open.dispatch import run
from gradkit.torch._autograd import Kept, Norm, Operator, operator
from gradkit.torch._cached_calls import CachedCalls

# The types of arguments that are neither tensors nor floats.
_TYPES = {
    **dict.fromkeys(("axis", "channel_axis", "num_groups"), "int"),
    **dict.fromkeys(("activation", "wanted"), "str"),
    "norm_before_gate": "bool",
}
# What compilers keep of an operator names its arguments by position: those that are new come last.
_LAST = ("channel_axis", "ds", "wanted")
_DEFAULTS = {
    "channel_axis": 1,
    "ds": None,
    "scale_offset": 0.0,
    "activation": "silu",
    "norm_before_gate": True,
    "wanted": "",  # names of results, with spaces between them; all
}
_OMITTED = {"engine": None}
_gradients: dict[type[Call], Operator] = {}


def norm_of(name: str, forward: type[Call], gradient: type[Call], **instead: str) -> Norm:
    """The differentiable norm with such a forward pass and such a gradient.

    The gradient finds what it needs under its own names among the inputs and the results of the
    forward pass; ``instead`` has the names of what is called otherwise there. A norm that gives a
    sum ``s`` takes the gradient of that as ``ds``.
    """
    names = [*_names(forward), *forward.result_names]
    needed = [n for n in _names(gradient) if n not in ("dy", "ds", "wanted")]
    pick: Any = itemgetter(*(names.index(instead.get(n, n)) for n in needed))
    tensors = sum(n not in gradient.numbers for n in needed)
    lacks_offset = "scale_offset" in forward.numbers and "scale_offset" not in gradient.numbers
    offset = names.index("scale_offset") if lacks_offset else 0

    def keep(inputs: Any, results: Any) -> Kept:
        values = pick((*inputs, *results))
        return values[:tensors], values[tensors:]

    def keep_without_offset(inputs: Any, results: Any) -> Kept:
        if inputs[offset]:
            raise NotImplementedError(
                f"{name} has no gradient by a scale_offset; pass scale + scale_offset as scale"
            )
        return keep(inputs, results)

    if gradient not in _gradients:
        operator_name = re.sub(r"(?<!^)(?=[A-Z])", "_", gradient.__name__).lower()
        _gradients[gradient] = _operator(operator_name, gradient, last=True)
    return Norm(
        _operator(name, forward),
        _gradients[gradient],
        keep_without_offset if lacks_offset else keep,
        residual="s" in forward.result_names,
        past="ds" in _names(gradient),
        in_place=len(forward.in_place),
    )


def _operator(name: str, kind: type[Call], *, last: bool = False) -> Operator:
    """The operator that runs calls of a kind: tensors, then numbers, then what is seldom there.

    It writes clones of what a call writes in place, and returns them behind the results.
    """
    call_of = _maker(kind)

    def compute(*args: Any) -> tuple[Any, ...]:
        results = run(call_of(args))
        return results if type(results) is tuple else (results,)

    def describe(*args: Any) -> Any:
        call = call_of(args)
        for label in kind.ordered_names:
            tensor = getattr(call, label)
            if tensor is not None and tensor.device != args[0].device:
                raise ValueError(
                    f"{label} is on another device, {tensor.device}, than {args[0].device}"
                )
        written = [getattr(call, each.name) for each in kind.in_place]
        clones = [args[0].new_empty(0) if t is None else t.new_empty(t.shape) for t in written]
        results = [_like(args[0], spec) for spec in _plan_of(call).results]
        outputs = *results, *clones
        return outputs if len(outputs) > 1 else outputs[0]

    names, numbers, count = _names(kind), {*kind.passing, *kind.numbers}, len(kind.in_place)
    kernel = _on_clones(compute, len(kind.arguments), count) if count else compute
    overload = operator(_schema(name, kind), kernel, describe, last=last)
    tensors = [names.index(each) for each in kind.ordered_names]
    others = [k for k, each in enumerate(names) if each in numbers]
    return Operator(CachedCalls(compute, tensors, others, count), overload, kind)


def _on_clones(
    compute: Callable[..., tuple[Any, ...]], first: int, count: int
) -> Callable[..., tuple[Any, ...]]:
    """The same on clones of ``count`` arguments from the ``first`` on, which are results too."""

    def on_clones(*args: Any) -> tuple[Any, ...]:
        clones = [t if t is None else t.clone() for t in args[first : first + count]]
        return *compute(*args[:first], *clones, *args[first + count :]), *clones

    return on_clones


def _maker(kind: type[Call]) -> Callable[[Any], Call]:
    """The function that makes a call of an operator's arguments."""
    names = _names(kind)
    defaults = {name: value for name, value in _DEFAULTS.items() if name in names}
    omitted = {name: value for name, value in _OMITTED.items() if name in kind.numbers}

    def call_of(args: Any) -> Call:
        call = object.__new__(kind)  # whose `__init__` takes longer, and checks names
        fields = call.__dict__
        if len(args) < len(names):  # PyTorch leaves out defaults at the end
            fields.update(defaults)
        fields.update(omitted)
        fields.update(zip(names, args, strict=False))
        if "wanted" in fields:
            fields["wanted"] = tuple(fields["wanted"].split()) or None
        return call

    return call_of


def checked_call_of(norm: Norm) -> Callable[[Any], Any]:
    """The function that makes a forward call of an operator's arguments, and its plan.

    Numbers are as a backend gets them: checked, and what the checks make of them.
    """
    kind = norm.forward.kind
    call_of = _maker(kind)

    def checked_call(args: Any) -> Call:
        call = call_of(args)
        passing = {name: check(getattr(call, name), None) for name, check in kind.passing.items()}
        call.plan = _plan_of(call)
        call.__dict__.update(call.plan.options | passing)
        return call

    return checked_call


def _plan_of(call: Call) -> Plan:
    described = call.described(_described)
    return described.layout.plan(described)


def _schema(name: str, kind: type[Call]) -> str:
    optional = {argument.name: argument.optional for argument in kind.arguments}
    optional |= {each.name: True for each in kind.in_place}
    parts = []
    for argument in _names(kind):
        if argument in optional:
            part = f"Tensor{'?' * optional[argument]} {argument}"
        else:
            part = f"{_TYPES.get(argument, 'float')} {argument}"
        parts.append(f"{part}={_DEFAULTS[argument]!r}" if argument in _DEFAULTS else part)
    results = ["Tensor"] * (len(kind.results) + len(kind.in_place))
    returned = f"({', '.join(results)})" if len(results) > 1 else results[0]
    return f"{name}({', '.join(parts)}) -> {returned}"


def _names(kind: type[Call]) -> list[str]:
    """The names of an operator's arguments."""
    names = [*(a.name for a in kind.arguments), *(each.name for each in kind.in_place)]
    names += [name for name in (*kind.passing, *kind.numbers) if name not in _OMITTED]
    return [n for n in names if n not in _LAST] + [n for n in _LAST if n in names]


def _described(label: str, tensor: Tensor) -> Described:
    dtype: Any = str(tensor.dtype).removeprefix("torch.")
    dtype = dtype_named(dtype) if dtype == "bfloat16" else np.dtype(dtype)
    steps = tuple(step * dtype.itemsize for step in tensor.stride())
    return Described(label, tuple(tensor.shape), dtype, steps)


def _like(first: Tensor, spec: Any) -> Tensor:
    """A tensor without memory, as a result looks like; one without elements for an absent one."""
    if spec is None:
        return first.new_empty(0)
    shape, order = spec.order or (spec.shape, [*range(len(spec.shape))])
    return first.new_empty(shape, dtype=getattr(torch, str(spec.dtype))).permute(order)

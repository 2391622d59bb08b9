"""Norms that JAX differentiates, made of records of calls."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, ParamSpec, cast

import jax
import jax.numpy as jnp

from gradkit._calls import checks, roles
from gradkit._calls.layouts import GroupLayout
from gradkit._calls.record import Call, Described
from gradkit._open.dispatch import write
from gradkit.jax._callbacks import ResultShape, call, vary_alike
from gradkit.jax._compiled import compiled_call

_ONCE = "{} has no second derivative, and none in forward mode: differentiate it once, by jax.grad"
_AXES = {"axis", "channel_axis"}
P = ParamSpec("P")


class TracedNorm(Generic[P]):
    """A norm that JAX differentiates once, in reverse mode, by a gradient that is a record too.

    It is called with the fields of the forward pass's record.

    The gradient finds its operands among the inputs and the results of the forward pass, by its own
    names; ``instead`` has the names of those that are called otherwise there. A norm that returns a
    sum ``s`` takes the gradient of that as ``ds``.
    """

    def __init__(self, name: str, record: Callable[P, Call], gradient: type[Call], **instead: str):
        self.refusal = _ONCE.format(name)
        forward = cast(type[Call], record)  # a class is what makes its instances
        self.forward, self.gradient = forward, gradient
        self.inputs = [argument.name for argument in forward.arguments]
        self.inputs += [each.name for each in forward.in_place]
        self.returned = [name for name in forward.result_names if name in ("y", "s")]
        needed = [a.name for a in gradient.arguments if a.name not in ("dy", "ds")]
        self.kept = {name: instead.get(name, name) for name in needed}
        # Inputs whose name is not among the gradient's results, such as statistics, are constants.
        data = {a.name for a in forward.arguments if a.role in roles.DATA}
        own = {name: f"d{name}" for name in self.inputs}
        self.gradient_names = [
            "dx" if name in data and own[name] not in gradient.result_names else own[name]
            for name in self.inputs
        ]
        # The operands that examples of a vmap may have in common, if one call does them all.
        self.shared: set[str] | None = set(self.inputs) - data

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The results of the forward pass that the caller sees; one by itself."""
        return self.of(self.forward(*args, **kwargs))

    def of(self, call: Call, **more: Any) -> Any:
        """The same of a record, with further numbers."""
        arrays = tuple(getattr(call, name) for name in self.inputs)
        for name, array in zip(self.inputs, arrays, strict=True):
            if isinstance(array, (list, tuple)):
                kind = type(array).__name__
                raise TypeError(f"{name} is a {kind}; expected an array; pass jnp.asarray({name})")
        return _trace(self, (*numbers_of(call), *more.items()), arrays)

    def alike(self, given: dict[str, Any]) -> list[Any]:
        """The inputs as arrays that differ between the same devices."""
        return vary_alike(*given.values())

    def forward_pass(self, given: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """The results by name."""
        return compute(self.refusal, self.forward, given, numbers, self.shared)

    def gradient_pass(self, found: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """The results of the gradient by name, from what was kept and the gradients that arrive."""
        own = {name: numbers[name] for name in self.gradient.numbers}
        return compute(self.refusal, self.gradient, self.operands(found), own, self.shared)

    def operands(self, found: dict[str, Any]) -> dict[str, Any]:
        """The operands of the gradient."""
        return {argument.name: found.get(argument.name) for argument in self.gradient.arguments}


def numbers_of(call: Call) -> tuple[tuple[str, Any], ...]:
    """The numbers of a call, checked before JAX takes them for constants: names and values."""
    numbers = []
    for name, check in call.numbers.items():
        value = getattr(call, name)
        if check is not None:
            value = check(value, call)
        elif value is not None:
            value = checks.integer(value, name)
        numbers.append((name, value))
    return tuple(numbers)


def results_of(
    kind: type[Call], operands: Mapping[str, Any], numbers: Mapping[str, Any]
) -> tuple[dict[str, ResultShape], dict[str, Any]]:
    """The results of a call by name, without absent ones, and its numbers as they were planned.

    Axes are counted from the end, because ``vmap`` adds axes in front.
    """
    described = kind(**operands, **numbers).described(_described)
    plan = described.layout.plan(described)
    ndim = getattr(described, kind.arguments[0].name).ndim
    options = {n: value - ndim if n in _AXES else value for n, value in plan.options.items()}
    specs = [spec for spec in plan.results if spec is not None]
    return {spec.name: ResultShape(spec.shape, spec.dtype) for spec in specs}, options


def _described(label: str, array: Any) -> Described:
    """The description of an array that XLA gives to a callback in C order."""
    return Described(label, array.shape, array.dtype, (0,) * array.ndim)


def compute(
    refusal: str,
    kind: type[Call],
    operands: Mapping[str, Any],
    numbers: Mapping[str, Any],
    shared: set[str] | None = None,
) -> dict[str, jax.Array]:
    """The results of a call by name.

    ``shared``: the operands that all examples of a ``vmap`` may have in common, so that one call
    computes all of them. Gradients of parameters are sums, of which each example has its own.
    """
    results, options = results_of(kind, operands, numbers)
    names, given = list(operands), list(operands.values())
    axes = [0 if array is None else array.ndim for array in given]
    result_axes = [len(result.shape) for result in results.values()]

    def run(outs: list[Any], ins: list[Any]) -> None:
        if isinstance(kind.layout, GroupLayout):
            outs, ins = list(map(_samples, outs, result_axes)), list(map(_samples, ins, axes))
        made = dict(zip(results, outs, strict=True))
        own = kind(**dict(zip(names, ins, strict=True)), **options)
        write(own, *map(made.get, kind.result_names))

    if shared is None or "dscale" in results or _per_sample(operands, options):
        places = None
    else:
        places = [k for k, name in enumerate(names) if name in shared]
    kinds = [(result.shape, result.dtype) for result in results.values()]
    known = [None if array is None else (array.shape, array.dtype) for array in given]
    compiled = None
    if not kind.reads_values:
        together = [] if places is None else [k not in places for k in range(len(given))]
        compiled = compiled_call(run, kinds, known, together)
    arrays = call(refusal, run, list(results.values()), given, shared=places, compiled=compiled)
    return dict(zip(results, arrays, strict=True))


def _per_sample(operands: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether each sample of a norm over rows has a scale of its own."""
    scale = operands.get("scale")
    return scale is not None and "axis" in options and scale.ndim > -options["axis"]


def _samples(array: Any, ndim: int) -> Any:
    """An array of ``ndim`` axes: those of examples in front become further samples."""
    if array is None:
        return None
    first = array.ndim - ndim + 1
    return array.reshape(math.prod(array.shape[:first]), *array.shape[first:])


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _trace(norm: TracedNorm[Any], numbers: Any, arrays: Any) -> Any:
    given = dict(zip(norm.inputs, arrays, strict=True))
    if given.get("bias") is not None and given["scale"] is None:
        given["scale"] = jnp.ones_like(given["bias"])  # gradients come in pairs
    return _differentiable(norm, numbers, *norm.alike(given))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(norm: TracedNorm[Any], numbers: Any, *arrays: Any) -> Any:
    return _forward(norm, numbers, *arrays)[0]


def _forward(norm: TracedNorm[Any], numbers: Any, *arrays: Any) -> Any:
    given = dict(zip(norm.inputs, arrays, strict=True))
    made = norm.forward_pass(given, dict(numbers))
    found, returned = given | made, tuple(made[name] for name in norm.returned)
    kept = {own: found[name] for own, name in norm.kept.items()}
    # For each input None or (), so that inputs which no gradient reads are not kept in memory.
    present = [None if array is None else () for array in arrays]
    return returned if len(returned) > 1 else returned[0], (kept, present)


def _gradients(norm: TracedNorm[Any], numbers: Any, residuals: Any, cotangents: Any) -> Any:
    kept, present = residuals
    arrived = cotangents if len(norm.returned) > 1 else (cotangents,)
    found = kept | dict(zip(("dy", "ds"), arrived, strict=False))
    made = norm.gradient_pass(found, dict(numbers))
    return tuple(
        None if given is None else made.get(name)
        for name, given in zip(norm.gradient_names, present, strict=True)
    )


_compiled = jax.jit(_gradients, static_argnums=(0, 1), inline=True)


def _backward(norm: TracedNorm[Any], numbers: Any, residuals: Any, cotangents: Any) -> Any:
    # JAX does not know the axis of a vmap while it traces a compiled function in a backward pass.
    trace = _compiled if dict(numbers).get("axis_name") is None else _gradients
    return trace(norm, numbers, residuals, cotangents)


_differentiable.defvjp(_forward, _backward)

"""Norms that JAX differentiates, made of records of calls."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, ParamSpec, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from gradkit._backend import Shape
from gradkit._calls import checks, roles
from gradkit._calls.layouts import GroupLayout
from gradkit._calls.record import Call, Described
from gradkit._open.dispatch import write
from gradkit.jax._callbacks import (
    ResultShape,
    call,
    is_known,
    place_alike,
    sharding_of,
    vary,
    vary_alike,
    varying,
)
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
        self.name, self.refusal = name, _ONCE.format(name)
        forward = cast(type[Call], record)  # a class is what makes its instances
        self.forward, self.gradient = forward, gradient
        self.inputs = [argument.name for argument in forward.arguments]
        self.inputs += [each.name for each in forward.in_place]
        self.returned = [name for name in forward.result_names if name in ("y", "s")]
        needed = [a.name for a in gradient.arguments if a.name not in ("dy", "ds")]
        self.residual_names = {name: instead.get(name, name) for name in needed}
        # Inputs whose name is not among the gradient's results, such as statistics, are constants.
        data = {a.name for a in forward.arguments if a.role in roles.DATA}
        gradient_of = {name: f"d{name}" for name in self.inputs}
        self.gradient_names = [
            "dx"
            if name in data and gradient_of[name] not in gradient.result_names
            else gradient_of[name]
            for name in self.inputs
        ]
        self.data = data
        # The operands that examples of a vmap may have in common, if one call does them all.
        self.shared: set[str] | None = set(self.inputs) - data

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The results of the forward pass that the caller sees; one by itself."""
        return self.of(self.forward(*args, **kwargs))

    def of(self, call: Call, **more: Any) -> Any:
        """The same of a record, with further numbers."""
        arrays = {name: getattr(call, name) for name in self.inputs}
        for name, array in arrays.items():
            absent = array is None and name in self.forward.optional
            if not (absent or hasattr(array, "shape")):
                instead = f"; pass jnp.asarray({name})" if isinstance(array, (list, tuple)) else ""
                kind = type(array).__name__
                raise TypeError(f"{name} is a {kind}; expected an array{instead}")
        numbers = (*numbers_of(call), *more.items())
        if all(array is None or is_known(array.shape) for array in arrays.values()):
            return _trace(self, numbers, tuple(arrays.values()))
        return self._of_symbolic_sizes(arrays, dict(numbers))

    def _of_symbolic_sizes(self, arrays: dict[str, Any], numbers: dict[str, Any]) -> Any:
        """The same while a function is exported for sizes that have names, as a ``vmap`` over them.

        A call in compiled code is planned for sizes, and reads no others than of a ``vmap``.
        """
        ndim = arrays["x"].ndim
        if self.shared is None:
            free, rule = 0, "none of which may be, since statistics are over them"
        elif "axis" in numbers:
            free, rule = numbers["axis"] % ndim, "those in front of axis may be"
            numbers["axis"] = free - ndim
        else:
            free, rule = 1, "the first may be, which counts samples"
        for name, array in arrays.items():
            free_here = free if name in self.data else 0
            if array is None or (
                is_known(array.shape[free_here:]) and array.ndim <= ndim - free + free_here
            ):
                continue
            raise TypeError(
                f"{name} has shape {array.shape} and x {arrays['x'].shape}: symbolic sizes are "
                f"those of data in gradkit.jax.{self.name}, {rule}; export with fixed sizes, or a "
                "formula of jax.numpy"
            )
        data = {name: array for name, array in arrays.items() if name in self.data}
        sizes = arrays["x"].shape[:free]
        depth = max((k + 1 for k in range(free) if not is_known(sizes[k : k + 1])), default=0)

        def norm(*examples: Any) -> Any:
            singles = [jnp.expand_dims(example, 0) for example in examples]
            inputs = arrays | dict(zip(data, singles, strict=True))
            results = _trace(self, tuple(numbers.items()), tuple(inputs.values()))
            return jax.tree.map(partial(jnp.squeeze, axis=0), results)

        for _ in range(depth):
            norm = jax.vmap(norm)
        return norm(*data.values())

    def alike(self, inputs: dict[str, Any]) -> list[Any]:
        """The inputs as arrays that differ between the same devices."""
        return vary_alike(*spread_alike(inputs).values())

    def forward_pass(self, inputs: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """The results by name."""
        return compute(self.refusal, self.forward, inputs, numbers, self.shared)

    def gradient_pass(self, values: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """The results of the gradient by name, from what was kept and the gradients that arrive."""
        options = {name: numbers[name] for name in self.gradient.numbers}
        return compute(self.refusal, self.gradient, self.operands(values), options, self.shared)

    def operands(self, values: dict[str, Any]) -> dict[str, Any]:
        """The operands of the gradient."""
        return {argument.name: values.get(argument.name) for argument in self.gradient.arguments}


def spread_alike(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, each spread over a mesh like the one whose gradient is spread like its own."""
    data = [name for name in ("x", "residual") if name in inputs]
    parameters = [name for name in ("scale", "bias") if name in inputs]
    spread = dict(inputs)
    for names in (data, parameters):
        spread |= zip(names, place_alike(*map(inputs.get, names)), strict=True)
    return spread


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
    results = {
        spec.name: ResultShape(
            spec.shape, spec.dtype, sharding=_sharding(spec.name, spec.shape, operands)
        )
        for spec in specs
    }
    return results, options


def _sharding(name: str, shape: Shape, operands: Mapping[str, Any]) -> Any:
    """Sharding of a result: that of the array it is the gradient of, or else of the data."""
    for source in ("scale" if name == "dbias" else name.removeprefix("d"), "x", "y"):
        operand = operands.get(source)
        if operand is not None and operand.shape == shape:
            return sharding_of(operand)
    return None


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
    names, inputs = list(operands), list(operands.values())
    axes = [0 if array is None else array.ndim for array in inputs]
    result_axes = [len(result.shape) for result in results.values()]

    def run(outs: list[Any], ins: list[Any]) -> None:
        if isinstance(kind.layout, GroupLayout):
            outs, ins = list(map(_samples, outs, result_axes)), list(map(_samples, ins, axes))
        outputs = dict(zip(results, outs, strict=True))
        record = kind(**dict(zip(names, ins, strict=True)), **options)
        write(record, *map(outputs.get, kind.result_names))

    sums = {"dscale", "dbias"} & results.keys()
    if shared is None or sums or _per_sample(operands, options):
        places = None
    else:
        places = [k for k, name in enumerate(names) if name in shared]
    kinds = [(result.shape, result.dtype) for result in results.values()]
    described = [None if array is None else (array.shape, array.dtype) for array in inputs]
    compiled = None
    if not kind.reads_values:
        together = [] if places is None else [k not in places for k in range(len(inputs))]
        compiled = compiled_call(run, kinds, described, together)
    arrays = call(refusal, run, list(results.values()), inputs, shared=places, compiled=compiled)
    return dict(zip(results, arrays, strict=True))


def _per_sample(operands: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """True if each sample of a norm over rows has a scale of its own."""
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
    inputs = dict(zip(norm.inputs, arrays, strict=True))
    x, bias = inputs["x"], inputs.get("bias")
    # The gradient of a bias alone has the dtype of x, and none is per sample.
    alike = bias is not None and bias.dtype == x.dtype and bias.ndim < x.ndim
    if bias is not None and inputs["scale"] is None and not alike:
        inputs["scale"] = jnp.ones_like(bias)
    return _differentiable(norm, numbers, *norm.alike(inputs))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(norm: TracedNorm[Any], numbers: Any, *arrays: Any) -> Any:
    return _compute(norm, numbers, arrays)[0]


def _compute(norm: TracedNorm[Any], numbers: Any, arrays: Any) -> Any:
    """The results of the forward pass that the caller sees, and what the gradient reads."""
    inputs = dict(zip(norm.inputs, arrays, strict=True))
    results = norm.forward_pass(inputs, dict(numbers))
    values, returned = inputs | results, tuple(results[name] for name in norm.returned)
    residuals = {residual: values[name] for residual, name in norm.residual_names.items()}
    return returned if len(returned) > 1 else returned[0], residuals


def _forward(norm: TracedNorm[Any], numbers: Any, *primals: Any) -> Any:
    returned, residuals = _compute(norm, numbers, [None if p is None else p.value for p in primals])
    # A dimension for each input, 2 if it is differentiated by, and no elements: JAX traces the
    # backward pass for each shape of what is kept, but not for each structure.
    differentiated = jnp.zeros((0, *(1 + (p is not None and p.perturbed) for p in primals)))
    return returned, (residuals, differentiated)


def _gradients(norm: TracedNorm[Any], numbers: Any, residuals: Any, arrived: Any) -> Any:
    """A gradient for each input that is differentiated by; the others are not computed."""
    saved, differentiated = residuals
    each = zip(norm.gradient_names, differentiated.shape[1:], strict=True)
    names = [name if size == 2 else None for name, size in each]
    wanted = tuple(name for name in norm.gradient.result_names if name in names)
    if not wanted:
        return (None,) * len(names)
    values = saved | dict(zip(("dy", "ds"), arrived, strict=False))
    gradients = norm.gradient_pass(values, {**dict(numbers), "wanted": wanted})
    return tuple([None if name is None else gradients.get(name) for name in names])


_compiled = jax.jit(_gradients, static_argnums=(0, 1), inline=True)


def _backward(norm: TracedNorm[Any], numbers: Any, residuals: Any, cotangents: Any) -> Any:
    dy, *others = cotangents if len(norm.returned) > 1 else (cotangents,)
    if isinstance(dy, SymbolicZero):  # the sum alone was used
        x = residuals[0]["x"]
        dy = vary(jnp.zeros_like(x), varying(x))
    arrived = dy, *(None if isinstance(each, SymbolicZero) else each for each in others)
    # JAX does not know the axis of a vmap while it traces a compiled function in a backward pass.
    trace = _compiled if dict(numbers).get("axis_name") is None else _gradients
    return trace(norm, numbers, residuals, arrived)


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)

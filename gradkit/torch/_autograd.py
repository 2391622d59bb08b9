"""Norms under autograd: operators, ``torch.ops.gradkit``, and functions that run them.

An operator runs a function of gradkit. It has a fixed number of results, all of them new memory; in
the place of an absent one stands a tensor without elements. Its fake kernel states shapes, dtypes
and strides. A gradient is an operator too, so that compilers see it.

A call goes one of three ways:

- Plain tensors: gradkit's function runs at once, without the dispatcher, which costs more than a
  small norm.
- Compilers get the operator itself.
- Subclasses, modes, tracers, transforms of ``torch.func`` and forward mode: a
  ``torch.autograd.Function`` runs the operator. It costs less than the kernel that
  ``torch.library.register_autograd`` makes, works in transforms, and refuses forward mode, in
  which that kernel drops tangents.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _dispatch_isTensorSubclassLike,
    _get_tracing_state,
    is_grad_enabled,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.fx import Proxy

from gradkit._arrays.torch import NESTED
from gradkit._arrays.torch import Torch as _Torch
from gradkit._calls.record import Call
from gradkit._open.foreign import shorten, tell
from gradkit.torch._cached_calls import CachedCalls

_NAMESPACE = "gradkit"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_INSTEAD = "use that of torch.nn.functional"
_TENSORS = _Torch()
_FIRST_ORDER = f"gradkit has no second derivatives of norms; {_INSTEAD}"
_REVERSE_MODE = f"gradkit has no forward-mode derivatives of norms; {_INSTEAD}"
_ONNX = (
    "torch.onnx.export with dynamo=False knows the norms of PyTorch alone; pass it "
    "gradkit.torch.restore_norms(copy.deepcopy(model)), or export without dynamo=False a program "
    "after run_decompositions(gradkit.torch.decompositions())"
)
_TRANSFORMS = (
    "gradkit's operators have no derivatives in transforms of torch.func; call the functions of "
    f"gradkit.torch outside of torch.compile, or {_INSTEAD}"
)


Function = TypeVar("Function", bound=Callable[..., Any])

_NAMES = {"x": "input", "scale": "weight"}  # where those of gradkit.torch differ


class IsRecorded(Exception):  # noqa: N818 - no error: ``recorded`` catches it
    """Raised for what stands for a tensor in a trace of ``torch.fx``."""


def recorded(function: Function) -> Function:
    """Let ``torch.fx`` record a call of a function, as it does of PyTorch's."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except IsRecorded as signal:
            tracer = signal.args[0].tracer
        except (TypeError, ValueError) as error:
            shorten(error)
            raise
        return tracer.create_proxy("call_function", called, args, kwargs)

    return cast(Function, called)


def refuse_nested(tensor: Tensor, label: str) -> None:
    """Raise if an argument is no tensor, or one without a shape."""
    if isinstance(tensor, Proxy):
        raise IsRecorded(tensor)
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__qualname__
        raise TypeError(f"{label} is of type {kind}; expected a tensor; pass torch.as_tensor of it")
    if tensor.is_nested:
        raise TypeError(f"{label} is a nested tensor; {NESTED}")


def tell_of_tensors(error: Exception) -> None:
    """Make an error of gradkit's say PyTorch's names of arguments and casts."""
    tell(error, _TENSORS, _NAMES)


# Operators


class Operator(NamedTuple):
    """A function of gradkit: its calls, which return tuples, its operator and its record."""

    calls: CachedCalls
    overload: Any
    kind: type[Call]


def operator(
    schema: str, run: Callable[..., Any], describe: Callable[..., Any], *, last: bool = False
) -> Any:
    """Define an operator by what it runs and by what its results look like; return it.

    ``last``: it is a gradient, which has no derivatives of its own.
    """
    overload = define(schema, _complete(run, single=schema.endswith("-> Tensor")), describe)
    torch.library.register_vmap(overload._name, _one_by_one(overload), lib=_LIBRARY)
    if last:
        _tell_autograd(overload, partial(Gradient.apply, overload))
    return overload


def define(schema: str, kernel: Callable[..., Any], describe: Callable[..., Any]) -> Any:
    """The operator of a schema, without derivatives: its kernel, and what its results look like."""
    name = schema.partition("(")[0]
    # Where the layout of a result follows that of an argument, compilers must not change it.
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", describe, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _complete(run: Callable[..., Any], *, single: bool) -> Callable[..., Any]:
    """A function whose results are all tensors, those without elements as PyTorch makes them.

    NumPy's have strides of 0.
    """

    def complete(first: Tensor, *args: Any) -> Any:
        results = tuple(
            first.new_empty(0)
            if result is None
            else (result if result.numel() else result.new_empty(result.shape))
            for result in run(first, *args)
        )
        return results[0] if single else results

    return complete


def _one_by_one(overload: Any) -> Callable[..., Any]:
    """The rule of an operator for vmap: a call for each sample, or for zeros if there is none."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        def sample(arg: Any, dim: int | None, k: int) -> Any:
            if dim is None:
                return arg
            return arg.select(dim, k) if info.batch_size else arg.sum(dim)

        def stack(parts: Sequence[Tensor]) -> Tensor:
            stacked = torch.stack(tuple(parts))
            return stacked if info.batch_size else stacked[:0]

        samples = [
            overload(*(sample(arg, dim, k) for arg, dim in zip(args, in_dims, strict=True)))
            for k in range(max(1, info.batch_size))
        ]
        if isinstance(samples[0], Tensor):
            return stack(samples), 0
        results = tuple(map(stack, zip(*samples, strict=True)))
        return results, (0,) * len(results)

    return rule


def as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


# Plain tensors


def _is_observed(tensor: Tensor) -> bool:
    """Return whether others than autograd take part in calls on a tensor.

    Tensors inside a transform, tensors without storage, and all tensors while a mode is active
    count as subclasses.
    """
    return bool(
        _dispatch_isTensorSubclassLike(tensor)
        or _are_functorch_transforms_active()
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether only autograd takes part in a call on tensors, the first of which is one."""
    for tensor in tensors:
        if tensor is not None and (
            _is_observed(tensor) or tensor.is_neg() or tensor._is_zerotensor()
        ):
            return False
    first = tensors[0]
    return first is not None and first.numel() > 0


def _is_traced() -> bool:
    """Return whether ``torch.jit.trace`` watches: its programs have operators and no Python."""
    if _get_tracing_state() is None:
        return False
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise NotImplementedError(_ONNX)
    return True


# Functions


class Gradient(torch.autograd.Function):
    """The operator of a gradient, which is not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(overload: Any, *args: Any) -> Any:
        """Run the operator."""
        return _below_autograd(overload, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse second derivatives."""
        raise NotImplementedError(_FIRST_ORDER)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode differentiation."""
        raise NotImplementedError(_REVERSE_MODE)


# From the inputs and results of a forward pass: tensors and numbers for the operator of the
# gradient, which takes them behind the gradient that arrives and before what is wanted.
Kept = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]
Keep = Callable[[Sequence[Any], Sequence[Any]], Kept]


@dataclass(eq=False)
class Norm:
    """A norm that autograd knows how to differentiate.

    The operator takes tensors first. The results of its gradient's operator belong to the first
    inputs. A ``residual`` norm has two summands for inputs, whose gradient is one, and returns
    their sum too: both results are differentiable; otherwise the first is. ``past``: the operator
    of the gradient takes that of the sum too. ``in_place``: so many tensors,
    the last ones, are written by calls on plain tensors. The operator returns new ones as its last
    results, which are copied outside of it: so compilers see every write.
    """

    forward: Operator
    gradient: Operator
    keep: Keep
    _: KW_ONLY
    residual: bool = False
    past: bool = False
    in_place: int = 0

    def __post_init__(self) -> None:
        self.overload, gradient = self.forward.overload, self.gradient
        self.results = 2 if self.residual else 1
        self.seen: int | slice = slice(2) if self.residual else 0  # of all results
        self._calls = self.forward.calls
        inputs = self.overload._schema.arguments
        self._tensors = sum("Tensor" in str(argument.type) for argument in inputs)
        self._summands = self.results  # that share the first gradient
        owners = len(gradient.overload._schema.returns) + self._summands - 1
        self._ownerless = (None,) * (len(inputs) + 1 - owners)  # what computes is an input too
        self._all = (True,) * owners + (False,) * len(self._ownerless)
        self._wanted: dict[tuple[bool, ...], str] = {}  # by which inputs need a gradient
        name = "".join(map(str.capitalize, self.overload._opname.split("_")))
        self._apply = _function_of_operators(name, self).apply
        # Function.apply would look for the transforms that are known to be absent.
        function: Any = super(torch.autograd.Function, _function_at_once(name, self))
        self._apply_at_once = function.apply
        _tell_autograd(self.overload, self._apply)

    def __call__(self, *args: Any) -> Any:
        """The differentiable result, or a tuple of both."""
        tensors = args[: self._tensors]
        if is_compiling():
            return self.dispatched(*args)[self.seen]
        try:
            compute = None if _is_observed(tensors[0]) else self._calls.find(args)
            if compute is None and not _are_plain(tensors):
                self._refuse_nested(tensors)
                return self.dispatched(*args)[self.seen]
            if is_grad_enabled():
                for tensor in tensors:
                    if tensor is not None and tensor.requires_grad:
                        return self._apply_at_once(*args, compute or self._calls)
            return (compute or self._calls)(*args)[self.seen]
        except (TypeError, ValueError) as error:
            self._refuse_nested(tensors)  # among others what is no tensor
            tell_of_tensors(error)
            raise

    def _refuse_nested(self, tensors: Sequence[Tensor | None]) -> None:
        for tensor, argument in zip(tensors, self.overload._schema.arguments, strict=False):
            if tensor is not None:
                refuse_nested(tensor, _NAMES.get(argument.name, argument.name))

    def dispatched(self, *args: Any) -> Any:
        """All results, as a tuple, through the dispatcher."""
        run = self.overload if is_compiling() or _is_traced() else self._apply
        results = as_tuple(run(*args))
        if self.in_place:
            written = args[self._tensors - self.in_place : self._tensors]
            with torch.no_grad():
                for old, new in zip(written, results[-self.in_place :], strict=True):
                    if old is not None:
                        old.copy_(new)
        return results

    def wanted(self, needed: tuple[bool, ...]) -> str:
        """The results of the gradient that inputs need, as its operator takes their names."""
        if (text := self._wanted.get(needed)) is None:
            each = any(needed[: self._summands]), *needed[self._summands :]
            names = zip(self.gradient.kind.result_names, each, strict=False)
            text = self._wanted[needed] = " ".join(name for name, is_needed in names if is_needed)
        return text

    def for_inputs(self, needed: tuple[bool, ...], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """A gradient for each input that needs one, from the results of the gradient."""
        if self._summands == 2:
            gradients = (gradients[0], *gradients)
        by_input = (*gradients, *self._ownerless)
        if needed == self._all:
            return by_input
        return tuple([g if n else None for g, n in zip(by_input, needed, strict=False)])


def _function_at_once(name: str, norm: Norm) -> Any:
    """A function for plain tensors, in whose backward pass others may take part.

    Its last argument is what computes the forward pass.
    """
    (calls, overload, _), keep, seen = norm.gradient, norm.keep, norm.seen

    def forward(ctx: Any, *inputs: Any) -> Any:
        *args, compute = inputs
        results = compute(*args)
        tensors, ctx.options = keep(args, results)
        if norm.residual:
            ctx.mark_non_differentiable(*results[_differentiable(norm, ctx) : 2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return results[seen]

    def compute(arrived: Sequence[Any], *args: Any) -> Any:
        if is_compiling():  # the backward pass alone
            return overload(*args)
        if is_grad_enabled():
            return _gradients(overload, *args)
        fast_call = None if _is_observed(arrived[0]) else calls.find(args)
        if fast_call is None and not _are_plain(arrived):
            return _gradients(overload, *args)
        return (fast_call or calls)(*args)

    return _function(name, forward, _backward(norm, compute))


def _function_of_operators(name: str, norm: Norm) -> Any:
    """A function for all other tensors."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        results = as_tuple(output)
        tensors, ctx.options = norm.keep(inputs, results)
        ctx.mark_non_differentiable(*results[_differentiable(norm, ctx) :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    def compute(_: Sequence[Any], *args: Any) -> Any:
        return _gradients(norm.gradient.overload, *args)

    backward = _backward(norm, compute)
    forward = partial(_below_autograd, norm.overload)
    return _function(name, forward, backward, setup_context=staticmethod(setup_context))


def _differentiable(norm: Norm, ctx: Any) -> int:
    """Number of results that have gradients; a sum has none if neither summand needs one."""
    return norm.results if any(ctx.needs_input_grad[: norm.results]) else 1


def _function(name: str, forward: Any, backward: Any, **more: Any) -> Any:
    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "jvp": staticmethod(Gradient.jvp),
        "generate_vmap_rule": True,
    }
    return type(name, (torch.autograd.Function,), members | more)


def _backward(norm: Norm, compute: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        arrived = grads[: norm.results]
        if arrived[0] is None:  # the sum alone was used, or nothing
            nothing = [None] * (len(norm.gradient.overload._schema.returns) - 1)
            return norm.for_inputs(ctx.needs_input_grad, (arrived[-1], *nothing))
        past = (*arrived[1:], None)[:1] if norm.past else ()
        needed = ctx.needs_input_grad
        further = *ctx.saved_tensors, *ctx.options, *past, norm.wanted(needed)
        return norm.for_inputs(needed, compute(arrived, arrived[0], *further))

    return backward


def _tell_autograd(overload: Any, apply: Any) -> None:
    """Have autograd run the function of an operator that is called directly, as compilers do."""
    defaults = [argument.default_value for argument in overload._schema.arguments]

    def kernel(*args: Any) -> Any:
        if _are_functorch_transforms_active():
            raise NotImplementedError(_TRANSFORMS)
        return apply(*args, *defaults[len(args) :])  # PyTorch leaves out defaults at the end

    _LIBRARY.impl(overload.name(), kernel, "Autograd")


def _below_autograd(overload: Any, *args: Any) -> Any:
    """Call an operator that autograd need not see."""
    with _AutoDispatchBelowAutograd():
        return overload(*args)


def _gradients(overload: Any, *args: Any) -> Any:
    """Call a gradient's operator; autograd sees it if it records the backward pass."""
    if is_grad_enabled():
        return Gradient.apply(overload, *args)
    return _below_autograd(overload, *args)

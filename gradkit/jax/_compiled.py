"""Operations that XLA calls in gradkit's compiled code on a CPU, without Python."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from gradkit import _host as host
from gradkit._backend import Array, Shape

Kind: TypeAlias = tuple[Shape, np.dtype[Any]]
# Writes the results, given the operands with None where there is none.
Compute: TypeAlias = Callable[[list[Array], list[Any]], object]


class CompiledCall(NamedTuple):
    """A call of a compiled operation; ``kernels/cpu/xla_call.h`` says how it is read."""

    name: str
    attributes: dict[str, Array]
    together: Any = ()


def compiled_call(
    run: Compute,
    results: Sequence[Kind],
    operands: Sequence[Kind | None],
    together: Sequence[bool] = (),
) -> CompiledCall | None:
    """The call of compiled code that ``run`` makes, if it makes one and does nothing else.

    It is given arrays without values, which stand for operands and results. ``together``: which of
    the operands, absent ones too, have an axis in front for all examples of a ``vmap``, as all
    results do; none if it does one example at a time.
    """
    if not _is_registered:
        return None
    fronts = [(1,) if each else () for each in together or [False] * len(operands)]
    try:
        ins = [
            None if kind is None else np.empty(front + kind[0], kind[1])
            for kind, front in zip(operands, fronts, strict=True)
        ]
        outs = [np.empty((1, *shape) if together else shape, dtype) for shape, dtype in results]
    except MemoryError:  # of shapes that no host will hold, such as a whole mesh's
        return None
    calls = host.compiled().calls_of(lambda: run(outs, ins))
    if len(calls) != 1:
        return None
    name, *arguments = calls[0]
    numbers = [each for each in arguments if isinstance(each, int | float)]
    memory = [array for array in (*ins, *outs) if array is not None]
    try:
        arrays = [_place(array, memory) for array in arguments[len(numbers) :]]
    except LookupError:
        return None
    marks = [t for t, a in zip(together, ins, strict=False) if a is not None] + [True] * len(outs)
    return CompiledCall(
        name,
        {"numbers": np.array(numbers, float), "arrays": np.concatenate(arrays)},
        np.array(marks if together else [], int),
    )


def named_call(
    name: str, numbers: Sequence[float] = (), **marks: Sequence[bool]
) -> CompiledCall | None:
    """A call that ``kernels/cpu/xla_lists.cpp`` has, if anything is compiled."""
    if not _is_registered:
        return None
    attributes = {key: np.array(mark, np.int64) for key, mark in marks.items()}
    return CompiledCall(name, {"numbers": np.array(numbers, np.float64)} | attributes)


def _place(array: Array | None, memory: list[Array]) -> list[int]:
    """Place of an array in the memory of these, as ``kernels/cpu/operation.h`` has it."""
    if array is None:
        return [-1]
    for place, target in enumerate(memory):
        offset = _address(array) - _address(target)
        if 0 <= offset < target.nbytes:
            return [place, offset, array.ndim, *array.shape, *array.strides]
    raise LookupError("memory of another array")


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]


def call_of_xla(
    call: CompiledCall, shapes: list[Any], operands: Sequence[Any], how: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that makes the call on JAX's arrays; ``how``: options of `ffi_call`."""
    axes = np.array([each.ndim for each in (*operands, *shapes)])
    handler = jax.ffi.ffi_call(f"gradkit.{call.name}", shapes, **how)
    attributes = {"axes": axes, "together": np.array(call.together, int), **call.attributes}
    return lambda *arguments: handler(*arguments, **attributes)


def _registered() -> bool:
    """Tell XLA what there is; false if nothing is compiled, or XLA has another interface."""
    compiled = host.compiled()
    if compiled is None:
        return False
    try:
        for name, handler in compiled.xla_handlers.items():
            jax.ffi.register_ffi_target(f"gradkit.{name}", handler, platform="cpu")
    except Exception:  # XLA's, of any kind
        return False
    return True


_is_registered = _registered()

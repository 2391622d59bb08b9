"""Calls of public functions with other libraries' argument names, or inside their compilers.

And what callers are told: tracebacks are short.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

from gradkit._arrays import Framework

Function = TypeVar("Function", bound=Callable[..., Any])

_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # not a sibling of like name
_NO_NAMES: Mapping[str, str] = {}
_BY_NAME = inspect.Parameter.KEYWORD_ONLY

_ONE_VALUE = "pass clip_value, c for elements from -c to c"
_NO_AXES = (
    "leave it out: a norm is one number, of all elements; clip_by_block_norm takes axis, for one "
    "of each row or column"
)
_INSTEAD: dict[str, str | Mapping[str, str]] = {
    "error_if_nonfinite": 'pass nonfinite="raise"',
    "total_norm": "pass norm",
    "clip_norm": "pass max_norm",
    "global_clipnorm": "pass max_norm",
    "clipnorm": "pass max_norm to clip_grad_block_norm, which clips each gradient by its own norm",
    "clipvalue": "clip_grad_value takes clip_value",
    "max_delta": "clip_grad_value takes clip_value",
    "threshold": "pass max_norm",
    "use_norm": "clip_grads_with_norm takes a norm that is known",
    "foreach": "leave it out: all gradients are taken together",
    "parameters": "pass grads, such as grads_of(parameters)",
    "t_list": "pass grads",
    "tensors": "pass grads",
    "updates": "pass grads",
    "model_params": "pass grads, such as grads_of(parameters)",
    "max_grad_norm": "pass max_norm",
    "a_min": _ONE_VALUE,
    "a_max": _ONE_VALUE,
    "min": _ONE_VALUE,
    "max": _ONE_VALUE,
    "ord": "pass norm_type",
    "p": "pass norm_type",
    "keepdims": _NO_AXES,
    "keepdim": _NO_AXES,
    "alpha": "pass scale",
    "loss_scale": "pass scale, 1 / loss_scale",
    "set_to_none": "leave it out: gradients stay, and become 0",
    "weight": "pass scale",
    "gamma": "pass scale",
    "beta": "pass bias",
    "offset": "pass scale_offset for what is added to scale, or bias",
    "epsilon": "pass eps",
    "variance_epsilon": "pass eps",
    "axis": {"channel_axis": "pass channel_axis", "": _NO_AXES},
    "dim": {"axis": "pass axis", "channel_axis": "pass channel_axis", "": _NO_AXES},
    "data_format": "pass channel_axis: 1 for channels first, -1 for channels last",
    "num_channels": "leave it out: x has them along channel_axis",
    "reduction_axes": "pass axis, the first axis that is normalised",
    "feature_axes": "pass axis, the first axis that is normalised",
    "groups": "pass num_groups",
    "normalized_shape": "pass axis, the first axis that is normalised",
    "input": "pass x",
    "inputs": "pass x",
    "elementwise_affine": "leave scale and bias out for a norm without them",
    "affine": "leave scale and bias out for a norm without them",
    "center": "leave bias out for a norm without it",
    "track_running_stats": "pass running_mean and running_var, which move, or leave them out",
    "grad_output": "pass dy",
    "grad_out": "pass dy",
    "dout": "pass dy",
    "rstd": "pass inv_std",
    "invstd": "pass inv_std",
    "var": "pass inv_std, 1 / sqrt(var + eps)",
    "save_mean": "pass mean",
    "save_invstd": "pass inv_std",
    "running_variance": "pass running_var",
    "moving_mean": "pass running_mean, or mean to batch_norm_inference",
    "moving_variance": "pass running_var, or var to batch_norm_inference",
    "variance": "pass var",
    "use_running_average": "batch_norm_inference normalises by running statistics",
    "training": "batch_norm is the pass in training, batch_norm_inference the other",
}


def answers(function: Function) -> Function:
    """Make a function say what to pass in the place of what other libraries take."""

    @wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            answer = _answer(function, args, kwargs)
            if answer is not None:
                raise TypeError(f"{function.__name__}() {answer}") from None
            shorten(error)
            raise
        except ValueError as error:
            shorten(error)
            raise

    return cast(Function, answering)


def _answer(function: Function, args: Sequence[Any], kwargs: Iterable[str]) -> str | None:
    """Say what is wrong with a call, if the function's signature shows it."""
    parameters = inspect.signature(function).parameters
    for name in kwargs:
        if name in _INSTEAD and name not in parameters:
            advice = _INSTEAD[name]
            if not isinstance(advice, str):  # by what the function takes
                advice = next(
                    s for argument, s in advice.items() if not argument or argument in parameters
                )
            return f"has no argument {name!r}; {advice}"
    kinds = [parameter.kind for parameter in parameters.values()]
    first = [*parameters][: kinds.index(_BY_NAME) if _BY_NAME in kinds else None]
    if "axis" in parameters and parameters.keys() & {"x", "y"}:  # a norm, of rows
        for value in args[1:]:
            axis = _axis_of(value)
            if axis is not None:
                return (
                    f"takes no shape by position, and got {value!r}; leave it out and pass "
                    f"axis={axis}, the first axis that is normalised (-1 if left out)"
                )
    if len(args) > len(first):
        named = ", ".join(list(parameters)[len(first) :])
        hint = f", and by name {named}" if named else ""
        return f"takes {len(first)} arguments by position, {', '.join(first)}{hint}"
    return None


def _axis_of(value: Any) -> int | None:
    """The first axis that is normalised, if a value is PyTorch's shape of those, or an axis."""
    if type(value) is int:
        return min(value, -1)
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return -len(value)
    return None


def tell(error: Exception, library: Framework | None, names: Mapping[str, str] = _NO_NAMES) -> None:
    """Make an error say what its reader needs: casts in the library's words, few of our frames.

    ``names``: arguments that the function called has under other names.
    """
    original = text = str(error)
    for name, instead in names.items():
        text = re.sub(rf"\b{name}\b", instead, text)
    if library is not None:
        text = library.in_its_words(text)
    if text != original:
        error.args = (text,)
    shorten(error)


def shorten(error: Exception) -> None:
    """Leave out of a traceback our frames between the first, and the last, which raised.

    With ``GRADKIT_TRACEBACKS=full`` in the environment all of them stay.
    """
    at = error.__traceback__
    if os.environ.get("GRADKIT_TRACEBACKS") == "full":
        return
    while at is not None and (after := at.tb_next) is not None:
        if after.tb_next is not None and after.tb_frame.f_code.co_filename.startswith(_OURS):
            at.tb_next = after.tb_next
        else:
            at = after


def norm_comes(place: int) -> Callable[[Function], Function]:
    """Make a function refuse a number by position for the norm, whose position is given.

    PyTorch has the limit before the norm, gradkit behind it, and a swap would clip nothing.
    """

    def checked(function: Function) -> Function:
        @wraps(function)
        def checking(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 2 and type(args[place]) in (int, float):
                names = list(inspect.signature(function).parameters)
                raise TypeError(
                    f"{function.__name__}() takes numbers by keyword, because other libraries have "
                    f"them in another order: pass {names[1]}={args[1]}, {names[2]}={args[2]}"
                )
            return function(*args, **kwargs)

        return cast(Function, checking)

    return checked


_REASON = (
    "gradkit computes outside of PyTorch's graphs; leave out fullgraph=True, or call the norms "
    "and clipping of gradkit.torch, which are operators"
)


class _Closed:
    """True, for a compiler that asks whether not to trace a function; it is told of all code.

    Dynamo would trace into NumPy, and puts one of its own in its place. ``torch.compiler.disable``
    needs PyTorch to be imported, and takes a microsecond in every call; this takes no time.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __bool__(self) -> bool:
        frames = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP  # this code, and all that it calls
        for code in self.codes:
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
        return True


_closed = _Closed()


def close_to_dynamo(names: Iterable[Any]) -> None:
    """Let ``torch.compile`` call functions and methods of classes, and not trace them."""
    for each in names:
        for function in vars(each).values() if isinstance(each, type) else (each,):
            if isinstance(function, FunctionType) and _is_ours(function):
                _closed.codes.add(function.__code__)
                function.__dict__.update(
                    _torchdynamo_disable=_closed, _torchdynamo_disable_msg=_REASON
                )


def _is_ours(function: FunctionType) -> bool:
    """True if a function is defined in gradkit, and not in a library such as contextlib."""
    name: str = function.__globals__["__name__"]
    return name.partition(".")[0] == "gradkit"

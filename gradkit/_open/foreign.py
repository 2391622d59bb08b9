"""What other libraries make of public functions: their names of arguments, and their compilers."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_INSTEAD = {
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
    "alpha": "pass scale",
    "set_to_none": "leave it out: gradients stay, and become 0",
    "weight": "pass scale",
    "gamma": "pass scale",
    "beta": "pass bias",
    "offset": "pass scale_offset for what is added to scale, or bias",
    "epsilon": "pass eps",
    "variance_epsilon": "pass eps",
    "dim": "pass axis",
    "reduction_axes": "pass axis, the first axis that is normalised",
    "feature_axes": "pass axis, the first axis that is normalised",
    "groups": "pass num_groups",
    "normalized_shape": "pass axis, the first axis that is normalised",
    "grad_output": "pass dy",
    "grad_out": "pass dy",
    "rstd": "pass inv_std",
    "save_mean": "pass mean",
    "save_invstd": "pass inv_std",
    "moving_mean": "pass running_mean, or mean to batch_norm_inference",
    "moving_variance": "pass running_var, or var to batch_norm_inference",
    "variance": "pass var",
    "use_running_average": "batch_norm_inference normalises by running statistics",
    "training": "batch_norm is the pass in training, batch_norm_inference the other",
}


def answers(function: Function) -> Function:
    """Make a function say what to pass in the place of another library's argument."""

    @wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            own = inspect.signature(function).parameters
            for name in kwargs:
                if name in _INSTEAD and name not in own:
                    raise TypeError(
                        f"{function.__name__}() has no argument {name!r}; {_INSTEAD[name]}"
                    ) from None
            raise

    return cast(Function, answering)


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


def deprecated(argument: str, instead: str) -> None:
    """Warn of an argument that is to go, in the caller of a public function that ``answers``."""
    warnings.warn(f"{argument} is deprecated; {instead}", DeprecationWarning, stacklevel=4)


_REASON = (
    "gradkit computes outside of PyTorch's graphs; leave out fullgraph=True, or call the norms of "
    "gradkit.torch, which are operators"
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
    """Whether its code is of no other library, such as what all context managers run."""
    name: str = function.__globals__["__name__"]
    return name.partition(".")[0] == "gradkit"

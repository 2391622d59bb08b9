"""Doing ahead of time what a first call would have to wait for."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradkit import _checks, _tree, accumulation, clipping, normalization
from gradkit._arrays import framework_of, is_array, view_of
from gradkit._dispatch import backend_of

__all__ = ["warmup"]

_COMPILED: dict[str, Callable[..., Any]] = {
    name: getattr(module, name)
    for module in (accumulation, clipping, normalization)
    for name in module.__all__
    if name != "grads_of"
}


def warmup(arrays: Any, *operations: Callable[..., Any]) -> int:
    """Compile what operations on arrays like these need, so that no later call has to.

    On a GPU the first call of each kind compiles its kernels: seconds where CuPy's cache on
    disk has none, and forbidden while a stream is captured into a CUDA graph. After this,
    calls on arrays of these dtypes on these devices compile nothing, whatever their shapes.

    Parameters
    ----------
    arrays : array, or iterable or nested dict/list/tuple of arrays
        A model's parameters, say, with examples of its data where that has other dtypes. Of
        any framework, whether or not they require grad. Only dtypes and devices count.
    *operations : functions of gradkit
        All of them where none is named, which for one 16-bit dtype are some hundred
        compilations: name those that you use.

    Returns
    -------
    int
        How many combinations of kernel and dtypes are ready now; 0 for arrays in host memory,
        whose operations are not compiled. cuDNN is loaded too where :func:`batch_norm` is
        meant, but not what it loads by itself.

    Raises
    ------
    TypeError
        A leaf that is not a floating-point array; an operation that is not gradkit's.
    BackendUnavailableError
        An array on a device that cannot be used.
    KernelCompileError
        The compiler rejects a kernel; the message holds its log.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> params = {"weights": np.ones((4, 3), np.float32), "scale": np.ones(3, np.float32)}
    >>> gradkit.warmup(params, gradkit.layer_norm, gradkit.layer_norm_grad, gradkit.clip_grad_norm)
    0
    """
    names = [_name(operation) for operation in operations] or list(_COMPILED)
    found: dict[Any, set[str]] = {}
    for label, leaf in _tree.walk(_tree.freeze(arrays, is_array), is_array, "arrays"):
        native = _native(leaf, label)
        dtype = _checks.floating(native, label)
        if type(native) is not np.ndarray:
            found.setdefault(backend_of(native), set()).add(dtype)
    return sum(backend.warm_up(names, dtypes) for backend, dtypes in found.items())


def _name(operation: Any) -> str:
    for name, function in _COMPILED.items():
        if operation is function:
            return name
    raise TypeError(
        f"{operation!r} is not an operation of gradkit's; accepted: {', '.join(_COMPILED)}"
    )


def _native(leaf: Any, label: str) -> Any:
    framework = framework_of(leaf)
    if framework is None:
        raise TypeError(f"{label} is a {type(leaf).__qualname__}; expected an array")
    return view_of(framework, leaf, label, detach=True)

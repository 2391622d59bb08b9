"""Doing ahead of time what a first call would have to wait for."""

from collections.abc import Callable
from typing import Any

from gradkit._arguments import checks, trees
from gradkit._arguments.given import known_framework, view_of
from gradkit._backend import Backend, Operations, names_in, operations_of
from gradkit._frameworks import backend_of, is_array

__all__ = ["warmup"]


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
    runs = set(names_in(Operations))
    if operations:
        runs = {name for operation in operations for name in _run_by(operation)}
    found: dict[Backend, set[str]] = {}
    for label, leaf in trees.walk(trees.freeze(arrays, is_array), is_array, "arrays"):
        view = view_of(known_framework(leaf, label), leaf, label, detach=True)
        dtype = checks.floating(view, label)
        found.setdefault(backend_of(view), set()).add(dtype)
    return sum(backend.warmup(runs, dtypes) for backend, dtypes in found.items())


def _run_by(function: Any) -> tuple[str, ...]:
    """The operations that one of gradkit's functions runs."""
    own = str(getattr(function, "__module__", "")).startswith("gradkit.")
    names = operations_of(function.__name__) if own else ()
    if not names:
        raise TypeError(
            f"{function!r} is not an operation of gradkit's; accepted: its functions that compute "
            "on arrays, such as gradkit.layer_norm"
        )
    return names

"""Compile kernels before the first call needs them."""

from collections.abc import Callable
from typing import Any

from gradkit._arrays import backend_of
from gradkit._calls import checks
from gradkit._calls.backend import OPERATIONS, Backend, operations_of
from gradkit._open import trees
from gradkit._open.arguments import known_framework, view_of
from gradkit._typing import Arrays

__all__ = ["warmup"]


def warmup(arrays: Arrays, *operations: Callable[..., Any]) -> int:
    """Compile what operations on arrays like these need, so that no later call compiles it.

    On a GPU the first call of each kind compiles its kernels. That takes seconds if they are
    not in CuPy's cache on disk, and it is not allowed during graph capture. After ``warmup``,
    calls on arrays of these dtypes on these devices compile nothing, for any shapes.

    Parameters
    ----------
    arrays : array, or iterable or nested dict/list/tuple of arrays
        For example a model's parameters, and examples of its data if those have other dtypes.
        Of any framework; may require grad. Only dtypes and devices count.
    *operations : functions of gradkit
        Default: all, which takes some 200 compilations for float32 and 400 for bfloat16. Name
        those that you use.

    Returns
    -------
    int
        How many combinations of kernel and dtypes are ready now; 0 for arrays on the host,
        which need no compilation. For batch norm this also loads cuDNN, but not the
        libraries that cuDNN loads later.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; an operation is not gradkit's.
    BackendUnavailableError
        An array is on a device that cannot be used.
    KernelError
        A kernel does not compile; the message holds the compiler's log.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> params = {"weights": np.ones((4, 3), np.float32), "scale": np.ones(3, np.float32)}
    >>> gradkit.warmup(params, gradkit.layer_norm, gradkit.layer_norm_grad, gradkit.clip_grad_norm)
    0
    """
    runs = set(OPERATIONS)
    if operations:
        runs = {name for operation in operations for name in _run_by(operation)}
    dtypes_of: dict[Backend, set[str]] = {}
    for label, leaf in trees.walk(trees.freeze(arrays), "arrays"):
        view = view_of(known_framework(leaf, label), leaf, label, detach=True)
        dtype = checks.floating(view, label)
        dtypes_of.setdefault(backend_of(view), set()).add(dtype)
    return sum(backend.warmup(runs, dtypes) for backend, dtypes in dtypes_of.items())


def _run_by(function: Any) -> tuple[str, ...]:
    """The operations that a public function runs."""
    in_gradkit = str(getattr(function, "__module__", "")).partition(".")[0] == "gradkit"
    names = operations_of(function.__name__) if in_gradkit else ()
    if not names:
        raise TypeError(
            f"{function!r} is not an operation of gradkit; accepted: its functions that compute "
            "on arrays, such as gradkit.layer_norm"
        )
    return names

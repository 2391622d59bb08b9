"""C's floating-point environment, which is a thread's own.

It says whether subnormal numbers count. XLA and TensorFlow have the processor flush them to zero on
the threads on which they call Python, and so does a thread that loads a library which was compiled
with ``-ffast-math``. A new thread inherits that from the one that starts it.
"""

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

Environment: TypeAlias = Any  # memory that holds C's fenv_t

_Memory = ctypes.c_uint64 * 16  # longer than the fenv_t of any platform


def _function(name: str) -> Any:
    """A function of C's fenv.h; ``None`` where Python does not bring it along."""
    try:
        function = ctypes.pythonapi[name]
    except AttributeError:  # on Windows
        return None
    function.restype = None
    return function


_get, _set = _function("fegetenv"), _function("fesetenv")


def current() -> Environment:
    """The environment of this thread; ``None`` where it cannot be read."""
    if _get is None:
        return None
    memory = _Memory()
    _get(memory)
    return memory


def _default() -> Environment:
    """C's ``FE_DFL_ENV``, whatever this thread has: it may flush subnormal numbers."""
    before = current()
    if before is None:
        return None
    try:  # on macOS
        named = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_FE_DFL_ENV"))
    except ValueError:
        named = -1
    _set(ctypes.c_void_p(named))
    default = current()
    _set(before)
    return default


DEFAULT = _default()


def within(environment: Environment, work: Callable[..., Any], *args: Any) -> Any:
    """Return what ``work`` returns in an environment; this thread's own is back afterwards."""
    before = current()
    if before is None:
        return work(*args)
    _set(environment)
    try:
        return work(*args)
    finally:
        _set(before)

"""The backend that computes on host arrays: the compiled one if it is there, else NumPy's."""

import os
import warnings
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, cast

from gradkit import _numpy
from gradkit import _threads as threads
from gradkit._calls.backend import Backend

_BACKENDS: dict[str, Backend] = {"numpy": _numpy}
_FAILED = "it could not be compiled when gradkit was installed; `pip install -v` shows why"
code: Any = None  # what is compiled, if it is there
try:
    import gradkit._cpu.compiled as code
    from gradkit import _cpu
except ModuleNotFoundError:  # pyproject.toml says when there is gradkit._not_compiled
    failed = find_spec("gradkit._not_compiled") is not None
    WHY_NOT_COMPILED = _FAILED if failed else "gradkit was installed without compiled code"
except ImportError as error:
    failed, WHY_NOT_COMPILED = True, f"it does not load: {error}"
else:
    _BACKENDS["compiled"] = cast(Backend, _cpu)
    code.use_threads(threads.workers())
    failed, WHY_NOT_COMPILED = False, ""

# The class of its tables of lists; nothing is one where it is not there.
Table: Any = () if code is None else code.Table

if failed and not os.environ.get("GRADKIT_CPU"):
    warnings.warn(
        f"gradkit computes on CPUs with NumPy, more slowly than with its compiled code: "
        f"{WHY_NOT_COMPILED}. GRADKIT_CPU=numpy accepts that.",
        RuntimeWarning,
        stacklevel=2,
    )


def backend() -> Backend:
    """Return the backend of host arrays."""
    return chosen.get()


def is_compiled() -> bool:
    """True if the CPU backend in use here is the compiled one."""
    return chosen.get() is not _numpy


def compiled() -> Any:
    """The compiled code if that computes on the threads that others start, or else ``None``."""
    return None if _default is _numpy else code


def use_threads(count: int) -> None:
    """Choose how many threads a call may use, those that XLA makes by itself too."""
    threads.use_workers(count)
    if "compiled" in _BACKENDS:
        code.use_threads(count)


def describe() -> dict[str, dict[str, Any]]:
    """Each backend: whether it is there, and whether it computes."""
    accelerated = _BACKENDS.get("compiled")
    cpu: dict[str, Any] = {"available": False, "reason": WHY_NOT_COMPILED}
    if accelerated is not None:
        details = {"instruction_set": code.instruction_set(), "threads": threads.workers()}
        cpu = {"available": True, "computes": backend() is accelerated} | details
    return {"compiled": cpu, "numpy": {"available": True, "computes": backend() is _numpy}}


def named(name: str, label: str) -> Backend:
    """The backend of a name; errors call it by the label."""
    if name not in ("compiled", "numpy"):
        raise ValueError(f"{label} must be 'compiled' or 'numpy', not {name!r}")
    if name not in _BACKENDS:
        raise ValueError(f"{label} is 'compiled', and nothing is: {WHY_NOT_COMPILED}")
    return _BACKENDS[name]


_default = named(os.environ.get("GRADKIT_CPU") or next(reversed(_BACKENDS)), "GRADKIT_CPU")
# A context's own choice. Threads that others start have the default.
chosen: ContextVar[Backend] = ContextVar("backend", default=_default)

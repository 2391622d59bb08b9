"""The cuDNN that this process uses: loaded once, by the first call that could use it."""

import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from gradkit._cuda.cudnn import bindings8, bindings9, search
from gradkit._cuda.cudnn.face import Bindings
from gradkit._cuda.cudnn.handles import Handles
from gradkit.errors import BackendUnavailableError

_PACKAGES = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


class Cudnn:
    """The library, its handles, and the cases that it does not support."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.handles = Handles(bindings)
        self.refused: set[Any] = set()


_lock = threading.Lock()
_library: Cudnn | BackendUnavailableError | None = None


def _after_fork() -> None:
    """Make a new lock: another thread of the parent may have held the old one."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cudnn() -> Cudnn:
    """The process's cuDNN; raises a ``BackendUnavailableError`` that says what to install."""
    global _library
    if _library is None:
        with _lock:
            _library = _library or _find()
    if isinstance(_library, BackendUnavailableError):
        raise BackendUnavailableError(*_library.args)
    return _library


def is_used(other: Cudnn) -> bool:
    """True if ``other`` is the cuDNN that this process uses."""
    return _library is other


def is_missing() -> bool:
    """True if an earlier call has searched for cuDNN and not found it."""
    return isinstance(_library, BackendUnavailableError)


def describe() -> dict[str, Any]:
    """Versions of cuDNN, as far as they are known without importing CuPy."""
    if sys.modules.get("cupy") is None:
        installed = {name: _installed(name) for name in _PACKAGES}
        return {"loaded": False, "packages": {k: v for k, v in installed.items() if v}}
    try:
        bindings = cudnn().bindings
    except BackendUnavailableError as error:
        return {"loaded": False, "reason": str(error)}
    version = version_text(bindings.getVersion())
    return {"loaded": True, "version": version, "binding": bindings.name, "path": bindings.path}


def version_text(version: int) -> str:
    """``"8.9.7"`` for 8907, ``"9.28.0"`` for 92800."""
    major = 10000 if version >= 90000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


def _find() -> Cudnn | BackendUnavailableError:
    failures = []
    for binding in _bindings():
        try:
            return Cudnn(binding(search.places()))
        except search.UnusableError as reason:
            failures.append(str(reason))
    return BackendUnavailableError(f"cuDNN cannot be used: {'; '.join(failures)}. {_advice()}")


def _bindings() -> list[Callable[[list[search.Place]], Bindings]]:
    """The bindings to try: CuPy's own first, if this CuPy has one."""
    if _cupy_major() < 14:
        return [bindings8.load, bindings9.load]
    return [bindings9.load]


def _cupy_major() -> int:
    return int(sys.modules["cupy"].__version__.split(".")[0]) if "cupy" in sys.modules else 14


def _advice() -> str:
    package = _PACKAGES[_cuda_major() >= 13]
    older = ", or 'nvidia-cudnn-cu12==8.9.7.29'" if _cupy_major() < 14 else ""
    return f"Install it with: pip install '{package}>=9,<10'{older}"


def _cuda_major() -> int:
    try:
        return int(sys.modules["cupy"].cuda.runtime.runtimeGetVersion()) // 1000
    except Exception:  # no CuPy, or it does not know
        return 12


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

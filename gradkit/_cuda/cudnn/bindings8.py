"""cuDNN 8 through ``cupy.cuda.cudnn``, which CuPy up to 13.6 has."""

import ctypes
import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from gradkit._cuda.cudnn import search
from gradkit._cuda.cudnn.face import FUNCTIONS, Bindings, name_of
from gradkit.errors import CudnnError

SONAME = "libcudnn.so.8"
OLDEST = 8800  # CuPy 13.6 was built with 8.8

_loaded: list[ctypes.CDLL] = []  # never emptied: a library in use must not be unloaded


def load(places: Iterable[search.Place]) -> Bindings:
    """Load the library from the first place that has it, and return CuPy's binding to it.

    Raises ``search.UnusableError`` with the reason if that is not a usable cuDNN 8.
    """
    reason = f"cupy.cuda.cudnn does not load with {SONAME}"
    try:
        _loaded.append(search.open_first(SONAME, places)[0])
    except search.UnusableError as error:  # CuPy may find it elsewhere
        reason = str(error)
    module = _module()
    if module is None or not hasattr(module, "getVersion"):
        raise search.UnusableError(reason)
    path = search.mapped(SONAME) or SONAME
    version = int(module.getVersion())
    if not OLDEST <= version < 9000:
        raise search.UnusableError(f"{path} is cuDNN {version}; cupy.cuda.cudnn needs 8.8 or 8.9")
    return bindings_of(module, path)


def bindings_of(module: ModuleType, path: str) -> Bindings:
    """CuPy's functions, whose errors become ``CudnnError``."""
    functions = {name: _checked(module, name) for name in FUNCTIONS}
    return Bindings("cupy.cuda.cudnn", path, **functions)


def _module() -> ModuleType | None:
    """``cupy.cuda.cudnn``, or ``None``. After a failed import the module exists but is empty."""
    with warnings.catch_warnings():  # gradkit gives one warning of its own
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module("cupy.cuda.cudnn")
            if not hasattr(module, "getVersion"):  # imported before the library was loaded
                module = importlib.import_module("cupy_backends.cuda.libs.cudnn")
        except ImportError:
            return None
    return module


def _checked(module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name)
    failure: type[Exception] = module.CuDNNError

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except failure as error:
            text = re.sub(r"^cuDNN Error: ", "", str(error))
            status = getattr(error, "status", None)
            raise CudnnError(name_of(name), status, text) from error

    return call

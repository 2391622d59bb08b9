"""From a file in ``kernels/`` to a compiled module, once for each dtype combination and device."""

import re
import threading
from functools import cache
from pathlib import Path

from gradkit._cuda.device import Device, Kernel, Module
from gradkit.errors import KernelCompileError

_INCLUDE = re.compile(r'^[ \t]*#include "([\w.]+)"[ \t]*$', re.MULTILINE)
_CXX = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
_PACKAGE = Path(__file__).resolve().parent.parent

_modules: dict[tuple[int, str, tuple[str, ...]], Module] = {}
_lock = threading.Lock()


def kernel(device: Device, file: str, name: str, **macros: str | int) -> Kernel:
    """The kernel ``name`` out of ``kernels/<file>.cu`` compiled with ``-D`` macros.

    A macro whose value is the name of a dtype becomes the type's name in the kernels.
    """
    options = options_of(macros)
    key = (id(device), file, options)
    module = _modules.get(key)
    if module is None:
        with _lock:  # two threads that ask at once compile once
            module = _modules.get(key) or _compile(device, file, options)
            _modules[key] = module
    return module.get_function(name)


def options_of(macros: dict[str, str | int]) -> tuple[str, ...]:
    """What the compiler is told, in an order that does not depend on the caller."""
    defined = (f"-D{name}={_CXX.get(str(macros[name]), macros[name])}" for name in sorted(macros))
    return ("-std=c++17", *defined)


@cache
def source_of(file: str) -> str:
    """The text of a kernel file with the project's own headers put in.

    CuPy's cache of compiled kernels knows the text alone: a header that was only pointed to
    could change without a recompilation.
    """
    folder = _folder()
    seen: set[str] = set()

    def include(match: re.Match[str]) -> str:
        header = match[1]
        if header in seen:
            return ""
        seen.add(header)
        return expand((folder / header).read_text())

    def expand(text: str) -> str:
        return _INCLUDE.sub(include, text.replace("#pragma once", ""))

    return expand((folder / f"{file}.cu").read_text())


def _folder() -> Path:
    """``kernels/`` inside an installed package, or beside it in a bare checkout."""
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"gradkit's kernels lie neither in {_PACKAGE} nor beside it")


def _compile(device: Device, file: str, options: tuple[str, ...]) -> Module:
    try:
        return device.compile(source_of(file), options)
    except Exception as error:
        raise KernelCompileError(
            f"kernels/{file}.cu did not compile with {' '.join(options)}: {error}"
        ) from error

"""From a file in ``kernels/`` to a kernel, compiled once for each dtype combination and device."""

import re
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gradkit._cuda.launch.device import Device, Kernel
from gradkit._dtypes import FLOATS, Types
from gradkit.errors import KernelCompileError, KernelLaunchError

_INCLUDE = re.compile(r'^[ \t]*#include "([\w.]+)"[ \t]*$', re.MULTILINE)
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')
_CXX = {row.name: row.cxx for row in FLOATS.values()}
_PACKAGE = Path(__file__).resolve().parents[2]

Macros: TypeAlias = dict[str, str | int]
# What an operation can ask for: a kernel file, and the macros it is compiled with.
Combination: TypeAlias = tuple[str, Macros]

_NULL = np.uint64(0)  # CuPy up to 13 makes garbage of None: github.com/cupy/cupy/issues/9046

_kernels: dict[tuple[Any, ...], "LoadedKernel"] = {}
_locks: dict[tuple[Any, ...], threading.Lock] = {}  # of compiling each
_allowing = threading.Lock()


class LoadedKernel:
    """A compiled kernel whose failure to launch is a typed error."""

    def __init__(self, device: Device, name: str, function: Kernel):
        self.device = device  # keeps alive what the cache's key names by id
        self.name = name
        self._function = function
        self._allowed = 0  # bytes of shared memory that launches may ask for

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        """Launch on the current stream: see ``device.Kernel``."""
        arguments = [_NULL if arg is None else arg for arg in args]
        try:
            if shared_mem > self._allowed:
                self._allow(shared_mem)
            self._function(grid, block, arguments, shared_mem=shared_mem)
        except self.device.launch_errors as error:
            raise KernelLaunchError(
                f"the device refused kernel {self.name} on a grid of {grid} blocks of {block} "
                f"threads with {shared_mem} bytes of shared memory: {error}. An earlier kernel "
                "on the device may be at fault: run with CUDA_LAUNCH_BLOCKING=1 to find it."
            ) from error

    def _allow(self, shared_mem: int) -> None:
        """Have the driver allow it: a block gets more than 48 KiB only where that was asked for."""
        with _allowing:
            if shared_mem > self._allowed:
                self._function.max_dynamic_shared_size_bytes = shared_mem
                self._allowed = shared_mem


def kernel(device: Device, file: str, name: str, **macros: str | int) -> LoadedKernel:
    """The kernel ``name`` out of ``kernels/<file>.cu`` compiled with ``-D`` macros.

    A macro whose value is the name of a dtype becomes the type's name in the kernels.
    """
    key = (id(device), file, name, *macros.items())
    found = _kernels.get(key)
    if found is None:
        with _locks.setdefault(key, threading.Lock()):  # two threads that ask at once compile once
            found = _kernels.get(key) or _load(device, file, name, options_of(macros))
            _kernels[key] = found
    return found


def options_of(macros: Macros) -> tuple[str, ...]:
    """What the compiler is told, in an order that does not depend on the caller."""
    defined = (f"-D{name}={_CXX.get(str(macros[name]), macros[name])}" for name in sorted(macros))
    return ("-std=c++17", *defined)


def norm_macros(types: Types, vector: int, **more: int) -> Macros:
    """The macros that every norm's kernels take; ``vector`` elements move in one access."""
    data, statistic, parameter = types
    return {"DATA_T": data, "STAT_T": statistic, "PARAM_T": parameter, "VEC": vector, **more}


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


@cache
def kernels_in(file: str) -> tuple[str, ...]:
    """The names of a file's kernels."""
    return tuple(_KERNEL.findall(source_of(file)))


def _folder() -> Path:
    """``kernels/`` inside an installed package, or beside it in a bare checkout."""
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"gradkit's kernels lie neither in {_PACKAGE} nor beside it")


def _load(device: Device, file: str, name: str, options: tuple[str, ...]) -> LoadedKernel:
    source = source_of(file)
    try:
        # CuPy compiles when it is asked for the function, and keeps modules that it has.
        function = device.compile(source, options).get_function(name)
    except OSError as error:
        raise KernelCompileError(
            f"kernels/{file}.cu could not be compiled into CuPy's cache: {error}. Set "
            "CUPY_CACHE_DIR to a folder that can be written, or CUPY_CACHE_IN_MEMORY=1."
        ) from error
    except Exception as error:
        raise KernelCompileError(
            f"kernels/{file}.cu did not compile with {' '.join(options)}: {error}"
        ) from error
    return LoadedKernel(device, name, function)

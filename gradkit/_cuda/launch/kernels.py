"""Load kernels from ``kernels/``; each is compiled once per device and combination of macros."""

import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._calls.roles import Data, Number, Parameter, Statistic
from gradkit._cuda.launch.device import Device, Kernel, noted
from gradkit._cuda.launch.packing import PackedKernel
from gradkit._dtypes import FLOATS, Types, float_name
from gradkit.errors import KernelError

_INCLUDE = re.compile(r'^[ \t]*#include "([\w.]+)"[ \t]*$', re.MULTILINE)
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*(?:IN_CLUSTERS\s+)?(\w+)\('
)
_CXX = {row.name: row.cxx for row in FLOATS.values()}
_PACKAGE = Path(__file__).resolve().parents[2]

Macros: TypeAlias = dict[str, str | int]
# A kernel file, and the macros that it is compiled with.
Combination: TypeAlias = tuple[str, Macros]

FLAGS = {False: np.uint32(0), True: np.uint32(1)}  # as kernels take them
_ONE = np.float64(1)

_kernels: dict[tuple[Any, ...], "LoadedKernel"] = {}
_locks: dict[tuple[Any, ...], threading.Lock] = {}  # one for each key, held while it is compiled
_allowing = threading.Lock()


class LoadedKernel:
    """A compiled kernel; a failed launch raises ``KernelError``."""

    def __init__(self, device: Device, name: str, function: Kernel):
        self.device = device  # keeps the device alive: the cache's key has its id
        self.name = name
        self.function = function
        self.allowed = 0  # bytes of dynamic shared memory that a launch may have

    def __call__(self, grid: Shape, block: Shape, args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch once on the current stream, as ``device.Kernel`` does."""
        Launch(self, grid, block, shared_mem)(*args)

    def resident(self, threads: int, shared_mem: int = 0) -> int:
        """Number of blocks that a multiprocessor holds at once, as the kernel was compiled."""
        try:
            self.allow(shared_mem)
            return max(1, self.device.resident(self.function, threads, shared_mem))
        except self.device.launch_errors as error:
            raise self.refused(f"blocks of {threads}", shared_mem, error) from error

    def places(self, threads: int) -> int:
        """Number of blocks that the device holds at once."""
        return self.resident(threads) * self.device.multiprocessors

    def clusters(self, size: int, threads: int) -> int:
        """Number of clusters of so many blocks that the device holds at once.

        Fewer than its blocks would make: a cluster lies within a part of the device, where some
        multiprocessors may be left over, and one that waits for another doubles the time. Where
        the driver does not tell how many, an eighth is left out.
        """
        blocks = self.places(threads)  # and binds a context
        function = self.function
        told = function.clusters(size, threads) if isinstance(function, PackedKernel) else None
        return told or blocks * 7 // (8 * size)

    def refused(self, block: str, shared_mem: int, error: Exception) -> KernelError:
        """Return the error of a failed launch."""
        return KernelError(
            f"the device refused kernel {self.name} on {block} threads with {shared_mem} bytes of "
            f"shared memory: {error}. An earlier kernel on the device may be at fault: run with "
            "CUDA_LAUNCH_BLOCKING=1 to find it."
        )

    def allow(self, shared_mem: int) -> None:
        """Raise the driver's limit: a block gets more than 48 KiB only on request."""
        if shared_mem <= self.allowed:
            return
        with _allowing:
            if shared_mem > self.allowed:
                self.function.max_dynamic_shared_size_bytes = shared_mem
                self.allowed = shared_mem


class Launch:
    """A launch without its arguments: all that shapes and dtypes decide.

    ``dependent``: the kernel may start before the one in front of it has ended, because each of its
    threads waits for that, by ``kernels/dependent.cuh``, before it does anything else.
    """

    __slots__ = ("block", "grid", "kernel", "shared_mem", "start")

    def __init__(
        self,
        kernel: LoadedKernel,
        grid: Shape,
        block: Shape,
        shared_mem: int = 0,
        *,
        dependent: bool = False,
    ):
        self.kernel, self.grid, self.block, self.shared_mem = kernel, grid, block, shared_mem
        sizes = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        function = kernel.function
        self.start: Callable[[Sequence[Any]], None] = (
            function.on(*sizes, shared_mem, dependent=dependent and kernel.device.clusters)
            if isinstance(function, PackedKernel)
            else partial(function, *sizes, shared_mem=shared_mem)
        )

    def __call__(self, *arguments: Any) -> None:
        """Launch with these arguments."""
        kernel = self.kernel
        try:
            if self.shared_mem > kernel.allowed:
                kernel.allow(self.shared_mem)
            self.start(arguments)
        except kernel.device.launch_errors as error:
            raise self.refused(error) from error
        if (notes := noted()) is not None:
            notes.launches.append((self, arguments))

    def refused(self, error: Exception) -> KernelError:
        """Return the error of a launch that failed."""
        where = f"a grid of {self.grid} blocks of {self.block}"
        return self.kernel.refused(where, self.shared_mem, error)

    def of(self, kernel: LoadedKernel, shared_mem: int = 0) -> "Launch":
        """The launch of another kernel on the same grid."""
        return Launch(kernel, self.grid, self.block, shared_mem)


def kernel(device: Device, file: str, name: str, **macros: str | int) -> LoadedKernel:
    """The kernel ``name`` from ``kernels/<file>.cu``, compiled with ``-D`` macros.

    If a macro's value is the name of a dtype, it becomes the name of the type in the kernels.
    """
    key = (id(device), file, name, *macros.items())
    loaded = _kernels.get(key)
    if loaded is None:
        with _locks.setdefault(key, threading.Lock()):  # concurrent calls compile it once
            loaded = _kernels.get(key) or _load(device, file, name, options_of(macros))
            _kernels[key] = loaded
    return loaded


def take_combinations(device: Device) -> list[Combination]:
    """Return each combination of macros that a device was asked for, and forget its kernels."""
    own = [key for key in [*_kernels] if key[0] == id(device)]
    combinations: dict[tuple[Any, ...], Combination] = {}
    for key in own:
        del _kernels[key], _locks[key]
        _, file, _, *macros = key
        combinations.setdefault((file, *sorted(macros)), (file, dict(macros)))
    return [*combinations.values()]


def either(number: Number) -> tuple[Array | None, np.float64]:
    """An array to read a number from, or none and the number itself."""
    return (None, np.float64(number)) if isinstance(number, float) else (number, _ONE)


def either_flag(flag: Array | bool) -> tuple[Array | None, np.uint32]:
    """The same of a flag."""
    return (None, FLAGS[flag]) if isinstance(flag, bool) else (flag, FLAGS[False])


def options_of(macros: Macros) -> tuple[str, ...]:
    """The compiler's options, in an order that does not depend on the caller."""
    defined = (f"-D{name}={_CXX.get(str(macros[name]), macros[name])}" for name in sorted(macros))
    return ("-std=c++17", *defined)


def types_of(data: Data, statistic: Statistic, *parameters: Parameter | None) -> Types:
    """(T, U, V) of arrays; parameters that are absent count as ones of the statistics' dtype."""
    parameter = first_of(*parameters, statistic)
    data_name, statistic_name, parameter_name = (
        float_name(array.dtype) or "" for array in (data, statistic, parameter)
    )
    return data_name, statistic_name, parameter_name


def first_of(*arrays: Array | None) -> Array:
    """The first of some arrays that is present."""
    return next(array for array in arrays if array is not None)


def norm_macros(types: Types, vector: int, **more: int) -> Macros:
    """The macros of every norm's kernels; ``vector``: the elements in one access."""
    data, statistic, parameter = types
    return {"DATA_T": data, "STAT_T": statistic, "PARAM_T": parameter, "VEC": vector, **more}


@cache
def source_of(file: str) -> str:
    """The text of a kernel file, with gradkit's headers inserted.

    CuPy's cache of compiled kernels compares only this text: if it only named a header, a change of
    the header would not cause a recompilation.
    """
    folder = _folder()
    included: set[str] = set()

    def include(match: re.Match[str]) -> str:
        header = match[1]
        if header in included:
            return ""
        included.add(header)
        return expand((folder / header).read_text())

    def expand(text: str) -> str:
        return _INCLUDE.sub(include, text.replace("#pragma once", ""))

    return expand((folder / f"{file}.cu").read_text())


@cache
def kernels_in(file: str) -> tuple[str, ...]:
    """The names of a file's kernels."""
    return tuple(_KERNEL.findall(source_of(file)))


def _folder() -> Path:
    """``kernels/`` inside an installed package, or next to it in a checkout."""
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"gradkit's kernels are neither in {_PACKAGE} nor next to it")


def _load(device: Device, file: str, name: str, options: tuple[str, ...]) -> LoadedKernel:
    source = source_of(file)
    try:
        # CuPy compiles in get_function, which takes no subclass of str, and reuses modules.
        function = device.compile(source, options).get_function(str(name))
    except OSError as error:
        raise KernelError(
            f"kernels/{file}.cu could not be compiled into CuPy's cache: {error}. Set "
            "CUPY_CACHE_DIR to a writable folder, or CUPY_CACHE_IN_MEMORY=1."
        ) from error
    except Exception as error:
        raise KernelError(
            f"kernels/{file}.cu did not compile with {' '.join(options)}: {error}"
        ) from error
    return LoadedKernel(device, name, function)

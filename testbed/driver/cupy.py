"""CuPy on the driver: its calls of CUDA's runtime, which is linked into it, go there too."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.nvrtc.nvrtc import library_path

from .library import Driver, build, build_cublas, load
from .machine import Machine

# What needs no driver, and stays CuPy's own.
_KEPT = {"check_status", "_getCUDAMajorVersion", "_getLocalRuntimeVersion", "_export_enum"}
_TYPES: dict[str, Any] = {
    "PyObject *": ctypes.py_object,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "intptr_t": ctypes.c_ssize_t,
    "float": ctypes.c_float,
}


@functools.cache
def install(**options: Any) -> tuple[Driver, Machine]:
    """Let CuPy, which must not have been imported, find the driver's devices.

    ``options`` are those of `testbed.ptx.PtxDevice`.
    """
    if "cupy" in sys.modules:
        raise RuntimeError("CuPy has been imported already, and has looked for its driver")
    os.environ["CUPY_COMPILE_WITH_PTX"] = "1"  # else NVRTC makes machine code
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB's kernels are compiled into CuPy
    driver = load()
    nvrtc = library_path()
    if nvrtc:
        ctypes.CDLL(str(nvrtc))
    architecture = int(os.environ.get("TESTBED_DRIVER_ARCHITECTURE", "80"))
    machine = Machine(driver, architecture=architecture, **options)
    importlib.import_module("cupy_backends.cuda.api.driver")  # finds the library
    runtime: Any = importlib.import_module("cupy_backends.cuda.api.runtime")

    replaced = driver.replace_runtime(runtime, _KEPT)
    for name, function in vars(runtime).copy().items():
        if isinstance(function, type) or not callable(function) or name in _KEPT | {"getDevice"}:
            continue
        setattr(runtime, name, _called(runtime, name) if name in replaced else _refusal(name))
    runtime.getDeviceProperties = functools.partial(_properties, runtime)
    _load_cublas(build())
    return driver, machine


def _load_cublas(cuda: Path) -> None:
    """Let CuPy find a cuBLAS with all functions that it asks for by name."""
    package: Any = importlib.util.find_spec("cupy_backends")
    [asking] = Path(package.submodule_search_locations[0], "cuda", "libs").glob("cublas.*.so")
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", asking], capture_output=True, text=True, check=True
    )
    names = set(re.findall(r"\bU (cublas\w+)@", listed.stdout))
    ctypes.CDLL(str(build_cublas(names, cuda)))
    importlib.import_module("cupy_backends.cuda.libs.cublas")  # or CuPy 14 looks for NVIDIA's


def _called(runtime: Any, name: str) -> Callable[..., Any]:
    """A function that calls what is in a capsule."""
    capsule = runtime.__pyx_capi__[name]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.argtypes, get_name.restype = [ctypes.py_object], ctypes.c_char_p
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    get_pointer.restype = ctypes.c_void_p
    text = get_name(capsule)
    found = re.fullmatch(r"(.*?) ?\((.*)\)", text.decode())
    if found is None:
        raise TypeError(f"CuPy's {name} is {text!r}")
    names = [part for part in found[2].split(", ") if part != "void"]
    skipped = [part for part in names if "__pyx" in part]  # Cython's own: 0, and no optional ones
    types = [_TYPES[part] for part in names if part not in skipped]
    own: list[Any] = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)][: len(skipped)]
    result = _TYPES.get(found[1], ctypes.py_object)
    function = ctypes.PYFUNCTYPE(result, *types, *own)(get_pointer(capsule, text))
    if len(skipped) < 2:
        zero = (0,) * len(skipped)
        return lambda *given: function(*given, *zero)

    def with_optional(*given: Any) -> Any:
        values = given[len(types) :]
        optional = (ctypes.c_int * 2)(len(values), *values)
        return function(*given[: len(types)], 0, optional)

    return with_optional


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"testbed.driver has no {name}")

    return refuse


def _properties(runtime: Any, device: int) -> dict[str, Any]:
    ask = runtime.deviceGetAttribute
    return {
        "name": f"testbed.driver {device}".encode(),
        "totalGlobalMem": int(os.environ.get("TESTBED_DRIVER_MEMORY", 2 << 30)),
        "major": ask(75, device),
        "minor": ask(76, device),
        "multiProcessorCount": ask(16, device),
        "sharedMemPerBlock": ask(8, device),
        "sharedMemPerBlockOptin": ask(97, device),
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "pciBusID": device,
    }

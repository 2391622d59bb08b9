"""The driver's library: built by g++, loaded under the name that CUDA's own has."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
import tempfile
from ctypes import POINTER, c_char_p, c_int, c_int64, c_long, c_uint64, c_void_p, py_object
from pathlib import Path

from testbed.emulator import cache
from testbed.emulator.compiler import RUNTIME, run_compiler
from testbed.emulator.runtime import Runtime

_FOLDER = Path(__file__).with_name("cuda")
_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-Wl,-soname,libcuda.so.1",
)


def build() -> Path:
    """Return the library's path; it is compiled if the cache has none."""
    files = sorted(_FOLDER.iterdir())
    included = sysconfig.get_paths()["include"]
    shared = (RUNTIME / "windows.h").read_text()
    texts = (f"{file.name}\n{file.read_text()}" for file in files)
    key = cache.digest(run_compiler(["--version"]), included, *_FLAGS, shared, *texts)
    library = cache.cache_folder() / f"driver-{key}" / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with cache.locked(library), tempfile.TemporaryDirectory(dir=library.parent) as folder:
            if not library.exists():
                built = Path(folder, "libcuda.so.1")
                sources = [str(file) for file in files if file.suffix == ".cpp"]
                paths = [f"-I{included}", f"-I{RUNTIME}"]
                run_compiler([*_FLAGS, *paths, *sources, "-o", str(built), "-ldl"])
                os.replace(built, library)
    return library


class _Windows(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("open", "close", "unwritten", "written")]


class Driver:
    """What tests ask of the driver besides CUDA's own calls, which `library` has."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        self.library = library
        self._use_machine = library.driver_use_machine
        self._use_machine.argtypes, self._use_machine.restype = [py_object], None
        self.replace_runtime = library.driver_replace_runtime
        self.replace_runtime.argtypes = [py_object, py_object]
        self.replace_runtime.restype = py_object
        self._calls = library.driver_calls
        self._calls.argtypes, self._calls.restype = [c_char_p], c_long
        self._fail = library.driver_fail
        self._fail.argtypes, self._fail.restype = [c_char_p, c_int, c_long, c_long], None
        self._message = library.driver_message
        self._message.argtypes, self._message.restype = [], c_char_p
        self._extent = library.driver_extent
        self._extent.argtypes = [c_int64, POINTER(c_uint64), POINTER(c_uint64)]
        library.driver_mend.restype = c_int

    def use(self, runtime: Runtime, machine: object) -> None:
        """Let kernels run on a machine, with the PTX machine's runtime beneath it."""
        functions = (
            *(runtime.register_window, runtime.unregister_window),
            *(runtime.mark_uninitialised, runtime.mark_initialised),
        )
        windows = _Windows(*(ctypes.cast(function, c_void_p).value for function in functions))
        self.library.driver_use_windows(ctypes.byref(windows))
        self._use_machine(machine)

    def calls(self, function: str) -> int:
        """Return how often a function, such as ``"cuMemAlloc_v2"``, was called in this process."""
        return int(self._calls(function.encode()))

    def fail(self, function: str, code: int, after: int = 1, times: int = 1) -> None:
        """Let calls of a function return an error: so many, from the ``after``-th on.

        ``times=0`` takes it back.
        """
        self._fail(function.encode(), code, after, times)

    def launches_run(self, chosen: bool) -> None:
        """Say whether kernels run; if not, launches are checked and forgotten."""
        self.library.driver_launches_run(int(chosen))

    def message(self) -> str:
        """Return why the last call that failed did."""
        return str(self._message().decode())

    def mend(self) -> int:
        """Return the device's error, or 0, and forget it: until then every call returns it."""
        return int(self.library.driver_mend())

    def extent(self, serial: int) -> tuple[int, int] | None:
        """Return where an allocation begins and ends."""
        start, end = c_uint64(), c_uint64()
        if not self._extent(serial, ctypes.byref(start), ctypes.byref(end)):
            return None
        return start.value, end.value


@functools.cache
def load() -> Driver:
    """Return the driver of this process. Whoever asks for ``libcuda.so.1`` from now on gets it."""
    return Driver(build())

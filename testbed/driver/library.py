"""The driver's libraries: built by g++, loaded under the names that CUDA's own have."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_long, c_uint64, c_void_p, py_object
from pathlib import Path

from testbed.emulator import cache
from testbed.emulator.compiler import RUNTIME, run_compiler
from testbed.emulator.runtime import Runtime

_FOLDER = Path(__file__).with_name("cuda")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def build() -> Path:
    """Return the library's path; it is compiled if the cache has none."""
    included = sysconfig.get_paths()["include"]
    shared = (RUNTIME / "windows.h").read_text()
    files = {file.name: file.read_text() for file in sorted(_FOLDER.iterdir())}
    return _built("libcuda.so.1", files, (f"-I{included}", f"-I{RUNTIME}", "-ldl"), shared)


def build_cublas(names: Iterable[str], cuda: Path) -> Path:
    """Return the path of cuBLAS with functions of these names, on the driver's streams.

    Those that ``blas/cublas.cpp`` does not have return ``CUBLAS_STATUS_NOT_SUPPORTED``.
    """
    own = (_FOLDER.with_name("blas") / "cublas.cpp").read_text()
    absent = sorted(name for name in names if f" {name}(" not in own)
    stubs = "".join(f"API int {name}() {{ return refused({name!r}); }}\n" for name in absent)
    head = (
        "#include <cstdio>\n"
        '#define API extern "C" __attribute__((visibility("default")))\n'
        "static int refused(const char* name) {\n"
        '  fprintf(stderr, "testbed.driver has no %s\\n", name);\n  return 15;\n}\n'
    )
    files = {"cublas.cpp": own, "stubs.cpp": head + stubs.replace("'", '"')}
    versions = "libcublas.so.12 { global: cublas*; local: *; };"
    linked = ("-Wl,--version-script=versions.map", str(cuda))
    return _built("libcublas.so.12", {**files, "versions.map": versions}, linked)


def _built(name: str, files: Mapping[str, str], options: Sequence[str], *more: str) -> Path:
    """Return the path of a library of that name; ``options`` name files by their own names."""
    flags = (*_FLAGS, f"-Wl,-soname,{name}")
    texts = (f"{file}\n{text}" for file, text in files.items())
    key = cache.digest(run_compiler(["--version"]), *flags, *options, *more, *texts)
    library = cache.cache_folder() / f"driver-{key}" / name
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with cache.locked(library), tempfile.TemporaryDirectory(dir=library.parent) as folder:
            if not library.exists():
                for file, text in files.items():
                    Path(folder, file).write_text(text)
                sources = [str(Path(folder, file)) for file in files if file.endswith(".cpp")]
                there = [option.replace("=versions", f"={folder}/versions") for option in options]
                built = Path(folder, name)
                run_compiler([*flags, *sources, *there, "-o", str(built)])
                os.replace(built, library)
    return library


class _Windows(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("open", "close", "unwritten", "written")]


class Driver:
    """The driver's switches and counters for tests; CUDA's own calls are in `library`."""

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

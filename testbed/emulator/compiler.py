"""Compiles a kernel's source, and the emulator's runtime, with g++ into shared libraries.

Every load and store of the kernel becomes a call of the runtime through ``-fsanitize=thread``,
whose own library is not linked: the runtime defines the functions that it would define.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .cache import cache_folder, digest, locked
from .signature import KernelText, find_kernels

RUNTIME = Path(__file__).with_name("runtime")
SHIM = RUNTIME / "cuda_shim.h"

# Of whatever calls the runtime, by hand or through -fsanitize=thread.
KERNEL_FLAGS = (
    "-O1",
    "-g1",
    "-fPIC",
    # A block that holds a barrier must not be copied: each copy would look like another barrier.
    "-fno-thread-jumps",
    "-fno-tree-dominator-opts",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    # A static of a template would otherwise be one for all kernels of the process.
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    "-w",
)
# One access per vector: see runtime/shim_vectors.h.
_SOURCE_FLAGS = (*KERNEL_FLAGS, "-fsanitize=thread", "-fno-tree-sra")
# Without g++'s own libraries, which kernels call nothing of: looking through them takes longest.
_LINK_FLAGS = ("-shared", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,now", "-lm", "-lc")
_RUNTIME_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wall",
    "-Wextra",
)
# A line of readelf's table: number, address, size, type, binding, visibility, section, name.
_SYMBOL = re.compile(
    r" +\d+: (?P<at>[0-9a-f]+) +(?P<size>\w+) (?P<kind>\w+) +\w+ +\w+ +"
    r"(?P<section>\w+) (?P<name>.+)"
)
# What only NVRTC understands and what changes nothing here.
_NVRTC_ONLY = (
    "-arch",
    "--gpu-architecture",
    "-ftz",
    "--ftz",
    "-fmad",
    "--fmad",
    "-lineinfo",
    "--generate-line-info",
    "-default-device",
    "--device-as-default-execution-space",
    "--ptxas-options",
    "-Xptxas",
    "--restrict",
    "-restrict",
    "--split-compile",
    "-maxrregcount",
    "--maxrregcount",
)


class CompilerMissingError(RuntimeError):
    """No g++ on this machine."""


class KernelCompileError(RuntimeError):
    """g++ rejects a kernel; the message holds its log."""


@dataclass(frozen=True)
class SharedArray:
    """A ``__shared__`` array with a size of its own: where it lies in the library."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class CompiledSource:
    """A library and what its kernels are called."""

    library: Path
    runtime: Path
    kernels: tuple[KernelText, ...]
    shared_arrays: tuple[SharedArray, ...]


def compiler_path() -> str | None:
    """Return the path of g++, or None where there is none."""
    return shutil.which(os.environ.get("GRADKIT_EMULATOR_CXX", "g++"))


def compile_source(
    source: str, options: Sequence[str] = (), *, portable_fibers: bool = False
) -> CompiledSource:
    """Return ``source`` as a library, compiled with the options that CuPy would pass to NVRTC.

    It comes from the cache if it was compiled before.

    Raises `KernelCompileError` with the compiler's log, `CompilerMissingError` without a compiler
    and ``ValueError`` for an option that it does not know.
    """
    standard, macros = translate_options(options)
    runtime = build_runtime(portable_fibers)
    key = digest(source, standard, macros, runtime.name)  # the runtime's name covers the flags
    library = runtime.with_name(f"kernel-{key}.so")
    description = library.with_suffix(".json")
    if not (description.exists() and library.exists()):
        with locked(library):
            if not (
                description.exists() and library.exists()
            ):  # another process may have built it meanwhile
                _build_kernel(source, standard, macros, runtime, library, description)
    return _read_description(library, runtime, description)


def complaints(source: str, options: Sequence[str], warning: str) -> list[str]:
    """Return the warnings of g++ about ``source``, with one more kind of warning turned on."""
    standard, macros = translate_options(options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "macros.h").write_text(macros)
        shim = (standard, "-include", str(SHIM), "-include", "./macros.h", "-x", "c++")
        done = subprocess.run(
            (compiler_path() or "g++", "-fsyntax-only", warning, *shim, "-"),
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},  # in English
            input=source,
            capture_output=True,
            text=True,
        )
    return [line for line in done.stderr.splitlines() if line.startswith("<stdin>")]


def translate_options(options: Sequence[str]) -> tuple[str, str]:
    """Return g++'s language standard and a header with the macros, made of NVRTC's options.

    A header, since ``-D`` would define them before the emulator's own headers. NVRTC has nothing
    of the kind: with 12.9 its built-in header does not compile under ``-DT=float``, nor with most
    lower-case words, so those are refused here.
    """
    standard, macros = "-std=c++17", []
    for option in options:
        if option.startswith(("-std=", "--std=")):
            standard = "-std=" + option.split("=", 1)[1]
        elif option.startswith("-D"):
            name, _, value = option[2:].strip().partition("=")
            if name == "T" or name.islower():
                raise ValueError(f"compile option {option!r}: NVRTC's own header uses that name")
            macros.append(f"#define {name} {value if '=' in option else 1}\n")
        elif option.startswith("-U"):
            macros.append(f"#undef {option[2:].strip()}\n")
        elif option.split("=", 1)[0] not in _NVRTC_ONLY:
            raise ValueError(
                f"compile option {option!r}: the emulator knows -D, -U, -std= and ignores "
                f"{', '.join(_NVRTC_ONLY)}"
            )
    return standard, "".join(macros)


def _build_kernel(
    source: str, standard: str, macros: str, runtime: Path, library: Path, description: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        Path(folder, "macros.h").write_text(macros)
        shim = (standard, "-include", str(SHIM), "-include", "./macros.h", "-x", "c++")
        unit = Path(folder, "kernel.cu")  # the name that messages call the source by
        unit.write_text(source + "\n")
        kernels = _kernels_of(unit.name, shim, folder)
        with unit.open("a") as text:
            text.writelines(
                f"EMU_EXPORT({k.name}, ({k.cluster_dims}), {k.launch_bounds})\n" for k in kernels
            )
        run_compiler([*_SOURCE_FLAGS, *shim, "-c", unit.name, "-o", "kernel.o"], folder)
        run_compiler(["kernel.o", "-o", "kernel.so", *link_options(runtime)], folder)
        built = Path(folder, "kernel.so")
        facts = {
            "kernels": [asdict(kernel) for kernel in kernels],
            "shared_arrays": [asdict(array) for array in _shared_arrays(built)],
        }
        written = Path(folder, "kernel.json")
        written.write_text(json.dumps(facts))
        # The description last: whoever finds it finds the library too.
        os.replace(built, library)
        os.replace(written, description)


def list_kernels(source: str, options: Sequence[str]) -> list[KernelText]:
    """Return the kernels that ``source`` defines under these options."""
    standard, macros = translate_options(options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "macros.h").write_text(macros)
        Path(folder, "kernel.cu").write_text(source + "\n")
        shim = (standard, "-include", str(SHIM), "-include", "./macros.h", "-x", "c++")
        return _kernels_of("kernel.cu", shim, folder)


def _kernels_of(unit: str, shim: Sequence[str], folder: str) -> list[KernelText]:
    preprocess = ["-E", "-P", "-DEMU_READ_SIGNATURES", *shim, unit]
    return find_kernels(run_compiler(preprocess, folder))


def _read_description(library: Path, runtime: Path, description: Path) -> CompiledSource:
    facts = json.loads(description.read_text())
    kernels = tuple(
        KernelText(**k | {"parameters": tuple(k["parameters"])}) for k in facts["kernels"]
    )
    arrays = tuple(SharedArray(**array) for array in facts["shared_arrays"])
    return CompiledSource(library, runtime, kernels, arrays)


def _shared_arrays(library: Path) -> list[SharedArray]:
    """List the library's uninitialised statics: kernels have none but their shared arrays."""
    # Ten times as quick as nm, which looks for linker plugins first.
    listing = subprocess.run(
        ["readelf", "--wide", "--sections", "--symbols", "--demangle", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    bss = re.findall(r"\[ *(\d+)\] \.bss ", listing)
    arrays = []
    for line in listing.splitlines():
        match = _SYMBOL.match(line)
        if match and match["kind"] == "OBJECT" and match["section"] in bss:
            name = match["name"].rsplit("::", 1)[-1]
            arrays.append(SharedArray(name, int(match["at"], 16), int(match["size"], 0)))
    return arrays


@functools.cache
def build_runtime(portable_fibers: bool) -> Path:
    """Return the runtime's library; it is compiled if the cache has none."""
    flags = [*_RUNTIME_FLAGS, *(["-DEMU_PORTABLE_FIBERS"] if portable_fibers else [])]
    files = sorted(RUNTIME.iterdir())
    # This file too: it holds the flags and the recipe of both libraries.
    files.append(Path(__file__))
    key = digest(_compiler_version(), *flags, *(f"{f.name}\n{f.read_text()}" for f in files))
    library = cache_folder() / f"emulator-{key}.so"
    if not library.exists():
        with locked(library):
            if not library.exists():
                _build_runtime(flags, [f for f in files if f.suffix == ".cpp"], library)
    return library


def _build_runtime(flags: Sequence[str], units: Sequence[Path], library: Path) -> None:
    """As one unit: the headers are read once, and an access is checked without a call between."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unit, built = Path(folder, "runtime.cpp"), Path(folder, "emulator.so")
        unit.write_text("".join(f'#include "{file}"\n' for file in units))
        # By its soname a kernel's library finds the runtime that the process has loaded, even
        # when another process has put its own build of it in the file's place since.
        run_compiler([*flags, str(unit), "-o", str(built), f"-Wl,-soname,{library.name}", "-ldl"])
        os.replace(built, library)


@functools.cache
def _compiler_version() -> str:
    return run_compiler(["--version"])


def link_options(runtime: Path) -> list[str]:
    """Return what links a kernel to the runtime beside it."""
    rpath = ["-Wl,-rpath,$ORIGIN", f"-L{runtime.parent}", f"-l:{runtime.name}"]
    return [*rpath, *_LINK_FLAGS]


def run_compiler(arguments: Sequence[str], folder: str | None = None) -> str:
    """Return what g++ prints; raise `KernelCompileError` with its log if it fails."""
    compiler = compiler_path()
    if compiler is None:
        raise CompilerMissingError("the emulator needs g++ (or GRADKIT_EMULATOR_CXX) on the path")
    done = subprocess.run([compiler, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise KernelCompileError(f"g++ rejects the source:\n{done.stderr}")
    return done.stdout

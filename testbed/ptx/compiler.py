"""CUDA source to PTX by NVRTC, and one kernel's PTX to a shared library by g++; both are kept."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.emulator import cache
from testbed.emulator.compiler import (
    KERNEL_FLAGS,
    RUNTIME,
    build_runtime,
    link_options,
    list_kernels,
    run_compiler,
)
from testbed.emulator.runtime import Parameter
from testbed.emulator.signature import KernelText
from testbed.nvrtc import cupy_options, kept_ptx

from .contract import may_be_contracted
from .parse import Module, Variable
from .translate import Translation, called_from, translate

MACHINE = Path(__file__).with_name("machine")
_HERE = Path(__file__).parent
_AFTER = ("__init__.py", "coverage.py", "device.py", "module.py")  # what only runs libraries
# Arithmetic in other rounding modes must stay where it is.
_FLAGS = (*KERNEL_FLAGS, "-std=c++17", "-frounding-math", "-ftrivial-auto-var-init=pattern")
# Behind the source, so that its lines keep their numbers: NVRTC itself says what kernels take.
_DESCRIBED = """
template <class F> struct EmuOf;
template <class... A> struct EmuOf<void(A...)> {
  EmuParameter rows[sizeof...(A) + 1] = {EMU_ROWS(A)..., {}};
};
"""
_PREFIX = "emu_parameters_"
_KEPT = 512  # modules that a process keeps in memory, and kernels


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel's library, and what its launches must know."""

    library: Path
    translation: Translation


@functools.lru_cache(_KEPT)
def compile_module(
    source: str, options: tuple[str, ...], architecture: int
) -> tuple[Module, list[KernelText]]:
    """Return what NVRTC makes of a source for CuPy, with its kernels and their parameters.

    Devices share it: a module does not change once it is read.
    """
    kernels = list_kernels(source, options)
    header = (RUNTIME / "shim_parameters.h").read_text().replace("#pragma once", "")
    lines = [
        f'extern "C" {{ __device__ EmuOf<decltype({kernel.name})> {_PREFIX}{kernel.name}; }}\n'
        for kernel in kernels
    ]
    text = "".join([source, "\n", header, _DESCRIBED, *lines])
    # For a virtual architecture: the same PTX, and NVRTC makes no machine code of it.
    passed = [o.replace("=sm_", "=compute_") for o in cupy_options(options, architecture)]
    return Module.of(kept_ptx(text, (*passed, "-lineinfo"))), kernels


def parameters_of(module: Module, kernel: KernelText) -> list[Parameter]:
    """Return what a kernel takes, as its module's variables say it."""
    table: Variable = module.variables[_PREFIX + kernel.name]
    rows = (Parameter * len(kernel.parameters)).from_buffer_copy(table.initial or b"")
    return list(rows)


@functools.lru_cache(_KEPT)
def compile_kernel(
    module: Module, name: str, *, contracted: bool, counted: bool = False
) -> CompiledKernel:
    """Return the library of one kernel of a module; it is compiled if the cache has none."""
    runtime = build_runtime(False)
    texts = "\n".join(text.content for text in called_from(module, name))
    contracted = contracted and may_be_contracted(texts)  # or it is the same library
    variables = repr(list(module.variables.values()))
    chosen = f"{contracted} {counted}"
    key = cache.digest(runtime.name, *_FLAGS, _recipe(), name, texts, variables, chosen)
    library = runtime.with_name(f"ptx-{key}.so")
    description = library.with_suffix(".json")
    if not (description.exists() and library.exists()):
        with cache.locked(library):
            if not (description.exists() and library.exists()):
                made = translate(module, name, contracted=contracted, counted=counted)
                _build(made, runtime, library)
    return CompiledKernel(library, Translation(**json.loads(description.read_text())))


@functools.cache
def _recipe() -> str:
    """The text of all that makes a library of PTX."""
    files = sorted({*_HERE.glob("*.py"), *MACHINE.iterdir()} - {_HERE / name for name in _AFTER})
    return "\n".join(file.read_text() for file in files)


def _build(translation: Translation, runtime: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        Path(folder, "kernel.cpp").write_text(translation.text)
        included = [f"-I{MACHINE}", f"-I{RUNTIME}"]
        run_compiler([*_FLAGS, *included, "-c", "kernel.cpp", "-o", "kernel.o"], folder)
        run_compiler(["kernel.o", "-o", "kernel.so", *link_options(runtime)], folder)
        written = Path(folder, "kernel.json")
        written.write_text(json.dumps(asdict(translation) | {"text": ""}))
        os.replace(Path(folder, "kernel.so"), library)
        os.replace(written, library.with_suffix(".json"))  # the last: it says that all is there

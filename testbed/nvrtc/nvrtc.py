"""NVRTC, CUDA's run-time compiler, from the PyPI package nvidia-cuda-nvrtc-cu12, by ctypes.

It needs neither a GPU nor a driver nor a toolkit.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

Read = TypeVar("Read")


class NvrtcMissingError(RuntimeError):
    """The package is not installed."""


class MachineCode(NamedTuple):
    """An ELF file with the machine code of a source's kernels, and the compiler's log."""

    cubin: bytes
    log: str


class NvrtcCompileError(RuntimeError):
    """NVRTC rejects a source; the message holds its log."""


def library_path() -> Path | None:
    """Return the path of libnvrtc, or None where its package is not installed.

    ``GRADKIT_NVRTC_LIBRARY`` names another one, of any version.
    """
    if named := os.environ.get("GRADKIT_NVRTC_LIBRARY"):
        return Path(named)
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder, "lib").glob("libnvrtc.so.*")]
    return found[0] if found else None


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise NvrtcMissingError(
            "libnvrtc is not here: pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'"
        )
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def compile_log(source: str, options: Sequence[str]) -> str:
    """Return the compiler's log of ``source``.

    Raises `NvrtcCompileError` if it does not compile.
    """
    return _compiled(source, options, _log_of)


def compile_ptx(source: str, options: Sequence[str]) -> str:
    """Return the PTX of ``source``, of which ptxas makes machine code."""
    return _compiled(source, options, _ptx_of)


def compile_machine_code(source: str, options: Sequence[str]) -> MachineCode:
    """Return the machine code of ``source`` for a real architecture."""
    return _compiled(source, options, lambda made: MachineCode(_cubin_of(made), _log_of(made)))


def _compiled(source: str, options: Sequence[str], read: Callable[[ctypes.c_void_p], Read]) -> Read:
    library = _library()
    program = ctypes.c_void_p()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _check(created, "nvrtcCreateProgram")
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = library.nvrtcCompileProgram(program, len(options), encoded)
        if result:
            reason = library.nvrtcGetErrorString(result).decode()
            raise NvrtcCompileError(f"{reason} with {' '.join(options)}:\n{_log_of(program)}")
        return read(program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log_of(program: ctypes.c_void_p) -> str:
    return _text(program, "nvrtcGetProgramLog")


def _ptx_of(program: ctypes.c_void_p) -> str:
    return _text(program, "nvrtcGetPTX")


def _cubin_of(program: ctypes.c_void_p) -> bytes:
    return _bytes(program, "nvrtcGetCUBIN")


def _text(program: ctypes.c_void_p, getter: str) -> str:
    return _bytes(program, getter).rstrip(b"\0").decode(errors="replace")


def _bytes(program: ctypes.c_void_p, getter: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"{getter}Size")(program, ctypes.byref(size)), f"{getter}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), getter)(program, buffer), getter)
    return buffer.raw


def _check(result: int, function: str) -> None:
    if result:
        raise RuntimeError(f"{function}: {_library().nvrtcGetErrorString(result).decode()}")

"""The places where gradkit searches for the cuDNN library.

The working directory and folders with a relative path are never searched, because loading a library
runs its code.
"""

import ctypes
import os
import site
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

# A name for messages, and a function from the library's file name to its path, the bare file name
# (for the system's loader) or None.
Place: TypeAlias = tuple[str, Callable[[str], str | None]]


# The environment variables whose folders cuda-pathfinder searches.
_ROOTS = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "CUDNN_PATH", "PYTHONUSERBASE")


class UnusableError(Exception):
    """No usable cuDNN was found; the text says why."""


def places() -> list[Place]:
    """The places in search order.

    cuda-pathfinder searches the PyPI packages first too, but it loads a file without checking it.
    """
    return [
        ("already loaded", _already_loaded),
        ("PyPI packages", _packaged),
        ("cuda-pathfinder", _pathfinder),
        ("the system's loader", _system),
    ]


def open_first(soname: str, where: Iterable[Place]) -> tuple[ctypes.CDLL, str]:
    """The library from the first place where it loads, and its path.

    It is loaded with ``RTLD_LOCAL``: another cuDNN that a framework has loaded keeps its own
    symbols.
    """
    failures = []
    for place, find in where:
        path = find(soname)
        if path is None:
            continue
        if path != soname:
            _check_whole(path, soname)
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            if path != soname:  # the file exists but does not load
                failures.append(f"{path} ({place}) does not load: {error}")
            continue
        if path == soname:
            path = mapped(soname) or path
        return library, path
    raise UnusableError("; ".join(failures) or f"{soname} is not installed")


def _check_whole(path: str, soname: str) -> None:
    """Raise an error for a truncated file: loading it would kill the process."""
    suffix = soname.removeprefix("libcudnn")
    for part in ("", "_graph", "_ops", "_ops_infer", "_ops_train"):
        file = Path(path).with_name(f"libcudnn{part}{suffix}")
        if file.is_file() and _is_cut_off(file):
            raise UnusableError(f"{file} is damaged: it ends before its last segment")


def _is_cut_off(file: Path) -> bool:
    """True if a segment of a 64-bit ELF file ends after the file does."""
    with file.open("rb") as stream:
        start = stream.read(64)
        if start[:5] != b"\x7fELF\x02"[: len(start)]:
            return False  # the loader reports what is wrong with such a file
        if len(start) < 64:
            return True
        (table,) = struct.unpack_from("<Q", start, 0x20)
        size, count = struct.unpack_from("<HH", start, 0x36)
        stream.seek(table)
        headers = stream.read(size * count)
    if len(headers) < size * count:
        return True
    spans = (struct.unpack_from("<8xQ16xQ", headers, size * k) for k in range(count))
    return any(offset + length > file.stat().st_size for offset, length in spans)


def _already_loaded(soname: str) -> str | None:
    """The loaded file comes first: two copies of cuDNN would mix up their sub-libraries."""
    return mapped(soname)


def _pathfinder(soname: str) -> str | None:
    if not soname.endswith(".9"):
        return None  # it finds the newest major version only
    if not (_loader_is_safe() and all(os.path.isabs(os.environ.get(k) or "/") for k in _ROOTS)):
        return None
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return None
    try:
        path = load_nvidia_dynamic_lib("cudnn").abs_path
    except Exception:  # its own errors for "not found" and "cannot load": try the next place
        return None
    return path if path and os.path.basename(path).startswith(soname) else None


def _packaged(soname: str) -> str | None:
    """The file in ``nvidia-cudnn-cu12`` or ``-cu13``, in the folders of installed packages."""
    for folder in _package_folders():
        path = folder / "nvidia" / "cudnn" / "lib" / soname
        if path.is_absolute() and path.is_file():
            return str(path)
    return None


def _package_folders() -> Iterator[Path]:
    """The folders of installed packages; not ``sys.path``, which may have the working directory."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and cupy.__file__:  # finds the folder of pip --target
        yield Path(cupy.__file__).resolve().parent.parent
    yield from (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    if site.ENABLE_USER_SITE:
        yield Path(site.getusersitepackages())


def _system(soname: str) -> str | None:
    return soname if _loader_is_safe() else None


def _loader_is_safe() -> bool:
    """True if LD_LIBRARY_PATH has no empty or relative entry: it means the working directory."""
    named = os.environ.get("LD_LIBRARY_PATH")
    return not named or all(os.path.isabs(entry) for entry in named.replace(";", ":").split(":"))


def mapped(soname: str) -> str | None:
    """The file of a library that this process has loaded, or ``None``."""
    try:
        with open("/proc/self/maps") as lines:
            paths = (line.split(maxsplit=5)[-1].strip() for line in lines if soname in line)
            return next((p for p in paths if os.path.basename(p).startswith(soname)), None)
    except OSError:  # not Linux
        return None

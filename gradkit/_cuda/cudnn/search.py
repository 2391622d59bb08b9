"""Where the cuDNN library is looked for, and nowhere else.

Never in the working directory, and in no folder that is named by a relative path: loading a
library runs its code.
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

# A name for messages, and what gives the library's path (or a bare name for the system's own
# loader) for a file name, or None.
Place: TypeAlias = tuple[str, Callable[[str], str | None]]


# Where cuda-pathfinder looks too.
_ROOTS = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "CUDNN_PATH", "PYTHONUSERBASE")


class UnusableError(Exception):
    """No cuDNN that can be used was found; the text says why."""


def places() -> list[Place]:
    """In the order in which they are tried.

    cuda-pathfinder would begin with the PyPI packages too, but loads what it finds unseen.
    """
    return [
        ("already loaded", _already_loaded),
        ("PyPI packages", _packaged),
        ("cuda-pathfinder", _pathfinder),
        ("the system's loader", _system),
    ]


def open_first(soname: str, where: Iterable[Place]) -> tuple[ctypes.CDLL, str]:
    """The library from the first place where it loads, and its path.

    It stays private to this process' users of it (``RTLD_LOCAL``): another cuDNN that a
    framework has brought along keeps its own symbols.
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
            if path != soname:  # a file that is there and does not load
                failures.append(f"{path} ({place}) does not load: {error}")
            continue
        if path == soname:
            path = mapped(soname) or path
        return library, path
    raise UnusableError("; ".join(failures) or f"{soname} is not installed")


def _check_whole(path: str, soname: str) -> None:
    """Loading a file that ends too soon (a download broke off, say) kills the process."""
    suffix = soname.removeprefix("libcudnn")
    for part in ("", "_graph", "_ops", "_ops_infer", "_ops_train"):
        file = Path(path).with_name(f"libcudnn{part}{suffix}")
        if file.is_file() and _is_cut_off(file):
            raise UnusableError(f"{file} is damaged: it ends before its last segment")


def _is_cut_off(file: Path) -> bool:
    """Whether a segment of a 64-bit ELF file lies beyond the file's end."""
    with file.open("rb") as stream:
        start = stream.read(64)
        if start[:5] != b"\x7fELF\x02"[: len(start)]:
            return False  # the loader says what is wrong with such a file
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
    """Two copies of one cuDNN in a process would mix up their sub-libraries."""
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
        found = load_nvidia_dynamic_lib("cudnn").abs_path
    except Exception:  # its own errors for "not found" and "cannot load"; the rest is tried next
        return None
    return found if found and os.path.basename(found).startswith(soname) else None


def _packaged(soname: str) -> str | None:
    """Out of ``nvidia-cudnn-cu12`` or ``-cu13`` in a folder that Python installs packages to."""
    for folder in _package_folders():
        path = folder / "nvidia" / "cudnn" / "lib" / soname
        if path.is_absolute() and path.is_file():
            return str(path)
    return None


def _package_folders() -> Iterator[Path]:
    """Not ``sys.path``, which may hold the working directory."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and cupy.__file__:  # also where pip --target put both
        yield Path(cupy.__file__).resolve().parent.parent
    yield from (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    if site.ENABLE_USER_SITE:
        yield Path(site.getusersitepackages())


def _system(soname: str) -> str | None:
    return soname if _loader_is_safe() else None


def _loader_is_safe() -> bool:
    """An empty or relative entry of LD_LIBRARY_PATH stands for the working directory."""
    named = os.environ.get("LD_LIBRARY_PATH")
    return not named or all(os.path.isabs(entry) for entry in named.replace(";", ":").split(":"))


def mapped(soname: str) -> str | None:
    """The file of a library that this process has loaded."""
    try:
        with open("/proc/self/maps") as lines:
            paths = (line.split(maxsplit=5)[-1].strip() for line in lines if soname in line)
            return next((p for p in paths if os.path.basename(p).startswith(soname)), None)
    except OSError:  # not Linux
        return None

"""Compiled libraries on disk, kept by what they were made from and shared by processes."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@functools.cache
def cache_folder() -> Path:
    """Return a folder of this user's own: in the cache, or else with the temporary files."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    fallback = Path(tempfile.gettempdir(), f"gradkit-emulator-{os.getuid()}")
    for folder in (Path(base, "gradkit-emulator"), fallback):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise RuntimeError(f"neither {base} nor {fallback} can hold the emulator's compiled kernels")


@contextmanager
def locked(library: Path) -> Iterator[None]:
    """Return a context in which this process alone may build ``library``; others wait."""
    import fcntl  # not on Windows, where there is a CPU backend to test too

    path = library.with_suffix(".lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, by the process's end too
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # whoever waits for it looks for the library next


def digest(*parts: str) -> str:
    """Return a short name for these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

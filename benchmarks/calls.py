"""How many Python functions a warm call runs: ``python -m benchmarks.calls [--list]``.

Counts all 'call' events of ``sys.setprofile``, whosever code it is. On the CUDA host the device
neither compiles nor launches; its arrays are CuPy's own where CuPy is installed, else a double's,
whose Python code is not counted.
"""

import argparse
import importlib.util
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import gradkit
from benchmarks.host import MAKERS, Maker

_PACKAGE = Path(gradkit.__file__).parent
# The double's code, and what frees its arrays.
_DOUBLE = (
    *(_PACKAGE.parent / name for name in ("benchmarks", "testbed", "tests")),
    weakref.__file__,
    Path(np.__file__).parent / "_core" / "_internal.py",
)


def warm_calls(make: Maker) -> dict[str, Callable[[], Any]]:
    """The calls that are counted."""

    def array(*shape: int) -> Any:
        return make(np.ones(shape, np.float32))

    x, dy, scale, row = array(8, 64), array(8, 64), array(64), array(8)
    two = [array(64), array(8, 64)]
    return {
        "layer_norm_grad": lambda: gradkit.layer_norm_grad(dy, x, scale, row, row),
        "clip_grad_norm": lambda: gradkit.clip_grad_norm(two, 1e9),
    }


def traced(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The file and the name of each Python function that a call runs, in order."""
    seen: list[tuple[str, str]] = []
    double: FrameType | None = None

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal double
        path = Path(frame.f_code.co_filename)
        own = path.is_relative_to(_PACKAGE)
        if double is not None:
            double = None if event == "return" and frame is double else double
        elif event == "call" and any(map(path.is_relative_to, _DOUBLE)):
            double = frame if frame.f_code is not call.__code__ else None
        elif event == "call":
            name = path.relative_to(_PACKAGE).as_posix() if own else path.name
            seen.append((name, frame.f_code.co_qualname))

    for _ in range(3):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def files_of(seen: list[tuple[str, str]]) -> set[str]:
    """The files that functions are in; a record's initializer, which is generated, is in none."""
    return {file for file, _ in seen} - {"<string>"}


def main() -> None:
    """Print calls and files, and with ``--list`` each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name each function")
    listed = parser.parse_args().list
    device = "cupy" if importlib.util.find_spec("cupy") else "idle"
    for place in ("numpy", device):
        with MAKERS[place]() as make:
            for name, call in warm_calls(make).items():
                seen = traced(call)
                files = len(files_of(seen))
                print(f"{place:6} {name:16} {len(seen):3} calls in {files:2} files")
                if listed:
                    print("\n".join(f"    {file:32} {function}" for file, function in seen))


if __name__ == "__main__":
    main()

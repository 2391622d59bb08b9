"""Cost of a warm call by how its arrays are passed: ``python -m benchmarks.calls``.

The first table counts, by ``sys.setprofile``, the calls of Python functions that are in gradkit's
files, and these files. Not counted: functions in C, other libraries' code, what a dataclass
generates, and comprehensions, which are no calls since Python 3.12. The second has microseconds,
the best of many rounds in which all calls take turns, and their ratio to another call's.

The CUDA host's arrays are CuPy's, on the testbed's driver, which forgets every launch; without CuPy
they are a double's, and only counted.

``--counts`` prints the first table alone; ``--list`` also each function that it counts. What is not
installed is left out: ``make bench-calls`` has all.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import gradkit
from benchmarks.host import MAKERS, Maker
from benchmarks.report import markdown
from benchmarks.timing import microseconds
from gradkit import _host

_PACKAGE = Path(gradkit.__file__).parent
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
NORM, LIST, DICT, MANY = "layer_norm_grad 8x64", "clip [a, b]", "clip {w: a, b: b}", "clip 1000"
LISTS, DICTS, STEP = "accumulate two lists", "accumulate two dicts", "adamw [a, b]"
COUNTED = (NORM, LIST, DICT, DICTS)
# The call of the same library that a call's time is divided by.
BESIDE = {
    "clip (a, b)": LIST,
    DICT: LIST,
    "clip {layer: {w: a, b: b}}": LIST,
    "clip a": LIST,
    "clip [a, b], max_norm=10": LIST,
    "clip [a, b], max_norm=array": LIST,
    "adamw [a, b], scale=array": STEP,
    "clip 1000 in 500 dicts of a dict": MANY,
    DICTS: LISTS,
}
Table = list[tuple[str, ...]]


def calls(make: Maker) -> dict[str, Callable[[], Any]]:
    """All calls, clips with ``max_norm=10.0``. The arrays are of zeros, which none changes."""

    def array(*shape: int) -> Any:
        return make(np.zeros(shape, np.float32))

    x, scale, row, a, b = array(8, 64), array(64), array(8), array(64), array(8, 64)
    named, grads = {"w": a, "b": b}, {"w": array(64), "b": array(8, 64)}
    many = [array(256) for _ in range(1000)]
    layers = {f"layer{k}": {"w": many[2 * k], "b": many[2 * k + 1]} for k in range(500)}
    clip, accumulate = gradkit.clip_grad_norm, gradkit.accumulate_grads
    moments = [[array(64), array(8, 64)] for _ in range(2)]
    adamw = partial(gradkit.adamw_update, [a, b], list(grads.values()), *moments, 1, lr=0.1)
    return {
        NORM: partial(gradkit.layer_norm_grad, array(8, 64), x, scale, row, row),
        LIST: partial(clip, [a, b], 10.0),
        "clip (a, b)": partial(clip, (a, b), 10.0),
        DICT: partial(clip, named, 10.0),
        "clip {layer: {w: a, b: b}}": partial(clip, {"layer": named}, 10.0),
        "clip a": partial(clip, a, 10.0),
        "clip [a, b], max_norm=10": partial(clip, [a, b], 10),
        "clip [a, b], max_norm=array": partial(clip, [a, b], make(np.array(10.0))),
        MANY: partial(clip, many, 10.0),
        "clip 1000 in 500 dicts of a dict": partial(clip, layers, 10.0),
        LISTS: partial(accumulate, [a, b], list(grads.values())),
        DICTS: partial(accumulate, named, grads),
        STEP: adamw,
        "adamw [a, b], scale=array": partial(adamw, scale=make(np.array(0.5))),
    }


def traced(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The file and the name of each of gradkit's functions that a warm call runs, in order."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        own = event == "call" and path.is_relative_to(_PACKAGE)
        if own and code.co_name not in _COMPREHENSIONS:
            seen.append((path.relative_to(_PACKAGE).as_posix(), code.co_qualname))

    for _ in range(3):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def counts(place: str, make: Maker, *, listed: bool = False) -> Table:
    """A row for each call that is counted: what it is, its calls, and the files they are in."""
    rows: Table = []
    for name, call in calls(make).items():
        if name in COUNTED:
            seen = traced(call)
            rows.append((f"{place}: {name}", str(len(seen)), str(len({f for f, _ in seen}))))
            rows += [(f"{file}: {function}", "", "") for file, function in seen if listed]
    return rows


def times(makers: dict[str, Maker]) -> Table:
    """A row for each call that is timed; other libraries are set beside the first."""
    first, rows, beside, every = next(iter(makers)), list[tuple[str, ...]](), {}, {}
    for place, make in makers.items():
        for name, call in calls(make).items():
            every[f"{place}: {name}"] = call
            if other := BESIDE.get(name) if place == first else name:
                beside[f"{place}: {name}"] = f"{first}: {other}"
    best = microseconds(every)
    for label, took in best.items():
        other = beside.get(label, "")
        rows.append((label, f"{took:.1f}", f"{took / best[other]:.2f}" if other else "", other))
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--counts", action="store_true", help="the first table alone")
    parser.add_argument("--list", action="store_true", help="name each function")
    options = parser.parse_args()
    here = {
        "the compiled backend": _host.describe()["compiled"]["available"],
        "PyTorch": importlib.util.find_spec("torch"),
        "CuPy": importlib.util.find_spec("cupy"),
    }
    makers: dict[str, Maker] = {"compiled" if here["the compiled backend"] else "NumPy": np.array}
    if here["PyTorch"]:
        makers["PyTorch"] = importlib.import_module("torch").from_numpy
    rows = [row for p, make in makers.items() for row in counts(p, make, listed=options.list)]
    timed = [] if options.counts else times(makers)  # before anything imports CuPy
    with MAKERS["driver" if here["CuPy"] else "idle"]() as make:
        rows += counts("CUDA host", make, listed=options.list)
        timed += times({"CuPy": make}) if timed and here["CuPy"] else []
    print(markdown(("call", "Python calls", "files"), rows))
    if timed:
        print("", markdown(("call", "us", "ratio", "beside"), timed), sep="\n")
    if missing := [name for name, found in here.items() if not found]:
        print(f"\nNot installed, and left out: {', '.join(missing)}.")


if __name__ == "__main__":
    main()

"""Cases, and how they are measured: warmed up, in interleaved rounds, with quartiles.

A *case* is one operation on one shape and dtype, done by gradkit and by each peer. All of its
calls take turns, round after round, so that what else the machine does hits them alike, and
ratios are taken within rounds. A copy of known size takes its turn too: the machine's own
bandwidth at that time.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks import machine

Call = Callable[[], object]
Timer = Callable[[Call], float]

COPY = "copy"
OURS = "gradkit"
COPIED = 64 << 20  # bytes that the copy reads, and again that it writes


@dataclass
class Case:
    """One operation on one shape, by everyone who can do it.

    ``bytes`` counts what must be read and written, scratch left out. ``calls`` has gradkit's
    own under "gradkit", a variant under "gradkit ...", a peer under the peer's name. A
    target is the least ratio of a peer's time to gradkit's, the least fraction of the copy's
    bandwidth under "copy", or the most milliseconds under "ms". ``check`` raises if what
    gradkit computes is wrong.
    """

    operation: str
    shape: str
    dtype: str
    bytes: int
    calls: Mapping[str, Call]
    targets: Mapping[str, float] = field(default_factory=dict)
    check: Call | None = None
    note: str = ""
    repeats: int = 1  # calls in a row that are timed as one, where one is too short


def wall(call: Call) -> float:
    """Seconds that one call takes on the CPU. A GPU has its own timer, of device events."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: Case, copy: Call, timer: Timer = wall, seconds: float = 3.0) -> dict[str, Any]:
    """All times of a case in ``seconds`` or so, as what the results file holds of it."""
    if case.check is not None:
        case.check()
    calls, failed = {COPY: copy}, {}
    for name, call in case.calls.items():
        try:
            call()
            calls[name] = call
        except Exception as error:
            if name.startswith(OURS):
                raise
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    repeats = {name: 1 if name == COPY else case.repeats for name in calls}

    def timed(name: str) -> float:
        return timer(_repeated(calls[name], repeats[name])) / repeats[name]

    once = sum(timed(name) * repeats[name] for name in calls)
    rounds = int(min(101, max(7, seconds / once)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    (own, all_), start = machine.busy(), time.perf_counter()
    for k in range(rounds):
        order = list(calls) if k % 2 else list(reversed(calls))
        for name in order:
            times[name].append(timed(name))
    (own_now, all_now), elapsed = machine.busy(), time.perf_counter() - start
    for name, call in calls.items():  # a peer in another process has its own clock
        if hasattr(call, "times"):
            times[name] = call.times()[-rounds:]
    return {
        "operation": case.operation,
        "shape": case.shape,
        "dtype": case.dtype,
        "bytes": case.bytes,
        "note": case.note,
        "failed": failed,
        "rounds": rounds,
        "cores_taken_by_others": round(max(0.0, all_now - all_ - own_now + own) / elapsed, 2),
        "ms": {name: _spread(np.array(t) * 1e3) for name, t in times.items()},
        "ratios": {
            name: _spread(np.array(t) / times[OURS])
            for name, t in times.items()
            if name not in (OURS, COPY)
        },
        "of_copy": _spread(case.bytes / (2 * COPIED) * np.array(times[COPY]) / times[OURS]),
        "targets": dict(case.targets),
    }


def verdicts(result: Mapping[str, Any]) -> Iterable[tuple[str, float, float, bool]]:
    """(what, wanted, measured, met) of every target of a measured case."""
    for name, wanted in result["targets"].items():
        if name == "ms":
            got = result["ms"][OURS]["median"]
            yield "ms", wanted, got, got <= wanted
        elif name == COPY:
            got = result["of_copy"]["median"]
            yield "of copy", wanted, got, got >= wanted
        elif name in result["ratios"]:
            got = result["ratios"][name]["median"]
            yield f"{name} /", wanted, got, got >= wanted


def copier() -> Call:
    """The machine's own copy, by whatever NumPy does it with."""
    source = np.ones(COPIED, np.uint8)
    target = np.zeros_like(source)
    return lambda: np.copyto(target, source)


def _repeated(call: Call, count: int) -> Call:
    if count == 1:
        return call

    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def _spread(values: np.ndarray[Any, Any]) -> dict[str, float]:
    low, median, high = quantiles(map(float, values), n=4, method="inclusive")
    found = {"min": min(values), "q1": low, "median": median, "q3": high}
    return {name: float(f"{value:.4g}") for name, value in found.items()}

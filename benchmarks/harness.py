"""Cases, and how they are measured: warmed up, in interleaved rounds, with quartiles.

A *case* is one operation on one shape and dtype, run by gradkit and by each peer. The calls take
turns, round after round, so that other load on the machine affects all of them equally, and ratios
are taken within a round. A copy of known size takes its turn too, as a measure of the machine's
bandwidth at that time.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.places import Call, Place

COPY = "copy"
AIM = "copy, aimed at"  # a goal; missing it is no failure
OURS = "gradkit"
LAUNCH = "empty launch"
WALLS = 5  # the wall time of a call is the median of so many rows of calls


@dataclass
class Case:
    """One operation on one shape, by gradkit and every peer that has it.

    ``bytes`` counts what must be read and written, without scratch. ``calls`` has gradkit's call
    under "gradkit", a variant under "gradkit ...", a peer's under its name. A target is a minimum
    ratio of a peer's time to gradkit's (under the peer's name), a minimum fraction of the copy's
    bandwidth ("copy"), or a maximum in milliseconds ("ms", "wall ms"). ``check`` raises an error
    if gradkit's result is wrong.
    """

    operation: str
    shape: str
    dtype: str
    bytes: int
    calls: Mapping[str, Call]
    targets: Mapping[str, float] = field(default_factory=dict)
    check: Call | None = None
    note: str = ""
    repeats: int = 1  # calls in a row that are timed as one, if a single one is too short


def measure(case: Case, place: Place, seconds: float) -> dict[str, Any]:
    """Measure a case for about ``seconds``; the entry of the results file."""
    if case.check is not None:
        case.check()
    calls, failed = {COPY: place.copy}, {}
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
        return place.timer(row[name]) / repeats[name]

    row = {name: _repeated(call, repeats[name]) for name, call in calls.items()}
    start = time.perf_counter()
    for name in calls:
        timed(name)
    once = time.perf_counter() - start
    rounds = int(min(101, max(7, seconds / once)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    (own, all_), start = machine.busy(), time.perf_counter()
    for k in range(rounds):
        order = list(calls) if k % 2 else list(reversed(calls))
        for name in order:
            times[name].append(timed(name))
    (own_now, all_now), elapsed = machine.busy(), time.perf_counter() - start
    for name, call in calls.items():  # a peer in another process measures its own times
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
        "wall_ms": _walls(place, calls),
        "of_copy": _spread(case.bytes / (2 * place.copied) * np.array(times[COPY]) / times[OURS]),
        "targets": dict(case.targets),
    }


def verdicts(result: Mapping[str, Any]) -> Iterable[tuple[str, float, float, bool]]:
    """(what, wanted, measured, met) of every target of a measured case."""
    for name, wanted in result["targets"].items():
        if name in ("ms", "wall ms"):
            got = result[name.replace(" ", "_")][OURS]["median"]
            yield name, wanted, got, got <= wanted
        elif name == LAUNCH and LAUNCH in result["wall_ms"]:
            own, launch = (result["wall_ms"][who]["median"] for who in (OURS, LAUNCH))
            yield "wall in launches", wanted, own / launch, own <= wanted * launch
        elif name in (COPY, AIM):
            got = result["of_copy"]["median"]
            yield name.replace(COPY, "of copy"), wanted, got, got >= wanted
        elif name in result["ratios"] and name != LAUNCH:
            got = result["ratios"][name]["median"]
            yield f"{name} /", wanted, got, got >= wanted


def _walls(place: Place, calls: Mapping[str, Call]) -> dict[str, dict[str, float]]:
    """Milliseconds per call of many in a row, if the place measures that too."""
    rows = {
        name: [place.wall(call) for _ in range(WALLS)]
        for name, call in calls.items()
        if name != COPY
    }
    return {name: _spread(np.array(row) * 1e3) for name, row in rows.items() if None not in row}


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

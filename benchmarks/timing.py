"""Cases and their measurement: interleaved rounds for large arrays, ``timeit`` for short calls.

A *case* is one operation on one shape and dtype, run by gradkit and by each peer. The calls take
turns, round after round, so that other load on the machine affects all of them equally, and ratios
are taken within a round. A copy of known size takes its turn too, as a measure of the machine's
bandwidth at that time.
"""

import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks import peers, system_info
from benchmarks.devices import Array, Call, Device
from benchmarks.peers import Arguments, Table

COPY = "copy"
OWN_COPY = "own copy"  # of as many bytes as a case has
AIM = "copy, aimed at"  # a goal; missing it is no failure
OURS = "gradkit"
OUT = "gradkit out="
LAUNCH = "empty launch"
OVERHEAD = "overhead"  # the note of a case that is nearly nothing else
ROUND = 0.002  # seconds of a round of short calls
WALLS = 5  # the wall time of a call is the median of so many rows of calls
SHORT, REPEATS = 1 << 22, 10  # below so many bytes, calls in a row that are timed as one
OFF = {2: 1e-2, 4: 1e-4, 8: 1e-10}  # error relative to the largest element, by itemsize


@dataclass
class Case:
    """One operation on one shape, by gradkit and every peer that has it.

    ``table`` has the operation by gradkit and by peers (see peers.py); ``arguments`` makes what
    they take, the same arrays for all: of copies, one may lie better in memory than another. Calls
    write those that are ``written``. ``bytes`` counts what must be read and written, without
    scratch. ``out``: gradkit also writes into given arrays. A target is a minimum ratio of a peer's
    time to gradkit's (under the peer's name), a minimum fraction of the copy's bandwidth ("copy"),
    or a maximum in milliseconds ("ms", "wall ms"). ``checked`` selects what is compared with the
    formula.
    """

    operation: str
    shape: str
    dtype: str
    table: Table
    arguments: Callable[[], Arguments]
    bytes: int
    targets: Mapping[str, float] = field(default_factory=dict)
    written: Sequence[str] = ()
    out: bool = False
    peers: Sequence[str] | None = None  # all that have the operation
    checked: Callable[[Arguments], Arguments] = dict
    note: str = ""

    def __str__(self) -> str:
        """Return the operation, the shape and the dtype."""
        return f"{self.operation} {self.shape} {self.dtype}"

    def makers(self, device: Device, everyone: Sequence[str]) -> dict[str, Callable[[], Call]]:
        """Return for gradkit and each peer a function that makes the call to be timed.

        What is written is copied once: it may be another argument too.
        """
        arguments, found = self._own(self.arguments()), dict[str, Callable[[], Call]]()
        ours = [name for name in self.table if name.startswith(OURS)]
        others = [name for name in everyone if self.peers is None or name in self.peers]
        for name, make in peers.makers(self.table, [*ours, *others]).items():
            found[name] = lambda make=make: make(arguments)
            if self.out and name == OURS:
                found[OUT] = lambda make=make: _with_out(make(arguments), device)
        if self.note == OVERHEAD and (launch := device.launch()):
            found[LAUNCH] = lambda: launch
        return found

    def check(self, device: Device) -> None:
        """Compare gradkit's results with the plain formula in float64."""
        if "naive" not in self.table:
            return
        given = self._own(self.checked(self.arguments()))
        exact = self._own(peers.mapped(device.exact, given))
        most = OFF[min(array.dtype.itemsize for array in _arrays(given))]
        results, expected = self.table[OURS](**given), self.table["naive"](**exact)
        pairs = [*zip(_arrays(results), _arrays(expected), strict=False)]
        pairs += [
            pair
            for name in self.written
            for pair in zip(_arrays(given[name]), _arrays(exact[name]), strict=True)
        ]
        for got, wanted in pairs:
            off, size = abs(device.exact(got) - wanted).max(), abs(wanted).max()
            if not float(off) <= most * float(size):
                raise AssertionError(f"{self} is off by {float(off):.2g} of {float(size):.2g}")

    def _own(self, arguments: Arguments) -> Arguments:
        """Return the arguments, with copies of those that are written."""
        return arguments | {name: _copied(arguments[name]) for name in self.written}


def on_array(
    device: Device, name: str, table: Table, shape: tuple[int, ...], dtype: str, **rest: Any
) -> Case:
    """Return a case on an array, of which on a CPU only PyTorch is a peer if it is not float32."""
    others = ("torch",) if device.name == "cpu" and dtype != "float32" else None
    return Case(name, "x".join(map(str, shape)), dtype, table, out=True, peers=others, **rest)


def measure(case: Case, device: Device, everyone: Sequence[str], seconds: float) -> dict[str, Any]:
    """Measure a case for about ``seconds``; return its line of the record."""
    case.check(device)
    repeats = REPEATS if device.name == "cpu" and case.bytes < SHORT else 1
    units = {COPY: device.copy, OWN_COPY: device.copy_of(case.bytes // 2)}
    calls: dict[str, Call] = {name: copy for name, copy in units.items() if copy}
    timed, failed = dict(calls), {}
    for name, make in case.makers(device, everyone).items():
        try:
            calls[name] = make()
            calls[name]()
            timed[name] = _repeated(calls[name], repeats)
        except Exception as error:
            if name.startswith(OURS):
                raise
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            calls.pop(name, None)
    start = time.perf_counter()
    for call in timed.values():
        device.timer(call)
    rounds = int(min(101, max(7, seconds / (time.perf_counter() - start))))
    times: dict[str, Any] = {name: [] for name in timed}
    busy, start = system_info.busy(), time.perf_counter()
    for k in range(rounds):
        for name in list(timed) if k % 2 else reversed(timed):
            times[name].append(device.timer(timed[name]) / (1 if name in units else repeats))
    taken = system_info.taken_by_others(busy) / (time.perf_counter() - start)
    for name, call in calls.items():  # a peer in another process measures its own times
        if isinstance(call, peers.Remote):
            times[name] = call.times()[-rounds:]
    copies, ours = (np.array(times[name]) for name in (COPY, OURS))
    others = {name: call for name, call in calls.items() if name not in units}
    walls = {n: [device.wall(call) for _ in range(WALLS)] for n, call in others.items()}
    return {
        **line(case, {name: row for name, row in times.items() if name not in units}, ours),
        "copy": _quartiles(case.bytes / (2 * device.copied) * copies / ours),
        **{n: _quartiles(np.array(times[n]) / ours) for n in (OWN_COPY,) if n in times},
        "wall_ms": {n: _figure(1e3 * median(row)) for n, row in walls.items() if None not in row},
        "failed": failed,
        "rounds": rounds,
        "others": round(taken, 2),
    }


def line(case: Case, times: Mapping[str, Sequence[float]], ours: Any) -> dict[str, Any]:
    """Return a case's line: quartiles of milliseconds, and of the ratios to ``ours``."""
    kept = ("operation", "shape", "dtype", "bytes", "note", "targets")
    return {
        **{name: getattr(case, name) for name in kept},
        "ms": {name: _quartiles(np.array(row) * 1e3) for name, row in times.items()},
        "ratio": {n: _quartiles(np.array(row) / ours) for n, row in times.items() if n != OURS},
    }


def microseconds(calls: Mapping[str, Call], rounds: int = 200) -> dict[str, float]:
    """Return the microseconds of short calls, the best of rounds in which they take turns."""
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    counts = {n: max(1, int(ROUND / min(timer.repeat(3, 1)))) for n, timer in timers.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, timer in timers.items():
            best[name] = min(best[name], timer.timeit(counts[name]) / counts[name] * 1e6)
    return best


def verdicts(case: Mapping[str, Any]) -> Iterator[tuple[str, float, float, bool]]:
    """Yield (what, wanted, measured, met) of every target of a case's line."""
    walls, ratios = case.get("wall_ms", {}), case["ratio"]
    for name, wanted in case.get("targets", {}).items():
        if name in ("ms", "wall ms"):
            got = case["ms"][OURS][1] if name == "ms" else walls[OURS]
            yield name, wanted, got, got <= wanted
        elif name == LAUNCH and LAUNCH in walls:
            got = walls[OURS] / walls[LAUNCH]
            yield "wall in launches", wanted, got, got <= wanted
        elif name in (COPY, AIM):
            yield name.replace(COPY, "of copy"), wanted, case["copy"][1], case["copy"][1] >= wanted
        elif name in ratios and name != LAUNCH:
            yield f"{name} /", wanted, ratios[name][1], ratios[name][1] >= wanted


def _with_out(call: Any, device: Device) -> Call:
    """Return a call of gradkit that writes into arrays like its results."""
    return partial(call, out=peers.mapped(device.empty_like, call()))


def _repeated(call: Call, count: int) -> Call:
    def repeated() -> None:
        for _ in range(count):
            call()

    return call if count == 1 else repeated


def _copied(value: Any) -> Any:
    return [member.copy() for member in value] if isinstance(value, list) else value.copy()


def _arrays(value: Any) -> list[Array]:
    """Return the arrays of nested lists and dicts, in order."""
    found: list[Array] = []
    peers.mapped(found.append, value)
    return found


def _quartiles(values: Any) -> list[float]:
    return list(map(_figure, quantiles(map(float, values), n=4, method="inclusive")))


def _figure(number: float) -> float:
    return float(f"{number:.4g}")

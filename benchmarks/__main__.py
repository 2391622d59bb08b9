"""Measure everything: ``python -m benchmarks [--device cuda] [--only clip] [--peers torch]``."""

import argparse
import datetime
import importlib
import importlib.util
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import (
    onnxruntime_peer,
    overhead,
    peers,
    report,
    rows,
    scaling,
    startup,
    system_info,
    timing,
)
from benchmarks.devices import DEVICES, Device

FAMILIES = ("rows", "channels", "lists", "step", "overhead")
PYPERF = importlib.util.find_spec("pyperf") is not None
ONCE = 20  # cases that take as long as what is measured once
OUT = Path(__file__).with_name("out")  # ignored by git: a run leaves the checkout clean


def main() -> int:
    """Measure, print the tables, and write the record."""
    options = _options()
    start = time.monotonic()
    try:
        device = DEVICES[options.device]()
    except Exception as error:
        sys.exit(f"--device {options.device} is not available: {type(error).__name__}: {error}")
    wanted = options.peers.split(",") if options.peers else peers.ON[options.device]
    everyone, missing = peers.available(wanted)
    run = _begun(options.device, missing)
    if "onnxruntime" in everyone:
        run["machine"]["versions"]["onnxruntime"] = onnxruntime_peer.check_interpreter()
    path = options.out or folder() / f"{system_info.slug(run['machine'])}-{run['date']}.jsonl"
    kept = options.out is not None or not (options.quick or options.device == "emulated")
    print(f"results go to {path}" if kept else "results are only printed", flush=True)
    deadline = start + options.budget if options.budget else float("inf")
    for _ in _measured(run, device, everyone, options, deadline):
        if kept:
            report.write(run, path)
    whole = not options.quick and options.only == ",".join(FAMILIES)
    if whole and time.monotonic() < deadline:
        try:
            run |= _once(options.device)
        except Exception as error:
            _fail(run, "what is measured once", error)
    run["load"].append(os.getloadavg()[0])
    run["seconds"] = round(time.monotonic() - start)
    print(report.table(run), report.walls(run), report.targets(run), sep="\n\n")
    if kept:
        report.write(run, path)
        print(f"\nwritten: {path}\nto publish it: make bench-record RUN={path}")
    return int(bool(run["errors"]))


def _begun(device: str, missing: dict[str, str]) -> report.Run:
    """Return a run without cases."""
    run: report.Run = {
        "date": datetime.datetime.now().astimezone().date().isoformat(),
        "command": _command(sys.argv[1:]),
        "device": device,
        "paused": device == "cpu",
        "machine": system_info.describe(),
        "missing": missing,
        "dropped": [],
        "errors": [],
        "load": [os.getloadavg()[0]],
        "cases": [],
    }
    if device == "cuda":
        run["machine"]["gpu"] = system_info.describe_gpu()
    return run


def _measured(
    run: report.Run, device: Device, everyone: list[str], options: Any, deadline: float
) -> Iterator[None]:
    """Add cases to the run. Families share the time by their cases, and leave the next the rest."""
    words, start = options.only.split(","), time.monotonic()
    families = [name for name in FAMILIES if name in words] or list(FAMILIES)
    cases = {name: list(_cases(name, words, device, quick=options.quick)) for name in families}
    left = ONCE + sum(map(len, cases.values()))
    for name, found in cases.items():
        now = time.monotonic()
        share, left = now + (deadline - now) * len(found) / left, left - len(found)
        try:
            if name == "overhead" and device.name == "cpu" and not options.quick and PYPERF:
                print(f"{now - start:5.0f} s  overhead, by pyperf", flush=True)
                run["cases"] += overhead.lines(everyone)
                continue
            for case in found:
                if time.monotonic() > share:
                    run["dropped"].append(f"{name}: {case} and all cases after it")
                    break
                print(f"{time.monotonic() - start:5.0f} s  {case}", flush=True)
                _add(run, case, device, everyone, options.seconds)
                yield
        except Exception as error:
            _fail(run, f"{name}, all remaining cases", error)


def _add(
    run: report.Run, case: timing.Case, device: Device, everyone: list[str], seconds: float
) -> None:
    """Measure a case. A failure, a wrong result included, does not end the run."""
    try:
        device.drop()
        run["cases"].append(timing.measure(case, device, everyone, seconds))
    except Exception as error:
        _fail(run, str(case), error)


def _command(arguments: list[str]) -> str:
    """Return how a run was asked for, but for the file that it writes."""
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    return shlex.join(["python", "-m", "benchmarks", *arguments])


def folder() -> Path:
    """Return where records are written by default: $OUT if it is set, otherwise benchmarks/out."""
    return Path(os.environ.get("OUT") or OUT)


def _cases(name: str, words: list[str], device: Device, *, quick: bool) -> Iterator[timing.Case]:
    """Yield the cases of a file whose titles begin with one of the words, or that is one."""
    for case in importlib.import_module(f"benchmarks.{name}").cases(device, quick=quick):
        if name in words or str(case).startswith(tuple(words)):
            yield case


def _once(device: str) -> dict[str, Any]:
    """Return what is measured once per run."""
    if device == "cpu":
        return {"scaling": scaling.tables()}
    formula = timing.microseconds({"formula": rows.formula()})["formula"]
    return {"startup": startup.measure(device), "formula_us": formula}


def _fail(run: report.Run, where: str, error: Exception) -> None:
    traceback.print_exception(error)
    run["errors"].append(f"{where}: {type(error).__name__}: {error}".partition("\n")[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, nothing is written")
    parser.add_argument(
        "--only",
        default=",".join(FAMILIES),
        help="families, or beginnings of cases (operation, shape, dtype), separated by commas",
    )
    parser.add_argument("--peers", help="peers, separated by commas (benchmarks/README.md)")
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds per case")
    parser.add_argument(
        "--budget", type=float, help="seconds for the whole run; what does not fit is dropped"
    )
    parser.add_argument(
        "--out", type=Path, help="record to write; the default is in $OUT or benchmarks/out"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

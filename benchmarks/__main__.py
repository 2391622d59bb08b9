"""Measure everything: ``python -m benchmarks [--device cuda] [--only clip] [--peers torch]``."""

import argparse
import datetime
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench_overhead, gpu_peers, harness, machine, peers, report, scaling, startup
from benchmarks.places import Cuda, Emulated, Host

FILES = (
    "layer_norm",
    "rms_norm",
    "invertible",
    "batch_norm",
    "group_norm",
    "forward",
    "clip",
    "step",
    "accumulate",
    "overhead",
)
PEERS = {
    "cpu": ("naive", "torch", "jax", "optax", "onnxruntime"),
    "cuda": tuple(peer.name for peer in gpu_peers.EVERYONE),
    "emulated": tuple(peer.name for peer in gpu_peers.EVERYONE),
}
PLACES = {"cpu": Host, "cuda": Cuda, "emulated": Emulated}
OUT = Path(__file__).with_name("out")  # ignored by git: a run leaves the checkout clean


def main() -> int:
    """Measure, print the tables, and write a results file with its page and plots."""
    options = _options()
    start = time.monotonic()
    try:
        place = PLACES[options.device]()
    except Exception as error:
        sys.exit(f"--device {options.device} is not available: {type(error).__name__}: {error}")
    wanted = options.peers.split(",") if options.peers else PEERS[options.device]
    on_cpu = options.device == "cpu"
    found_peers, missing = peers.available(wanted) if on_cpu else gpu_peers.available(wanted, place)
    found: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().date().isoformat(),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "device": options.device,
        "machine": machine.describe(),
        "missing": missing,
        "dropped": [],
        "errors": [],
        "load": [machine.load()],
        "cases": [],
    }
    versions = {peer.name: peer.version for peer in found_peers if hasattr(peer, "version")}
    found["machine"]["versions"] |= versions
    if options.device == "cuda":
        found["machine"]["gpu"] = machine.describe_gpu()
    path = options.out or folder() / f"{machine.slug(found['machine'])}-{found['date']}.json"
    kept = options.out is not None or not (options.quick or options.device == "emulated")
    print(f"results go to {path}" if kept else "results are only printed", flush=True)
    names = options.only.split(",")
    deadline = start + options.budget if options.budget else float("inf")
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        now = time.monotonic()
        share = now + (deadline - now) / (left + 1)  # one more for what is measured once
        try:
            for case in _cases(name, place, found_peers, options):
                if time.monotonic() > share:
                    found["dropped"].append(f"{name}: {_title(case)} and all cases after it")
                    break
                print(f"{time.monotonic() - start:5.0f} s  {_title(case)}", flush=True)
                _add(case, found, place, options.seconds)
                if kept:
                    _write(found, path)
        except Exception as error:
            _fail(found, f"{name}, all remaining cases", error)
    if not options.quick and time.monotonic() < deadline:
        try:
            found |= _once(options.device)
        except Exception as error:
            _fail(found, "what is measured once", error)
    found["load"].append(machine.load())
    found["seconds"] = round(time.monotonic() - start)
    print(report.table(found), report.summary(found), sep="\n\n")
    if kept:
        _write(found, path)
        report.write(found, path)
        print(f"\nwritten: {path}\nto publish it: make bench-record RUN={path}")
    return int(bool(found["errors"]))


def folder() -> Path:
    """Where results are written by default: $OUT if it is set, otherwise benchmarks/out."""
    return Path(os.environ.get("OUT") or OUT)


def _add(case: harness.Case, found: dict[str, Any], place: Any, seconds: float) -> None:
    """Measure a case. A failure, a wrong result included, does not end the run."""
    try:
        found["cases"].append(harness.measure(case, place, seconds))
    except Exception as error:
        _fail(found, _title(case), error)
    place.drop()


def _fail(found: dict[str, Any], where: str, error: Exception) -> None:
    traceback.print_exception(error)
    found["errors"].append(f"{where}: {type(error).__name__}: {error}".partition("\n")[0])


def _cases(
    name: str, place: Any, everyone: Sequence[Any], options: argparse.Namespace
) -> Iterator[harness.Case]:
    file = importlib.import_module(f"benchmarks.bench_{name}")
    if options.device == "cpu":
        return file.cases(everyone, quick=options.quick)
    return file.device_cases(place, everyone)


def _once(device: str) -> dict[str, Any]:
    """What is measured once per run."""
    if device == "cpu":
        return {
            "scaling": scaling.tables(quick=False),
            "import": bench_overhead.imports(),
            "memory": bench_overhead.memory(),
        }
    imports = bench_overhead.imports(rounds=15 if device == "cuda" else 3)
    return {"import": imports, "startup": startup.measure(device)}


def _title(case: harness.Case) -> str:
    return f"{case.operation} {case.shape} {case.dtype}"


def _write(found: dict[str, Any], path: Path) -> None:
    """Write what has been measured so far: a run may be cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=PLACES, default="cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, nothing is written")
    parser.add_argument(
        "--only", default=",".join(FILES), help="files, separated by commas (default: all)"
    )
    parser.add_argument("--peers", help="peers, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds per case")
    parser.add_argument(
        "--budget", type=float, help="seconds for the whole run; what does not fit is dropped"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="results file to write (JSON); the default is in $OUT or benchmarks/out",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Measure everything: ``python -m benchmarks [--quick] [--only clip] [--peers naive,torch]``."""

import argparse
import datetime
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import bench_overhead, harness, machine, report, scaling
from benchmarks.peers import available

FILES = ("layer_norm", "rms_norm", "batch_norm", "clip", "accumulate", "overhead")
PEERS = ("naive", "torch", "jax", "onnxruntime")
RESULTS = Path(__file__).with_name("results")


def main() -> int:
    """Measure, print the tables, and write the results with their page and plots."""
    options = _options()
    peers, missing = available(options.peers.split(","))
    found: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().date().isoformat(),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "machine": machine.describe(),
        "missing": missing,
        "load": [machine.load()],
        "cases": [],
    }
    found["machine"]["versions"] |= {p.name: p.version for p in peers if hasattr(p, "version")}
    start, copy = time.monotonic(), harness.copier()
    for name in options.only.split(","):
        for case in importlib.import_module(f"benchmarks.bench_{name}").cases(
            peers, quick=options.quick
        ):
            print(f"{time.monotonic() - start:5.0f} s  {case.operation} {case.shape} {case.dtype}")
            found["cases"].append(harness.measure(case, copy, seconds=options.seconds))
    if not options.quick:
        found["scaling"] = scaling.tables(quick=False)
        found["import"] = bench_overhead.imports()
        found["memory"] = bench_overhead.memory()
    found["load"].append(machine.load())
    found["seconds"] = round(time.monotonic() - start)
    print(report.table(found), report.summary(found), sep="\n\n")
    if options.out is not None or not options.quick:
        path = options.out or RESULTS / f"{machine.slug(found['machine'])}-{found['date']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        report.write(found, path)
        print(f"\nwritten: {path}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few shapes, nothing is written")
    parser.add_argument("--only", default=",".join(FILES), help="files, separated by commas")
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, separated by commas")
    parser.add_argument("--seconds", type=float, default=2.5, help="for each case")
    parser.add_argument("--out", type=Path, help="where to write the results (JSON)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

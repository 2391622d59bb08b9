"""Publish a finished run: ``python -m benchmarks.record FILE.json`` (``make bench-record``).

Copies the results file into ``benchmarks/results``, in the place of earlier results of the same
machine, makes its page and plots there, and makes ``docs/performance.md`` from all files there.
Without a file it makes only ``docs/performance.md``.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks import machine, report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PARTIAL = ("--only", "--peers", "--quick")  # options of runs that leave something out


def main() -> None:
    """Record the files named on the command line, then make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results files of finished runs")
    for path in parser.parse_args().files:
        print(f"written: {record(path)}")
    PAGE.write_text(overview())
    print(f"written: {PAGE}")


def record(path: Path) -> Path:
    """Copy a run into ``RESULTS`` and make its page and plots; the path of the copy."""
    text = path.read_text()
    results = json.loads(text)
    if reason := _unfit(results):
        sys.exit(f"{path} is not recorded: {reason}")
    name = machine.slug(results["machine"])
    target = RESULTS / f"{name}-{results['date']}.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    plots = report.plots(results, target.with_suffix(""))
    target.with_suffix(".md").write_text(report.page(results, plots))
    for earlier in RESULTS.glob(f"{name}-[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*"):
        if not earlier.name.startswith(target.stem):
            earlier.unlink()
    return target


def overview() -> str:
    """The text of ``PAGE``, from every results file."""
    files = sorted(RESULTS.glob("*.json"))
    plots = [
        [os.path.relpath(plot, PAGE.parent) for plot in sorted(RESULTS.glob(f"{path.stem}-*.png"))]
        for path in files
    ]
    return report.overview([json.loads(path.read_text()) for path in files], plots)


def _unfit(results: report.Results) -> str:
    """Why a run should not be published, or "" if it should."""
    if results["device"] == "emulated":
        return "the emulator's times mean nothing"
    if "seconds" not in results:
        return "the run did not finish"
    if results["errors"]:
        return f"the run has errors: {'; '.join(results['errors'])}"
    left_out = [word for word in results["command"].split() if word in PARTIAL]
    return f"the run is a partial one, with {left_out[0]}" if left_out else ""


if __name__ == "__main__":
    main()

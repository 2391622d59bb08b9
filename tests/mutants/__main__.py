"""Run every mutant against its tests and print which were killed.

``python -m tests.mutants [--fast] [--only WORD] [--jobs N]``; exits 1 if one survives.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.mutants.plugin import ROOT
from tests.mutants.table import MUTANTS, Mutant

LIMIT_S = 600


class Outcome(NamedTuple):
    """How one mutant fared."""

    mutant: Mutant
    killed: bool
    seconds: float
    how: str


def main() -> int:
    """Run the chosen mutants; the number of survivors decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="one mutant of each file")
    parser.add_argument("--only", default="", help="those whose file or description has this word")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.file or options.only in m.what]
    if options.fast:
        chosen = list({m.file: m for m in chosen}.values())
    for marker in sorted({m.marker for m in chosen}):
        _check_green(marker, {test for m in chosen if m.marker == marker for test in m.tests})
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(run, chosen):
            outcomes.append(outcome)
            _print(outcome)
    survivors = sum(not outcome.killed for outcome in outcomes)
    print(f"{len(outcomes) - survivors} killed, {survivors} survived")
    return 1 if survivors else 0


def run(mutant: Mutant) -> Outcome:
    """One mutant against its tests, which stop at the first failure."""
    start = time.perf_counter()
    planted = ("-p", "tests.mutants.plugin", "--mutant", mutant.file, mutant.old, mutant.new)
    try:
        finished = _pytest(mutant.tests, "-m", mutant.marker, *planted)
    except subprocess.TimeoutExpired:
        return Outcome(mutant, True, LIMIT_S, "hangs")
    # 1 is "tests failed", 2 "could not be collected"; anything else is not the mutant's doing.
    if finished.returncode not in (0, 1, 2):
        raise RuntimeError(f"{mutant.what}: {finished.stdout[-2000:]}{finished.stderr[-2000:]}")
    how = next((line for line in finished.stdout.splitlines() if line.startswith("FAILED")), "")
    killed = finished.returncode != 0
    return Outcome(mutant, killed, time.perf_counter() - start, how[7:90])


def _check_green(marker: str, tests: set[str]) -> None:
    """Tests that fail without a mutant would kill every mutant."""
    finished = _pytest(tuple(sorted(tests)), "-m", marker)
    if finished.returncode != 0:
        sys.exit(f"the tests fail without any mutant:\n{finished.stdout[-4000:]}")


def _pytest(tests: tuple[str, ...], *extra: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *extra, *tests)
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def _print(outcome: Outcome) -> None:
    state = "killed  " if outcome.killed else "SURVIVED"
    where = f"{outcome.mutant.file}: {outcome.mutant.what}"
    print(f"{state} {outcome.seconds:6.1f} s  {where:<80} {outcome.how}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

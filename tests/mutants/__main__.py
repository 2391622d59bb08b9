"""Run mutants against their tests, on all cores; ``RESULTS.md`` keeps which test killed each.

``python -m tests.mutants [--fast] [--resume] [--interop] [--only WORD]``; exits 1 if one survives.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.mutants import results
from tests.mutants.faults import FAMILIES
from tests.mutants.plugin import ROOT
from tests.mutants.results import Result
from tests.mutants.table import MUTANTS, Mutant

LIMIT_S = 300
_NO_SUCH_TEST, _NOTHING_CHOSEN = 4, 5  # pytest's exit statuses; 3 is a complaint of its own too
_KINDS = ("not slow", "slow")  # of tests, the quick ones first
_TEST = re.compile(r"^(tests/\S+\.py::.+?)(?: (?:PASSED|FAILED|ERROR|SKIPPED).*)? *$", re.M)


def main() -> int:
    """Run the chosen mutants; a survivor makes the exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fast", action="store_true", help="the quickest mutant of each family and file"
    )
    parser.add_argument("--resume", action="store_true", help="those not known to be killed")
    parser.add_argument("--only", default="", help="those whose file or description has this text")
    parser.add_argument(
        "--interop", action="store_true", help="those of gradkit.torch and gradkit.jax instead"
    )
    options = parser.parse_args()
    before = results.read()
    chosen = [m for m in MUTANTS if options.only in m.name and m.interop == options.interop]
    if options.fast:
        quick = _quickest(before)
        chosen = [m for m in chosen if m.name in quick]
    if options.resume:
        chosen = [m for m in chosen if m.name not in before or not before[m.name].killer]
    again = {m.name for m in chosen}
    found = {name: result for name, result in before.items() if name not in again}
    survivors = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda mutant: run(mutant, before | found), chosen):
            print(
                f"{result.seconds:6.1f} s  {result.name}: {result.killer or 'SURVIVED'}", flush=True
            )
            found[result.name] = result
            survivors += [] if result.killer else [result.name]
            if not options.fast:
                results.write([found[m.name] for m in MUTANTS if m.name in found])
    print(f"{len(chosen) - len(survivors)} killed, {len(survivors)} survived", *survivors, sep="\n")
    return 1 if survivors else 0


def run(mutant: Mutant, known: dict[str, Result]) -> Result:
    """One mutant against the tests that killed it or others of its file, then against all."""
    own = known.get(mutant.name, Result("", "", 0)).killer
    likely = {r.killer for r in known.values() if r.name.startswith(f"{mutant.file}:")}
    for tests in ((own,), tuple(sorted(likely - {own, ""})), mutant.tests):
        start = time.perf_counter()
        killer = next(filter(None, (_killer(mutant, tests, kind) for kind in _KINDS)), "")
        seconds = time.perf_counter() - start
        if killer:
            if killer != own:
                _check_green(killer, compiled=mutant.compiled)
            break
    return Result(mutant.name, killer, seconds)


def _killer(mutant: Mutant, tests: tuple[str, ...], kind: str) -> str:
    """The first test of that kind that fails, hangs or crashes, or "" if none does."""
    if not any(tests):
        return ""
    planted = ("-p", "tests.mutants.plugin", "--mutant", mutant.file, mutant.old, mutant.new)
    marker = f"({mutant.marker}) and {kind}"
    status, output = _pytest(tests, "-m", marker, *planted, compiled=mutant.compiled)
    if status == _NOTHING_CHOSEN or (status == _NO_SUCH_TEST and tests != mutant.tests):
        return ""  # a test that is no longer there, or of the other kind
    if status in (3, 4) or "g++ rejects the source" in output:
        raise RuntimeError(f"not a mutant: {mutant.name}\n{output[-4000:]}")
    at: str = (_TEST.findall(output) or tests)[-1]
    if status is None and tests != (at,):  # a test that hangs, or a slow machine
        return _killer(mutant, (at,), kind)
    return at if status != 0 else ""


@functools.cache
def _check_green(test: str, *, compiled: bool) -> None:
    """A test that fails without a mutant would kill every mutant. Those known are the suite's."""
    status, output = _pytest((test,), compiled=compiled)
    if status:
        sys.exit(f"this fails without any mutant:\n{output[-4000:]}")


def _pytest(tests: tuple[str, ...], *extra: str, compiled: bool = False) -> tuple[int | None, str]:
    """The exit status, or none where time ran out, and what was printed."""
    command = (sys.executable, "-m", "pytest", "-v", "-x", "--no-header", *extra, *tests)
    environment = {
        **os.environ,
        "HYPOTHESIS_PROFILE": "ci",
        "GRADKIT_PTX": "80" if compiled else "0",
        "GRADKIT_PTX_CONTRACTED": "1",  # with every fusion that ptxas may make
    }
    try:
        finished = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as stopped:
        return None, (stopped.stdout or b"").decode()
    return finished.returncode, finished.stdout


def _quickest(before: dict[str, Result]) -> set[str]:
    """One mutant of each family of faults in kernels, and one of each file in Python."""
    everything = [before.get(m.name, Result(m.name, "", 0)) for m in MUTANTS]
    groups = [
        [result for kind in kinds for result in results.of_kind(kind, everything)]
        for kinds in FAMILIES.values()
    ]
    files = {m.file for m in MUTANTS if m.file.endswith(".py") and not m.interop}
    groups += [[r for r in everything if r.name.startswith(f"{file}:")] for file in files]
    return {min(group, key=lambda r: (not r.killer, r.seconds)).name for group in groups}


if __name__ == "__main__":
    sys.exit(main())

"""Plant faults one by one; each must make a test fail that runs its line. See README.md.

``python -m tests.mutants [--interop | --driver] [--each N] [--seconds S] [--only TEXT]
[--without TEXT]``; the exit status is 1 if a mutant survives. Results go to ``build/mutants``.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants import covered, kernel_rules, python_rules
from tests.mutants.covered import Timed
from tests.mutants.mutant import ROOT, Mutant, by_hand, digest, equivalent, in_order

OUT = ROOT / "build" / "mutants"
# What calls CuPy; the other tests run stand-ins for it.
DRIVER = re.compile(
    r"gradkit/(_cuda/(launch/(device|replay)|several_devices)|_arrays/(cuda|cupy))\.py"
)
# What runs only where PyTorch, JAX and TensorFlow are.
INTEROP = re.compile(r"gradkit/(torch/|jax/|_ranks/torch\.py|_arrays/(jax|tensorflow|torch)\.py)")
GRACE_S = 90  # that tests may take longer than they did: kernels that are needed are found anew
BUILD_S = 300  # that C++ may take to compile
_BATCHES = (5, 40, 400, 4000)  # tests at once: most mutants die in the first batch
_SURVIVORS = ("survived", "timed out", "run by no test")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$", re.M)


class Result(NamedTuple):
    """Result of one mutant."""

    digest: str  # of the mutated file
    file: str
    rule: str
    shown: str
    status: str  # "killed", "no mutant" (no compiler takes it) or of ``_SURVIVORS``
    killer: str = ""
    seconds: float = 0.0


def every_mutant(*, interop: bool = False, driver: bool = False) -> list[Mutant]:
    """All mutants of the code as it is, by rule and by hand; ``driver``: of what calls CuPy."""
    found: list[Mutant] = []
    kernels = ROOT / "kernels"
    native = [*kernels.glob("*.cu*"), *kernels.glob("cpu/*.cpp"), *kernels.glob("cpu/*.h")]
    for path in sorted([*(ROOT / "gradkit").rglob("*.py"), *native]):
        file, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if DRIVER.match(file) if driver else bool(INTEROP.match(file)) == interop:
            rules = python_rules if path.suffix == ".py" else kernel_rules
            places = [*rules.places(text), *by_hand(text)]
            if _language(file) == "C++":  # of such an index no test can tell without gigabytes
                places = [place for place in places if "32 bits" not in place.rule]
            found += in_order(file, text, places)
    return found


def sample(mutants: Iterable[Mutant], each: int) -> list[Mutant]:
    """``each`` of each rule for Python, kernels and C++, spread over files: always the same.

    First one of each rule, then the second of each.
    """
    files: Counter[tuple[str, str]] = Counter()
    groups = defaultdict(list)
    for mutant in sorted(mutants, key=lambda m: (m.order, m.file)):
        turn = files[mutant.rule, mutant.file]
        files[mutant.rule, mutant.file] += 1
        groups[mutant.rule, _language(mutant.file)].append((turn, mutant.order, mutant))
    spread = [sorted(group, key=lambda row: row[:2])[:each] for group in groups.values()]
    turns = [(k, row[1], row[2]) for rows in spread for k, row in enumerate(rows)]
    return [mutant for _, _, mutant in sorted(turns, key=lambda row: row[:2])]


def _language(file: str) -> str:
    return {"py": "Python", "cu": "kernels", "cuh": "kernels"}.get(file.rpartition(".")[2], "C++")


def run(mutant: Mutant, tests: Sequence[Timed], cap: float) -> Result:
    """Run tests in batches until one fails, as many as take ``cap`` seconds without a fault."""
    begin = time.perf_counter()
    status, killer = "survived" if tests else "run by no test", ""
    total = accumulate(test.cost for test in tests)
    left = [
        test for k, (test, at) in enumerate(zip(tests, total, strict=True)) if not k or at < cap
    ]
    for size in _BATCHES:
        batch, left = left[:size], left[size:]
        if batch and status == "survived":
            status, killer = _run_batch(mutant, batch)
    about = digest(mutant.mutated), mutant.file, mutant.rule, mutant.shown
    return Result(*about, status, killer, round(time.perf_counter() - begin, 1))


def _run_batch(mutant: Mutant, batch: Sequence[Timed]) -> tuple[str, str]:
    place = mutant.place
    planted = ("-x", "--mutant", mutant.file, str(place.start), str(place.end), place.new)
    extra = {"GRADKIT_PTX": "80", "GRADKIT_PTX_CONTRACTED": "1"} if place.compiled else {}
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        if mutant.file.startswith("kernels/"):  # what is compiled goes with the mutant
            shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            extra["XDG_CACHE_HOME"] = folder
            own = Path(folder, "gradkit-emulator")
            own.mkdir(mode=0o700)
            for known in (shared / own.name).glob("*.[js]*o*"):
                (own / known.name).symlink_to(known)
        limit = GRACE_S + sum(6 * test.cost for test in batch)
        limit += BUILD_S * (_language(mutant.file) == "C++")
        status, output = pytest([t.name for t in batch], planted, extra, limit)
    if status is None:
        return "timed out", ""
    if "rejects the source" in output and mutant.file.startswith("kernels/"):
        return "no mutant", ""
    if status in (0, 5) or "ERROR: not found: " in output:  # a test that is no longer there
        return "survived", ""
    found = _FAILED.search(output)
    return "killed", found[1] if found else f"{batch[0].name} (exit status {status})"


def pytest(
    tests: Iterable[str], options: Sequence[str], extra: dict[str, str], limit: float
) -> tuple[int | None, str]:
    """The exit status, or none if time ran out, and what was printed."""
    plain = ("-q", "--tb=line", "-rfE", "--no-header", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", "-p", "tests.mutants.plugin", *plain, *options)
    quick = {**os.environ, "HYPOTHESIS_PROFILE": "quick", **extra}
    with tempfile.NamedTemporaryFile("w") as names, tempfile.TemporaryFile() as out:
        names.write("\n".join(tests))
        names.flush()
        where: Any = {"cwd": ROOT, "env": quick, "stdout": out, "stderr": subprocess.STDOUT}
        # In a session of its own, so that what it starts ends with it.
        process = subprocess.Popen((*command, f"@{names.name}"), start_new_session=True, **where)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None, ""
        out.seek(0)
        return process.returncode, out.read().decode(errors="replace")


def unfounded(results: Iterable[Result]) -> set[str]:
    """Killers that fail without any mutant too."""
    killers = {r.killer for r in results if "::" in r.killer}
    plain = sorted(k for k in killers if "[ptx" not in k and "(exit status" not in k)
    status, output = pytest(plain, (), {}, GRACE_S + 20 * len(plain)) if plain else (0, "")
    return set(_FAILED.findall(output)) if status else set()


def main() -> int:
    """Run the chosen mutants; a survivor makes the exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--each", type=int, default=10**9, help="that many of each rule")
    add("--seconds", type=float, default=1e9, help="begin none after that long")
    add("--cap", type=float, default=240, help="seconds of tests for one mutant")
    add("--interop", action="store_true", help="what runs where PyTorch and JAX are")
    add("--driver", action="store_true", help="what calls CuPy, on the testbed's driver")
    add("--only", default="", help="those whose file, rule or line has this text")
    add("--without", default="", help="leave out those with this text, such as compiled:")
    add("--list", action="store_true", help="print the mutants alone")
    options = parser.parse_args()
    begin = time.perf_counter()
    every = every_mutant(interop=options.interop, driver=options.driver)
    spared = equivalent()
    wanted = [m for m in every if options.only in m.shown]
    if options.without:
        wanted = [m for m in wanted if options.without not in m.shown]
    marked = {m: any(e.covers(m) for e in spared) for m in wanted}
    chosen = sample((m for m, same in marked.items() if not same), options.each)
    if options.list:
        print(*(m.shown for m in chosen), sep="\n")
        return 0
    where = "interop" if options.interop else "driver" if options.driver else ""
    if options.driver:
        os.environ["PYTEST_ADDOPTS"] = "-p testbed.driver.plugin"
    tests = covered.load(*(OUT / folder for folder in ([where] if where else ["tests", "slow"])))
    path = OUT / f"{where or 'results'}.json"  # a row a line
    rows = path.read_text().splitlines() if path.exists() else []
    earlier = [Result(*json.loads(row)) for row in rows]
    known = {r.digest: r for r in earlier if r.status not in _SURVIVORS}

    def one(mutant: Mutant) -> Result | None:
        name = digest(mutant.mutated)
        if name in known or time.perf_counter() - begin > options.seconds:
            return known.get(name)
        found = run(mutant, tests.of(mutant), options.cap)
        print(f"{found.seconds:6.1f} s  {found.status}: {found.shown}", flush=True)
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [result for result in pool.map(one, chosen) if result is not None]
    bad = unfounded(r for r in results if r.digest not in known)
    results = [r._replace(status="survived") if r.killer in bad else r for r in results]
    with path.open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in results if r.killer in bad)
    print(summary(results), *(f"{name} fails without any mutant" for name in bad), sep="\n")
    print(f"{sum(marked.values())} are marked as equivalent, {len(chosen) - len(results)} not run")
    return int(any(r.status in _SURVIVORS for r in results))


def summary(results: Sequence[Result]) -> str:
    """Every survivor, and how many of each rule were killed."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[_language(result.file), result.rule][result.status] += 1
    lines = [f"{r.status}: {r.shown}" for r in results if r.status in _SURVIVORS]
    total = sum(counts.values(), Counter())
    for (kind, rule), by in [*sorted(counts.items()), (("", "all"), total)]:
        rest = "".join(f", {n} {status}" for status, n in by.most_common() if status != "killed")
        lines.append(f"{kind:7}  {rule:42} {by['killed']:5} killed{rest}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

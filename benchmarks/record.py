"""Publish a finished run: ``python -m benchmarks.record FILE.jsonl`` (``make bench-record``).

Copies the record into ``benchmarks/results``, in the place of an earlier one of the same machine,
with what further files have of other peers in the same cases (``make bench-gpu-compiled``), and
makes plots there, ``docs/performance.md``, two pages for each record in ``docs/records`` and what
the README says of speed from all records. Without a file it only makes those.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report, system_info

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PAGES = ROOT / "docs" / "records"
README = ROOT / "README.md"
IN_A_GPT = ROOT / "docs" / "torch.md"  # has a table of a GPT on PyTorch's tensors
EAGER = re.compile(r"^\| eager \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
SPEED = re.compile(r"^\*\*Fast on large arrays\.\*\*.*\n(?:.+\n)*", re.MULTILINE)
PARTIAL = ("--only", "--quick")  # options of runs that leave cases out
HEAD = """# Performance

gradkit pays on arrays of megabytes and on lists of many gradients. A call on a few thousand elements is nearly all
overhead: do without gradkit there if each microsecond counts.
"""  # noqa: E501
PARTS = {
    "cpu": (
        "## On a CPU: {machine}",
        "How many times as long as gradkit NumPy's own calls and PyTorch take on {machine}",
        "Times of calls with cold caches, in float32.",
    ),
    "cuda": (
        "## On a GPU: {machine}",
        "How many times as long as gradkit other libraries take on {machine}",
        "Times of calls in a row, with what the host does. On small arrays gradkit is behind: "
        "their kernels take a few microseconds, and the host the rest.",
    ),
}
FOOT = """## How it was measured

`make bench-record` writes this page from the records in `benchmarks/results`; no figure is entered by hand.
[The benchmarks](../benchmarks/README.md) explain the measurements and how to repeat them,
[their notes](../benchmarks/NOTES.md) list what was tried for speed, and [predictions](predictions.md) compare
a model with the GPU.

```{toctree}
:hidden:

RECORDS
```
"""  # noqa: E501


def main() -> None:
    """Record the files named on the command line, then make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="a finished run, and parts of it")
    parser.add_argument(
        "--with-errors", action="store_true", help="also if cases failed, which the page names"
    )
    options = parser.parse_args()
    if options.files:
        print(f"written: {record(*options.files, with_errors=options.with_errors)}")
    for path in RESULTS.glob("*.jsonl"):
        draw(path)
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.md"):
        old.unlink()
    for path, text in pages().items():
        path.write_text(text)
        print(f"written: {path}")


def record(path: Path, *parts: Path, with_errors: bool = False) -> Path:
    """Copy a run into ``RESULTS``, with parts of it; return the path of the copy."""
    run = report.read(path)
    if reason := _unfit(run, with_errors=with_errors) or _partial(run):
        sys.exit(f"{path} is not recorded: {reason}")
    name = system_info.slug(run["machine"])
    for other in parts:
        part = report.read(other)
        reason = "" if system_info.slug(part["machine"]) == name else "it is of another machine"
        if reason := _unfit(part, with_errors=with_errors) or reason:
            sys.exit(f"{other} is not recorded: {reason}")
        run = report.joined(run, part)
    target = RESULTS / f"{name}-{run['date']}.jsonl"
    report.write(run, target)
    for earlier in RESULTS.glob(f"{name}-[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*"):
        if not earlier.name.startswith(target.stem):
            earlier.unlink()
    return target


def draw(path: Path) -> None:
    """Draw the plots of a record beside it."""
    run, stem = report.read(path), path.with_suffix("")
    report.plots(run, stem)
    report.glance(run, stem)


def pages() -> dict[Path, str]:
    """Return the text of every page that is made from records."""
    runs = [(path, report.read(path)) for path in sorted(RESULTS.glob("*.jsonl"))]
    found = {README: readme(runs)}
    toctree = []
    for path, run in runs:
        name = _name(path)
        plots = [p for p in sorted(RESULTS.glob(f"{path.stem}-*.png")) if p != _glance(path)]
        pictures = [os.path.relpath(plot, PAGES) for plot in plots]
        found[PAGES / f"{name}.md"] = report.page(run, pictures, f"{name}-cases.md")
        found[PAGES / f"{name}-cases.md"] = report.cases_page(run, f"{name}.md")
        toctree += [f"{PAGES.name}/{name}", f"{PAGES.name}/{name}-cases"]
    parts = [HEAD, *(text for path, run in runs for text in _part(path, run))]
    return found | {PAGE: "\n".join([*parts, FOOT.replace("RECORDS", "\n".join(toctree))])}


def _part(path: Path, run: report.Run) -> Iterator[str]:
    """Yield what the page of all records says of one: its chart, and where gradkit is behind."""
    if not _glance(path).exists():
        return
    title, alternative, said = (
        text.format(machine=report.machine_name(run)) for text in PARTS[run["device"]]
    )
    name = f"{PAGES.name}/{_name(path)}"
    yield f"{title}\n\n![{alternative}]({os.path.relpath(_glance(path), PAGE.parent)})\n"
    said += f" [Every operation, conditions and targets]({name}.md); [all cases]({name}-cases.md)."
    yield f"{_filled(said)}\n"
    count, table = report.behind(run)
    yield f"In {count} of {len(run['cases'])} cases another library is faster:\n\n{table}\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def readme(runs: list[tuple[Path, report.Run]]) -> str:
    """Return the text of ``README``, with figures of the records that the page begins with."""
    text = README.read_text()
    for _, run in runs:
        if run["device"] == "cuda":
            text = report.replaced(text, "gpu", report.in_readme(run))
        elif said := _ratio(run):
            text = SPEED.sub(lambda _, said=said: f"{said}\n", text)
    return text


def _ratio(run: report.Run) -> str:
    """Return one ratio on a CPU with its machine, and that of PyTorch's tensors in a small GPT."""
    wanted = "layer_norm_grad", "8192x1024", "float32"
    found = {(case["operation"], case["shape"], case["dtype"]): case for case in run["cases"]}
    if wanted not in found or not (eager := EAGER.search(IN_A_GPT.read_text())):
        return ""
    case, (torch, ours) = found[wanted], eager.groups()
    return _filled(
        f"**Fast on large arrays.** On {report.machine_name(run)}, the gradient of layer norm of "
        f"8192 x 1024 float32 takes {case['ms']['gradkit'][1]:.2g} ms, and "
        f"{case['ratio']['torch'][1]:.2g} times as long in PyTorch. Small norms of PyTorch's "
        "tensors are slower than PyTorch's own: a forward and backward pass of a small GPT takes "
        f"{ours} ms with those of `gradkit.torch`, {torch} ms without. "
        "[Performance](docs/performance.md) lists where gradkit is slower."
    )


def _name(path: Path) -> str:
    return re.sub(r"(-\d+){3}$", "", path.stem)


def _glance(path: Path) -> Path:
    return path.with_name(f"{path.stem}-glance.png")


def _unfit(run: report.Run, *, with_errors: bool) -> str:
    """Return why a run should not be published, or "" if it should."""
    if run["device"] == "emulated":
        return "the emulator's times mean nothing"
    if "seconds" not in run:
        return "the run did not finish"
    if run["errors"] and not with_errors:
        return f"the run has errors: {'; '.join(run['errors'])}"
    return ""


def _partial(run: report.Run) -> str:
    """Return that a run leaves cases out, or ""."""
    left_out = [word for word in run["command"].split() if word in PARTIAL]
    return f"the run is a partial one, with {left_out[0]}" if left_out else ""


if __name__ == "__main__":
    main()

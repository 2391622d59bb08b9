"""Publish a finished run: ``python -m benchmarks.record FILE.jsonl`` (``make bench-record``).

Copies the record into ``benchmarks/results``, in the place of an earlier one of the same machine,
with what further files have of other peers in the same cases (``make bench-gpu-compiled``), and
makes plots there, ``docs/performance.md`` and what the README says of speed from all records.
Without a file it only makes those.
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
README = ROOT / "README.md"
IN_README = (
    ("layer_norm_grad", "8192x1024"),
    ("rms_norm_grad", "8192x1024"),
    ("clip_grad_norm, scaling", "1000 x 256"),
)
SPEED = re.compile(r"- \*\*Fast\.\*\*.*\n(?:  .*\n)*")
PARTIAL = ("--only", "--quick")  # options of runs that leave cases out
HEAD = """# Performance

gradkit pays on arrays of megabytes and lists of many gradients. If a call has only thousands of elements, nearly all of
its time is overhead: do without gradkit there if each microsecond counts.

{shown}

`make bench-record` writes this page from the records in `benchmarks/results`; no figure is entered by hand.
[benchmarks/README.md](../benchmarks/README.md) explains the measurements;
[benchmarks/NOTES.md](../benchmarks/NOTES.md) lists the optimisations that were tried. The oldest record, of
2026-11-23, is from before the compiled code, and its rows are NumPy's.
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
    for path, text in ((PAGE, page()), (README, readme())):
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
    if run["device"] == "cpu":
        report.glance(run, stem)


def page() -> str:
    """Return the text of ``PAGE``, from every record."""
    runs = [(path, report.read(path)) for path in sorted(RESULTS.glob("*.jsonl"))]
    parts = [HEAD.replace("{shown}", "\n\n".join([*_chart(runs), *_on_a_gpu(runs)]))]
    for path, run in runs:
        plots = sorted(RESULTS.glob(f"{path.stem}-*.png"))
        pictures = [os.path.relpath(plot, PAGE.parent) for plot in plots if plot != _glance(path)]
        parts.append(report.section(run, pictures) + "\n")
    return "\n".join(parts)


def readme() -> str:
    """Return the text of ``README``, with figures of the records that the page begins with."""
    text = README.read_text()
    for path in sorted(RESULTS.glob("*.jsonl")):
        if (run := report.read(path))["device"] == "cuda":
            text = report.replaced(text, "gpu", report.on_a_gpu(run))
    shown = [path for path in sorted(RESULTS.glob("*.jsonl")) if _glance(path).exists()]
    cases = report.read(shown[0])["cases"] if shown else []
    found = {(c["operation"], c["shape"]): c["ratio"] for c in cases if c["dtype"] == "float32"}
    if not found.keys() >= {*IN_README}:
        return text
    layer, rms, clip = (
        [f"{found[case][peer][1]:.2g} times" for peer in report.GLANCE_PEERS] for case in IN_README
    )
    said = (
        f"- **Fast.** On two cores, `layer_norm_grad` of a large array is {layer[0]} as fast as "
        f"NumPy's own calls and {layer[1]} as fast as PyTorch, `rms_norm_grad` {rms[0]} and "
        f"{rms[1]}, clipping 1000 small arrays {clip[0]} and {clip[1]} "
        "([all figures, also where gradkit is slower](docs/performance.md))."
    )
    lines = textwrap.fill(said, 118, subsequent_indent="  ", break_long_words=False)
    return SPEED.sub(lambda _: f"{lines}\n", text)


def _chart(runs: list[tuple[Path, report.Run]]) -> Iterator[str]:
    """Yield the page's first chart, of the first record that has one, and where it is from."""
    for path, run in runs:
        if _glance(path).exists():
            chart = os.path.relpath(_glance(path), PAGE.parent)
            yield f"![How many times faster than NumPy's own calls and PyTorch]({chart})"
            yield f"A part of what {_link(run)} measured, in float32 on two threads."
            return


def _on_a_gpu(runs: list[tuple[Path, report.Run]]) -> Iterator[str]:
    """Yield the table of each GPU, and where it is from."""
    for _, run in runs:
        if run["device"] == "cuda":
            yield report.on_a_gpu(run)
            yield (
                f"A part of what {_link(run)} measured. Times are those of calls in a row and, on "
                "the GPU, of its work with cold caches; `of copy` divides the bandwidth of the "
                "latter by a copy's."
            )


def _link(run: report.Run) -> str:
    title = report.section_title(run)
    return f"[{title}](#{_anchor(title)})"


def _glance(path: Path) -> Path:
    return path.with_name(f"{path.stem}-glance.png")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


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

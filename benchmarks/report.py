"""Tables and plots made from a results file; no figure in them is typed by hand.

``python -m benchmarks.report FILE.json`` writes the page and the plots beside the file.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import LAUNCH, OURS, verdicts

Results = Mapping[str, Any]

METHOD = {
    "cpu": "Times are medians of interleaved rounds. A ratio is the median of a peer's time over "
    "gradkit's in the same round. GB/s count useful bytes; `of copy` divides that by the bandwidth "
    "of `np.copyto` in the same rounds. `others` is how many cores other programs kept busy "
    "meanwhile, including the ONNX Runtime worker.",
    "cuda": "Times are those of the device, from events around a whole call, with L2 emptied "
    "before and the host ahead of the device; medians of interleaved rounds. A ratio is the median "
    "of a peer's time over gradkit's in the same round. GB/s count useful bytes; `of copy` divides "
    "that by the bandwidth of a copy of 512 MiB in the same rounds. `wall` is the time per call of "
    "many calls in a row, with warm caches.",
    "emulated": "Made on the emulator, as a test of the benchmarks: the times mean nothing.",
}


def table(results: Results) -> str:
    """One row per case: gradkit's time, bandwidth, fraction of copy, each peer's ratio."""
    names = _peers(results)
    head = ["operation", "shape", "dtype", "ms", "quartiles", "GB/s", "of copy"]
    head += [f"{name} ms (ratio)" for name in names]
    if _has_walls(results):
        head += ["wall ms", *(f"{name} wall ms" for name in names)]
    rows = [_row(case, names, walls=_has_walls(results)) for case in results["cases"]]
    return _markdown([*head, "others", "target"], rows)


def summary(results: Results) -> str:
    """One row per target: wanted, measured, met or not."""
    rows = []
    for case in results["cases"]:
        for what, wanted, got, met in verdicts(case):
            where = f"{case['operation']} {case['shape']} {case['dtype']}"
            kind = "<=" if what in ("ms", "wall ms", "wall in launches") else ">="
            missed = "short" if "aimed" in what else "MISSED"
            rows.append([where, what, f"{kind} {wanted:g}", f"{got:.3g}", "met" if met else missed])
    for what, found in (("import", results.get("import")), ("memory", results.get("memory"))):
        if found:
            most = found["at most"]
            worst = (
                found["added"] if what == "import" else max(v for v in found.values() if v != most)
            )
            unit = "ms over numpy" if what == "import" else "MiB beyond outputs"
            rows.append(
                [what, unit, f"<= {most:g}", f"{worst:g}", "met" if worst <= most else "MISSED"]
            )
    return _markdown(["what", "against", "target", "measured", "verdict"], rows)


def page(results: Results, plots: Iterable[str]) -> str:
    """The whole of a results file as Markdown."""
    parts = [
        f"# {_machine_name(results)}, {results['date']}",
        _conditions(results),
        METHOD[results.get("device", "cpu")],
        *_not_measured(results),
        "## Targets\n\n" + summary(results),
        "## Where a peer is faster\n\n" + slower(results),
        "## Cases\n\n" + table(results),
        *[f"## {name}\n\n{_scaling(rows)}" for name, rows in results.get("scaling", {}).items()],
        *_startup(results),
        *[f"![{plot}]({plot})" for plot in plots],
    ]
    return "\n\n".join(parts) + "\n"


def slower(results: Results) -> str:
    """One row for each case and peer for which gradkit is slower."""
    rows = [
        [case["operation"], case["shape"], case["dtype"], name, f"{ratio['median']:.2f}x"]
        for case in results["cases"]
        for name, ratio in case["ratios"].items()
        if not name.startswith(OURS) and name != LAUNCH and ratio["median"] < 1
    ]
    head = ["operation", "shape", "dtype", "peer", "its time / gradkit's"]
    return _markdown(head, rows) if rows else "Nowhere in this run."


def plots(results: Results, stem: Path) -> list[str]:
    """Draw ratios to the peers as bars and scaling as curves; return the files' names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not results["cases"]:
        return []
    names = _peers(results)
    # The dtype of most cases: float32 on a CPU, bfloat16 on a GPU if there are norms.
    dtype = Counter(c["dtype"] for c in results["cases"]).most_common(1)[0][0]
    cases = [c for c in results["cases"] if c["dtype"] == dtype and c["note"] != "overhead"]
    figure, axis = plt.subplots(figsize=(9, 1 + 0.42 * len(cases)))
    for k, name in enumerate(names):
        found = [(i, c["ratios"][name]) for i, c in enumerate(cases) if name in c["ratios"]]
        at = [i + 0.8 * (k + 0.5) / len(names) - 0.4 for i, _ in found]
        middle = [r["median"] for _, r in found]
        spread = [
            [r["median"] - r["q1"] for _, r in found],
            [r["q3"] - r["median"] for _, r in found],
        ]
        axis.barh(at, middle, 0.8 / len(names), xerr=spread, label=name)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(
        range(len(cases)), [f"{c['operation']} {c['shape']}" for c in cases], fontsize=7
    )
    axis.set_xscale("log")
    axis.set_xlabel("time of the peer / time of gradkit (right of the line: gradkit is faster)")
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    written = [_save(figure, stem, "peers")]
    if results.get("scaling"):
        figure, axes = plt.subplots(1, len(results["scaling"]), figsize=(13, 3.6))
        for axis, (name, rows) in zip(axes, results["scaling"].items(), strict=True):
            axis.loglog([r["at"] for r in rows], [r["ns an element"] for r in rows], marker="o")
            axis.set_title(name, fontsize=9)
            axis.set_ylabel("ns an element")
        written.append(_save(figure, stem, "scaling"))
    return written


def write(results: Results, path: Path) -> None:
    """Write the page beside a results file, and the plots if matplotlib is installed."""
    try:
        drawn = plots(results, path.with_suffix(""))
    except ImportError:
        drawn = []
    path.with_suffix(".md").write_text(page(results, drawn))


def _machine_name(results: Results) -> str:
    machine = results["machine"]
    gpu = machine.get("gpu")
    return gpu["name"] if gpu else f"{machine['cpu']}, {machine['cores']} cores"


def _conditions(results: Results) -> str:
    machine = results["machine"]
    versions, gpu = dict(machine["versions"]), machine.get("gpu")
    parts = [f"{machine['system']}, Python {machine['python']}, {machine['blas']}"]
    if gpu:
        versions |= gpu["versions"]
        parts.insert(
            0,
            f"{gpu['multiprocessors']} multiprocessors, L2 {gpu['l2_mib']} MiB, driver "
            f"{gpu['driver']}, CUDA {gpu['cuda']['runtime']}, NVRTC {gpu['cuda']['nvrtc']}, clocks "
            f"{gpu['clocks']} before the run; host {machine['cpu']}, {machine['cores']} cores",
        )
    parts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return (
        f"{'; '.join(parts)}. Caches {machine['caches']}. Load average {results['load'][0]:.2f} at "
        f"the start and {results['load'][-1]:.2f} at the end. Made by `{results['command']}`."
    )


def _not_measured(results: Results) -> Iterator[str]:
    for name, why in results["missing"].items():
        yield f"Not measured: {name} ({why})."
    for error in results.get("errors", []):
        yield f"**Failed: {error}.**"
    for what in results.get("dropped", []):
        yield f"Not measured, for lack of time: {what}."
    for case in results["cases"]:
        for name, why in case["failed"].items():
            where = f"{case['operation']} {case['shape']} {case['dtype']}"
            yield f"Not measured: {name} on {where} ({why})."


def _startup(results: Results) -> Iterator[str]:
    found = results.get("startup")
    if found:
        head = ["first call of a process, ms", *next(iter(found.values()))]
        rows = [[name, *(f"{ms:.4g}" for ms in row.values())] for name, row in found.items()]
        yield "## First calls\n\n" + _markdown(head, rows)


def _row(case: Mapping[str, Any], names: list[str], *, walls: bool) -> list[str]:
    own = case["ms"][OURS]
    rate = case["bytes"] / own["median"] / 1e6
    row = [case["operation"], case["shape"], case["dtype"], f"{own['median']:.4g}"]
    row += [f"{own['q1']:.3g}-{own['q3']:.3g}"]
    row += [f"{rate:.1f}", f"{case['of_copy']['median']:.2f}"] if case["bytes"] else ["", ""]
    for name in names:
        if name in case["ratios"]:
            row.append(f"{case['ms'][name]['median']:.4g} ({case['ratios'][name]['median']:.2f}x)")
        else:
            row.append("failed" if name in case["failed"] else "")
    if walls:
        found = (case["wall_ms"].get(name) for name in (OURS, *names))
        row += [f"{spread['median']:.4g}" if spread else "" for spread in found]
    marks = [
        f"{what} {wanted:g}: {'met' if met else f'MISSED ({got:.3g})'}"
        for what, wanted, got, met in verdicts(case)
    ]
    return [*row, f"{case['cores_taken_by_others']:.1f}", "; ".join(marks)]


def _has_walls(results: Results) -> bool:
    return any(case.get("wall_ms") for case in results["cases"])


def _scaling(rows: list[dict[str, float]]) -> str:
    head = list(rows[0])
    return _markdown(head, [[f"{row[name]:g}" for name in head] for row in rows])


def _peers(results: Results) -> list[str]:
    found = dict.fromkeys(name for case in results["cases"] for name in case["ratios"])
    return list(found)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _save(figure: Any, stem: Path, kind: str) -> str:
    path = stem.with_name(f"{stem.name}-{kind}.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")  # with the longest label
    return path.name


def overview(every: Sequence[Results], pictures: Sequence[Sequence[str]]) -> str:
    """docs/performance.md: each results file without its table of cases.

    ``pictures`` are the plots of each file, relative to the page.
    """
    parts = [
        "# Performance",
        "Made by `make bench-record` from the files in `benchmarks/results`; no figure here is "
        "typed by hand. [benchmarks/README.md](../benchmarks/README.md) says how things are "
        "measured; [benchmarks/NOTES.md](../benchmarks/NOTES.md) says what was tried and what "
        "keeps a row short of its aim.",
    ]
    for results, own in zip(every, pictures, strict=True):
        parts += [
            f"## {_machine_name(results)}, {results['date']}",
            _conditions(results),
            METHOD[results.get("device", "cpu")],
            *_not_measured(results),
            "### Targets\n\n" + summary(results),
            "### Where a peer is faster\n\n" + slower(results),
            *[f"![{Path(picture).stem.rpartition('-')[2]}]({picture})" for picture in own],
            *(part.replace("## ", "### ", 1) for part in _startup(results)),
        ]
    if not any(results.get("device") == "cuda" for results in every):
        parts.append(
            "## On a GPU\n\nNot yet run on a GPU: `make bench-gpu` measures everything there in "
            "one command, which the tests run on the emulator."
        )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Make the page and plots of each file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        write(json.loads(path.read_text()), path)


if __name__ == "__main__":
    main()

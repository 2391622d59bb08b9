"""Tables and plots out of a results file; nothing in them is typed.

``python -m benchmarks.report results/<file>.json`` writes the page and the plots beside it.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, verdicts

Results = Mapping[str, Any]


def table(results: Results) -> str:
    """One row a case: gradkit's time, bandwidth, fraction of copy, each peer's ratio."""
    names = _peers(results)
    head = ["operation", "shape", "dtype", "ms", "quartiles", "GB/s", "of copy"]
    head += [f"{name} ms (ratio)" for name in names] + ["others", "target"]
    return _markdown(head, [_row(case, names) for case in results["cases"]])


def summary(results: Results) -> str:
    """One row a target: wanted, measured, met or not."""
    rows = []
    for case in results["cases"]:
        for what, wanted, got, met in verdicts(case):
            where = f"{case['operation']} {case['shape']}"
            kind = "<=" if what == "ms" else ">="
            rows.append(
                [where, what, f"{kind} {wanted:g}", f"{got:.3g}", "met" if met else "MISSED"]
            )
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
    """Everything of a results file as Markdown."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"# {machine['cpu']}, {machine['cores']} cores, {results['date']}",
        f"{machine['system']}, Python {machine['python']}, {machine['blas']}; {versions}. "
        f"Caches {machine['caches']}. Load average {results['load'][0]:.2f} at the start and "
        f"{results['load'][1]:.2f} at the end. Made by `{results['command']}`.",
        "Times are medians of interleaved rounds; a ratio is the median of a peer's time over "
        "gradkit's in the same round; GB/s count useful bytes; `of copy` is that against "
        "`np.copyto` in the same rounds; `others` is how many cores other programs kept busy "
        "meanwhile, among them the ONNX Runtime worker.",
        *[f"Not measured: {name} ({why})." for name, why in results["missing"].items()],
        "## Targets\n\n" + summary(results),
        "## Cases\n\n" + table(results),
        *[f"## {name}\n\n{_scaling(rows)}" for name, rows in results.get("scaling", {}).items()],
        *[f"![{plot}]({plot})" for plot in plots],
    ]
    return "\n\n".join(parts) + "\n"


def plots(results: Results, stem: Path) -> list[str]:
    """Ratios to the peers as bars, scaling as curves; the names of the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = _peers(results)
    cases = [c for c in results["cases"] if c["dtype"] == "float32" and c["note"] != "overhead"]
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
    """The page and the plots beside a results file."""
    path.with_suffix(".md").write_text(page(results, plots(results, path.with_suffix(""))))


def _row(case: Mapping[str, Any], names: list[str]) -> list[str]:
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
    marks = [
        f"{what} {wanted:g}: {'met' if met else f'MISSED ({got:.3g})'}"
        for what, wanted, got, met in verdicts(case)
    ]
    return [*row, f"{case['cores_taken_by_others']:.1f}", "; ".join(marks)]


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
    figure.savefig(path, dpi=110)
    return path.name


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(json.loads(Path(name).read_text()), Path(name))

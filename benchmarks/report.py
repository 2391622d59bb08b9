"""Records of runs, and the tables and plots made from them; no figure in those is typed by hand.

A record is JSON lines: the first says how the run was made, the others are one case each, with
quartiles of milliseconds and of ratios.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import LAUNCH, OURS, OVERHEAD, verdicts

Run = dict[str, Any]

METHOD = {
    "cpu": "Times are medians of interleaved rounds. A ratio is the median of a peer's time over "
    "gradkit's in the same round; it is bold if the peer is faster. GB/s count useful bytes; `of "
    "copy` divides that by the bandwidth of `np.copyto` in the same rounds. `others` is how many "
    "cores other programs kept busy meanwhile, including the ONNX Runtime worker.",
    "cuda": "Times are those of the device, from events around a whole call, with L2 emptied "
    "before and the host ahead of the device; medians of interleaved rounds. A ratio is the median "
    "of a peer's time over gradkit's in the same round; it is bold if the peer is faster. GB/s "
    "count useful bytes; `of copy` divides that by the bandwidth of a copy of 512 MiB in the same "
    "rounds. `wall` is the time per call of many calls in a row, with warm caches.",
    "emulated": "Made on the emulator, as a test of the benchmarks: the times mean nothing.",
}

# Of a run on a CPU, unless its record is older than the pause.
PAUSED = (
    " Before each call, 64 MiB are copied for 10 ms, so that caches are cold and no other "
    "library's threads spin."
)

# What the page's first chart shows: operations and shapes in float32, the last of them too small.
AT_A_GLANCE = {
    ("layer_norm_grad", "8192x1024"): "layer norm's gradient\n8192 x 1024",
    ("rms_norm_grad", "8192x1024"): "RMS norm's gradient\n8192 x 1024",
    ("batch_norm_grad", "32x2048x7x7"): "batch norm's gradient\n32 x 2048 x 7 x 7",
    (
        "clip_grad_norm, scaling",
        "GPT-2 124M",
    ): "clipping GPT-2's gradients\n124 million",
    ("clip_grad_norm, scaling", "1000 x 256"): "clipping a long list\n1000 arrays of 256",
    ("grad_norm", "1 x 64"): "the norm of one small array\n64 elements",
}
# What the table of a GPU shows: operations of each kind, the last of them too small.
ON_A_GPU = {
    ("layer_norm_grad", "16384x4096", "bfloat16"): "layer norm's gradient, 16384 x 4096",
    ("rms_norm_grad", "65536x1024", "bfloat16"): "RMS norm's gradient, 65536 x 1024",
    ("batch_norm_grad", "256x512x28x28", "bfloat16"): "batch norm's gradient, 256 x 512 x 28 x 28",
    ("group_norm_grad", "256x512x28x28", "bfloat16"): "group norm's gradient, the same images",
    ("grad_norm", "Llama-3-8B", "bfloat16"): "the norm of Llama-3-8B's gradients",
    ("clip_grad_norm, scaling", "Llama-3-8B", "bfloat16"): "clipping them",
    ("clip_grad_norm, scaling", "ResNet-50", "float32"): "clipping ResNet-50's, in float32",
    ("clip_grad_norm, scaling", "1000 x 256", "float32"): "clipping 1000 small ones, in float32",
    ("layer_norm_grad", "8x64", "float32"): "layer norm's gradient, 8 x 64, in float32",
}
FULL = 50e6  # bytes with which a GPU is busy long enough for a bandwidth
GPU_PEERS = {"torch": "PyTorch", "torch.compile": "torch.compile", "liger": "Liger-Kernel"}
GLANCE_PEERS = {"naive": ("NumPy's own calls", "#0072B2"), "torch": ("PyTorch", "#D55E00")}


def write(run: Run, path: Path) -> None:
    """Write a record, also of what has been measured so far: a run may be cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{name: value for name, value in run.items() if name != "cases"}]
    lines += [{k: v for k, v in case.items() if v not in ("", {}, [])} for case in run["cases"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> Run:
    """Return what ``write`` has written."""
    run, *cases = map(json.loads, path.read_text().splitlines())
    return {**run, "cases": cases}


def joined(run: Run, part: Run) -> Run:
    """Return a run with what a part of it, run again, has of other peers in the same cases."""
    found = {_title(case): case for case in part["cases"]}
    cases = []
    for case in run["cases"]:
        more = found.get(_title(case), {})
        kinds = [kind for kind in ("ms", "ratio", "wall_ms", "failed") if kind in {**case, **more}]
        cases.append(case | {kind: more.get(kind, {}) | case.get(kind, {}) for kind in kinds})
    return {**run, "joined": [*run.get("joined", []), part["command"]], "cases": cases}


def _title(case: Mapping[str, Any]) -> str:
    return f"{case['operation']} {case['shape']} {case['dtype']}"


def table(run: Run) -> str:
    """Return one row per case: gradkit's time, bandwidth, fraction of copy, each peer's ratio."""
    names = _peers(run["cases"])
    head = ["operation", "shape", "dtype", "ms", "quartiles", "GB/s", "of copy"]
    head += [f"{name} ms (ratio)" for name in names]
    walls = [OURS, *names] if any(case.get("wall_ms") for case in run["cases"]) else []
    head += [f"{name} wall ms".removeprefix(f"{OURS} ") for name in walls]
    return markdown([*head, "others"], [_row(case, names, walls) for case in run["cases"]])


def _row(case: Mapping[str, Any], names: Sequence[str], walls: Sequence[str]) -> list[str]:
    low, own, high = case["ms"][OURS]
    row = [case["operation"], case["shape"], case["dtype"], f"{own:.4g}", f"{low:.3g}-{high:.3g}"]
    fractions = case.get("copy")
    large = case["bytes"] and fractions
    row += [f"{case['bytes'] / own / 1e6:.1f}", f"{fractions[1]:.2f}"] if large else ["", ""]
    for name in names:
        if name not in case["ratio"]:
            row.append("failed" if name in case.get("failed", ()) else "")
            continue
        ratio = f"{case['ratio'][name][1]:.2f}x"
        faster = case["ratio"][name][1] < 1 and not name.startswith(OURS) and name != LAUNCH
        row.append(f"{case['ms'][name][1]:.4g} ({f'**{ratio}**' if faster else ratio})")
    found = case.get("wall_ms", {})
    row += [f"{found[name]:.4g}" if name in found else "" for name in walls]
    return [*row, f"{case['others']:.1f}" if "others" in case else ""]


def on_a_gpu(run: Run) -> str:
    """Return a few cases of a GPU: the time of a call, and how many times that others take.

    Of calls in a row, with what the host does, unlike the times of the device in the other tables.
    """
    found = {(case["operation"], case["shape"], case["dtype"]): case for case in run["cases"]}
    cases = {title: found[case] for case, title in ON_A_GPU.items() if case in found}
    peers = [name for name in GPU_PEERS if any(name in c["wall_ms"] for c in cases.values())]
    rows = []
    for title, case in cases.items():
        walls, large = case["wall_ms"], case["bytes"] >= FULL
        busy = [short(1e3 * case["ms"][OURS][1]), f"{case['copy'][1]:.0%}" if large else ""]
        ratios = [_times(walls[p] / walls[OURS]) if p in walls else "" for p in peers]
        rows.append([title, short(1e3 * walls[OURS]), *busy, *ratios])
    head = [f"on one {_machine_name(run)}, in bfloat16", "us a call", "us on the GPU", "of copy"]
    return plain_table([*head, *(f"{GPU_PEERS[name]} takes" for name in peers)], rows)


def short(number: float, digits: int = 3) -> str:
    """Return a number without an exponent."""
    return f"{float(f'{number:.{digits}g}'):,g}"


def _times(ratio: float) -> str:
    """Return how many times as long a peer takes, bold if it is faster."""
    return f"**{ratio:.2f} x**" if ratio < 1 else f"{ratio:.{0 if ratio >= 10 else 1}f} x"


def targets(run: Run) -> str:
    """Return one row per target: wanted, measured, met or not."""
    rows = []
    for case in run["cases"]:
        for what, wanted, got, met in verdicts(case):
            kind = "<=" if what in ("ms", "wall ms", "wall in launches") else ">="
            missed = "short" if "aimed" in what else "MISSED"
            rows.append(
                [_title(case), what, f"{kind} {wanted:g}", f"{got:.3g}", "met" if met else missed]
            )
    return markdown(["what", "against", "target", "measured", "verdict"], rows)


def section(run: Run, pictures: Sequence[str]) -> str:
    """Return a run's part of the page; ``pictures`` are its plots, relative to the page."""
    parts = [
        f"## {section_title(run)}",
        _conditions(run),
        METHOD[run["device"]] + (PAUSED if run.get("paused") else ""),
        *_not_measured(run),
        *(f"![{Path(each).stem.rpartition('-')[2]}]({each})" for each in pictures),
        "### Targets\n\n" + targets(run),
        "### Cases\n\n" + table(run),
    ]
    if found := run.get("startup"):
        head = ["first call of a process, ms", *next(iter(found.values()))]
        rows = [[name, *(f"{ms:.4g}" for ms in row.values())] for name, row in found.items()]
        parts.append("### First calls\n\n" + markdown(head, rows))
    return "\n\n".join(parts)


def plots(run: Run, stem: Path) -> list[Path]:
    """Draw ratios to the peers as bars, of the first case of each operation, and scaling."""
    from matplotlib.figure import Figure

    if not run["cases"]:
        return []
    # The dtype of most cases: float32 on a CPU, bfloat16 on a GPU if there are norms.
    dtype = Counter(case["dtype"] for case in run["cases"]).most_common(1)[0][0]
    cases = [c for c in run["cases"] if c["dtype"] == dtype and c.get("note") != OVERHEAD]
    cases = [*{case["operation"]: case for case in reversed(cases)}.values()][::-1]
    names = _peers(cases or run["cases"])
    figure = Figure(figsize=(9, 1 + 0.42 * len(cases)))
    axis = figure.subplots()
    for k, name in enumerate(names):
        found = [(i, case["ratio"][name]) for i, case in enumerate(cases) if name in case["ratio"]]
        at = [i + 0.8 * (k + 0.5) / len(names) - 0.4 for i, _ in found]
        errors = [[m - low for _, (low, m, _) in found], [high - m for _, (_, m, high) in found]]
        axis.barh(at, [m for _, (_, m, _) in found], 0.8 / len(names), xerr=errors, label=name)
    axis.axvline(1, color="black", linewidth=1)
    labels = [f"{case['operation']} {case['shape']}" for case in cases]
    axis.set_yticks(range(len(cases)), labels, fontsize=7)
    axis.set_xscale("log")
    axis.set_xlabel("time of the peer / time of gradkit (right of the line: gradkit is faster)")
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    written = [_save(figure, stem, "peers")]
    if scaling := run.get("scaling"):
        figure = Figure(figsize=(13, 3.6))
        axes = figure.subplots(1, len(scaling))
        for axis, (name, curve) in zip(axes, scaling.items(), strict=True):
            axis.loglog(curve["at"], curve["ns an element"], marker="o")
            axis.set_title(name, fontsize=9)
            axis.set_ylabel("ns an element")
        written.append(_save(figure, stem, "scaling"))
    return written


def glance(run: Run, stem: Path) -> Path | None:
    """Draw the few cases that show when gradkit pays and when not, against two peers."""
    from matplotlib.figure import Figure

    cases = [case for case in run["cases"] if case["dtype"] == "float32"]
    found = {(case["operation"], case["shape"]): case["ratio"] for case in cases}
    rows = {title: found[case] for case, title in AT_A_GLANCE.items() if case in found}
    if not rows:
        return None
    figure = Figure(figsize=(8, 0.8 + 0.62 * len(rows)))
    axis = figure.subplots()
    for k, (peer, (label, colour)) in enumerate(GLANCE_PEERS.items()):
        at = [i + 0.36 * (k - 0.5) for i in range(len(rows))]
        ratios = [ratio[peer][1] for ratio in rows.values()]
        bars = axis.barh(at, [r - 1 for r in ratios], 0.34, left=1, label=label, color=colour)
        for bar, ratio in zip(bars, ratios, strict=True):
            middle = bar.get_y() + bar.get_height() / 2
            axis.text(1.04 * max(ratio, 1), middle, f"{ratio:.2g}x", va="center", fontsize=9)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    ticks = {0.1: "1/10", 0.5: "1/2", 1: "same", 2: "2x", 5: "5x", 10: "10x"}
    axis.set_xticks([*ticks], [*ticks.values()])
    axis.minorticks_off()
    axis.set_xlim(0.1, 20)
    axis.set_xlabel("slower  \u2190  gradkit, compared with the other  \u2192  faster")
    axis.set_yticks(range(len(rows)), [*rows])
    axis.invert_yaxis()
    axis.spines[["right", "top"]].set_visible(False)
    axis.legend(loc="upper left", frameon=False)
    return _save(figure, stem, "glance")


def _save(figure: Any, stem: Path, kind: str) -> Path:
    path = stem.with_name(f"{stem.name}-{kind}.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")  # with the longest label
    return path


def section_title(run: Run) -> str:
    """Return the title of a run's part of the page."""
    return f"{_machine_name(run)}, {run['date']}"


def _machine_name(run: Run) -> str:
    machine = run["machine"]
    gpu = machine.get("gpu")
    return gpu["name"] if gpu else f"{machine['cpu']}, {machine['cores']} cores"


def _conditions(run: Run) -> str:
    machine, load = run["machine"], run["load"]
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
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    return (
        f"{'; '.join(parts)}. Caches {caches}. Load average {load[0]:.2f} at the start "
        f"and {load[-1]:.2f} at the end. Made by `{run['command']}`."
    )


def _not_measured(run: Run) -> Iterator[str]:
    for name, why in run["missing"].items():
        yield f"Not measured: {name} ({why})."
    for error in run["errors"]:
        yield f"**Failed: {error}.**"
    for what in run["dropped"]:
        yield f"Not measured, for lack of time: {what}."
    failed: dict[tuple[str, str], list[str]] = {}
    for case in run["cases"]:
        for reason in case.get("failed", {}).items():
            failed.setdefault(reason, []).append(_title(case))
    for (name, why), cases in failed.items():
        yield f"Not measured: {name} on {', '.join(cases)} ({why})."
    for command in run.get("joined", ()):
        yield f"Other peers, with ratios to gradkit's times beside them, are from `{command}`."


def _peers(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for case in cases for name in case["ratio"]))


def replace_in_page(page: Path, tables: Mapping[str, str]) -> None:
    """Put each table after the comment that names its place, instead of the one there."""
    text = page.read_text()
    for name, table in tables.items():
        text = replaced(text, name, table)
    page.write_text(text)


def replaced(text: str, name: str, table: str) -> str:
    """Return a page's text with a table after the comment that names its place."""
    return _place(name).sub(lambda _: f"{table}\n", text, count=1)


def in_page(page: Path, name: str) -> str:
    """Return the table after the comment that names its place."""
    found = _place(name).search(page.read_text())
    if found is None:
        raise LookupError(f"{page.name} has no <!-- {name} -->")
    return found[0].removesuffix("\n")


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n)(\|.*\n)*")


def plain_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines).replace(" --- ", "---")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with aligned columns."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )

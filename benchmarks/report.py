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

CHARTS = {
    "peers": "Time of other libraries divided by gradkit's, for each operation",
    "scaling": "Time for an element, by rows, their length, and gradients",
}

# Of a run on a CPU, unless its record is older than the pause.
PAUSED = (
    " Before each call, 64 MiB are copied for 10 ms, so that caches are cold and no other "
    "library's threads spin."
)
# Of a run on a GPU, unless its record is older than such copies.
OWN_COPY = " In brackets: beside a copy of as many bytes as the case has."

# What the page's charts show of a CPU and of a GPU, the last of them too small.
AT_A_GLANCE = {
    "cpu": {
        ("layer_norm_grad", "8192x1024", "float32"): "layer norm's gradient\n8192 x 1024",
        ("rms_norm_grad", "8192x1024", "float32"): "RMS norm's gradient\n8192 x 1024",
        ("batch_norm_grad", "32x2048x7x7", "float32"): "batch norm's gradient\n32 x 2048 x 7 x 7",
        ("clip_grad_norm, scaling", "GPT-2 124M", "float32"): "clipping GPT-2's gradients\n"
        "124 million",
        ("clip_grad_norm, scaling", "1000 x 256", "float32"): "clipping a long list\n"
        "1000 arrays of 256",
        ("grad_norm", "1 x 64", "float32"): "the norm of one small array\n64 elements",
    },
    "cuda": {
        (
            "layer_norm_grad",
            "16384x4096",
            "bfloat16",
        ): "layer norm's gradient\n16384 x 4096, bfloat16",
        ("rms_norm_grad", "65536x1024", "bfloat16"): "RMS norm's gradient\n65536 x 1024, bfloat16",
        ("batch_norm_grad", "256x512x28x28", "bfloat16"): "batch norm's gradient\n"
        "256 x 512 x 28 x 28, bfloat16",
        ("group_norm_grad", "256x512x28x28", "bfloat16"): "group norm's gradient\n"
        "256 x 512 x 28 x 28, bfloat16",
        ("layer_norm", "16384x4096", "bfloat16"): "layer norm\n16384 x 4096, bfloat16",
        ("clip_grad_norm, scaling", "Llama-3-8B", "bfloat16"): "clipping Llama-3-8B's gradients\n"
        "8 billion, bfloat16",
        ("clip_grad_norm, scaling", "1000 x 256", "float32"): "clipping a long list\n"
        "1000 arrays of 256, float32",
        ("layer_norm_grad", "8x64", "float32"): "layer norm's gradient\n8 x 64, float32",
    },
}
IN_README = ("16384x4096", "Llama-3-8B", "1000 x 256", "8x64")  # rows of a GPU's chart, by shape
# Peers as pages and charts call them. Okabe and Ito's colours, which colour-blind readers can
# distinguish.
PEERS = {
    "naive": ("NumPy's own calls", "#0072B2"),
    "torch": ("PyTorch", "#D55E00"),
    "torch.compile": ("torch.compile", "#009E73"),
    "liger": ("Liger-Kernel", "#CC79A7"),
    "quack": ("quack", "#F0E442"),
    "jax": ("JAX", "#56B4E9"),
    "optax": ("optax", "#009E73"),
    "onnxruntime": ("ONNX Runtime", "#E69F00"),
    "cuDNN through gradkit": ("cuDNN through gradkit", "#E69F00"),
    "torch cuDNN": ("PyTorch through cuDNN", "#0072B2"),
}
SHOWN = {"cpu": ("naive", "torch"), "cuda": ("torch", "torch.compile", "liger")}


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


def _method(run: Run) -> str:
    own = any("own copy" in case for case in run["cases"])
    paused = PAUSED if run.get("paused") else ""
    return METHOD[run["device"]] + paused + (OWN_COPY if own else "")


def table(run: Run) -> str:
    """Return one row per case: gradkit's time, bandwidth, fraction of copy, each peer's ratio."""
    names = _peers(run["cases"])
    head = ["operation", "shape", "dtype", "ms", "quartiles", "GB/s", "of copy"]
    head += [f"{name} ms (ratio)" for name in names]
    return markdown([*head, "others"], [_row(case, names) for case in run["cases"]])


def _row(case: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    low, own, high = case["ms"][OURS]
    row = [case["operation"], case["shape"], case["dtype"], f"{own:.4g}", f"{low:.3g}-{high:.3g}"]
    fractions = case.get("copy")
    large = case["bytes"] and fractions
    beside = f" ({case['own copy'][1]:.2f})" if "own copy" in case else ""
    share = f"{fractions[1]:.2f}{beside}" if large else ""
    row += [f"{case['bytes'] / own / 1e6:.1f}" if large else "", share]
    for name in names:
        if name not in case["ratio"]:
            row.append("failed" if name in case.get("failed", ()) else "")
            continue
        ratio = f"{case['ratio'][name][1]:.2f}x"
        faster = case["ratio"][name][1] < 1 and not name.startswith(OURS) and name != LAUNCH
        row.append(f"{case['ms'][name][1]:.4g} ({f'**{ratio}**' if faster else ratio})")
    return [*row, f"{case['others']:.1f}" if "others" in case else ""]


def walls(run: Run) -> str:
    """Return one row per case: the time of a call, of many in a row; "" if there are none."""
    cases = [case for case in run["cases"] if case.get("wall_ms")]
    names = [OURS, *_peers(cases)]
    rows = [
        [case["operation"], case["shape"], case["dtype"]]
        + [f"{case['wall_ms'][name]:.4g}" if name in case["wall_ms"] else "" for name in names]
        for case in cases
    ]
    head = ["wall ms of", "shape", "dtype", *names]
    return markdown(head, rows) if rows else ""


def in_readme(run: Run) -> str:
    """Return a GPU's table: the time of a call, with what the host does, beside PyTorch's."""
    rows = []
    for title, case in _at_a_glance(run):
        if case["shape"] in IN_README and title.partition("\n")[0] != "layer norm":
            own, theirs = case["wall_ms"][OURS], case["wall_ms"]["torch"]
            faster = f"**{_time(theirs)}**" if theirs < own else _time(theirs)
            rows.append([title.replace("\n", ", "), _time(own), faster])
    return plain_table([f"time of a call on one {machine_name(run)}", "gradkit", "PyTorch"], rows)


def _at_a_glance(run: Run) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the cases of a chart, each with its title."""
    found = {(case["operation"], case["shape"], case["dtype"]): case for case in run["cases"]}
    for case, title in AT_A_GLANCE[run["device"]].items():
        if case in found:
            yield title, found[case]


def _time(ms: float) -> str:
    return f"{short(ms)} ms" if ms >= 1 else f"{short(1e3 * ms)} us"


def ratios(case: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as long as gradkit each other library takes, for calls in a row.

    Of a CPU, for calls with cold caches.
    """
    walls = case.get("wall_ms", {})
    found = {n: walls[n] / walls[OURS] for n in walls} or {
        n: r[1] for n, r in case["ratio"].items()
    }
    return {name: ratio for name, ratio in found.items() if name in PEERS}


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 1 else 1 if ratio < 10 else 0}f}x"


def behind(run: Run) -> tuple[int, str]:
    """Return the number of cases in which another library is faster, and their table."""
    found = {
        _title(case): [
            f"{PEERS[name][0]} {_times(ratio)}"
            for name, ratio in ratios(case).items()
            if round(ratio, 2) < 1
        ]
        for case in run["cases"]
    }
    rows = [[case, ", ".join(faster)] for case, faster in found.items() if faster]
    return len(rows), plain_table(["case", "time of the faster library / gradkit's"], rows)


def short(number: float, digits: int = 3) -> str:
    """Return a number without an exponent."""
    return f"{float(f'{number:.{digits}g}'):,g}"


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


def page(run: Run, pictures: Sequence[str], cases: str) -> str:
    """Return a run's page; ``pictures`` and the page of its ``cases`` are relative to it."""
    parts = [
        f"# {heading(run)}",
        _conditions(run),
        f"{_method(run)} [All cases]({cases}).",
        *_not_measured(run),
        *(f"![{CHARTS[Path(each).stem.rpartition('-')[2]]}]({each})" for each in pictures),
        "## Targets\n\n" + targets(run),
    ]
    if unit := run.get("formula_us"):
        text = f"The host takes {unit:.1f} us for the formula of a layer norm's gradient, 8x64, in"
        parts.append(f"{text} NumPy: by this unit hosts can be compared.")
    if found := run.get("startup"):
        head = ["first call of a process, ms", *next(iter(found.values()))]
        rows = [[name, *(f"{ms:.4g}" for ms in row.values())] for name, row in found.items()]
        parts.append("## First calls\n\n" + plain_table(head, rows))
    return "\n\n".join(parts) + "\n"


def cases_page(run: Run, about: str) -> str:
    """Return the page of a run's cases; ``about`` is the run's own page, relative to it."""
    said = f"Every case of [this run]({about}), whose page explains the columns."
    parts = [f"# Cases: {heading(run)}", said, table(run), walls(run)]
    return "\n\n".join(filter(None, parts)) + "\n"


def plots(run: Run, stem: Path) -> list[Path]:
    """Draw a chart of the first case of each operation, and one of scaling."""
    from matplotlib.figure import Figure

    if not run["cases"]:
        return []
    # The dtype of most cases: float32 on a CPU, bfloat16 on a GPU if there are norms.
    dtype = Counter(case["dtype"] for case in run["cases"]).most_common(1)[0][0]
    cases = [c for c in run["cases"] if c["dtype"] == dtype and c.get("note") != OVERHEAD]
    cases = [case for case in cases if PEERS.keys() & case["ratio"].keys()]
    cases = [*{case["operation"]: case for case in reversed(cases)}.values()][::-1] or run["cases"]
    figure = Figure(figsize=(9, 1.2 + 0.27 * len(cases)))
    axis = figure.subplots()
    for name in [name for name in PEERS if name in _peers(cases)]:
        label, colour = PEERS[name]
        found = [(i, case["ratio"][name]) for i, case in enumerate(cases) if name in case["ratio"]]
        middles = [middle for _, (_, middle, _) in found]
        errors = [[m - low for _, (low, m, _) in found], [high - m for _, (_, m, high) in found]]
        at = [i for i, _ in found]
        axis.errorbar(middles, at, xerr=errors, fmt="o", color=colour, label=label, markersize=6)
    axis.set_yticks(range(len(cases)), [f"{c['operation']}, {c['shape']}" for c in cases])
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="0.9")
    axis.set_ylim(len(cases) - 0.5, -0.5)
    _compare(axis)
    written = [_save(figure, stem, "peers")]
    if scaling := run.get("scaling"):
        figure = Figure(figsize=(13, 3.6))
        axes = figure.subplots(1, len(scaling))
        for axis, (name, curve) in zip(axes, scaling.items(), strict=True):
            axis.loglog(curve["at"], curve["ns an element"], marker="o")
            axis.set_title(name, fontsize=9)
            axis.set_ylabel("ns an element")
            axis.set_xlabel(name.rpartition(", ")[2])
        written.append(_save(figure, stem, "scaling"))
    return written


def glance(run: Run, stem: Path) -> Path | None:
    """Draw the few cases that show when gradkit pays and when not, against a few peers.

    Cases are named above their bars, so that the chart is narrow: on a phone its letters are read.
    """
    from matplotlib.figure import Figure

    rows = {title: ratios(case) for title, case in _at_a_glance(run)}
    if not rows:
        return None
    peers = [p for p in SHOWN[run["device"]] if any(p in row for row in rows.values())]
    figure = Figure(figsize=(4.6, 1 + (0.32 + 0.19 * len(peers)) * len(rows)))
    axis = figure.subplots()
    height = 0.19 / (0.32 + 0.19 * len(peers))
    top = 0.45 - height * len(peers)
    for peer in peers:
        label, colour = PEERS[peer]
        found = [(i, [*row], row[peer]) for i, row in enumerate(rows.values()) if peer in row]
        lines = [[p for p in peers if p in row].index(peer) for _, row, _ in found]
        at = [i + top + height * (k + 0.5) for (i, *_), k in zip(found, lines, strict=True)]
        lengths = [ratio - 1 for *_, ratio in found]
        axis.barh(at, lengths, 0.92 * height, left=1, label=label, color=colour)
        for middle, (*_, ratio) in zip(at, found, strict=True):
            axis.text(1.04 * max(ratio, 1), middle, _times(ratio), va="center")
    style = {"va": "bottom", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
    for i, title in enumerate(rows):
        name = title.replace("\n", ", ")
        axis.text(0, i + top - 0.03, name, transform=axis.get_yaxis_transform(), **style)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    _compare(axis)
    return _save(figure, stem, "glance")


def _compare(axis: Any) -> None:
    """Label a logarithmic axis of ratios, and name the peers above the chart."""
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    least, most = axis.dataLim.x0, axis.dataLim.x1
    axis.set_xlim(min(0.8 * least, 0.8), 1.35 * most)
    ticks = {0.1: "1/10", 0.2: "1/5", 0.5: "1/2", 1: "same", 2: "2x", 5: "5x", 10: "10x", 20: "20x"}
    ticks |= {50: "50x", 100: "100x", 200: "200x"}
    shown = [at for at in ticks if axis.get_xlim()[0] <= at <= axis.get_xlim()[1]]
    axis.set_xticks(shown, [ticks[at] for at in shown])
    axis.minorticks_off()
    axis.set_xlabel("slower  \u2190  gradkit, compared with the other  \u2192  faster")
    axis.spines[["right", "top"]].set_visible(False)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False)


def _save(figure: Any, stem: Path, kind: str) -> Path:
    path = stem.with_name(f"{stem.name}-{kind}.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")  # with the longest label
    return path


def heading(run: Run) -> str:
    """Return the title of a run's page."""
    return f"{machine_name(run)}, {run['date']}"


def machine_name(run: Run) -> str:
    """Return the GPU's name, or the processor's with its number of cores."""
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

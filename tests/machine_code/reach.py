"""Bytes in one round trip to memory: a table for the page, out of the recorded rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gradkit._cuda import row_gradient
from gradkit._dtypes import dtype_named
from testbed.machine_code.table import Cells

from .cases import dtype_called

NVRTC = "12.9"
PAGE = Path(__file__).parents[2] / "docs" / "machine-code.md"
BEGIN, END = "<!-- reach: written by make machine-code RECORD=1 -->\n", "<!-- end of reach -->"
_NORMS = {
    "layer norm": row_gradient.LAYER,
    "RMS norm": row_gradient.RMS,
    "invertible layer norm": row_gradient.LAYER_OUTPUT,
    "invertible RMS norm": row_gradient.RMS_OUTPUT,
}
_PLACES = {"0": "registers", "1": "shared memory", "2": "shared memory, with scale"}


def table(rows: Iterable[Cells]) -> str:
    """Return, for each way to hold a row of a norm's gradient, the round trips it takes."""
    found: dict[tuple[str, str, int, str], dict[str, str]] = {}
    for row in rows:
        if row["kernel"].startswith("layer_norm_grad") and row["nvrtc"] == NVRTC:
            macros = dict(macro.split("=") for macro in row["macros"].split())
            if not {"STRIDED", "FURTHER"} & macros.keys():
                found.setdefault(_way(macros), {})[row["sm"]] = row["trips"]
    architectures = sorted({sm for trips in found.values() for sm in trips}, key=int)
    heads = ("norm", "data", "columns up to", "sums in", *(f"sm_{sm}" for sm in architectures))
    lines = [heads, ("---",) * len(heads)]
    for (norm, data, columns, place), trips in sorted(found.items()):
        cells = (trips.get(sm, "") for sm in architectures)
        lines.append((norm, data, f"{columns:,}", place, *cells))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: Iterable[Cells]) -> None:
    """Put the table in its place on the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


def _way(macros: dict[str, str]) -> tuple[str, str, int, str]:
    """The norm, its data, how many columns a row may have, and where sums over rows lie."""
    kind = row_gradient.GradientKind(macros["FROM_OUTPUT"] == "1", macros["CENTRED"] == "1")
    (norm,) = (name for name, known in _NORMS.items() if known == kind)
    data, vector, chunks = macros["DATA_T"], int(macros["VEC"]), int(macros["CHUNKS"])
    itemsize = dtype_named(dtype_called(data)).itemsize
    clusters = "LONG" not in macros
    plans = row_gradient.row_plans(kind, itemsize, vector, clusters=clusters)
    (plan,) = (p for p in plans if p.chunks == chunks and (p.blocks > 1) == clusters)
    columns = plan.blocks * int(macros.get("THREADS", plan.threads)) * chunks * vector
    packs = {16 // itemsize: "", 1: ", one by one"}.get(vector, f", {vector * itemsize} bytes")
    place = "registers of a cluster" if clusters else _PLACES[macros["LONG"]]
    return norm, data + packs, columns, place

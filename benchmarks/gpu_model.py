"""Predicted times on GPUs, beside those measured: ``python -m benchmarks.gpu_model``.

Writes the tables of docs/predictions.md, of a GPU that has run gradkit, and prints what it predicts
of every card.

A prediction, never a result. The host's own code launches each operation on a device that does
nothing, as for the card in question. What a launch needs then follows from the arrays that it
gets, from the tables of machine code (docs/machine-code.md) and from the card's data sheet. The
longest of these is its time and names what limits it:

    memory     bytes / bandwidth, each array once, partial sums too; of the bandwidth, COPY
    latency    bytes / (bytes in flight), for a round trip of LATENCY: threads that fit, times loads
               in flight at a round trip, times the bytes of one
    issue      instructions / (128 a clock and multiprocessor)
    double     those in double precision / (what the card has for them)

Instructions are those of machine code in a turn of the loop over the data, which may hold branches
that are not taken, or PTX instructions as counted while they run, which ptxas may merge: the fewer
of the two. Of rows, threads that have no columns take part, and a last round of blocks in which
some have no row takes as long as any other.

A launch starts START after the one before it; where that is more than half of a call, `start`
limits it. If the host takes longer for a call than the device, `host` limits it, and the call takes
as long. The host's time was measured with CuPy 14.2, on one machine and on the testbed's driver in
the place of NVIDIA's (host_times.csv, by ``python -m benchmarks.host --record``). Left out are
caches, tails and clocks below boost.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np

import gradkit
from benchmarks import host, record, report
from benchmarks.devices import DTYPES
from benchmarks.shapes import GPU_LISTS, GPU_NORMS
from gradkit._cuda import CudaBackend
from gradkit._cuda.launch.device import SHARING
from testbed.emulator import IdleDevice
from testbed.machine_code.table import Cells
from tests.devices.emulated import on_device
from tests.machine_code.executed import LONG_CHUNKS
from tests.machine_code.tables import CODE, EXECUTED

PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"
LATENCY, START = 700e-9, 2e-6  # seconds; assumed for every card, round numbers
COPY = 0.9  # an H200 copies at 4.3 of the 4.8 TB/s of its data sheet; assumed for the others
_ISSUED = 128  # instructions of threads, a clock and multiprocessor: four warps
_PACK = 16  # bytes of a load, unless macros have fewer
# Packs of a turn of the loop over the data: of each chunk of a row, or those that are in flight.
_ROWS = "layer_norm_grad"
_BATCH = 4
_BATCHED = {
    *("norm_partials", "clip_by_norm", "normalize"),
    *("channel_moments", "sum_channels", "apply_channels"),
}


class Card(NamedTuple):
    """A GPU by its data sheet; ``sm`` is the nearest architecture that the tables have."""

    name: str
    sm: int
    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float  # boost
    double: int  # operations in double precision, a clock and multiprocessor
    threads: int  # that a multiprocessor holds
    shared: int  # bytes that a block may have


CARDS = (  # from NVIDIA's data sheets, its paper on Ada and its paper on Turing
    Card("H200", 90, 4.8e12, 132, 1.98e9, 64, 2048, 227 << 10),
    Card("A100", 80, 2.039e12, 108, 1.41e9, 32, 2048, 163 << 10),
    Card("RTX 4090", 80, 1.008e12, 128, 2.52e9, 2, 1536, 99 << 10),
    Card("T4", 80, 0.32e12, 40, 1.59e9, 2, 1024, 64 << 10),
)

_PEERS = ("cuDNN", "PyTorch", "torch.compile")  # as below


class Peers(NamedTuple):
    """Published times of a gradient in bfloat16 on an H200, in microseconds; 0: none."""

    operation: str
    rows: int
    width: int
    cudnn: float
    eager: float
    compiled: float


# cudnn-frontend, benchmark/norms/results/h200/all_models_20260227_035147.csv.
PUBLISHED = (
    Peers("rms_norm_grad", 16384, 4096, 106, 223, 236),
    Peers("rms_norm_grad", 8192, 8192, 114, 260, 236),
    Peers("rms_norm_grad", 4096, 16384, 118, 261, 177),
    Peers("rms_norm_grad", 8192, 5120, 69, 172, 156),
    Peers("rms_norm_grad", 4096, 6144, 49, 104, 87),
    Peers("rms_norm_grad", 2048, 4096, 18, 30, 31),
    Peers("rms_norm_grad", 131072, 128, 35, 0, 55),
    Peers("layer_norm_grad", 1024, 12288, 80, 61, 43),
)


class Launch(NamedTuple):
    """One kernel's launch: as the compiler was asked for it, and the bytes of its arrays."""

    kernel: str
    macros: str
    grid: Sequence[int]
    block: Sequence[int]
    bytes: int

    @property
    def threads(self) -> int:
        """Number of threads in all blocks."""
        return math.prod(self.grid) * math.prod(self.block)


class Recorder(IdleDevice):
    """Does nothing, and remembers what it was to launch."""

    def __init__(self, card: Card) -> None:
        sizes = {"multiprocessors": card.multiprocessors, "max_shared_memory": card.shared}
        super().__init__(clusters=card.sm >= 90, sharing=SHARING, **sizes)
        self.launches: list[Launch] = []

    def compile(self, source: str, options: tuple[str, ...] = ()) -> Any:  # noqa: ARG002
        """Return a module whose kernels take notes."""
        return _Module(self, " ".join(o[2:] for o in options if o.startswith("-D")))


class _Module(NamedTuple):
    device: Recorder
    macros: str

    def get_function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, args: Any, **options: Any) -> None:  # noqa: ARG001
            arrays = sum(a.nbytes for a in args if isinstance(a, np.ndarray) and a.ndim)
            self.device.launches.append(Launch(name, self.macros, grid, block, arrays))

        return launch


class Work(NamedTuple):
    """One operation on one shape, or on a list of so many ``arrays``.

    ``passes`` over a list's bytes, by kernel: its tables hide them.
    """

    operation: str
    shape: str
    dtype: str
    elements: int
    call: Callable[[Callable[..., Any]], object]  # of a function that makes arrays
    counted: dict[str, tuple[str, str]]  # by kernel: operation and kernel in executed.csv
    passes: dict[str, int] = {}  # noqa: RUF012
    arrays: int = 1
    rows: int = 0  # of a norm over rows


def works() -> Iterator[Work]:
    """Every operation and shape that is to be published."""
    yield from _norms()
    yield from _lists()
    yield from _images()


def _norms() -> Iterator[Work]:
    for name in ("layer_norm_grad", "rms_norm_grad"):
        for dtype in ("bfloat16", "float16", "float32"):
            for m, d in GPU_NORMS:
                yield _norm(name, m, d, dtype)


def _norm(name: str, m: int, d: int, dtype: str) -> Work:
    counted = {_ROWS: (name, _ROWS)}
    for rows, kernel in (
        ("wide", "layer_norm_grad_cluster"),
        ("the widest", "row_sums_of_gradient"),
        ("the widest", "apply_gradient"),
    ):
        counted[kernel] = f"layer_norm_grad of {rows} rows", kernel
    call = partial(_gradient, name, (m, d), dtype)
    return Work(name, f"{m}x{d}", dtype, m * d, call, counted, rows=m)


def _gradient(name: str, shape: tuple[int, int], dtype: str, array: Any) -> object:
    (m, d), count = shape, 2 if name == "layer_norm_grad" else 1
    statistics = [array((m,), "float32") for _ in range(count)]
    dy, x, dx = (array(shape, dtype) for _ in range(3))
    scale, *columns = (array((d,), dtype) for _ in range(1 + count))
    return getattr(gradkit, name)(dy, x, scale, *statistics, out=(dx, *columns))


def _lists() -> Iterator[Work]:
    for name, passes in (("grad_norm", {"norm_partials": 1}), ("clip_grad_norm", _CLIP)):
        for title, (dtype, shapes) in GPU_LISTS.items():
            elements = sum(map(math.prod, shapes))
            chunks = LONG_CHUNKS if elements * DTYPES[dtype].itemsize > 1 << 25 else ""
            counted = {
                "norm_partials": (f"grad_norm p=2{chunks}", "norm_partials"),
                "clip_by_norm": (f"scale_grads{chunks}", "scale_grads"),  # the same loop
            }
            call = partial(_listed, name, shapes, dtype)
            yield Work(name, title, dtype, elements, call, counted, passes, len(shapes))


_CLIP = {"norm_partials": 1, "clip_by_norm": 2}


def _listed(name: str, shapes: Sequence[tuple[int, ...]], dtype: str, array: Any) -> object:
    grads = [array(shape, dtype) for shape in shapes]
    return getattr(gradkit, name)(grads, *((1.0,) if name == "clip_grad_norm" else ()))


_CHANNELS = {
    "batch_norm": ("channel_moments", "normalize"),
    "batch_norm_grad": ("sum_channels", "apply_channels"),
}
_IMAGES = [(64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7)]  # channels, height


def _images() -> Iterator[Work]:
    kinds = product((False, True), (32, 256), _IMAGES, _CHANNELS.items())
    for last, n, (c, size), (name, kernels) in kinds:
        shape = (n, size, size, c) if last else (n, c, size, size)
        of, title = (" of channels last", " channels last") if last else ("", "")
        of = of or (" of odd images" if size % 2 else "")
        counted = {kernel: (f"{name}{of}", kernel) for kernel in kernels}
        call = partial(_batch_norm, name, shape, 3 if last else 1)
        title = f"{n}x{c}x{size}x{size}{title}"
        yield Work(name, title, "bfloat16", math.prod(shape), call, counted)


def _batch_norm(name: str, shape: tuple[int, ...], axis: int, array: Any) -> object:
    dy, x, y = (array(shape, "bfloat16") for _ in range(3))
    scale, bias, dscale, dbias = (array((shape[axis],), "bfloat16") for _ in range(4))
    mean, inv_std = (array((shape[axis],), "float32") for _ in range(2))
    if name == "batch_norm":
        return gradkit.batch_norm(x, scale, bias, channel_axis=axis, out=(y, mean, inv_std))
    out = y, dscale, dbias
    return gradkit.batch_norm_grad(dy, x, scale, mean, inv_std, channel_axis=axis, out=out)


class Prediction(NamedTuple):
    """The time of one call in seconds, and what limits it; ``device``: if that is the host."""

    seconds: float
    limiter: str
    device: "Prediction | None" = None

    def __str__(self) -> str:
        """Microseconds and what limits the call."""
        device = f" ({self.device})" if self.device else ""
        return f"{_figure(self.seconds * 1e6)} {self.limiter}{device}"


def predicted(work: Work, card: Card, tables: "Tables") -> Prediction:
    """Predict one call: its kernels, one after another."""
    device = Recorder(card)
    backend = CudaBackend(device)

    def array(shape: tuple[int, ...], dtype: str) -> Any:
        return on_device(np.empty(shape, DTYPES[dtype]), backend)  # its pages are never touched

    work.call(array)
    parts = [_launched(launch, work, card, tables) for launch in device.launches]
    starts = START * len(parts)
    total = sum(part.seconds for part in parts) + starts
    longest = max(parts, key=lambda part: part.seconds)
    found = Prediction(total, "start" if starts > total / 2 else longest.limiter)
    host_takes = tables.host(work)
    return Prediction(host_takes, "host", found) if host_takes > total else found


def _launched(launch: Launch, work: Work, card: Card, tables: "Tables") -> Prediction:
    """Predict the time of a kernel, by each limit."""
    itemsize = DTYPES[work.dtype].itemsize
    moved = launch.bytes + work.passes.get(launch.kernel, 0) * work.elements * itemsize
    code = tables.code(launch, card.sm)
    fitting = card.multiprocessors * min(card.threads, int(code["threads"]) or card.threads)
    access = _number("PIECE", launch.macros) or _number("VEC", launch.macros)
    in_flight = min(launch.threads, fitting) * float(code["inner_loads"] or 1)
    in_flight *= access * itemsize if access else _PACK
    limits = {"memory": moved / (COPY * card.bandwidth), "latency": moved / in_flight * LATENCY}
    clocks = card.multiprocessors * card.clock
    counted = work.counted.get(launch.kernel)
    issued = _issued(launch, work, code)
    if counted and (row := tables.executed(*counted, work.dtype)):
        if _is_counted(launch, work):
            issued = min(issued, float(row["instructions"]))
        limits["double"] = work.elements * float(row["double"]) / (card.double * clocks)
    if issued < math.inf:
        limits["issue"] = work.elements * issued / (_ISSUED * clocks)
    limiter = max(limits, key=limits.__getitem__)
    return Prediction(limits[limiter] * _tail(launch, work), limiter)


def _number(name: str, macros: str) -> int:
    """A macro's number; 0 if there is none."""
    found = re.search(rf"\b{name}=(\d+)", macros)
    return int(found[1]) if found else 0


def _issued(launch: Launch, work: Work, code: Cells) -> float:
    """Instructions of machine code for an element of the data, idle threads' too, at most."""
    pack = _number("VEC", code["macros"]) or _PACK // DTYPES[work.dtype].itemsize
    if not code["turn"]:
        return math.inf
    if launch.kernel == _ROWS:
        return float(code["turn"]) * launch.block[0] * work.rows / work.elements
    return float(code["turn"]) / (_BATCH * pack) if launch.kernel in _BATCHED else math.inf


def _is_counted(launch: Launch, work: Work) -> bool:
    """True if what was counted, without idle threads and in whole packs, is of rows like these."""
    if launch.kernel != _ROWS:
        return True
    held = _number("CHUNKS", launch.macros) * _number("VEC", launch.macros)
    whole = _number("VEC", launch.macros) * DTYPES[work.dtype].itemsize == _PACK
    return whole and launch.block[0] * held * work.rows == work.elements


def _tail(launch: Launch, work: Work) -> float:
    """Factor on the time of blocks of rows for those that have no row in the last round."""
    if launch.kernel != _ROWS:
        return 1.0
    at_once = launch.grid[0] * launch.block[1]
    return -(-work.rows // at_once) * at_once / work.rows


class Tables:
    """The recorded tables, looked up for a launch."""

    def __init__(self) -> None:
        self._code = {CODE.name_of(row): row for row in CODE.read()}
        self._files = {row["kernel"]: row["file"] for row in self._code.values()}
        self._nvrtc = min(row["nvrtc"] for row in self._code.values())
        self._executed = {EXECUTED.name_of(row): row for row in EXECUTED.read()}
        self._host = host.recorded()

    def code(self, launch: Launch, sm: int) -> Cells:
        """The row of a kernel, or of the nearest one that has a row."""
        file = self._files[launch.kernel]
        for macros in _nearest(launch.macros):
            for arch in (sm, 90):
                name = (file, macros, launch.kernel, str(arch), self._nvrtc)
                if name in self._code:
                    return self._code[name]
        raise LookupError(f"no row of {launch.kernel} for {launch.macros}")

    def host(self, work: Work) -> float:
        """Seconds of the host; those of a list lie on a line through those of 1 and of 1000."""
        one = self._host[work.operation]
        thousand = self._host.get(f"{work.operation}, 1000", one)
        return (one + (thousand - one) * (work.arrays - 1) / 999) * 1e-6

    def executed(self, operation: str, kernel: str, dtype: str) -> Cells | None:
        """Return what a kernel executes; float16 counts as bfloat16 if it has no row."""
        for name in (dtype, "bfloat16"):
            if row := self._executed.get((operation, name, kernel)):
                return row
        return None


def _nearest(macros: str) -> Iterator[str]:
    """The macros, and others whose code differs little; not every combination has a row."""
    yield macros
    for kept in (re.sub(r"DATA_T=f32\b(.*)\bVEC=(\d+)", _as_bf16, macros), macros):
        for of, instead in (
            ("CAPACITY=0", "CAPACITY=90"),
            (r"THREADS=\d+", "THREADS=512"),
            (r"(DATA_T|PARAM_T|LIST_T)=f16", r"\1=bf16"),
            (r"(DATA_T|PARAM_T|LIST_T)=f32", r"\1=bf16"),
            ("CENTRED=0", "CENTRED=1"),
        ):
            kept = re.sub(rf"{of}\b", instead, kept)
            yield kept


def _as_bf16(found: "re.Match[str]") -> str:
    """As many bytes at once of a dtype of half the size."""
    return f"DATA_T=bf16{found[1]}VEC={2 * int(found[2])}"


def beside_published(tables: "Tables") -> list[list[str]]:
    """Compare predictions and measurements of the device with what others published."""
    rows = []
    for name, m, d, *times in PUBLISHED:
        work = _norm(name, m, d, "bfloat16")
        found = predicted(work, CARDS[0], tables)
        ours = _figure((found.device or found).seconds * 1e6)
        seconds = _measured(work)
        theirs = [f"{t:.0f}" if t else "" for t in times]
        own = report.short(seconds * 1e6) if seconds else ""
        rows.append([name, f"{m}x{d}", ours, own, *theirs])
    return rows


@cache
def measured(card: Card) -> dict[tuple[str, str, str], float]:
    """Seconds that a published run on this card took on the device, by what a record calls it."""
    found = {}
    for path in sorted(record.RESULTS.glob("*.jsonl")):
        run = report.read(path)
        if card.name in run["machine"].get("gpu", {"name": ""})["name"].split():
            for case in run["cases"]:
                title = case["operation"], case["shape"], case["dtype"]
                found[title] = case["ms"]["gradkit"][1] * 1e-3
    return found


def _recorded_as(work: Work) -> tuple[str, str, str]:
    name = "clip_grad_norm, scaling" if work.operation == "clip_grad_norm" else work.operation
    return name, work.shape, work.dtype


_CHANGED = {"batch_norm"}  # since a GPU was measured


def _measured(work: Work) -> float | None:
    """Seconds that were measured of the kernels as they are."""
    return None if work.operation in _CHANGED else measured(CARDS[0]).get(_recorded_as(work))


def beside_measured(tables: "Tables") -> Iterator[tuple[Work, Prediction, float]]:
    """Pair predictions of the device with the seconds that were measured there."""
    card = CARDS[0]
    for work in works():
        if seconds := _measured(work):
            found = predicted(work, card, tables)
            yield work, found.device or found, seconds


def by_limiter(found: Sequence[tuple[Work, Prediction, float]]) -> Iterator[list[str]]:
    """Rows of each limit: cases it decides, quartiles of measured / predicted; last, of all."""
    ratios: dict[str, list[float]] = {}
    for _, prediction, seconds in found:
        for limiter in (prediction.limiter, "all"):
            ratios.setdefault(limiter, []).append(seconds / prediction.seconds)
    for limiter in sorted(ratios, key=lambda name: (name == "all", -len(ratios[name]))):
        each = ratios[limiter]
        low, middle, high = quantiles(each, n=4, method="inclusive") if each[1:] else each * 3
        yield [limiter, str(len(each)), f"{middle:.2f} ({low:.2f} to {high:.2f})"]


def page_tables(tables: "Tables") -> dict[str, str]:
    """The tables of the page, by their places in it."""
    taken = [host.recorded(version) for version in host.VERSIONS]
    hosts = [
        [name.replace(", 1000", " of 1000 arrays")]
        + [f"{_figure(each[name])} ({_figure(each[name] / each[host.FORMULA])})" for each in taken]
        for name in host.RECORDED
    ]
    table, found = report.plain_table, [*beside_measured(tables)]
    return {
        "decides": table(
            ["what decides", "cases", "measured / predicted, median and quartiles"],
            by_limiter(found),
        ),
        "hosts": table(["call on the host", *(f"CuPy {each}" for each in host.VERSIONS)], hosts),
        "published": table(
            ["operation", "shape", "predicted", "measured", *_PEERS], beside_published(tables)
        ),
        "measured": table(
            ["operation", "shape", "dtype", "predicted", "measured", "measured / predicted"],
            [
                [*work[:3], prediction, report.short(at * 1e6), f"{at / prediction.seconds:.2f}"]
                for work, prediction, at in found
            ],
        ),
    }


def every_prediction(tables: "Tables") -> str:
    """A table of all that is published of any card, in microseconds."""
    rows = [
        [*work[:3], *(predicted(work, card, tables) for card in CARDS)]  # name, shape, dtype
        for work in works()
    ]
    return report.plain_table(["operation", "shape", "dtype", *(c.name for c in CARDS)], rows)


def _figure(number: float) -> str:
    """Two digits: a model has no more."""
    digits = 1 - math.floor(math.log10(number))
    return f"{round(number, digits):,.{max(digits, 0)}f}"


def main() -> None:
    """Write the page's tables, and print the predictions."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    tables = Tables()
    report.replace_in_page(PAGE, page_tables(tables))
    print(every_prediction(tables))


if __name__ == "__main__":
    main()

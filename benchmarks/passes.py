"""What the NumPy calls of an operation take by themselves: how far a row on the CPU can go.

Run ``python -m benchmarks.passes [--out FILE]`` with PyTorch installed, and with
``GRADKIT_ORT_PYTHON`` for ONNX Runtime. Each operation is also written as the NumPy calls that it
is made of, on gradkit's own tiles, less all checks and special cases.
All run on one core and take turns; times are processor time, medians of rounds.

``passes`` is what those calls take. It is what is left of gradkit's time if everything else cost
nothing, so that a peer's time over it bounds the ratio that these calls allow. Other calls may do
better.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import gradkit
from benchmarks import bench_batch_norm, machine, norms, peers, shapes
from gradkit._config import set_num_threads
from gradkit._numpy.casts import narrow, widen
from gradkit._numpy.channels import Channels
from gradkit._numpy.sums import column_sums, row_sums
from gradkit._numpy.tiles import Rows

Array = np.ndarray[Any, Any]
# One NumPy call, or a few that make one pass over a tile.
Step = tuple[str, Callable[[], object]]
ROUNDS = 15
FLOAT32 = np.dtype(np.float32)


class Row(NamedTuple):
    """One operation on one shape and dtype, and its passes, tile by tile."""

    operation: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: str
    arguments: dict[str, Any]
    passes: Callable[..., Iterator[Sequence[Step]]]

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"{self.operation.__name__} {'x'.join(map(str, self.shape))} {self.dtype}"


def rows() -> Iterator[Row]:
    """The rows of the table."""
    large = 8192, 1024
    kinds = [(large, dtype) for dtype in ("float32", "bfloat16", "float16")]
    for shape, dtype in (((128, 4096), "float32"), ((1, 4096), "float32"), *kinds):
        arguments = norms.rows(shape, norms.DTYPES.get(dtype, np.float32), centred=True)
        yield Row(gradkit.layer_norm_grad, shape, dtype, arguments, of_layer_norm)
    for images in shapes.IMAGES[::-1][:3]:
        arguments = bench_batch_norm.arguments(images, np.float32)
        yield Row(gradkit.batch_norm_grad, images, "float32", arguments, of_batch_norm)


def of_layer_norm(
    dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array, dx: Array
) -> Iterator[Sequence[Step]]:
    """The gradient of layer norm: eight passes and four sums; conversions if data is narrow."""
    cut = Rows.of((dy, x, dx), 1, FLOAT32)
    shape = dy[cut.rows[0]].shape
    xhat, product, wide = (np.empty(shape, np.float32) for _ in range(3))
    middle = np.full((shape[0], 1), 1e-3, np.float32)
    for at in cut.rows:
        g, source = dy[at], x[at]
        n, target = len(g), cut.target(dx[at], product.reshape(-1))
        own, p, c, i, m = xhat[:n], product[:n], mean[at][:, None], inv_std[at][:, None], middle[:n]
        steps: list[Step] = []
        if g.dtype != FLOAT32:
            steps += [
                ("widen dy", partial(widen, g, wide[:n])),
                ("widen x", partial(widen, source, own)),
            ]
            g, source = wide[:n], own
        steps += [
            ("x - mean", partial(np.subtract, source, c, own)),
            ("* inv_std", partial(np.multiply, own, i, own)),
            ("columns of dy", partial(column_sums, g)),
            ("rows of dy scale", partial(row_sums, g, scale)),
            ("dy xhat", partial(np.multiply, g, own, p)),
            ("columns of dy xhat", partial(column_sums, p)),
            ("rows of dy xhat scale", partial(row_sums, p, scale)),
            ("dy scale", partial(np.multiply, g, scale, target)),
            ("xhat * its mean", partial(np.multiply, own, m, own)),
            ("+ mean", partial(np.add, own, m, own)),
            ("w - that", partial(np.subtract, target, own, target)),
            ("* inv_std again", partial(np.multiply, target, i, target)),
        ]
        if np.shares_memory(target, p):
            last = "copy dx" if dx.dtype == FLOAT32 else "narrow dx"
            steps.append((last, partial(narrow, target, dx[at], own.reshape(-1))))
        yield steps


def of_batch_norm(
    dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array, dx: Array
) -> Iterator[Sequence[Step]]:
    """The gradient of batch norm: five passes for the sums and five for dx."""
    channels = Channels((dy, x, dx), 1, slice(None))
    room = np.empty(max(x[index].size for index in channels.blocks), np.float32)
    centre, factor, outer = map(channels.vector, (mean, inv_std, inv_std * scale))
    dys, xs, dxs = channels.arrays
    for sums in (True, False):
        for index in channels.blocks:
            at, g, source, out = channels.of(index), dys[index], xs[index], dxs[index]
            c, i, o, own = centre[at], factor[at], outer[at], channels.shaped(room, source)
            first: list[Step] = [("x - mean", partial(np.subtract, source, c, own))]
            if sums:
                yield [
                    *first,
                    ("* inv_std", partial(np.multiply, own, i, own)),
                    ("* dy", partial(np.multiply, own, g, own)),
                    ("sums of dy xhat", partial(channels.sums, own)),
                    ("sums of dy", partial(channels.sums, g)),
                ]
            else:
                target = channels.target(out, own)
                yield [
                    ("x - mean again", first[0][1]),
                    ("* slope", partial(np.multiply, own, i, own)),
                    ("+ mean of dy", partial(np.add, own, c, own)),
                    ("dy - that", partial(np.subtract, g, own, own)),
                    ("* inv_std scale", partial(np.multiply, own, o, target)),
                    *([("copy dx", partial(np.copyto, out, own))] if target is own else []),
                ]


def measure(row: Row, everyone: Sequence[Any]) -> dict[str, Any]:
    """Median milliseconds of gradkit, of its passes and of each peer; and of each pass."""
    arguments, operation = row.arguments, row.operation
    outs = tuple(np.empty_like(a) for a in operation(**arguments))
    if row.dtype != "float32":
        everyone = [peer for peer in everyone if peer.name == "torch"]
    steps = [step for tile in row.passes(**arguments, dx=outs[0]) for step in tile]
    calls = {
        "gradkit": lambda: operation(**arguments, out=outs),
        "passes": lambda: [call() for _, call in steps],
        **peers.calls(everyone, operation.__name__, **arguments),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    each: dict[str, list[float]] = {name: [] for name, _ in steps}
    repeats = min(100, max(1, (1 << 20) // row.arguments["x"].size))
    with np.errstate(all="ignore"):
        np.setbufsize(512)  # as gradkit does for runs of these lengths
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(_time(call, repeats))
            now: dict[str, float] = defaultdict(float)
            for name, call in steps:
                now[name] += _time(call, 1)
            for name, ms in now.items():
                each[name].append(ms)
    for name, call in calls.items():  # a peer in another process measures its own times
        if hasattr(call, "times"):
            times[name] = [s * 1e3 for s in call.times()[-ROUNDS:]]
    return {
        "ms": {name: median(found) for name, found in times.items()},
        "each": {name: median(found) for name, found in each.items()},
    }


def _time(call: Callable[[], object], repeats: int) -> float:
    start = time.process_time_ns()
    for _ in range(repeats):
        call()
    return (time.process_time_ns() - start) / repeats / 1e6


def report(found: dict[str, dict[str, Any]]) -> str:
    """The tables."""
    about = machine.describe()
    names = [n for n in ("torch", "onnxruntime") if any(n in r["ms"] for r in found.values())]
    lines = [
        f"# Passes on one core of {about['cpu']}",
        "",
        f"Made by `python -m benchmarks.passes`. {about['system']}, Python {about['python']}, "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + ". Milliseconds of processor time; a peer's ratio is its time over gradkit's, and then "
        "over that of the passes, which is the most that these calls allow.",
        "",
        "| row | gradkit | passes | " + " | ".join(f"{n} | today | at most" for n in names) + " |",
        "|---" * (3 + 3 * len(names)) + "|",
    ]
    for name, result in found.items():
        ms = result["ms"]
        cells = [name, f"{ms['gradkit']:.3g}", f"{ms['passes']:.3g}"]
        for peer in names:
            own = ms.get(peer)
            ratios = [f"{own / ms[k]:.2f}x" for k in ("gradkit", "passes")] if own else ["", ""]
            cells += [f"{own:.3g}" if own else "", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    for name, result in found.items():
        lines += ["", f"## {name}", "", "| pass | ms |", "|---|---|"]
        lines += [f"| {step} | {ms:.3g} |" for step, ms in result["each"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    set_num_threads(1)
    everyone, missing = peers.available(("torch", "onnxruntime"))
    for name, why in missing.items():
        print(f"without {name}: {why}")
    text = report({row.name: measure(row, everyone) for row in rows()})
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()

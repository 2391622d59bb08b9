"""Cost of a call apart from its arithmetic, in microseconds, by pyperf.

``python -m benchmarks.overhead GROUP [--in-turns] [pyperf's options]`` times small arrays
in several ways, each in processes of its own (pyperf's defaults here: ``-p 3 -n 5``), and prints
medians. ``--in-turns``, or without pyperf: in this process, in turns, the best of many rounds.

- ``small``: calls on NumPy arrays, by gradkit and by its peers.
- ``tensors``: calls on ten of PyTorch's tensors, on NumPy arrays over their memory, and on arrays
  that own theirs, which need no search for shared memory.
- ``torch``: both passes of a norm in PyTorch's autograd. ``direct``: gradkit's two calls;
  ``+ engine``: then PyTorch's ``x.view_as(x)`` and its backward pass; ``nothing``: a
  ``torch.autograd.Function`` that computes nothing, below which none in Python can go; ``bare``:
  one that makes the two calls and checks nothing.
- ``modules``: both passes of modules at sizes that are computed, not overhead, in new tensors, by
  ``gradkit.torch`` and by PyTorch; with ``OMP_NUM_THREADS=2`` on threads that both have.
- ``gpt``: both passes of a small transformer, by ``torch.compile`` too, which needs a compiler;
  ``decomposed``: compiled with our norms by ``gradkit.torch.decomposed_inductor``.
- ``jax``: both passes of a norm in one jitted function, and a clip.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import gradkit
from benchmarks import autograd, lists
from benchmarks import rows as row_norms
from benchmarks.autograd import COLUMNS, TENSORS, Makers
from benchmarks.devices import Call, Cpu, Device
from benchmarks.peers import Arguments, tensor
from benchmarks.report import markdown
from benchmarks.timing import LAUNCH, OURS, OVERHEAD, Case, line, microseconds

LOCAL = ("naive", "torch", "jax", "torch.compile", "liger", "quack")  # peers in this process
PYPERF = {"processes": 3, "values": 5, "min_time": 0.02}
Times = dict[str, dict[str, float]]  # microseconds, by row and way


def cases(device: Device, *, quick: bool = False) -> Iterator[Case]:  # noqa: ARG001
    """Yield one call of each kind; on a GPU, compared with a launch that does nothing."""

    def one(name: str) -> Arguments:
        if name == "layer_norm_grad":
            return row_norms.gradient_arguments(device, name, (8, 64), "float32")
        if name == "accumulate_grad":
            buffer, grad = (device.normal((64,), "float32", seed) for seed in (0, 1))
            return {"buffer": buffer, "grad": grad}
        found = {"grads": [device.normal((64,), "float32")]}
        return found | {"limit": lists.fixed(1e9)} if name == "clip_grad_norm" else found

    tables = row_norms.TABLES | lists.TABLES
    for name, shape, written in (
        ("layer_norm_grad", "8x64", ()),
        ("grad_norm", "1 x 64", ()),
        ("clip_grad_norm", "1 x 64", ("grads", "limit")),
        ("accumulate_grad", "64", ("buffer",)),
        ("zero_grad", "1 x 64", ("grads",)),
    ):
        targets = {LAUNCH: 3.0} if device.name == "cuda" else {}
        case = Case(name, shape, "float32", tables[name], partial(one, name), 0, targets, written)
        yield replace(case, peers=LOCAL, note=OVERHEAD)


def small_calls(peers: str = ",".join(LOCAL)) -> dict[str, Makers]:
    """Return calls on NumPy arrays by gradkit and by its peers."""
    device = Cpu()
    return {str(case): case.makers(device, peers.split(",")) for case in cases(device)}


def on_tensors() -> dict[str, Makers]:
    """Return calls on lists of small tensors and of arrays."""
    owned = [np.random.default_rng(k).random(COLUMNS, np.float32) for k in range(TENSORS)]
    calls: dict[str, Callable[[Any], object]] = {
        "grad_norm": gradkit.grad_norm,
        "clip_grad_norm": lambda grads: gradkit.clip_grad_norm(grads, 1e9),
        "scale_grads": lambda grads: gradkit.scale_grads(grads, 1.0),
        "zero_grad": gradkit.zero_grad,
        "clip_by_global_norm": lambda grads: gradkit.clip_by_global_norm(grads, 1e9),
    }
    return {
        name: {
            "owned": partial(partial, call, owned),
            "memory": lambda call=call: partial(call, [tensor(array).numpy() for array in owned]),
            "torch": lambda call=call: partial(call, [tensor(array.copy()) for array in owned]),
        }
        for name, call in calls.items()
    }


GROUPS: dict[str, Callable[..., dict[str, Makers]]] = {
    "small": small_calls,
    "tensors": on_tensors,
    "torch": autograd.in_torch,
    "modules": autograd.in_modules,
    "gpt": autograd.in_a_gpt,
    "jax": autograd.in_jax,
}
# Differences of two ways that are printed too.
DIFFERENCES = {
    "tensors": {"beyond": ("torch", "memory")},
    "torch": {"beyond": ("gradkit.torch", "+ engine"), "own": ("gradkit.torch", "bare")},
    "jax": {"beyond": ("gradkit.jax", "direct")},
}


def by_pyperf(runner: Any, rows: Mapping[str, Makers]) -> Times | None:
    """Return medians, or None in one of pyperf's own processes."""
    found: Times = {}
    for row, makers in rows.items():
        for way, make in makers.items():
            timed = runner.bench_time_func(f"{row}: {way}", partial(_seconds, [], make))
            if not runner.args.worker:
                found.setdefault(row, {})[way] = median(timed.get_values()) * 1e6
    return None if runner.args.worker else found


def lines(peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of small calls for a record, measured by pyperf."""
    import pyperf

    with tempfile.TemporaryDirectory(prefix="gradkit-bench-") as folder:
        path = Path(folder, "small.json")
        command = [sys.executable, "-m", "benchmarks.overhead", "small", "-q", "-o", str(path)]
        subprocess.run([*command, "--peers", ",".join(peers)], check=True)
        suite = pyperf.BenchmarkSuite.load(str(path))
        found = {bench.get_name(): bench.get_values() for bench in suite}
    made = []
    for case in cases(Cpu()):
        title = f"{case}: "
        own = {name.removeprefix(title): t for name, t in found.items() if name.startswith(title)}
        made.append(line(case, own, median(own[OURS])))
    return made


def _seconds(made: list[Call], make: Callable[[], Call], loops: int) -> float:
    """Return the seconds of so many calls; the call is made before the first one."""
    if not made:
        made.append(make())
        made[0]()
    return timeit.Timer(made[0]).timeit(loops)


def table(group: str, times: Times) -> str:
    """Return rows of microseconds, with the differences of the group."""
    ways = list(dict.fromkeys(way for row in times.values() for way in row))
    differences, lines = DIFFERENCES.get(group, {}), []
    for name, row in times.items():
        cells = [f"{row[way]:.1f}" if way in row else "" for way in ways]
        cells += [f"{row[more] - row[less]:.1f}" for more, less in differences.values()]
        lines.append([name, *cells])
    return markdown(["us a call", *ways, *differences], lines)


def main() -> None:
    """Print the group's table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import pyperf
    except ImportError:
        pyperf = None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead")
    plain = pyperf is None or "--in-turns" in sys.argv
    if not plain:
        program = ("-m", "benchmarks.overhead")
        runner = pyperf.Runner(**PYPERF, program_args=program, add_cmdline_args=_pass_on)
        parser = runner.argparser
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--peers", default=",".join(LOCAL[:3]), help="of small calls")
    parser.add_argument("--in-turns", action="store_true", help="without pyperf")
    options = parser.parse_args() if plain else runner.parse_args()
    rows = small_calls(options.peers) if options.group == "small" else GROUPS[options.group]()
    times: Times | None
    if plain:
        times = {
            row: microseconds({w: make() for w, make in ways.items()}) for row, ways in rows.items()
        }
    else:
        times = by_pyperf(runner, rows)
    if times is not None:
        print(table(options.group, times))


def _pass_on(command: list[str], options: argparse.Namespace) -> None:
    """Give pyperf's processes the options that are not pyperf's."""
    command += [options.group, "--peers", options.peers]


if __name__ == "__main__":
    main()

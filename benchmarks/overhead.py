"""What a call costs apart from its arithmetic, in microseconds, by pyperf.

``python -m benchmarks.overhead GROUP [--in-turns] [--check] [pyperf's options]`` times small arrays
in several ways, each in processes of its own (pyperf's defaults here: ``-p 3 -n 5``), and prints
medians. ``--in-turns``, or without pyperf: in this process, in turns, the best of many rounds.

- ``small``: calls on NumPy arrays, by gradkit and by its peers.
- ``tensors``: calls on ten of PyTorch's tensors, on NumPy arrays over their memory, and on arrays
  that own theirs, which need no search for shared memory. ``--check``: 10 us beyond ``memory``.
- ``torch``: both passes of a norm in PyTorch's autograd. ``direct``: gradkit's two calls;
  ``+ engine``: then PyTorch's ``x.view_as(x)`` and its backward pass; ``bare``: a
  ``torch.autograd.Function`` that makes the two calls and checks nothing. ``--check``: 15 us beyond
  ``bare``.
- ``gpt``: both passes of a small transformer, by ``torch.compile`` too, which needs a compiler;
  ``decomposed``: compiled with our norms by ``gradkit.torch.decomposed_inductor``.
- ``jax``: both passes of a norm in one jitted function, and a clip. ``nothing``: as many callbacks
  that do nothing; ``in turn``: ``nothing`` and then ``direct``, of which each finds the processor's
  caches full of the other's code. ``--check``: no more than that.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import gradkit
from benchmarks import autograd, small
from benchmarks.autograd import COLUMNS, TENSORS, Makers
from benchmarks.devices import Call, Cpu
from benchmarks.peers import tensor
from benchmarks.report import markdown
from benchmarks.timing import OURS, line, microseconds

PYPERF = {"processes": 3, "values": 5, "min_time": 0.02}
Times = dict[str, dict[str, float]]  # microseconds, by row and way


def small_calls(peers: str = ",".join(small.LOCAL)) -> dict[str, Makers]:
    """Return calls on NumPy arrays by gradkit and by its peers."""
    device = Cpu()
    return {str(case): case.makers(device, peers.split(",")) for case in small.cases(device)}


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
    "gpt": autograd.in_a_gpt,
    "jax": autograd.in_jax,
}
# Differences of two ways that are printed too; what ``--check`` looks at, and the most it may be.
DIFFERENCES = {
    "tensors": {"beyond": ("torch", "memory")},
    "torch": {"beyond": ("gradkit.torch", "+ engine"), "own": ("gradkit.torch", "bare")},
    "jax": {"beyond": ("gradkit.jax", "direct"), "more": ("gradkit.jax", "in turn")},
}
LIMITS = {"tensors": ("beyond", 10.0), "torch": ("own", 15.0), "jax": ("more", 0.0)}


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
    for case in small.cases(Cpu()):
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


def exceeded(group: str, times: Times) -> list[str]:
    """Return the rows above the group's limit."""
    name, limit = LIMITS[group]
    more, less = DIFFERENCES[group][name]
    return [row for row, found in times.items() if found[more] - found[less] > limit]


def main() -> int:
    """Print the group's table; return 1 if ``--check`` finds a row above the limit."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch's threads would wait for one another
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
    parser.add_argument("--peers", default=",".join(small.LOCAL[:3]), help="of small calls")
    parser.add_argument("--in-turns", action="store_true", help="without pyperf")
    parser.add_argument("--check", action="store_true", help="fail above the limit")
    options = parser.parse_args() if plain else runner.parse_args()
    rows = small_calls(options.peers) if options.group == "small" else GROUPS[options.group]()
    if plain:
        times: Times | None = {
            row: microseconds({way: make() for way, make in makers.items()})
            for row, makers in rows.items()
        }
    else:
        times = by_pyperf(runner, rows)
    if times is None:
        return 0
    print(table(options.group, times))
    return int(options.check and bool(exceeded(options.group, times)))


def _pass_on(command: list[str], options: argparse.Namespace) -> None:
    """Give pyperf's processes the options that are not pyperf's."""
    command += [options.group, "--peers", options.peers]


if __name__ == "__main__":
    sys.exit(main())

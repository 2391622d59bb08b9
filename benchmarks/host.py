"""The host's time in calls on small arrays: ``python -m benchmarks.host [--on KIND]``.

On CuPy arrays and ``idle`` arrays (NumPy's, on a test double of a device) kernels do nothing, so
this runs without a GPU; CuPy has to be installed. ``cupy`` leaves out what CuPy's launches take;
``driver`` is all of CuPy on the testbed's driver, which checks each launch and forgets it, and
whose own time is in the figures. ``torch``: PyTorch's CPU tensors, taken for CUDA ones, on that
driver; ``make bench-host-torch`` puts PyTorch and CuPy into one process. NumPy takes longer than
CuPy to give an array's address, so compare idle times only with each other. ``--profile NAME``
shows where a call spends its time.
``--record`` measures on the driver and writes the column of this version of CuPy into
host_times.csv, which ``benchmarks.gpu_model`` reads.
"""

import argparse
import cProfile
import csv
import itertools
import pstats
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import gradkit
from benchmarks import rows
from benchmarks.timing import microseconds
from gradkit._cuda import CudaBackend
from testbed.driver import install
from testbed.emulator import IdleDevice
from tests.devices.emulated import IdleArray, on_device
from tests.devices.idle_cupy import idle_cupy
from tests.devices.idle_torch import torch_on_cuda

TIMES = Path(__file__).with_name("host_times.csv")
FORMULA = "formula, NumPy"
RECORDED = (  # what the model predicts
    *(FORMULA, "layer_norm_grad", "rms_norm_grad", "batch_norm", "batch_norm_grad"),
    *("grad_norm", "grad_norm, 1000", "clip_grad_norm", "clip_grad_norm, 1000"),
)
VERSIONS = ("13.6", "14.2")  # of CuPy
_ROUNDS = 1000  # of which the best is recorded

Maker: TypeAlias = Callable[[np.ndarray[Any, Any]], Any]


@contextmanager
def idle() -> Iterator[Maker]:
    """Arrays of a device that neither compiles nor launches."""
    device = IdleDevice(multiprocessors=132)
    backend = CudaBackend(device)

    def empty(shape: Any, dtype: Any) -> IdleArray:
        return on_device(np.empty(shape, dtype), backend, IdleArray)

    device.empty = empty
    yield lambda host: on_device(device.xp.asarray(host), backend, IdleArray)


@contextmanager
def on_driver() -> Iterator[Maker]:
    """CuPy's own arrays, launches, pool and streams, on a driver that only checks launches."""
    driver, _ = install()
    driver.launches_run(False)
    import cupy

    yield cupy.asarray


@contextmanager
def torch_on_driver() -> Iterator[Maker]:
    """PyTorch's tensors, which CuPy launches kernels on, on such a driver."""
    with on_driver(), torch_on_cuda() as make:
        yield make


# How arrays are made; the CPU backend computes on NumPy's own.
MAKERS: dict[str, Callable[[], AbstractContextManager[Maker]]] = {
    "cupy": idle_cupy,
    "driver": on_driver,
    "idle": idle,
    "numpy": partial(nullcontext, np.array),
    "torch": torch_on_driver,
}


def calls(make: Maker) -> dict[str, Callable[[], Any]]:
    """One call of each kind, on small arrays and on lists of 1 to 1000."""

    def array(*shape: int) -> Any:
        return make(np.ones(shape, np.float32))

    vector, other = array(64), array(64)
    x, dy, scale, row = array(8, 64), array(8, 64), array(64), array(8)
    out = array(8, 64), array(64), array(64)
    images, channels = array(4, 8, 3, 3), array(8)
    one, many = [array(64)], [array(256) for _ in range(1000)]
    others = [[array(256) for _ in range(1000)] for _ in range(70)]  # more lists than are kept
    turns = itertools.count()
    four, ten = [array(n) for n in (64, 256, 64, 10)], [array(64) for _ in range(10)]
    return {
        FORMULA: rows.formula(),
        "layer_norm": lambda: gradkit.layer_norm(x, scale, scale),
        "layer_norm_grad": lambda: gradkit.layer_norm_grad(dy, x, scale, row, row),
        "layer_norm_grad, out=": lambda: gradkit.layer_norm_grad(dy, x, scale, row, row, out=out),
        "rms_norm_grad": lambda: gradkit.rms_norm_grad(dy, x, scale, row),
        "batch_norm": lambda: gradkit.batch_norm(images, channels, channels),
        "batch_norm_grad": lambda: gradkit.batch_norm_grad(
            images, images, channels, channels, channels
        ),
        "accumulate_grad": lambda: gradkit.accumulate_grad(vector, other),
        "zero_grad": lambda: gradkit.zero_grad(one),
        "grad_norm": lambda: gradkit.grad_norm(one),
        "clip_grad_norm": lambda: gradkit.clip_grad_norm(one, 1e9),
        "clip_grad_norm, 4": lambda: gradkit.clip_grad_norm(four, 1e9),
        "clip_grad_norm, 10": lambda: gradkit.clip_grad_norm(ten, 1e9),
        "grad_norm, 1000": lambda: gradkit.grad_norm(many),
        "clip_grad_norm, 1000": lambda: gradkit.clip_grad_norm(many, 1e9),
        "zero_grad, 1000": lambda: gradkit.zero_grad(many),
        "zero_grad, 1000 others": lambda: gradkit.zero_grad(others[next(turns) % len(others)]),
    }


def both_passes(make: Maker) -> dict[str, Callable[[], Any]]:
    """Layer norm and its gradient on PyTorch's tensors, and the same in PyTorch's autograd."""
    import torch

    import gradkit.torch

    (x, dy), norm = (
        (make(np.ones((8, 64), np.float32)) for _ in range(2)),
        gradkit.torch.LayerNorm(64),
    )
    scale, bias = (parameter.detach() for parameter in norm.parameters())
    wanted = [x.clone().requires_grad_(), *norm.parameters()]

    def direct() -> None:
        _, *saved = gradkit.layer_norm(x, scale, bias)
        gradkit.layer_norm_grad(dy, x, scale, *saved)

    return {
        "both passes": direct,
        "gradkit.torch.LayerNorm": lambda: torch.autograd.grad(norm(wanted[0]), wanted, dy),
    }


def recorded(version: str = VERSIONS[-1]) -> dict[str, float]:
    """The microseconds of each call that were recorded with a version of CuPy, on one machine."""
    with TIMES.open(newline="") as file:
        return {row["call"]: float(row[version]) for row in csv.DictReader(file)}


def _record(every: dict[str, Callable[[], Any]], version: str) -> None:
    """Write the column of a version, and keep the others."""
    best = {name: microseconds({name: every[name]}, _ROUNDS)[name] for name in RECORDED}
    columns = {known: recorded(known) for known in VERSIONS} | {version: best}
    with TIMES.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("call", *VERSIONS))
        for name in RECORDED:
            lines.writerow((name, *(f"{times[name]:.1f}" for times in columns.values())))


def main() -> None:
    """Print a line for each call, or one call's profile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--on", choices=MAKERS, default="idle")
    parser.add_argument("--profile", metavar="NAME")
    parser.add_argument("--record", action="store_true", help="on the driver")
    options = parser.parse_args()
    with MAKERS["driver" if options.record else options.on]() as make:
        every = calls(make) | (both_passes(make) if options.on == "torch" else {})
        if options.record:
            import cupy

            _record(every, ".".join(cupy.__version__.split(".")[:2]))
        elif options.profile is None:
            for name, call in every.items():  # one by one: each finds its own code in the caches
                print(f"{name:24} {microseconds({name: call})[name]:8.1f} us")
        else:
            every[options.profile]()
            with cProfile.Profile() as profile:
                for _ in range(200):
                    every[options.profile]()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

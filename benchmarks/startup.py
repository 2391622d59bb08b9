"""The cost of first calls: ``python -m benchmarks.startup`` prints it as JSON.

It times each operation's first and second call in a fresh process, with an empty cache of compiled
kernels and then with the cache that the first process left. ``--nvrtc`` needs no GPU: it times how
long NVRTC takes to compile what ``gradkit.warmup`` would compile for each operation, one by one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import gradkit
from benchmarks import bench_batch_norm, norms
from benchmarks.places import Arrays, Cuda, Emulated

OPERATIONS = (
    *("zero_grad", "accumulate_grad", "grad_norm", "clip_grad_norm", "layer_norm"),
    *("layer_norm_grad", "rms_norm_grad", "batch_norm_grad"),
)
PLACES = {"cuda": Cuda, "emulated": Emulated}


def measure(device: str) -> dict[str, dict[str, float]]:
    """Milliseconds of each operation's first call, with a cold and a warm cache, and its second."""
    with tempfile.TemporaryDirectory(prefix="gradkit-bench-") as cache:
        environment = os.environ | {"CUPY_CACHE_DIR": cache}
        command = [sys.executable, "-m", "benchmarks.startup", "--one", device]
        cold, warm = (
            json.loads(
                subprocess.run(
                    command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )
    return {
        name: {"cold": cold[name][0], "from the disk cache": warm[name][0], "second call": second}
        for name, (_, second) in warm.items()
    }


def one(place: Arrays) -> dict[str, tuple[float, float]]:
    """Milliseconds of each operation's first and second call in this process."""
    return {name: (_ms(call), _ms(call)) for name, call in _calls(place)}


def compile_times(dtype: str, architecture: int = 90) -> dict[str, dict[str, float]]:
    """For each operation on arrays of a dtype: combinations, their seconds, the slowest one's."""
    from gradkit._calls.backend import OPERATIONS, operations_of
    from gradkit._cuda.launch import warmup
    from gradkit._cuda.launch.kernels import options_of, source_of
    from testbed.nvrtc import compile_ptx, cupy_options

    @cache
    def seconds(file: str, options: tuple[str, ...]) -> float:
        start = time.perf_counter()
        compile_ptx(source_of(file), cupy_options(options, architecture))
        return time.perf_counter() - start

    found = {}
    for operation in OPERATIONS:
        combined = warmup.needed(operations_of(operation), {dtype})
        each = [seconds(file, options_of(macros)) for file, macros in combined]
        found[operation] = {
            "combinations": len(each),
            "seconds": round(sum(each), 2),
            "slowest": round(max(each), 2),
        }
    return found


def _calls(place: Arrays) -> Iterator[tuple[str, Callable[[], Any]]]:
    dtype = "float32" if place.tiny else "bfloat16"
    rows = norms.device_rows(place, (64, 1024), dtype, centred=True)
    x, scale = rows["x"], rows["scale"]
    images = bench_batch_norm.device_arguments(place, (2, 8, 4, 4), dtype, last=False)
    yield "zero_grad", lambda: gradkit.zero_grad([x.copy()])
    yield "accumulate_grad", lambda: gradkit.accumulate_grad(x.copy(), x)
    yield "grad_norm", lambda: gradkit.grad_norm([x])
    yield "clip_grad_norm, after it", lambda: gradkit.clip_grad_norm([x.copy()], 1.0)
    yield "layer_norm", lambda: gradkit.layer_norm(x, scale)
    yield "layer_norm_grad", lambda: gradkit.layer_norm_grad(**rows)
    native = {"engine": "native"}
    yield "batch_norm_grad, native", lambda: gradkit.batch_norm_grad(**images, **native)
    if not place.tiny:
        yield "batch_norm_grad", lambda: gradkit.batch_norm_grad(**images)


def _ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return round((time.perf_counter() - start) * 1e3, 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--one", action="store_true", help="in this process, with its own cache")
    parser.add_argument("device", choices=PLACES, nargs="?", default="cuda")
    parser.add_argument("--nvrtc", metavar="DTYPE", help="compile times, without a device")
    options = parser.parse_args()
    if options.nvrtc:
        print(json.dumps(compile_times(options.nvrtc), indent=1))
    else:
        run = one(PLACES[options.device]()) if options.one else measure(options.device)
        print(json.dumps(run))

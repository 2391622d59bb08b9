"""Each operation's first call: ``python -m benchmarks.startup``.

Times first and second calls in a fresh process, with an empty cache of compiled kernels and then
with the cache that the first process left, and prints them as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gradkit
from benchmarks import channels, rows
from benchmarks.devices import DEVICES, Device


def measure(device: str) -> dict[str, dict[str, float]]:
    """Return milliseconds of each first call, with a cold and a warm cache, and of the second."""
    with tempfile.TemporaryDirectory(prefix="gradkit-bench-") as cache:
        command = [sys.executable, "-m", "benchmarks.startup", "--one", device]
        run = partial(subprocess.run, command, check=True, stdout=subprocess.PIPE, text=True)
        environment = os.environ | {"CUPY_CACHE_DIR": cache}
        cold, warm = (json.loads(run(env=environment).stdout.splitlines()[-1]) for _ in range(2))
    return {
        name: {"cold": cold[name][0], "from the disk cache": warm[name][0], "second call": second}
        for name, (_, second) in warm.items()
    }


def one(device: Device) -> dict[str, tuple[float, float]]:
    """Return milliseconds of each operation's first and second call in this process."""
    return {name: (_ms(call), _ms(call)) for name, call in _calls(device).items()}


def _calls(device: Device) -> dict[str, Callable[[], Any]]:
    dtype = "float32" if device.tiny else "bfloat16"
    given = rows.gradient_arguments(device, "layer_norm_grad", (64, 1024), dtype)
    images = channels.gradient_arguments(device, "batch_norm_grad", (2, 8, 4, 4), dtype)
    x, scale = given["x"], given["scale"]
    batch_norm_grad = partial(gradkit.batch_norm_grad, **images)
    return {
        "zero_grad": lambda: gradkit.zero_grad([x.copy()]),
        "accumulate_grad": lambda: gradkit.accumulate_grad(x.copy(), x),
        "grad_norm": lambda: gradkit.grad_norm([x]),
        "clip_grad_norm, after it": lambda: gradkit.clip_grad_norm([x.copy()], 1.0),
        "layer_norm": lambda: gradkit.layer_norm(x, scale),
        "layer_norm_grad": lambda: gradkit.layer_norm_grad(**given),
        "batch_norm_grad, native": partial(batch_norm_grad, engine="native"),
        **({} if device.tiny else {"batch_norm_grad": batch_norm_grad}),
    }


def _ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return round((time.perf_counter() - start) * 1e3, 3)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--one", action="store_true", help="in this process, with its own cache")
    parser.add_argument("device", choices=("cuda", "emulated"), nargs="?", default="cuda")
    options = parser.parse_args()
    print(json.dumps(one(DEVICES[options.device]()) if options.one else measure(options.device)))


if __name__ == "__main__":
    main()

"""The host's time in calls whose kernels do nothing: ``python -m benchmarks.host``.

The device is a test double that neither compiles nor launches, over NumPy arrays, so this runs
anywhere. NumPy takes longer than CuPy to give an array's address, so compare these times only
with each other. ``--profile NAME`` shows where a call spends its time.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gradkit
from gradkit._cuda import CudaBackend
from testbed.emulated import IdleDevice, on_device

ROUNDS, SECONDS = 7, 0.02  # rounds, of which the best counts; the length of one


def calls() -> dict[str, Callable[[], Any]]:
    """One call of each kind, on small arrays and on a list of a thousand."""
    backend = CudaBackend(IdleDevice(multiprocessors=132))

    def array(*shape: int) -> Any:
        return on_device(backend.device.xp.asarray(np.ones(shape, np.float32)), backend)

    x, dy, scale, row = array(8, 64), array(8, 64), array(64), array(8)
    out = array(8, 64), array(64), array(64)
    images, channels = array(4, 8, 3, 3), array(8)
    one, many = [array(64)], [array(256) for _ in range(1000)]
    return {
        "layer_norm": lambda: gradkit.layer_norm(x, scale, scale),
        "layer_norm_grad": lambda: gradkit.layer_norm_grad(dy, x, scale, row, row),
        "layer_norm_grad, out=": lambda: gradkit.layer_norm_grad(dy, x, scale, row, row, out=out),
        "rms_norm_grad": lambda: gradkit.rms_norm_grad(dy, x, scale, row),
        "batch_norm_grad": lambda: gradkit.batch_norm_grad(
            images, images, channels, channels, channels
        ),
        "accumulate_grad": lambda: gradkit.accumulate_grad(x, dy),
        "zero_grad": lambda: gradkit.zero_grad(one),
        "grad_norm": lambda: gradkit.grad_norm(one),
        "clip_grad_norm": lambda: gradkit.clip_grad_norm(one, 1.0),
        "grad_norm, 1000": lambda: gradkit.grad_norm(many),
        "clip_grad_norm, 1000": lambda: gradkit.clip_grad_norm(many, 1.0),
        "zero_grad, 1000": lambda: gradkit.zero_grad(many),
    }


def microseconds(call: Callable[[], Any], seconds: float = SECONDS) -> float:
    """Microseconds per call in the best round."""
    call()
    start = time.perf_counter()
    call()
    count = max(1, int(seconds / (time.perf_counter() - start)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


def main() -> None:
    """Print a line for each call, or one call's profile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--profile", metavar="NAME", choices=calls())
    name = parser.parse_args().profile
    if name is None:
        for each, call in calls().items():
            print(f"{each:24} {microseconds(call):8.1f} us")
        return
    call = calls()[name]
    call()
    with cProfile.Profile() as profile:
        for _ in range(200):
            call()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

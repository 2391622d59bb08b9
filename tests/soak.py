"""Every operation over and over, with other shapes each time, on threads too: nothing may grow.

``python -m tests.soak [--minutes M] [--seed N]`` watches what Python has allocated, the process'
resident memory and the sizes of gradkit's caches, and exits 1 where the last quarter of the rounds
has more of one than the quarter before.
"""

import argparse
import contextlib
import functools
import gc
import math
import os
import random
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import gradkit
from gradkit import _arrays
from gradkit._cuda import list_tables
from gradkit._cuda.launch import kernels
from tests.backends import BACKENDS
from tests.layouts import LAYOUTS
from tests.operations import GROUPS, OPERATIONS, drawn
from tests.tolerances import DTYPES

# How much more is none; the kernels, of which there are so many, come as shapes ask for them.
SLACK = {
    "traced": 64 << 10,
    "resident": 8 << 20,
    "plans": 0,
    "cuts": 0,
    "types": 0,
    "threads": 0,
}
NAMES = (*SLACK, "kernels")
_MOST = 1 << 17  # samples


def sizes():
    """Sizes that must not grow, in the order of ``NAMES``: bytes, and entries of every cache."""
    gc.collect()
    statm = Path("/proc/self/statm")  # on Linux
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    found = {
        "traced": tracemalloc.get_traced_memory()[0],
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "plans": len(list_tables._plans._cached),
        "cuts": len(list_tables._cuts._cached),
        "kernels": len(kernels._kernels),
        "types": len(_arrays._BY_TYPE),
        "threads": threading.active_count(),
    }
    return [found[name] for name in NAMES]


def growth(backend, samples):
    """By how much each of the last two quarters of the samples lies above the one before, by name.

    A leak shows in both; a table that was enlarged once shows in one. The emulator's resident
    memory does not count: it keeps a shadow of every page that arrays lay in.
    """
    quarter = len(samples) // 4
    parts = (samples[-k * quarter :][:quarter] for k in (3, 2, 1))
    steps = np.diff([np.median(part, axis=0) for part in parts], axis=0)
    more = dict(zip(NAMES, steps.min(axis=0), strict=True))
    counted = [name for name in SLACK if backend.on_host or name != "resident"]
    return {name: float(more[name]) for name in counted if more[name] > SLACK[name]}


def every_operation(backend, rng, largest=None):
    """Each public function once, on arrays whose shapes, dtypes and layouts are drawn; errors."""
    largest = largest or backend.max_elements // 16

    def make(*spec):
        return backend.asarray(LAYOUTS[rng.choice([*LAYOUTS])](drawn(*spec)))

    grads = [
        make("grads", (rng.randint(0, 40), 3), rng.choice([*DTYPES]))
        for _ in range(rng.choice((0, 1, 5, 120)))
    ]
    for operation in OPERATIONS.values():
        shape = _shape(rng, 1 if operation.family == "rows" else 2, largest)
        if operation.family != "rows":  # two elements a channel, and whole groups
            shape = 1 + shape[0], GROUPS * shape[1], *shape[2:]
        variant = rng.choice(["", *operation.variants])
        given = operation.arguments(make, rng.choice(operation.types), shape, variant=variant)
        if operation.family == "lists":
            given |= dict.fromkeys(given.keys() & {"grads", "params"}, grads)
        if "norm_type" in operation.parameters:
            given["norm_type"] = rng.choice((1, 2, 3.5, math.inf))
        operation(**given)
        if operation.writes == "grads" and "params" not in given:
            operation(**given | {"grads": (grad for grad in [None, *grads])})
        if operation.results[:1] == ("dx",) and "dx" in given.get("wanted", ("dx",)):
            over = given["dy"], *(None for _ in operation.results[1:])
            operation(**given | {"out": over if operation.results[1:] else over[0]})
    _refused(backend, make)


def _refused(backend, make):
    """Calls that fail, before they write and after they have computed a norm."""
    x = make("x", (3, 5), "float32")
    with contextlib.suppress(ValueError):
        gradkit.layer_norm(x, out=(x[:0], None, None))
    with contextlib.suppress(TypeError):
        gradkit.accumulate_grad(x, None)
    backend.assign(x, math.nan)  # CuPy's own kernels need aligned elements
    with contextlib.suppress(gradkit.NonFiniteNormError):
        gradkit.clip_grad_norm({"x": x}, 1.0, nonfinite="raise")


def _shape(rng, least, largest):
    rank = rng.randint(least, 4)
    most = rng.choice((256, largest))
    return tuple(rng.randint(1, max(1, round(most ** (1 / rank)))) for _ in range(rank))


def soak(backend, seconds, *, seed=0, variety=1 << 32, work=every_operation):
    """A sample after each round, on four threads and on this one; ``variety`` rounds differ."""
    samples = np.zeros((_MOST, len(NAMES)), np.int64)  # before anything is traced: no growth
    count = 0
    end = time.monotonic() + seconds
    tracemalloc.start()
    try:
        with backend.active():
            while count < 12 or (count < _MOST and time.monotonic() < end):
                rngs = [random.Random(f"{seed} {count % variety} {k}") for k in range(5)]
                if backend.on_host:
                    with ThreadPoolExecutor(4) as pool:
                        list(pool.map(functools.partial(work, backend), rngs[1:]))
                work(backend, rngs[0])
                samples[count] = sizes()
                count += 1
    finally:
        tracemalloc.stop()
    return samples[:count]


def main():
    """The exit status: 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    backends = [backend for backend in BACKENDS if backend.name in ("numpy", "emulated")]
    status = 0
    for backend in backends:
        samples = soak(backend, 60 * options.minutes / len(backends), seed=options.seed)
        found = growth(backend, samples)
        status = status or bool(found)
        print(f"soak: {backend.name}, {len(samples)} rounds, seed {options.seed}")
        for when, sample in (("half-way", samples[len(samples) // 2]), ("end", samples[-1])):
            shown = zip(NAMES, sample, strict=True)
            print(f"  {when:8}", *(f"{name} {value:,}" for name, value in shown))
        print(f"  grew: {found}" if found else "  nothing grew", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

"""Time against M, D and the number of tensors, to show any jump; and working memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

import gradkit
from benchmarks import channels, rows
from benchmarks.devices import Call, Cpu

REPEATS = 9
MEMORY_MIB = 16.0
Point = tuple[int, int, Call]  # the variable, elements, a call


def tables(*, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Return for each table the values of the variable, and ns per element."""
    step = 4 if quick else 2
    return {
        "layer_norm_grad, M rows of 1024": _table(_rows(1, 65536, step, by_row=True)),
        "layer_norm_grad, 1024 rows of D": _table(_rows(16, 65536, step, by_row=False)),
        "clip_grad_norm, n gradients of 1024": _table(_lists(1, 16384, step)),
    }


def _table(points: Iterator[Point]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"at": [], "ns an element": []}
    for value, elements, call in points:
        call()
        repeats = 10 * REPEATS if elements < 1 << 18 else REPEATS
        best = min(Cpu().timer(call) for _ in range(repeats))
        found["at"].append(value)
        found["ns an element"].append(float(f"{best * 1e9 / elements:.4g}"))
    return found


def _gradient(shape: tuple[int, int]) -> Call:
    given = rows.gradient_arguments(Cpu(), "layer_norm_grad", shape, "float32")
    out = tuple(np.empty_like(given[name]) for name in ("x", "scale", "scale"))
    return partial(gradkit.layer_norm_grad, **given, out=out)


def _rows(low: int, high: int, step: int, *, by_row: bool) -> Iterator[Point]:
    while low <= high:
        shape = (low, 1024) if by_row else (1024, low)
        yield low, 1024 * low, _gradient(shape)
        low *= step


def _lists(low: int, high: int, step: int) -> Iterator[Point]:
    while low <= high:
        grads = [np.full(1024, 2.0, np.float32) for _ in range(low)]
        yield low, 1024 * low, partial(gradkit.clip_grad_norm, grads, 1e9)
        low *= step


def _clip(size: int) -> Call:
    return partial(gradkit.clip_grad_norm, [np.ones((size, 1024), np.float32)], 1e-3)


def _batch_norm() -> Call:
    name, shape = "batch_norm_grad", (32, 256, 56, 56)
    given = channels.gradient_arguments(Cpu(), name, shape, "float32")
    out = tuple(np.empty_like(given[each]) for each in ("x", "scale", "scale"))
    return partial(gradkit.batch_norm_grad, **given, out=out)


_MEMORY: dict[str, Callable[[], Call]] = {
    "layer_norm_grad 8192x1024": partial(_gradient, (8192, 1024)),
    "clip_grad_norm 8192x1024": partial(_clip, 8192),
    "layer_norm_grad 32768x1024": partial(_gradient, (32768, 1024)),
    "clip_grad_norm 32768x1024": partial(_clip, 32768),
    "batch_norm_grad 32x256x56x56": _batch_norm,
}


def memory() -> dict[str, float]:
    """Return the most MiB that operations allocate beyond their outputs, in fresh processes."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(_MEMORY, pool.map(peak, _MEMORY, chunksize=1), strict=True))
    return found | {"at most": MEMORY_MIB}


def peak(name: str) -> float:
    """Return the MiB of one operation, in this process: what it has kept before is not counted."""
    call: Any = _MEMORY[name]()
    tracemalloc.start()
    try:
        call()
        return round(tracemalloc.get_traced_memory()[1] / 2**20, 2)
    finally:
        tracemalloc.stop()

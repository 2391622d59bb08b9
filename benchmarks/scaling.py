"""Time against M, D and the number of tensors, to show any jump."""

from collections.abc import Iterator
from functools import partial

import numpy as np

import gradkit
from benchmarks import rows
from benchmarks.devices import Call, Cpu

REPEATS = 9
Point = tuple[int, int, Call]  # the variable, elements, a call


def tables() -> dict[str, dict[str, list[float]]]:
    """Return for each table the values of the variable, and ns per element."""
    return {
        "layer_norm_grad, M rows of 1024": _table(_rows(1, by_row=True)),
        "layer_norm_grad, 1024 rows of D": _table(_rows(16, by_row=False)),
        "clip_grad_norm, n gradients of 1024": _table(_lists()),
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


def _rows(low: int, *, by_row: bool) -> Iterator[Point]:
    while low <= 65536:
        shape = (low, 1024) if by_row else (1024, low)
        yield low, 1024 * low, _gradient(shape)
        low *= 2


def _lists() -> Iterator[Point]:
    for count in (2**k for k in range(15)):
        grads = [np.full(1024, 2.0, np.float32) for _ in range(count)]
        yield count, 1024 * count, partial(gradkit.clip_grad_norm, grads, 1e9)

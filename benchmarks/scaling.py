"""Time against M, D and the number of tensors, from small to large, to show any jump."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import gradkit
from benchmarks import norms
from benchmarks.places import Host

REPEATS = 9


def tables(*, quick: bool) -> dict[str, list[dict[str, float]]]:
    """For each table, rows of the variable, the elements, ms and ns per element."""
    step = 4 if quick else 2
    return {
        "layer_norm_grad, M rows of 1024": _table(_rows(1, 65536, step, by_row=True)),
        "layer_norm_grad, 1024 rows of D": _table(_rows(16, 65536, step, by_row=False)),
        "clip_grad_norm, n gradients of 1024": _table(_lists(1, 16384, step)),
    }


def _table(points: Iterator[tuple[int, int, Callable[[], object]]]) -> list[dict[str, float]]:
    rows = []
    for value, elements, call in points:
        call()
        repeats = 10 * REPEATS if elements < 1 << 18 else REPEATS
        best = min(Host.timer(call) for _ in range(repeats))
        rows.append(
            {
                "at": value,
                "elements": elements,
                "ms": float(f"{best * 1e3:.4g}"),
                "ns an element": float(f"{best * 1e9 / elements:.4g}"),
            }
        )
    return rows


def _rows(low: int, high: int, step: int, *, by_row: bool) -> Iterator[Any]:
    value = low
    while value <= high:
        shape = (value, 1024) if by_row else (1024, value)
        given = norms.rows(shape, np.float32, centred=True)
        out = tuple(np.empty_like(given[name]) for name in ("x", "scale", "scale"))
        call = lambda given=given, out=out: gradkit.layer_norm_grad(**given, out=out)  # noqa: E731
        yield value, shape[0] * shape[1], call
        value *= step


def _lists(low: int, high: int, step: int) -> Iterator[Any]:
    value = low
    while value <= high:
        grads = [np.full(1024, 2.0, np.float32) for _ in range(value)]
        yield value, 1024 * value, lambda grads=grads: gradkit.clip_grad_norm(grads, 1e9)
        value *= step

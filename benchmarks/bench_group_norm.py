"""The gradient of group norm, in 32 groups, channels first and last.

All of a group's dy and x must be read before its first dx is written. On a CPU a group stays in a
cache between the two, so 3 elements per element move through memory. ONNX Runtime has no kernel for
it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradkit
from benchmarks import norms, shapes
from benchmarks.harness import Case
from benchmarks.places import Arrays

GROUPS = 32
TARGETS = {"naive": 2.0}


def arguments(shape: tuple[int, ...], dtype: Any) -> norms.Arguments:
    """Arguments of the gradient of group norm."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    statistic = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    scale = rng.standard_normal(shape[1], np.float32).astype(statistic)
    mean = np.zeros((shape[0], GROUPS), statistic)
    return {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": mean + 1}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every stage with every peer."""
    stages = norms.small(shapes.IMAGES[::-1], quick=quick)
    yield from norms.cases(gradkit.group_norm_grad, arguments, peers, stages, TARGETS)


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """Both memory orders; 5 passes, since every sum is known before the first dx."""
    images = shapes.TINY_IMAGES if place.tiny else shapes.DEVICE_IMAGES
    for shape in images:
        for last in (False, True):
            make = partial(device_arguments, place, last=last)
            wanted, layout = [(shape, "bfloat16")], " channels last" if last else ""
            targets = lambda *_: {"copy": 0.80}  # noqa: E731
            own = gradkit.group_norm_grad
            yield from norms.device_cases(own, make, place, peers, wanted, targets, 5, layout)


def device_arguments(
    place: Arrays, shape: tuple[int, ...], dtype: str, *, last: bool
) -> norms.Arguments:
    """The same as ``arguments``, on a device; ``last``: channels last in memory."""
    n, c, h, w = shape
    x, dy = (place.normal((n, h, w, c) if last else shape, dtype, seed) for seed in (0, 1))
    if last:
        x, dy = (array.transpose(0, 3, 1, 2) for array in (x, dy))
    scale, groups = place.normal((c,), "float32", 2), min(GROUPS, c)
    mean, inv_std = (place.array(np.full((n, groups), v, np.float32)) for v in (0, 1))
    return {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}

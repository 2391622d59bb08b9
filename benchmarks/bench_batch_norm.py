"""The gradient of batch norm on a ResNet-50's images, channels first.

All of dy and x must be read before the first dx is written. If they fit into a cache, 3 elements
per element move through memory, otherwise 5.
"""

from collections.abc import Iterator, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

import gradkit
from benchmarks import norms, shapes
from benchmarks import peers as peers_
from benchmarks.harness import Case
from benchmarks.places import Arrays

TARGETS = {"naive": 2.0}


def arguments(shape: tuple[int, ...], dtype: Any) -> norms.Arguments:
    """Arguments of the gradient of batch norm."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    channels = shape[1]
    statistic = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    scale = rng.standard_normal(channels, np.float32).astype(statistic)
    mean, inv_std = np.zeros(channels, statistic), np.ones(channels, statistic)
    return {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every stage with every peer."""
    stages = norms.small(shapes.IMAGES[::-1], quick=quick)
    yield from norms.cases(gradkit.batch_norm_grad, arguments, peers, stages, TARGETS)


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """Gradkit's own kernels (5 passes) and cuDNN, called by gradkit and by PyTorch."""
    images = shapes.TINY_IMAGES if place.tiny else shapes.DEVICE_IMAGES
    own = wraps(gradkit.batch_norm_grad)(partial(gradkit.batch_norm_grad, engine="native"))
    if not place.tiny:
        peers = [*peers, ThroughCudnn()]
    for shape in images:
        dtypes = ("bfloat16", "float32") if shape is images[0] else ("bfloat16",)
        for last in (False, True):
            make = partial(device_arguments, place, last=last)
            wanted = [(shape, dtype) for dtype in dtypes]
            targets = partial(_targets, last=last)
            layout = " channels last" if last else ""
            yield from norms.device_cases(own, make, place, peers, wanted, targets, 5, layout)


class ThroughCudnn:
    """gradkit's own call, with the cuDNN engine."""

    name = "cuDNN through gradkit"

    def batch_norm_grad(self, **arguments: Any) -> peers_.Call:
        """The same call on the same arrays."""
        return lambda: gradkit.batch_norm_grad(**arguments, engine="cudnn")


def device_arguments(
    place: Arrays, shape: tuple[int, ...], dtype: str, *, last: bool
) -> norms.Arguments:
    """The same as ``arguments``, on a device; ``last``: channels last in memory."""
    n, c, h, w = shape
    x, dy = (place.normal((n, h, w, c) if last else shape, dtype, seed) for seed in (0, 1))
    if last:
        x, dy = (array.transpose(0, 3, 1, 2) for array in (x, dy))
    scale = place.normal((c,), "float32", 2)
    mean, inv_std = (place.array(np.full(c, value, np.float32)) for value in (0, 1))
    return {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}


def _targets(shape: tuple[int, ...], size: int, *, last: bool) -> dict[str, float]:  # noqa: ARG001
    return {"copy": 0.80} if last else {"copy": 0.80, "torch cuDNN": 1.5}

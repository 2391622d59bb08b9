"""The gradients of batch norm on a ResNet-50's images, channels first.

3 elements' worth of traffic an element is the least that a cache could bring it down to; all of
dy and x must be read before the first dx, so that 5 go through memory where they do not fit.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import gradkit
from benchmarks import norms, shapes
from benchmarks.harness import Case

TARGETS = {"naive": 3.0}


def arguments(shape: tuple[int, ...], dtype: Any) -> norms.Arguments:
    """Arguments of the gradient of a batch norm."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    channels = shape[1]
    statistic = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    scale = rng.standard_normal(channels, np.float32).astype(statistic)
    mean, inv_std = np.zeros(channels, statistic), np.ones(channels, statistic)
    return {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every stage beside every peer."""
    stages = norms.small(shapes.IMAGES[::-1], quick=quick)
    yield from norms.cases(gradkit.batch_norm_grad, arguments, peers, stages, TARGETS)

"""The gradient of layer norm from its input: 3 M D elements must be read or written."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gradkit
from benchmarks import norms
from benchmarks.harness import AIM, Case
from benchmarks.places import Arrays

TARGETS = {"naive": 3.0, "torch": 1.3, "jax": 2.0, "onnxruntime": 5.0, AIM: 0.35}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every shape with every peer."""
    make = partial(norms.rows, centred=True)
    wanted = norms.row_shapes(quick=quick)
    yield from norms.cases(gradkit.layer_norm_grad, make, peers, wanted, TARGETS)


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The same on a device."""
    make = partial(norms.device_rows, place, centred=True)
    wanted, targets = norms.device_row_shapes(place), partial(norms.row_targets, 0.8)
    yield from norms.device_cases(gradkit.layer_norm_grad, make, place, peers, wanted, targets)

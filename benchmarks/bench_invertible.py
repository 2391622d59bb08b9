"""The gradient of layer norm from its output: 3 M D elements must be read or written."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradkit
from benchmarks import norms
from benchmarks.harness import Case
from benchmarks.places import Arrays

TARGETS = {"naive": 3.0, "jax": 2.0, "onnxruntime": 5.0}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """The most common shapes with every peer; PyTorch has no such operation."""
    wanted = norms.row_shapes(quick=quick)[:3]
    yield from norms.cases(gradkit.invertible_layer_norm_grad, _rows, peers, wanted, TARGETS)


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The same on a device."""
    make = partial(_device_rows, place)
    wanted = norms.device_row_shapes(place)[:3]
    operation, targets = gradkit.invertible_layer_norm_grad, partial(norms.row_targets, 0.8)
    yield from norms.device_cases(operation, make, place, peers, wanted, targets)


def _rows(shape: tuple[int, ...], dtype: Any) -> norms.Arguments:
    found = norms.rows(shape, dtype, centred=True)
    scale = found["scale"]
    bias = np.random.default_rng(1).standard_normal(scale.shape, np.float32)
    return _from_output(found, bias.astype(scale.dtype))


def _device_rows(place: Arrays, shape: tuple[int, ...], dtype: str) -> norms.Arguments:
    found = norms.device_rows(place, shape, dtype, centred=True)
    return _from_output(found, place.normal(shape[1:], dtype, 3))


def _from_output(found: norms.Arguments, bias: Any) -> norms.Arguments:
    """A layer norm's arguments, with x in the place of its output."""
    named = {"dy": found["dy"], "y": found["x"], "scale": found["scale"], "bias": bias}
    return named | {"inv_std": found["inv_std"]}

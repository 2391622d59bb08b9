"""The gradient of RMS norm: 3 M D elements must be read or written."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradkit
from benchmarks import norms
from benchmarks import peers as others
from benchmarks.harness import AIM, OURS, Case
from benchmarks.places import Arrays

TARGETS = {"naive": 3.0, "torch": 1.3, "jax": 2.0, "onnxruntime": 5.0, AIM: 0.35}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every shape with every peer."""
    make = partial(norms.rows, centred=False)
    wanted = norms.row_shapes(quick=quick)
    yield from norms.cases(gradkit.rms_norm_grad, make, peers, wanted, TARGETS)
    yield from _strided_cases(peers, wanted)


def _strided_cases(peers: Sequence[Any], wanted: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """The gradient on rows inside rows three times as long."""
    for shape in wanted[:2]:
        given = norms.rows(shape, np.float32, centred=False)
        for name in ("dy", "x"):
            room = np.zeros((shape[0], 3 * shape[1]), np.float32)
            room[:, shape[1] : 2 * shape[1]] = given[name]
            given[name] = room[:, shape[1] : 2 * shape[1]]
        yield Case(
            operation="rms_norm_grad",
            shape="x".join(map(str, shape)) + " of rows 3 times as long",
            dtype="float32",
            bytes=3 * given["x"].nbytes,
            calls={
                OURS: lambda a=given: gradkit.rms_norm_grad(**a),
                **others.calls(peers, "rms_norm_grad", **given),
            },
            targets={},
            check=None,
        )


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The same on a device."""
    make = partial(norms.device_rows, place, centred=False)
    wanted, targets = norms.device_row_shapes(place), partial(norms.row_targets, 0.85)
    yield from norms.device_cases(gradkit.rms_norm_grad, make, place, peers, wanted, targets)

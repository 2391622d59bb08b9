"""The gradients of RMS norm: 3 M D elements must be read or written."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gradkit
from benchmarks import norms
from benchmarks.harness import Case

TARGETS = {"naive": 3.0, "torch": 1.3, "jax": 2.0, "onnxruntime": 5.0, "copy": 0.35}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every shape beside every peer."""
    make = partial(norms.rows, centred=False)
    wanted = norms.row_shapes(quick=quick)
    yield from norms.cases(gradkit.rms_norm_grad, make, peers, wanted, TARGETS)

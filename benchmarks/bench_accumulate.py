"""Adding a gradient into its buffer (3 elements of traffic) and zeroing (1)."""

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import gradkit
from benchmarks import peers as peers_
from benchmarks.harness import OURS, Case

SIDE = 4096


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Accumulating in three pairs of dtypes, and zeroing."""
    rng = np.random.default_rng(0)
    grad = rng.standard_normal((SIDE, SIDE), np.float32)
    shape = f"{SIDE}x{SIDE}"
    for into, of in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))[
        : 1 if quick else 3
    ]:
        addend = grad.astype(np.float32 if of == "float32" else ml_dtypes.bfloat16)
        buffer = np.zeros((SIDE, SIDE), np.float32 if into == "float32" else ml_dtypes.bfloat16)
        plain = into == of == "float32"
        beside = peers if plain else [peer for peer in peers if peer.name == "torch"]
        yield Case(
            operation="accumulate_grad",
            shape=shape,
            dtype=into if into == of else f"{into} += {of}",
            bytes=2 * buffer.nbytes + addend.nbytes,
            calls={
                OURS: lambda a=buffer, b=addend: gradkit.accumulate_grad(a, b),
                **peers_.calls(beside, "accumulate_grad", buffer=buffer.copy(), grad=addend),
            },
        )
    grads = [grad]
    yield Case(
        operation="zero_grad",
        shape=shape,
        dtype="float32",
        bytes=grad.nbytes,
        calls={
            OURS: lambda: gradkit.zero_grad(grads),
            **peers_.calls(peers, "zero_grad", grads=[grad.copy()]),
        },
    )

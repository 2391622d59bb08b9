"""Adding a gradient to its buffer (moves 3 elements per element) and zeroing (1)."""

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import gradkit
from benchmarks import gpu_peers
from benchmarks import peers as peers_
from benchmarks.harness import OURS, Case
from benchmarks.places import Arrays

SIDE = 4096
TARGETS = {"copy": 0.92, "torch": 1.0}  # on a GPU


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


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The same on a device, with arrays of a GiB in float32."""
    side = 40 if place.tiny else 1 << 14
    for into, of in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        buffer, addend = place.normal((side, side), into, 0), place.normal((side, side), of, 1)
        yield Case(
            operation="accumulate_grad",
            shape=f"{side}x{side}",
            dtype=into if into == of else f"{into} += {of}",
            bytes=2 * buffer.nbytes + addend.nbytes,
            calls={
                OURS: lambda a=buffer, b=addend: gradkit.accumulate_grad(a, b),
                **gpu_peers.calls(peers, "accumulate_grad", buffer=buffer.copy(), grad=addend),
            },
            targets={} if place.tiny else TARGETS,
            check=lambda a=buffer, b=addend: _check(place, a[:64].copy(), b[:64]),
        )
    grads = [place.normal((side, side), "float32")]
    yield Case(
        operation="zero_grad",
        shape=f"{side}x{side}",
        dtype="float32",
        bytes=grads[0].nbytes,
        calls={
            OURS: lambda: gradkit.zero_grad(grads),
            **gpu_peers.calls(peers, "zero_grad", grads=[grads[0].copy()]),
        },
        targets={} if place.tiny else TARGETS,
        check=lambda: _check_zero(gradkit.zero_grad(grads)[0]),
    )


def _check(place: Arrays, buffer: Any, addend: Any) -> None:
    wanted = place.exact(buffer) + place.exact(addend)
    off = abs(place.exact(gradkit.accumulate_grad(buffer, addend)) - wanted).max()
    if not float(off / abs(wanted).max()) <= 2.0**-8:
        raise AssertionError(f"accumulate_grad is off by {float(off):.2g}")


def _check_zero(grad: Any) -> None:
    if bool(grad.any()):
        raise AssertionError("zero_grad left something")

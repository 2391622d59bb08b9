"""What a training step does between the backward pass and the optimiser, at once and in steps.

One call of gradkit stands beside the several that it saves, and beside PyTorch and optax, which
runs under jax.jit and makes new arrays.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

import gradkit
from benchmarks import gpu_peers, shapes
from benchmarks import peers as peers_
from benchmarks.harness import OURS, Case
from benchmarks.places import Arrays

SEVERAL = "gradkit, several calls"
LISTS = ("ResNet-50", "1000 x 256")
SLOWEST = 200  # tensors that jax.jit compiles within seconds

Make = Callable[[], list[Any]]


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """Every operation on a model's gradients and on many small ones."""
    for name in LISTS[: 1 if quick else 2]:
        rng = np.random.default_rng(0)
        grads = [rng.standard_normal(shape, np.float32) for shape in shapes.LISTS[name]]
        found = [peer for peer in peers if peer.name != "optax" or len(grads) <= SLOWEST]
        yield from of_list(name, "float32", grads, found, peers_.calls)


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The same on a device, the model's in two dtypes."""
    wanted = {"3 tensors": [(40, 30), (7,), (5, 3, 3, 3)]} if place.tiny else shapes.LISTS
    names = list(wanted) if place.tiny else LISTS
    for name in names:
        for dtype in ("float32", "bfloat16")[: 1 if name == "1000 x 256" else 2]:
            grads = [place.normal(shape, dtype, seed) for seed, shape in enumerate(wanted[name])]
            yield from of_list(name, dtype, grads, peers, gpu_peers.calls)


def of_list(
    name: str, dtype: str, grads: list[Any], peers: Sequence[Any], calls: Callable[..., Any]
) -> Iterator[Case]:
    """Every operation on one list; each call has gradients of its own, which it writes."""
    size = sum(grad.nbytes for grad in grads)
    repeats = 10 if size < 1 << 22 else 1

    def case(operation: str, passes: int, own: dict[str, Any], method: str, **more: Any) -> Case:
        found = {}
        for peer in peers:
            found |= calls(
                [peer], method, grads=_copies(grads), **{k: v() for k, v in more.items()}
            )
        return Case(
            operation=operation,
            shape=name,
            dtype=dtype,
            bytes=passes * size,
            calls={**own, **found},
            repeats=repeats,
        )

    yield case("clip_grad_norm with a scale", 3, _scaled(grads), "scaled_clip", scale=_scales)
    yield case(
        "accumulate_grads with their norm",
        3,
        _accumulated(grads),
        "accumulate_with_norm",
        buffers=lambda: _copies(grads),
    )
    yield case("per_tensor_norms", 1, _normed(grads), "tensor_norms")
    limits = partial(_falling, 0.5)
    yield case("clip_grad_block_norm, rms", 3, _blocks(grads), "clip_blocks", limit=limits)
    yield case(
        "clip_grad_adaptive by rows",
        4,
        _adapted(grads),
        "clip_adaptive",
        params=lambda: _copies(grads),
        limit=partial(_falling, 0.1),
    )
    yield case("SpikeGuard", 1, _guarded(grads), "guarded_clip")


def _copies(grads: Sequence[Any]) -> list[Any]:
    return [grad.copy() for grad in grads]


def _falling(start: float) -> Callable[[], float]:
    """A limit a little below the last one, so that every call scales."""
    held = [start]

    def limit() -> float:
        held[0] *= 1 - 1e-6
        return held[0]

    return limit


def _scales() -> Callable[[], float]:
    """A scale and its inverse in turn: gradients neither grow nor vanish."""
    return cycle((2.0, 0.5)).__next__


def _scaled(grads: Sequence[Any]) -> dict[str, Any]:
    one, several, scale, other = _copies(grads), _copies(grads), _scales(), _scales()

    def calls() -> None:
        gradkit.scale_grads(several, other())
        gradkit.clip_grad_norm(several, 1e9)

    return {OURS: lambda: gradkit.clip_grad_norm(one, 1e9, scale=scale()), SEVERAL: calls}


def _accumulated(grads: Sequence[Any]) -> dict[str, Any]:
    one, several = _copies(grads), _copies(grads)
    norm = gradkit.grad_norm(one)

    def calls() -> None:
        gradkit.accumulate_grads(several, grads)
        gradkit.grad_norm(several)

    return {OURS: lambda: gradkit.accumulate_grads(one, grads, norm_out=norm), SEVERAL: calls}


def _normed(grads: Sequence[Any]) -> dict[str, Any]:
    return {
        OURS: lambda: gradkit.per_tensor_norms(grads),
        SEVERAL: lambda: [gradkit.grad_norm(grad) for grad in grads],
    }


def _blocks(grads: Sequence[Any]) -> dict[str, Any]:
    one, several, limit, other = _copies(grads), _copies(grads), _falling(0.5), _falling(0.5)

    def calls() -> None:
        largest = other()
        for grad in several:
            gradkit.clip_grad_norm(grad, largest * math.sqrt(grad.size))

    return {
        OURS: lambda: gradkit.clip_grad_block_norm(one, limit(), rms=True),
        SEVERAL: calls,
    }


def _adapted(grads: Sequence[Any]) -> dict[str, Any]:
    one, several, limit, other = _copies(grads), _copies(grads), _falling(0.1), _falling(0.1)
    axes: list[Any] = [tuple(range(1, grad.ndim)) for grad in grads]

    def calls() -> None:
        ratio = other()
        for grad, param, axis in zip(several, grads, axes, strict=True):
            gradkit.clip_grad_adaptive(grad, param, ratio, axis=axis)

    return {
        OURS: lambda: gradkit.clip_grad_adaptive(one, grads, limit(), axis=axes),
        SEVERAL: calls,
    }


def _guarded(grads: Sequence[Any]) -> dict[str, Any]:
    """Beside a rule in Python, for which the host waits for the norm."""
    one, several, mean = _copies(grads), _copies(grads), [0.0]
    guard = gradkit.SpikeGuard()

    def ours() -> None:
        norm = gradkit.grad_norm(one)
        gradkit.clip_grads_with_norm(one, norm, guard.update(norm))

    def calls() -> None:
        norm = float(gradkit.grad_norm(several))
        mean[0] += 0.03 * (norm - mean[0])
        gradkit.clip_grads_with_norm(several, norm, max(norm, 2 * mean[0]))

    return {OURS: ours, SEVERAL: calls}

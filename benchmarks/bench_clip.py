"""The norm of lists of gradients, and clipping that scales and that does not scale.

The norm reads every element. If clipping scales, it reads each element again and writes it. If it
does not, the work ends with the norm, except for a peer that always multiplies.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradkit
from benchmarks import gpu_peers, shapes
from benchmarks import peers as peers_
from benchmarks.harness import OURS, Case
from benchmarks.places import Arrays

SLOW = ("jax", "onnxruntime")  # to compile or transfer lists of so many tensors or bytes

# To scale, everyone must read all gradients before writing the first: memory sets the limit.
CPU_TARGETS = {"scaling": {"copy": 1.0, "torch": 1.0}, "not scaling": {"copy": 0.8, "torch": 2.0}}


def cases(peers: Sequence[Any], *, quick: bool) -> Iterator[Case]:
    """The norm, clipping that scales and clipping that does not, of every list."""
    wanted = ["24 x 1024x1024", "1000 x 256"] if quick else list(shapes.LISTS)
    for name in wanted:
        rng = np.random.default_rng(0)
        grads = [rng.standard_normal(shape, np.float32) for shape in shapes.LISTS[name]]
        yield from of_list(name, grads, peers)


def of_list(name: str, grads: list[Any], everyone: Sequence[Any]) -> Iterator[Case]:
    """The three cases of one list of float32 gradients."""
    size = sum(grad.nbytes for grad in grads)
    if len(grads) > 100 or size > 1 << 28:
        everyone = [peer for peer in everyone if peer.name not in SLOW]
    norm = float(gradkit.grad_norm(grads))
    headline, tiny = name.startswith("24 x"), name.startswith("1000 x 256")
    yield Case(
        operation="grad_norm",
        shape=name,
        dtype="float32",
        bytes=size,
        calls={
            OURS: lambda: gradkit.grad_norm(grads),
            **peers_.calls(everyone, "grad_norm", grads=grads),
        },
        targets={"copy": 0.8} if headline else {},
        check=lambda: np.testing.assert_allclose(norm, _norm(grads), rtol=1e-6),
    )
    for kind, shrink, passes in (("scaling", 1e-6, 3), ("not scaling", 0.0, 1)):
        limit = _limit(norm, shrink)
        targets = CPU_TARGETS[kind] if headline else {"ms": 1.0} if tiny else {}
        yield Case(
            operation=f"clip_grad_norm, {kind}",
            shape=name,
            dtype="float32",
            bytes=passes * size,
            calls={
                OURS: lambda limit=limit: gradkit.clip_grad_norm(grads, limit()),
                **{
                    peer.name: peer.clip_grad_norm([g.copy() for g in grads], _limit(norm, shrink))
                    for peer in everyone
                    if hasattr(peer, "clip_grad_norm")
                },
            },
            targets=targets,
            repeats=10 if tiny else 1,
        )


def _limit(norm: float, shrink: float) -> Callable[[], float]:
    """A max_norm a little below the last one, so that every call scales; or far above it."""
    held = [norm if shrink else 2 * norm]

    def limit() -> float:
        held[0] *= 1 - shrink
        return held[0]

    return limit


def _norm(grads: Sequence[Any]) -> float:
    return float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads)))


# On a device

MANY, LARGE = 2000, 4 << 30  # tensors and bytes above which PyTorch is the only peer


def device_cases(place: Arrays, peers: Sequence[Any]) -> Iterator[Case]:
    """The norm, clipping that scales and clipping that does not, of every list."""
    lists = shapes.TINY_LISTS if place.tiny else shapes.DEVICE_LISTS
    for name, (dtype, wanted) in lists.items():
        grads = [place.normal(shape, dtype, seed) for seed, shape in enumerate(wanted)]
        yield from _of_device_list(name, dtype, grads, place, peers)


def _of_device_list(
    name: str, dtype: str, grads: list[Any], place: Arrays, everyone: Sequence[Any]
) -> Iterator[Case]:
    size = sum(grad.nbytes for grad in grads)
    if len(grads) > MANY or size > LARGE:
        everyone = [peer for peer in everyone if peer.name == "torch"]
    exact = sum(float((place.exact(grad) ** 2).sum()) for grad in grads) ** 0.5

    def check() -> None:
        np.testing.assert_allclose(float(gradkit.grad_norm(grads)), exact, rtol=1e-10)

    yield Case(
        operation="grad_norm",
        shape=name,
        dtype=dtype,
        bytes=size,
        calls={
            OURS: lambda: gradkit.grad_norm(grads),
            **gpu_peers.calls(everyone, "grad_norm", grads=grads),
        },
        targets={"copy": 0.92} if size > 1e9 else {},
        check=check,
    )
    tiny = name.startswith("1000 x 256")
    own = {who: [grad.copy() for grad in grads] for who in (OURS, *(p.name for p in everyone))}
    for kind, shrink, passes, copied, ratio in (
        ("scaling", 1e-6, 3, 0.88, 1.1),
        ("not scaling", 0.0, 1, 0.92, 2.7),
    ):
        targets = {"copy": copied, "torch": ratio} if size > 1e9 else {}
        calls = {OURS: partial(_clip, own[OURS], _limit(exact, shrink))}
        for peer in everyone:
            given = {"grads": own[peer.name], "limit": _limit(exact, shrink)}
            calls |= gpu_peers.calls([peer], "clip_grad_norm", **given)
        yield Case(
            operation=f"clip_grad_norm, {kind}",
            shape=name,
            dtype=dtype,
            bytes=passes * size,
            calls=calls,
            targets={"ms": 0.060, "torch": 10.0} if tiny else targets,
            check=partial(_check_clipping, grads, shrink, place),
        )


def _clip(grads: list[Any], limit: Callable[[], float]) -> object:
    return gradkit.clip_grad_norm(grads, limit())


def _check_clipping(grads: list[Any], shrink: float, place: Arrays) -> None:
    """A limit of half the norm halves gradients; one of twice the norm keeps their bits."""
    some = [grad.copy() for grad in grads[:16]]
    norm = sum(float((place.exact(grad) ** 2).sum()) for grad in some) ** 0.5
    factor, most = (0.5, 2.0**-7) if shrink else (1.0, 0.0)
    gradkit.clip_grad_norm(some, norm / 2 if shrink else 2 * norm)
    for got, grad in zip(some, grads, strict=False):
        wanted = factor * place.exact(grad)
        off = float(abs(place.exact(got) - wanted).max() / abs(wanted).max())
        if not off <= most:
            raise AssertionError(f"a clipped gradient is off by {off:.2g}")

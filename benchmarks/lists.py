"""Lists of gradients: their norm, clipping, accumulation and zeroing.

The norm reads every element. If clipping scales, it reads each element again and writes it. If it
does not, the work ends with the norm, except for a peer that always multiplies. Accumulation moves
3 elements per element, zeroing 1.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gradkit
from benchmarks.devices import DTYPES, Device
from benchmarks.peers import Arguments, Call, Remote, Table, onnxruntime, torch
from benchmarks.shapes import Shape, chosen
from benchmarks.timing import Case

FLOAT32 = ("float32", "float32")
PAIRS = (FLOAT32, ("float32", "bfloat16"), ("bfloat16", "bfloat16"))  # buffer, gradient
SIDE, GPU_SIDE, TINY_SIDE = 4096, 1 << 14, 40  # of a matrix that is accumulated or zeroed
# Tensors and bytes above which some peers are left out: compiling or copying takes too long.
MANY, LARGE, GPU_MANY, GPU_LARGE = 100, 1 << 28, 2000, 4 << 30
COMPARED = 16  # gradients whose clipping is compared with the formula's
# By whether clipping scales: passes over the bytes, targets on a CPU and on a GPU.
CLIPPING = {
    "scaling": (3, {"copy": 1.0, "torch": 1.0}, {"copy": 0.88, "torch": 1.1}),
    "not scaling": (1, {"copy": 0.8, "torch": 2.0}, {"copy": 0.92, "torch": 2.7}),
}


class Limit:
    """A limit, or one that is a little lower in every call, so that each call scales."""

    def __init__(self, value: float, shrink: float = 1e-6) -> None:
        self.value, self._shrink = value, shrink

    def __call__(self) -> float:
        """Return the limit for the next call."""
        self.value *= 1 - self._shrink
        return self.value

    def copy(self) -> "Limit":
        """Return one that is lowered by itself."""
        return Limit(self.value, self._shrink)


def _norm(grads: Sequence[Any]) -> Any:
    return sum((g * g).sum() for g in grads) ** 0.5


def _clip(grads: Sequence[Any], limit: Limit) -> Any:
    norm = _norm(grads)
    coefficient = (limit() / norm).astype(norm.dtype)
    if coefficient < 1:
        for g in grads:
            g *= coefficient.astype(g.dtype)
    return norm


def _jax_clip(grads: Sequence[Any], limit: Limit) -> Any:
    coefficient = limit() / _norm(grads)
    return [g * coefficient.clip(max=1) for g in grads]


def parameters(grads: Sequence[Any]) -> list[Any]:
    """Return PyTorch's parameters with these gradients."""
    found = []
    for grad in grads:
        found.append(torch.nn.Parameter(torch.empty_like(grad)))
        found[-1].grad = grad
    return found


def _torch_clip(a: Any) -> Call:
    with_grads = parameters(a.grads)
    return lambda: torch.nn.utils.clip_grad_norm_(with_grads, a.limit())


def _onnxruntime_clip(a: Any) -> Call:
    attributes = {"max_norm": a.limit(), "norm_type": "fro"}
    outputs = {"clipped": "sequence of float32"}
    node = {"op": "InplaceClipGradNorm", "outputs": outputs, "attributes": attributes}
    return Remote(node, {"grads": a.grads})


def _accumulate(buffer: Any, grad: Any) -> Any:
    buffer += grad
    return buffer


def _zero(grads: Sequence[Any]) -> None:
    for g in grads:
        g[...] = 0


TABLES: dict[str, Table] = {
    "grad_norm": {
        "gradkit": gradkit.grad_norm,
        "torch": lambda a: partial(torch.nn.utils.get_total_norm, a.grads),
        "naive": _norm,
        "jax": "naive",
    },
    "clip_grad_norm": {
        "gradkit": lambda grads, limit: gradkit.clip_grad_norm(grads, limit()),
        "torch": _torch_clip,
        "onnxruntime": _onnxruntime_clip,
        "naive": _clip,
        "jax": _jax_clip,
    },
    "accumulate_grad": {
        "gradkit": gradkit.accumulate_grad,
        "torch": lambda a: partial(a.buffer.add_, a.grad),
        "onnxruntime": lambda a: onnxruntime("InPlaceAccumulator", 1, a),
        "naive": _accumulate,
        "jax": "naive",
    },
    "zero_grad": {
        "gradkit": gradkit.zero_grad,
        "torch": lambda a: partial(torch._foreach_zero_, a.grads),
        "naive": _zero,
    },
}


def cases(device: Device, *, quick: bool = False) -> Iterator[Case]:
    """Yield the norm and both kinds of clipping of every list, then accumulation and zeroing."""
    wanted = chosen(device).lists
    quickly = {name: wanted[name] for name in ("24 x 1024x1024", "1000 x 256") if name in wanted}
    for name, (dtype, shapes) in (quickly if quick else wanted).items():
        yield from _of_list(device, name, dtype, shapes)
    side = TINY_SIDE if device.tiny else GPU_SIDE if device.name == "cuda" else SIDE
    for into, of in (FLOAT32,) if quick else PAIRS:
        yield _accumulation(device, (side, side), into, of)
    yield Case(
        operation="zero_grad",
        shape=f"{side}x{side}",
        dtype="float32",
        table=TABLES["zero_grad"],
        arguments=partial(gradients, device, "float32", [(side, side)]),
        bytes=side * side * 4,
        targets={"copy": 0.92, "torch": 1.0} if device.name == "cuda" else {},
        written=("grads",),
    )


def _of_list(device: Device, name: str, dtype: str, shapes: list[Shape]) -> Iterator[Case]:
    on_cpu = device.name == "cpu"
    size, large = list_bytes(shapes, dtype), list_bytes(shapes, dtype) > 1e9
    headline, tiny = name.startswith("24 x"), name.startswith("1000 x 256")
    yield Case(
        operation="grad_norm",
        shape=name,
        dtype=dtype,
        table=TABLES["grad_norm"],
        arguments=partial(gradients, device, dtype, shapes),
        bytes=size,
        targets={"copy": 0.8} if headline else {"copy": 0.92} if large and not on_cpu else {},
        peers=_peers(device, len(shapes), size),
    )
    for kind, (passes, on_a_cpu, on_a_gpu) in CLIPPING.items():
        if on_cpu:
            targets = on_a_cpu if headline else {"ms": 1.0} if tiny else {}
        else:
            targets = {"ms": 0.060, "torch": 10.0} if tiny else on_a_gpu if large else {}
        yield Case(
            operation=f"clip_grad_norm, {kind}",
            shape=name,
            dtype=dtype,
            table=TABLES["clip_grad_norm"],
            arguments=partial(_limited, device, dtype, shapes, scales=kind == "scaling"),
            bytes=passes * size,
            targets=targets,
            written=("grads", "limit"),
            peers=_peers(device, len(shapes), size),
            checked=_a_part,
        )


def _peers(device: Device, tensors: int, size: int) -> tuple[str, ...] | None:
    if device.name == "cpu":
        return ("naive", "torch") if tensors > MANY or size > LARGE else None
    return ("torch",) if tensors > GPU_MANY or size > GPU_LARGE else None


def _accumulation(device: Device, shape: Shape, into: str, of: str) -> Case:
    return Case(
        operation="accumulate_grad",
        shape="x".join(map(str, shape)),
        dtype=into if into == of else f"{into} += {of}",
        table=TABLES["accumulate_grad"],
        arguments=lambda: {
            "buffer": device.normal(shape, into, 0),
            "grad": device.normal(shape, of, 1),
        },
        bytes=2 * list_bytes([shape], into) + list_bytes([shape], of),
        targets={"copy": 0.92, "torch": 1.0} if device.name == "cuda" else {},
        written=("buffer",),
        peers=("torch",) if device.name == "cpu" and (into, of) != FLOAT32 else None,
    )


def list_bytes(shapes: Sequence[Shape], dtype: str) -> int:
    """Return the bytes of arrays of these shapes."""
    return sum(map(math.prod, shapes)) * DTYPES[dtype].itemsize


def gradients(device: Device, dtype: str, shapes: Sequence[Shape]) -> Arguments:
    """Return a list of gradients by name."""
    return {"grads": [device.normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]}


def _limited(device: Device, dtype: str, shapes: Sequence[Shape], *, scales: bool) -> Arguments:
    """Return gradients and a limit a little below their norm, or one far above it."""
    found = gradients(device, dtype, shapes)
    norm = float(gradkit.grad_norm(found["grads"]))
    return {**found, "limit": Limit(norm) if scales else Limit(2 * norm, 0.0)}


def _a_part(arguments: Arguments) -> Arguments:
    """Return some of the gradients, with a limit that halves them or one that does not scale."""
    grads, limit = arguments["grads"][:COMPARED], arguments["limit"]
    whole = float(gradkit.grad_norm(arguments["grads"]))
    share = 0.5 if limit.value <= whole else 2.0
    return {"grads": grads, "limit": Limit(share * float(gradkit.grad_norm(grads)), 0.0)}

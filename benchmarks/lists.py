"""Lists of gradients: their norm, clipping, accumulation and zeroing.

The norm reads every element. If clipping scales, it reads each element again and writes it. If it
does not, the work ends with the norm, except for a peer that always multiplies. Accumulation moves
3 elements per element, zeroing 1, a step of AdamW 7.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import Any

import gradkit
from benchmarks.devices import Device
from benchmarks.peers import Arguments, Call, Remote, Table, direct, onnxruntime, optax, torch
from benchmarks.shapes import Shape, chosen, list_bytes
from benchmarks.timing import Case, on_array

FLOAT32 = ("float32", "float32")
PAIRS = (FLOAT32, ("float32", "bfloat16"), ("bfloat16", "bfloat16"))  # buffer, gradient
SIDE, GPU_SIDE, TINY_SIDE = 4096, 1 << 14, 40  # of a matrix that is accumulated or zeroed
# Tensors and bytes above which some peers are left out: compiling or copying takes too long.
MANY, LARGE, GPU_MANY, GPU_LARGE = 100, 1 << 28, 2000, 4 << 30
DECAY = 0.999
MOMENTUM = 0.9
STEP, RATE, BETAS, EPS, WEIGHT_DECAY = 3, 1e-3, (0.9, 0.999), 1e-8, 0.01  # of AdamW
COMPARED = 16  # gradients that are compared with the formula's: float64 takes four times bfloat16
# By whether clipping scales: passes over the bytes, targets on a CPU and on a GPU.
CLIPPING = {
    "scaling": (3, {"copy": 1.0, "torch": 1.0}, {"copy": 0.88, "torch": 1.1}),
    "not scaling": (1, {"copy": 0.8, "torch": 2.0}, {"copy": 0.92, "torch": 2.7}),
}


class Changing:
    """A number that callers pass, another one in every call."""

    def __init__(self, values: Callable[[], Iterator[float]]) -> None:
        self._values, self._next = values, iter(values()).__next__

    def __call__(self) -> float:
        """Return the number for the next call."""
        return self._next()

    def copy(self) -> "Changing":
        """Return one that begins anew."""
        return Changing(self._values)


def falling(start: float) -> Changing:
    """Return a limit that is a little lower in every call, so that each call scales."""
    return Changing(lambda: (start * (1 - 1e-6) ** k for k in count(1)))


def fixed(limit: float) -> Changing:
    """Return a limit that stays."""
    return Changing(lambda: repeat(limit))


def _norm(grads: Sequence[Any]) -> Any:
    return sum((g * g).sum() for g in grads) ** 0.5


def _clip(grads: Sequence[Any], limit: Changing) -> Any:
    norm = _norm(grads)
    coefficient = (limit() / norm).astype(norm.dtype)
    if coefficient < 1:
        for g in grads:
            g *= coefficient.astype(g.dtype)
    return norm


def halves(grads: Sequence[Any]) -> list[bool]:
    """Return the keys of two blocks: whether a gradient is in the second half."""
    return [2 * k >= len(grads) for k in range(len(grads))]


def _clip_blocks(grads: Sequence[Any], limit: Changing) -> Any:
    most, middle = fixed(limit()), (len(grads) + 1) // 2
    return [_clip(block, most) for block in (grads[:middle], grads[middle:])]


def _jax_clip(grads: Sequence[Any], limit: Changing) -> Any:
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


def _torch_clip_blocks(a: Any) -> Call:
    middle = (len(a.grads) + 1) // 2
    blocks = parameters(a.grads[:middle]), parameters(a.grads[middle:])
    clip = torch.nn.utils.clip_grad_norm_

    def call() -> Any:
        most = a.limit()
        return [clip(block, most) for block in blocks]

    return call


def _onnxruntime_clip(a: Any) -> Call:
    attributes = {"max_norm": a.limit(), "norm_type": "fro"}
    outputs = {"clipped": "sequence of float32"}
    node = {"op": "InplaceClipGradNorm", "outputs": outputs, "attributes": attributes}
    return Remote(node, {"grads": a.grads})


def _accumulate(buffer: Any, grad: Any) -> Any:
    buffer += grad
    return buffer


def _average(buffer: Any, grad: Any) -> Any:
    buffer += (1 - DECAY) * (grad - buffer)
    return buffer


def _adamw(param: Any, grad: Any, moment: Any, variance: Any) -> Any:
    moment += (1 - BETAS[0]) * (grad - moment)
    variance += (1 - BETAS[1]) * (grad * grad - variance)
    mean, square = moment / (1 - BETAS[0] ** STEP), variance / (1 - BETAS[1] ** STEP)
    param -= RATE * (mean / (square**0.5 + EPS) + WEIGHT_DECAY * param)
    return param


def _torch_adamw(a: Any) -> Call:
    """Return a step of PyTorch's fused optimiser on the same memory."""
    param = torch.nn.Parameter(a.param)
    param.grad = a.grad
    optimizer = torch.optim.AdamW([param], RATE, BETAS, EPS, WEIGHT_DECAY, fused=True)
    count = torch.tensor(STEP - 1.0, device=a.param.device)
    optimizer.state[param] = {"step": count, "exp_avg": a.moment, "exp_avg_sq": a.variance}
    return optimizer.step


def _optax_adamw(param: Any, grad: Any, moment: Any, variance: Any) -> Any:
    adam = optax.scale_by_adam(*BETAS, EPS)
    state = optax.ScaleByAdamState(STEP - 1, moment, variance)
    updates, state = adam.update(grad, state)
    return param - RATE * (updates + WEIGHT_DECAY * param), state.mu, state.nu


def _sgd(param: Any, grad: Any, momentum: Any) -> Any:
    momentum *= MOMENTUM
    momentum += grad
    param -= RATE * momentum
    return param


def _torch_sgd(a: Any) -> Call:
    """Return a step of PyTorch's fused optimiser on the same memory."""
    param = torch.nn.Parameter(a.param)
    param.grad = a.grad
    optimizer = torch.optim.SGD([param], RATE, MOMENTUM, fused=True)
    optimizer.state[param]["momentum_buffer"] = a.momentum
    return optimizer.step


def _optax_sgd(param: Any, grad: Any, momentum: Any) -> Any:
    steps, state = optax.trace(MOMENTUM).update(grad, optax.TraceState(momentum))
    return param - RATE * steps, state.trace


def _by_float32(buffer: Any, grad: Any, kept: Any, wide: Any) -> None:  # noqa: ARG001
    gradkit.accumulate_grad(wide, grad)
    gradkit.accumulate_grad_v2(buffer, wide, overwrite=True, casting="same_kind")


def _torch_stochastic(buffer: Any, grad: Any, kept: Any, wide: Any) -> None:  # noqa: ARG001
    """Do what torchao's optimisers do, with 16 random bits for each sum in float32."""
    bits = buffer.float().add_(grad).view(torch.int32)
    random, cut = torch.randint_like(bits, 1 << 16), bits & -0x10000
    up = torch.where(random < (bits & 0xFFFF), cut + 0x10000, cut)
    buffer.copy_(up.view(torch.float32))


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
    "clip_grad_block_norm, two blocks": {
        "gradkit": lambda grads, limit: gradkit.clip_grad_block_norm(
            grads, limit(), blocks=halves(grads)
        ),
        "torch": _torch_clip_blocks,
        "naive": _clip_blocks,
    },
    "accumulate_grad": {
        "gradkit": gradkit.accumulate_grad,
        "torch": lambda a: partial(a.buffer.add_, a.grad),
        "onnxruntime": lambda a: onnxruntime("InPlaceAccumulator", 1, a),
        "naive": _accumulate,
        "jax": "naive",
    },
    "ema_update": {
        "gradkit": lambda buffer, grad: gradkit.ema_update(buffer, grad, DECAY),
        "torch": lambda a: partial(torch._foreach_lerp_, [a.buffer], [a.grad], 1 - DECAY),
        "naive": _average,
        "jax": "naive",
    },
    "adamw_update": {
        "gradkit": lambda param, grad, moment, variance: gradkit.adamw_update(
            param, grad, moment, variance, STEP, lr=RATE
        ),
        "torch": _torch_adamw,
        "naive": _adamw,
        "jax": _optax_adamw,
    },
    "sgd_update": {
        "gradkit": lambda param, grad, momentum: gradkit.sgd_update(
            param, grad, momentum, lr=RATE, momentum=MOMENTUM
        ),
        "torch": _torch_sgd,
        "naive": _sgd,
        "jax": _optax_sgd,
    },
    # Beside PyTorch's sums in float32, which take as much memory.
    "accumulate_grad, compensated": {
        "gradkit": lambda buffer, grad, kept, wide: gradkit.accumulate_grad(  # noqa: ARG005
            buffer, grad, compensation=kept
        ),
        "gradkit, several calls": _by_float32,
        "torch": lambda a: partial(a.wide.add_, a.grad),
    },
    "accumulate_grads, stochastic": {
        "gradkit": lambda buffer, grad, kept, wide: gradkit.accumulate_grads(  # noqa: ARG005
            buffer, grad, rounding="stochastic"
        ),
        "gradkit, several calls": _by_float32,
        "torch": direct(_torch_stochastic),
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
    for name in () if quick else ("slices", "transposed"):
        yield _accumulation(device, (side, side), *FLOAT32, layout=name)
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        case = _accumulation(device, (side, side), dtype, dtype)
        yield replace(case, operation="ema_update", table=TABLES["ema_update"], targets={})
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        yield _update(device, (side, side), dtype, "adamw_update", "moment", "variance")
        yield _update(device, (side, side), dtype, "sgd_update", "momentum")
    yield _in_16_bits(device, (side, side), "accumulate_grad, compensated", 5, ("buffer", "kept"))
    yield _in_16_bits(device, (side, side), "accumulate_grads, stochastic", 3, ("buffer",))
    zeroed = partial(gradients, device, "float32", [(side, side)])
    case = _accumulation(device, (side, side), *FLOAT32)
    yield replace(
        case,
        operation="zero_grad",
        table=TABLES["zero_grad"],
        arguments=zeroed,
        bytes=case.bytes // 3,
        written=("grads",),
    )


def _of_list(device: Device, name: str, dtype: str, shapes: list[Shape]) -> Iterator[Case]:
    on_cpu, size, peers = device.name == "cpu", list_bytes(shapes, dtype), None
    large = size > 1e9
    if on_cpu and (len(shapes) > MANY or size > LARGE):
        peers = ("naive", "torch")
    elif len(shapes) > GPU_MANY or size > GPU_LARGE:
        peers = ("torch",)
    headline, tiny = name.startswith("24 x"), name.startswith("1000 x 256")
    targets = {"copy": 0.8} if headline else {"copy": 0.92} if large and not on_cpu else {}
    arguments, table = partial(gradients, device, dtype, shapes), TABLES["grad_norm"]
    norm = Case("grad_norm", name, dtype, table, arguments, size, targets, peers=peers)
    yield replace(norm, checked=_first)
    for kind, (passes, on_a_cpu, on_a_gpu) in CLIPPING.items():
        if on_cpu:
            targets = on_a_cpu if headline else {"ms": 1.0} if tiny else {}
        else:
            targets = {"ms": 0.060, "torch": 10.0} if tiny else on_a_gpu if large else {}
        yield replace(
            norm,
            operation=f"clip_grad_norm, {kind}",
            table=TABLES["clip_grad_norm"],
            arguments=partial(_limited, arguments, scales=kind == "scaling"),
            bytes=passes * size,
            targets=targets,
            written=("grads", "limit"),
            checked=_a_part,
        )
    if headline or (large and not on_cpu):
        yield replace(
            norm,
            operation="clip_grad_block_norm, two blocks",
            table=TABLES["clip_grad_block_norm, two blocks"],
            arguments=partial(_limited, arguments, scales=True, share=0.5),
            bytes=3 * size,
            targets={},
            written=("grads", "limit"),
            checked=_a_part,
        )


def _accumulation(device: Device, shape: Shape, into: str, of: str, layout: str = "") -> Case:
    """Return a sum; a layout has a gradient that is transposed, or a slice of a wider buffer."""

    def arguments() -> Arguments:
        buffer, grad = device.normal(shape, into, 0), device.normal(shape, of, 1)
        if layout == "transposed":
            grad = device.normal(shape[::-1], of, 1).T
        elif layout:
            buffer = device.normal((shape[0], shape[1] + 8), into, 0)[:, : shape[1]]
        return {"buffer": buffer, "grad": grad}

    table, dtype = TABLES["accumulate_grad"], into if into == of else f"{into} += {of}"
    size = 2 * list_bytes([shape], into) + list_bytes([shape], of)
    targets = {"copy": 0.92, "torch": 1.0} if device.name == "cuda" else {}
    operation = f"accumulate_grad, {layout}" if layout else "accumulate_grad"
    return replace(
        on_array(device, operation, table, shape, dtype, arguments=arguments, bytes=size),
        targets={} if layout else targets,
        written=("buffer",),
        out=False,
        peers=("torch", "naive") if layout else None,  # the others are handed a contiguous copy
    )


def _update(device: Device, shape: Shape, dtype: str, operation: str, *states: str) -> Case:
    def arguments() -> Arguments:
        names = "param", "grad", *states
        found = {name: device.normal(shape, dtype, seed) for seed, name in enumerate(names)}
        if "variance" in found:
            found["variance"] *= found["variance"]
        return found

    table, size = TABLES[operation], (3 + 2 * len(states)) * list_bytes([shape], dtype)
    case = on_array(device, operation, table, shape, dtype, arguments=arguments, bytes=size)
    return replace(case, written=("param", *states), out=False)


def _in_16_bits(
    device: Device, shape: Shape, operation: str, passes: int, written: tuple[str, ...]
) -> Case:
    """Return a way to add bfloat16 gradients so that small ones are not lost."""

    def arguments() -> Arguments:
        halves = {
            name: device.normal(shape, "bfloat16", seed)
            for seed, name in enumerate(("buffer", "grad", "kept"))
        }
        return halves | {"wide": device.normal(shape, "float32", 0)}

    table, size = TABLES[operation], passes * list_bytes([shape], "bfloat16")
    case = on_array(device, operation, table, shape, "bfloat16", arguments=arguments, bytes=size)
    return replace(case, written=(*written, "wide"), out=False)


def gradients(device: Device, dtype: str, shapes: Sequence[Shape]) -> Arguments:
    """Return a list of gradients by name."""
    return {"grads": [device.normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]}


def _limited(make: Callable[[], Arguments], *, scales: bool, share: float = 1.0) -> Arguments:
    """Return gradients and a limit a little below a share of their norm, or one far above it."""
    found = make()
    norm = share * float(gradkit.grad_norm(found["grads"]))
    return {**found, "limit": falling(norm) if scales else fixed(2 * norm)}


def _first(arguments: Arguments) -> Arguments:
    """Return some of the gradients."""
    return {"grads": arguments["grads"][:COMPARED]}


def _a_part(arguments: Arguments) -> Arguments:
    """Return some of the gradients, with a limit that halves them or one that does not scale."""
    whole, part = arguments["grads"], _first(arguments)["grads"]
    share = 0.5 if arguments["limit"]() < float(gradkit.grad_norm(whole)) else 2.0
    return {"grads": part, "limit": fixed(share * float(gradkit.grad_norm(part)))}

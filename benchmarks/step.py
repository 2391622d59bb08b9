"""A training step between the backward pass and the optimiser, in one call.

gradkit's call, the several of gradkit that it saves, and those of PyTorch and of optax, which runs
under jax.jit and makes new arrays.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import gradkit
from benchmarks.devices import Device
from benchmarks.lists import Changing, falling, gradients, parameters
from benchmarks.peers import Arguments, Call, Table, direct, optax, torch
from benchmarks.shapes import LISTS, Shape, list_bytes
from benchmarks.timing import Case

HIGH = 1e9  # a norm that no gradients have
TINY: dict[str, list[Shape]] = {"3 tensors": [(40, 30), (7,), (5, 3, 3, 3)]}
NAMES = ("ResNet-50", "1000 x 256")
SEVERAL = "gradkit, several calls"
SLOWEST = 200  # tensors that jax.jit compiles within seconds


def _update(transform: Any, grads: Any, params: Any = None) -> Any:
    """Return what one of optax's transformations makes of gradients."""
    return transform.update(grads, transform.init(params or grads), params)[0]


def _scale(grads: Any, scale: Any) -> None:
    gradkit.scale_grads(grads, scale())
    gradkit.clip_grad_norm(grads, HIGH)


def _torch_scale(a: Any) -> Call:
    with_grads = parameters(a.grads)

    def call() -> None:
        torch._foreach_mul_(a.grads, a.scale())
        torch.nn.utils.clip_grad_norm_(with_grads, HIGH)

    return call


def _optax_scale(grads: Any, scale: Any) -> Any:
    chain = optax.chain(optax.scale(scale()), optax.clip_by_global_norm(HIGH))
    return _update(chain, grads)


def _accumulate(grads: Any, buffers: Any, norm: Any) -> None:  # noqa: ARG001
    gradkit.accumulate_grads(buffers, grads)
    gradkit.grad_norm(buffers)


def _torch_accumulate(grads: Any, buffers: Any, norm: Any) -> None:  # noqa: ARG001
    torch._foreach_add_(buffers, grads)
    torch.nn.utils.get_total_norm(buffers)


def _optax_accumulate(grads: Any, buffers: Any, norm: Any) -> Any:  # noqa: ARG001
    total = [b + g for b, g in zip(buffers, grads, strict=True)]
    return total, optax.global_norm(total)


def _clip_blocks(grads: Any, limit: Any) -> None:
    largest = limit()
    for grad in grads:
        gradkit.clip_grad_norm(grad, largest * math.sqrt(grad.size))


def _torch_blocks(a: Any) -> Call:
    roots = [grad.numel() ** 0.5 for grad in a.grads]

    def call() -> None:
        largest, norms = a.limit(), torch._foreach_norm(a.grads)
        factors = [(largest * r / n).clamp(max=1) for r, n in zip(roots, norms, strict=True)]
        torch._foreach_mul_(a.grads, factors)

    return call


def _adapt(grads: Any, params: Any, limit: Any, axes: Any) -> None:
    ratio = limit()
    for grad, param, axis in zip(grads, params, axes, strict=True):
        gradkit.clip_grad_adaptive(grad, param, ratio, axis=axis)


def _torch_adapt(grads: Any, params: Any, limit: Any, axes: Any) -> None:  # noqa: ARG001
    """Clip as timm does."""

    def unit_norm(tensor: Any) -> Any:
        dims = tuple(range(1, tensor.ndim)) or (0,)
        return tensor.norm(2, dim=dims, keepdim=tensor.ndim > 1)

    ratio = limit()
    for grad, param in zip(grads, params, strict=True):
        largest, norm = unit_norm(param).clamp_(min=1e-3).mul_(ratio), unit_norm(grad)
        clipped = grad * (largest / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < largest, grad, clipped))


def _optax_adapt(grads: Any, params: Any, limit: Any, axes: Any) -> Any:  # noqa: ARG001
    """Clip by columns: optax's weights have inputs in all axes but the last."""
    return _update(optax.adaptive_grad_clip(limit()), grads, params)


def _some(grads: Any, matrices: Any) -> None:
    """Clip matrices by the norm of all."""
    gradkit.clip_grad_norm(grads, 0.01, clip=matrices)


def _some_apart(grads: Any, matrices: Any) -> None:
    norm = gradkit.grad_norm(grads)
    chosen = [grad for grad, one in zip(grads, matrices, strict=True) if one]
    gradkit.clip_grads_with_norm(chosen, norm=norm, max_norm=0.01)


def _torch_some(a: Any) -> Call:
    with_grads = [p for p, one in zip(parameters(a.grads), a.matrices, strict=True) if one]

    def call() -> None:
        norm = torch.nn.utils.get_total_norm(a.grads)
        torch.nn.utils.clip_grads_with_norm_(with_grads, 0.01, norm)

    return call


def _guard(grads: Any, guard: Any, mean: Any) -> None:  # noqa: ARG001
    norm = gradkit.grad_norm(grads)
    gradkit.clip_grads_with_norm(grads, norm=norm, max_norm=guard.update(norm))


def _guard_in_python(grads: Any, guard: Any, mean: Any) -> None:  # noqa: ARG001
    """Apply a rule for which the host waits for the norm."""
    norm = float(gradkit.grad_norm(grads))
    mean[0] += 0.03 * (norm - mean[0])
    gradkit.clip_grads_with_norm(grads, norm=norm, max_norm=max(norm, 2 * mean[0]))


def _torch_guard(a: Any) -> Call:
    with_grads, mean = parameters(a.grads), [0.0]

    def call() -> None:
        norm = torch.nn.utils.get_total_norm(a.grads)
        mean[0] += 0.03 * (norm.item() - mean[0])
        limit = max(norm.item(), 2 * mean[0])
        torch.nn.utils.clip_grads_with_norm_(with_grads, limit, norm)

    return call


def _skip(grads: Any, new: Any, old: Any) -> None:
    """Take a step, or keep what is there."""
    gradkit.keep_if(gradkit.step_verdict(gradkit.grad_norm(grads)), new, old)


def _skip_on_the_host(grads: Any, new: Any, old: Any) -> None:
    """Decide on the host, which waits, and copy one by one."""
    if math.isfinite(float(gradkit.grad_norm(grads))):
        for into, after in zip(old, new, strict=True):
            into[...] = after


def _torch_skip(grads: Any, new: Any, old: Any) -> None:
    taken = torch.isfinite(torch.nn.utils.get_total_norm(grads))
    torch._foreach_copy_(old, [torch.where(taken, n, o) for n, o in zip(new, old, strict=True)])


def _optax_skip(grads: Any, new: Any, old: Any) -> Any:
    import jax.numpy as jnp

    taken = jnp.isfinite(optax.global_norm(grads))
    return [jnp.where(taken, n, o) for n, o in zip(new, old, strict=True)]


def _arriving(grads: Any, buffers: Any, norm: Any) -> None:
    gradkit.accumulate_grads(buffers, grads)
    norm[...] = gradkit.grad_norm(grads)


def _torch_arriving(grads: Any, buffers: Any, norm: Any) -> None:
    norm.copy_(torch.nn.utils.get_total_norm(grads))
    torch._foreach_add_(buffers, grads)


def _torch_stats(grads: Any) -> None:
    """The same five of each: norms by functions over lists, and a loop over the gradients."""
    norms, largest = torch._foreach_norm(grads), torch._foreach_norm(grads, math.inf)
    others = [
        torch.stack([g.mean(dtype=torch.float64), (g == 0).sum(), (~g.isfinite()).sum()])
        for g in grads
    ]
    torch.stack(norms), torch.stack(largest), torch.stack(others)


def _guard_each(grads: Any, guard: Any, guards: Any) -> None:  # noqa: ARG001
    limits = guard.update(gradkit.per_tensor_norms(grads, flat=True))
    gradkit.clip_grad_block_norm(grads, limits)


def _guards(grads: Any, guard: Any, guards: Any) -> None:  # noqa: ARG001
    for grad, own in zip(grads, guards, strict=True):
        norm = gradkit.grad_norm(grad)
        gradkit.clip_grads_with_norm(grad, norm=norm, max_norm=own.update(norm))


def _torch_guards(a: Any) -> Call:
    """Follow each mean on the device, and clip to twice of it."""
    means = torch.stack(torch._foreach_norm(a.grads))

    def call() -> None:
        norms = torch.stack(torch._foreach_norm(a.grads))
        means.lerp_(norms, 0.03)
        factors = (2 * means / norms).clamp(max=1)
        torch._foreach_mul_(a.grads, list(factors.to(a.grads[0].dtype)))

    return call


TABLES: dict[str, Table] = {
    "clip_grad_norm with a scale": {
        "gradkit": lambda grads, scale: gradkit.clip_grad_norm(grads, HIGH, scale=scale()),
        "gradkit, several calls": _scale,
        "torch": _torch_scale,
        "optax": _optax_scale,
    },
    "accumulate_grads with their norm": {
        "gradkit": lambda grads, buffers, norm: gradkit.accumulate_grads(
            buffers, grads, norm_out=norm
        ),
        "gradkit, several calls": _accumulate,
        "torch": direct(_torch_accumulate),
        "optax": _optax_accumulate,
    },
    "accumulate_grads, norm of what arrives": {
        "gradkit": lambda grads, buffers, norm: gradkit.accumulate_grads(
            buffers, grads, grad_norm_out=norm
        ),
        "gradkit, several calls": _arriving,
        "torch": direct(_torch_arriving),
    },
    "per_tensor_norms": {
        "gradkit": gradkit.per_tensor_norms,
        "gradkit, several calls": lambda grads: [gradkit.grad_norm(grad) for grad in grads],
        "torch": direct(lambda grads: torch._foreach_norm(grads)),
    },
    "grad_stats": {
        "gradkit": gradkit.grad_stats,
        "gradkit, several calls": lambda grads: [gradkit.grad_stats(grad) for grad in grads],
        "torch": direct(_torch_stats),
    },
    "clip_grad_block_norm, rms": {
        "gradkit": lambda grads, limit: gradkit.clip_grad_block_norm(grads, limit(), rms=True),
        "gradkit, several calls": _clip_blocks,
        "torch": _torch_blocks,
        "optax": lambda grads, limit: _update(optax.clip_by_block_rms(limit()), grads),
    },
    "clip_grad_adaptive by rows": {
        "gradkit": lambda grads, params, limit, axes: gradkit.clip_grad_adaptive(
            grads, params, limit(), axis=axes
        ),
        "gradkit, several calls": _adapt,
        "torch": direct(_torch_adapt),
        "optax": _optax_adapt,
    },
    "clip_grad_norm of some": {
        "gradkit": _some,
        "gradkit, several calls": _some_apart,
        "torch": _torch_some,
    },
    "SpikeGuard": {
        "gradkit": _guard,
        "gradkit, several calls": _guard_in_python,
        "torch": _torch_guard,
    },
    "SpikeGuard of each": {
        "gradkit": _guard_each,
        "gradkit, several calls": _guards,
        "torch": _torch_guards,
    },
    "keep_if": {
        "gradkit": _skip,
        "gradkit, several calls": _skip_on_the_host,
        "torch": direct(_torch_skip),
        "optax": _optax_skip,
    },
}
# Of each operation: passes over the bytes of the gradients, and what it writes.
MOVED: dict[str, tuple[int, tuple[str, ...]]] = {
    "clip_grad_norm with a scale": (3, ("grads", "scale")),
    "accumulate_grads with their norm": (3, ("buffers", "norm")),
    "accumulate_grads, norm of what arrives": (4, ("buffers", "norm")),
    "per_tensor_norms": (1, ()),
    "grad_stats": (1, ()),
    "clip_grad_block_norm, rms": (3, ("grads", "limit")),
    "clip_grad_adaptive by rows": (4, ("grads", "limit")),
    "clip_grad_norm of some": (3, ("grads",)),
    "SpikeGuard": (1, ("grads",)),
    "SpikeGuard of each": (3, ("grads",)),
    "keep_if": (3, ("old",)),
}


def cases(device: Device, *, quick: bool = False) -> Iterator[Case]:
    """Yield every operation on a model's gradients, on a GPU in two dtypes, and on many small."""
    wanted = TINY if device.tiny else {name: LISTS[name] for name in NAMES[: 1 if quick else 2]}
    for name, shapes in wanted.items():
        one = device.name == "cpu" or name == "1000 x 256"
        for dtype in ("float32",) if one else ("float32", "bfloat16"):
            for operation, table in TABLES.items():
                passes, written = MOVED[operation]
                arguments = partial(_arguments, device, operation, shapes, dtype)
                size, peers = passes * list_bytes(shapes, dtype), None
                if len(shapes) > SLOWEST:
                    peers = ("torch",)
                    if device.name == "cuda":  # a call of each tensor takes a tenth of a second
                        table = {k: call for k, call in table.items() if k != SEVERAL}
                case = Case(operation, name, dtype, table, arguments, size)
                yield replace(case, written=written, peers=peers)


def _arguments(device: Device, operation: str, shapes: Sequence[Shape], dtype: str) -> Arguments:
    found = gradients(device, dtype, shapes)
    grads = found["grads"]
    more: dict[str, Callable[[], Arguments]] = {
        "clip_grad_norm with a scale": lambda: {"scale": Changing(lambda: cycle((2.0, 0.5)))},
        "accumulate_grads with their norm": lambda: {
            "buffers": grads,
            "norm": gradkit.grad_norm(grads),
        },
        "accumulate_grads, norm of what arrives": lambda: {
            "buffers": gradients(device, dtype, shapes)["grads"],
            "norm": gradkit.grad_norm(grads),
        },
        "clip_grad_block_norm, rms": lambda: {"limit": falling(0.5)},
        "clip_grad_adaptive by rows": lambda: {
            "params": grads,
            "limit": falling(0.1),
            "axes": [tuple(range(1, grad.ndim)) for grad in grads],
        },
        "clip_grad_norm of some": lambda: {"matrices": [grad.ndim > 1 for grad in grads]},
        "keep_if": lambda: {"new": grads, "old": gradients(device, dtype, shapes)["grads"]},
        "SpikeGuard of each": lambda: {
            "guard": gradkit.SpikeGuard(),
            "guards": [gradkit.SpikeGuard() for _ in grads],
        },
        "SpikeGuard": lambda: {"guard": gradkit.SpikeGuard(), "mean": [0.0]},
    }
    return found | more.get(operation, dict)()

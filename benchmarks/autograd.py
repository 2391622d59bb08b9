"""Norms in PyTorch's autograd and in jax.jit, on arrays so small that nearly all time is overhead.

Each row of a table is one operation by gradkit's own functions, by ``gradkit.torch`` or
``gradkit.jax``, and by PyTorch's or JAX's own; ``python -m benchmarks.overhead`` measures them.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

import gradkit
from benchmarks.devices import Call
from benchmarks.peers import Module, jax, torch

ROWS, COLUMNS, TENSORS = 8, 64, 10
Makers = dict[str, Callable[[], Call]]  # by way

ours, functional = Module("gradkit.torch"), Module("torch.nn.functional")
ours_in_jax, jnp = Module("gradkit.jax"), Module("jax.numpy")


@cache
def _running() -> Any:
    return torch.zeros(COLUMNS), torch.ones(COLUMNS)


def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    mean, var = _running()
    return gradkit.batch_norm(x, w, b, running_mean=mean, running_var=var)


def _by_running_statistics(x: Any, w: Any, b: Any) -> Any:
    return gradkit.batch_norm_inference(x, w, b, *_running()), *_running()


# gradkit's two passes, gradkit.torch's norm, PyTorch's norm
TORCH_NORMS: dict[str, tuple[Any, Any, Any, Any]] = {
    "layer norm": (
        *(gradkit.layer_norm, gradkit.layer_norm_grad),
        lambda x, w, b: ours.layer_norm(x, (COLUMNS,), w, b),
        lambda x, w, b: functional.layer_norm(x, (COLUMNS,), w, b),
    ),
    "RMS norm": (
        *(gradkit.rms_norm, gradkit.rms_norm_grad),
        lambda x, w: ours.rms_norm(x, (COLUMNS,), w, 1e-6),
        lambda x, w: functional.rms_norm(x, (COLUMNS,), w, 1e-6),
    ),
    "group norm": (
        *(lambda x, w, b: gradkit.group_norm(x, 8, w, b), gradkit.group_norm_grad),
        lambda x, w, b: ours.group_norm(x, 8, w, b),
        lambda x, w, b: functional.group_norm(x, 8, w, b),
    ),
    "batch norm": (
        *(_batch_norm, gradkit.batch_norm_grad),
        lambda x, w, b: ours.batch_norm(x, *_running(), w, b, True),
        lambda x, w, b: functional.batch_norm(x, *_running(), w, b, True),
    ),
    "batch norm by running statistics": (
        *(_by_running_statistics, gradkit.batch_norm_inference_grad),
        lambda x, w, b: ours.batch_norm(x, *_running(), w, b),
        lambda x, w, b: functional.batch_norm(x, *_running(), w, b),
    ),
}


def in_torch() -> dict[str, Makers]:
    """Return both passes of each norm, in each way."""
    ways = "direct", "+ engine", "nothing", "bare", "gradkit.torch", "torch"
    return {
        name: {way: lambda norm=norm, way=way: _torch_passes(*norm)[way] for way in ways}
        for name, norm in TORCH_NORMS.items()
    }


def _torch_passes(forward: Any, gradient: Any, through: Any, theirs: Any) -> dict[str, Call]:
    x, dy = torch.randn(ROWS, COLUMNS, requires_grad=True), torch.ones(ROWS, COLUMNS)
    parameters = torch.ones(COLUMNS), torch.zeros(COLUMNS)
    count = len(inspect.signature(through).parameters)
    tensors = (x, *map(torch.nn.Parameter, parameters))[:count]
    plain = [each.detach() for each in tensors]

    def direct() -> None:
        _, *saved = forward(*plain)
        gradient(dy, *plain[:2], *saved)

    def direct_and_engine() -> None:
        direct()
        torch.autograd.grad(x.view_as(x), x, dy)

    class Nothing(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_: Any, x: Any, *_parameters: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, dy: Any) -> Any:
            return dy, *plain[1:]

    class Bare(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            y, *saved = forward(*tensors)
            ctx.save_for_backward(*tensors[:2], *saved)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return gradient(dy, *ctx.saved_tensors)

    found: dict[str, Call] = {"direct": direct, "+ engine": direct_and_engine}
    functions = {"nothing": Nothing.apply, "bare": Bare.apply}
    for way, norm in (functions | {"gradkit.torch": through, "torch": theirs}).items():
        found[way] = lambda norm=norm: torch.autograd.grad(norm(*tensors), tensors, dy)
    return found


# A module, what it is made of, and the shape of its input.
MODULES: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("LayerNorm", (256,), (512, 256)),
    ("LayerNorm", (768,), (2048, 768)),
    ("LayerNorm", (1024,), (8192, 1024)),
    ("BatchNorm2d", (32,), (8, 32, 14, 14)),
    ("BatchNorm2d", (64,), (32, 64, 56, 56)),
    ("BatchNorm2d", (256,), (64, 256, 14, 14)),
    ("GroupNorm", (8, 64), (32, 64, 16, 16)),
    ("GroupNorm", (8, 256), (64, 256, 14, 14)),
)


def in_modules() -> dict[str, Makers]:
    """Return both passes of modules, of two libraries whose calls follow one another at once."""
    found: dict[str, Makers] = {}
    for kind, made_of, shape in MODULES:
        layouts = ["contiguous", "channels last"][: len(shape) // 2]
        for dtype, layout in product(("float32", "bfloat16"), layouts):
            given = kind, made_of, shape, dtype, layout
            found[f"{kind} {'x'.join(map(str, shape))} {dtype} {layout}"] = {
                "gradkit.torch": partial(_module_passes, ours, *given),
                "torch": partial(_module_passes, torch.nn, *given),
            }
    return found


def _module_passes(
    library: Any, kind: str, made_of: Any, shape: Any, dtype: str, layout: str
) -> Call:
    formats = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
    data = [torch.randn(shape).to(getattr(torch, dtype)) for _ in range(2)]
    x, dy = (each.contiguous(memory_format=formats[layout]) for each in data)
    norm = getattr(library, kind)(*made_of, dtype=x.dtype)
    wanted = [x.requires_grad_(), *norm.parameters()]
    return lambda: torch.autograd.grad(norm(x), wanted, dy)


def in_a_gpt() -> dict[str, Makers]:
    """Return both passes of a small GPT by PyTorch's norms and ours, by torch.compile too."""
    ways = {
        "torch": partial(_gpt_passes, functional),
        "gradkit.torch": partial(_gpt_passes, ours),
        "torch, compiled": partial(_gpt_passes, functional, lambda: "inductor"),
        "gradkit.torch, compiled": partial(_gpt_passes, ours, lambda: "inductor"),
        "decomposed": partial(_gpt_passes, ours, lambda: ours.decomposed_inductor),
    }
    return {"4 blocks of 8 x 64 x 128": ways}


def _gpt_passes(library: Any, backend: Callable[[], Any] | None = None) -> Call:
    samples, length, width, heads = 8, 64, 128, 4

    def block(x: Any, qkv: Any, out: Any, up: Any, down: Any, *norms: Any) -> Any:
        row = library.layer_norm(x, (width,), *norms[:2])
        parts = (row @ qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2) @ out
        row = library.layer_norm(x, (width,), *norms[2:])
        return x + functional.gelu(row @ up) @ down

    def loss(x: Any, *blocks: Any) -> Any:
        for parameters in blocks:
            x = block(x, *parameters)
        return x.square().mean()

    shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    blocks = [
        [*(torch.randn(shape) / 10 for shape in shapes), *(torch.ones(width) for _ in range(4))]
        for _ in range(4)
    ]
    leaves = [parameter.requires_grad_() for parameters in blocks for parameter in parameters]
    x = torch.randn(samples, length, width)
    run = torch.compile(loss, backend=backend()) if backend else loss
    return lambda: torch.autograd.grad(run(x, *blocks), leaves)


def _jax_passes(norm: Callable[..., Any], dy: Any, x: Any, scale: Any) -> Any:
    y, gradient = jax.vjp(norm, x, scale)
    return y, gradient(dy)


def _direct_passes(dy: Any, x: Any, scale: Any) -> Any:
    y, inv_std = gradkit.rms_norm(x, scale)
    return y, gradkit.rms_norm_grad(dy, x, scale, inv_std)


def _jax_norm(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _jax_clip(*grads: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads))
    return [g * jnp.minimum(1.0, 1.0 / norm) for g in grads], norm


# gradkit's functions, gradkit.jax's and JAX's own.
JAX_CALLS: dict[str, tuple[Any, Any, Any]] = {
    "rms_norm and its gradient": (
        _direct_passes,
        lambda *given: _jax_passes(ours_in_jax.rms_norm, *given),
        partial(_jax_passes, _jax_norm),
    ),
    "clip_by_global_norm": (
        lambda *grads: gradkit.clip_by_global_norm(grads, 1.0),
        lambda *grads: ours_in_jax.clip_by_global_norm(grads, 1.0),
        _jax_clip,
    ),
}


def in_jax() -> dict[str, Makers]:
    """Return a norm's passes and a clip, in each way."""
    rng = np.random.default_rng(0)
    shapes = [(ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,)], [(COLUMNS,)] * TENSORS
    given = ([rng.normal(size=shape).astype(np.float32) for shape in each] for each in shapes)
    return {
        name: _jax_ways(arrays, *call)
        for (name, call), arrays in zip(JAX_CALLS.items(), given, strict=True)
    }


def _jax_ways(arrays: Any, direct: Any, through: Any, theirs: Any) -> Makers:
    def jitted(function: Any) -> Call:
        placed, compiled = [jnp.asarray(array) for array in arrays], jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*placed))

    return {
        "direct": lambda: partial(direct, *arrays),
        "gradkit.jax": lambda: jitted(through),
        "jax": lambda: jitted(theirs),
    }

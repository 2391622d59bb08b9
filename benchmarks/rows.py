"""Norms over the rows of a matrix: layer norm, RMS norm, the invertible layer norm.

A gradient must read or write 3 M D elements, a norm 2 M D, and 4 M D with a residual; 5 M D and
3 M D with a gate.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import gradkit
from benchmarks.devices import DTYPES, Call, Device
from benchmarks.peers import COMPILED, Arguments, Module, Table, backward, onnxruntime, torch
from benchmarks.shapes import Shape, chosen
from benchmarks.timing import AIM, Case, on_array

liger_layer_norm = Module("liger_kernel.ops.layer_norm")
liger_rms_norm = Module("liger_kernel.ops.rms_norm")
liger_add_rms_norm = Module("liger_kernel.ops.fused_add_rms_norm")
quack = Module("quack.rmsnorm")


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(axis=-1)
    centred = x - mean[..., None]
    inv_std = 1 / ((centred * centred).mean(axis=-1) + 1e-5) ** 0.5
    return centred * inv_std[..., None] * scale + bias, mean, inv_std


def _rms_norm(x: Any, scale: Any) -> Any:
    inv_std = 1 / ((x * x).mean(axis=1) + 1e-6) ** 0.5
    return x * inv_std[:, None] * scale, inv_std


def _add_rms_norm(x: Any, residual: Any, scale: Any) -> Any:
    s = x + residual
    y, inv_std = _rms_norm(s, scale)
    return y, s, inv_std


def _gradient(dy: Any, xhat: Any, scale: Any, inv_std: Any) -> Any:
    w = dy * scale
    product = (w * xhat).mean(axis=-1, keepdims=True)
    dx = inv_std[..., None] * (w - w.mean(axis=-1, keepdims=True) - xhat * product)
    rows = {"axis": dy.ndim - 2, "keepdims": dy.ndim > 2}  # of a sample, if there are samples
    return dx, (dy * xhat).sum(**rows), dy.sum(**rows)


def formula() -> Call:
    """Return a small layer norm's gradient in plain NumPy: the unit by which hosts are compared."""
    small = [np.ones(shape, np.float32) for shape in ((8, 64), (8, 64), 64, 8, 8)]
    return partial(layer_norm_grad, *small)


def layer_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
    """Return dx, dscale and dbias by the formula."""
    return _gradient(dy, (x - mean[..., None]) * inv_std[..., None], scale, inv_std)


def _invertible_grad(dy: Any, y: Any, scale: Any, bias: Any, inv_std: Any) -> Any:
    return _gradient(dy, (y - bias) / scale, scale, inv_std)


def _rms_norm_grad(dy: Any, x: Any, scale: Any, inv_std: Any) -> Any:
    xhat, w = x * inv_std[:, None], dy * scale
    dx = inv_std[:, None] * (w - xhat * (w * xhat).mean(axis=1, keepdims=True))
    return dx, (dy * xhat).sum(axis=0)


def _invertible_rms_grad(dy: Any, y: Any, scale: Any, inv_std: Any) -> Any:
    return _rms_norm_grad(dy, y / scale / inv_std[:, None], scale, inv_std)


def _silu(gate: Any) -> Any:
    share = 1 / (1 + math.e**-gate)  # an array of any library
    return gate * share, share * (1 + gate * (1 - share))


def _gated_rms_norm(x: Any, gate: Any, scale: Any) -> Any:
    y, inv_std = _rms_norm(x, scale)
    return y * _silu(gate)[0], inv_std


def _gated_rms_norm_grad(dy: Any, x: Any, gate: Any, scale: Any, inv_std: Any) -> Any:
    value, slope = _silu(gate)
    dx, dscale = _rms_norm_grad(dy * value, x, scale, inv_std)
    return dx, dy * (x * inv_std[:, None]) * scale * slope, dscale


def _torch_gated_rms_norm(x: Any, gate: Any, scale: Any) -> Any:
    return _torch_rms_norm(x, scale) * torch.nn.functional.silu(gate)


def _torch_layer_norm_grad(a: Any, *, dx: bool, weights: bool) -> Any:
    given = a.dy, a.x, a.x.shape[1:], a.mean[:, None], a.inv_std[:, None], a.scale, a.scale
    wanted = [dx, weights, weights]
    return partial(torch.ops.aten.native_layer_norm_backward, *given, wanted)


def _torch_rms_norm_grad(dy: Any, x: Any, scale: Any, inv_std: Any) -> Any:
    """Compute in float32, as torch.compile does: PyTorch has no operator for it."""
    dx, dscale = _rms_norm_grad(dy.float(), x.float(), scale.float(), inv_std)
    return dx.to(x.dtype), dscale.to(scale.dtype)


def _torch_rms_norm(x: Any, scale: Any) -> Any:
    return torch.nn.functional.rms_norm(x, x.shape[1:], scale, 1e-6)


def _torch_add_rms_norm(x: Any, residual: Any, scale: Any) -> Any:
    s = x + residual
    return _torch_rms_norm(s, scale), s


def _liger_rms_norm(x: Any, scale: Any) -> Any:
    in_place = False  # otherwise its gradient overwrites dy, which the next call reads
    return liger_rms_norm.LigerRMSNormFunction.apply(x, scale, 1e-6, 0.0, "llama", in_place)


def _liger_layer_norm(x: Any, scale: Any) -> Any:
    bias = torch.zeros_like(scale, requires_grad=True)
    return liger_layer_norm.LigerLayerNormFunction.apply(x, scale, bias, 1e-5)


def _torch_modulated(x: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[2:]) * scale + bias


TABLES: dict[str, Table] = {
    "layer_norm_grad": {
        "gradkit": gradkit.layer_norm_grad,
        "torch": lambda a: _torch_layer_norm_grad(a, dx=True, weights=True),
        "liger": lambda a: backward(_liger_layer_norm, a.dy, a.x, a.scale),
        "quack": lambda a: partial(
            quack.layernorm_bwd, a.x, a.scale, a.dy, a.inv_std, a.mean, has_bias=True
        ),
        "onnxruntime": lambda a: onnxruntime(
            "LayerNormalizationGrad", 3, a, mean=a.mean[:, None], inv_std=a.inv_std[:, None]
        ),
        "naive": layer_norm_grad,
        **COMPILED,
    },
    "rms_norm_grad": {
        "gradkit": gradkit.rms_norm_grad,
        "torch": lambda a: backward(_torch_rms_norm, a.dy, a.x, a.scale),
        "liger": lambda a: backward(_liger_rms_norm, a.dy, a.x, a.scale),
        "quack": lambda a: partial(quack.rmsnorm_bwd, a.x, a.scale, a.dy, a.inv_std),
        "onnxruntime": lambda a: onnxruntime(
            "SimplifiedLayerNormalizationGrad", 2, a, inv_std=a.inv_std[:, None]
        ),
        "naive": _rms_norm_grad,
        **COMPILED,
        "torch.compile": lambda a: partial(_torch_rms_norm_grad, a.dy, a.x, a.scale, a.inv_std),
    },
    "invertible_layer_norm_grad": {  # PyTorch has no such operation
        "gradkit": gradkit.invertible_layer_norm_grad,
        "onnxruntime": lambda a: onnxruntime(
            "InvertibleLayerNormalizationGrad", 3, a, inv_std=a.inv_std[:, None]
        ),
        "naive": _invertible_grad,
        **COMPILED,
    },
    "invertible_rms_norm_grad": {
        "gradkit": gradkit.invertible_rms_norm_grad,
        "naive": _invertible_rms_grad,
        **COMPILED,
    },
    "gated_rms_norm_grad": {
        "gradkit": gradkit.gated_rms_norm_grad,
        "torch": lambda a: backward(_torch_gated_rms_norm, a.dy, a.x, a.gate, a.scale),
        "naive": _gated_rms_norm_grad,
        **COMPILED,
    },
    "layer_norm": {
        "gradkit": gradkit.layer_norm,
        "torch": lambda a: partial(
            torch.ops.aten.native_layer_norm, a.x, a.x.shape[1:], a.scale, a.bias, 1e-5
        ),
        "liger": lambda a: partial(
            liger_layer_norm.LigerLayerNormFunction.apply, a.x, a.scale, a.bias, 1e-5
        ),
        "quack": lambda a: partial(
            quack.layernorm_fwd,
            *(a.x, a.scale.float(), a.bias.float()),  # it takes no others
            eps=1e-5,
            return_rstd=True,
            return_mean=True,
        ),
        "naive": _layer_norm,
        **COMPILED,
    },
    "rms_norm": {
        "gradkit": gradkit.rms_norm,
        "torch": lambda a: partial(_torch_rms_norm, a.x, a.scale),
        "liger": lambda a: partial(_liger_rms_norm, a.x, a.scale),
        "quack": lambda a: partial(quack.rmsnorm_fwd, a.x, a.scale, store_rstd=True),
        "naive": _rms_norm,
        **COMPILED,
    },
    "add_rms_norm": {
        "gradkit": gradkit.add_rms_norm,
        "torch": lambda a: partial(_torch_add_rms_norm, a.x, a.residual, a.scale),
        "liger": lambda a: partial(
            liger_add_rms_norm.LigerFusedAddRMSNormFunction.apply,
            *(a.x, a.residual, a.scale, 1e-6, 0.0, "llama", False),
        ),
        "quack": lambda a: partial(
            quack.rmsnorm_fwd, a.x, a.scale, residual=a.residual, store_rstd=True
        ),
        "naive": _add_rms_norm,
        **COMPILED,
    },
    "gated_rms_norm": {
        "gradkit": gradkit.gated_rms_norm,
        "torch": lambda a: partial(_torch_gated_rms_norm, a.x, a.gate, a.scale),
        "naive": _gated_rms_norm,
        **COMPILED,
    },
}
# With a scale and bias of each sample, as diffusion transformers modulate: by the same formulas.
_MODULATED = {
    "layer_norm_grad": lambda a: backward(_torch_modulated, a.dy, a.x, a.scale, a.scale),
    "layer_norm": lambda a: partial(_torch_modulated, a.x, a.scale, a.bias),
}
PER_SAMPLE = {
    name: {own: TABLES[name][own] for own in ("gradkit", "naive")} | {"torch": make, **COMPILED}
    for name, make in _MODULATED.items()
}


def _and_ds(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return a formula whose dx has the gradient of the residual branch too."""

    def summed(*, ds: Any, **given: Any) -> Any:
        dx, *others = gradient(**given)
        return dx + ds, *others

    return summed


def _torch_and_ds(make: Callable[[Any], Callable[[], Any]]) -> Callable[[Any], Callable[[], Any]]:
    def made(a: Any) -> Callable[[], Any]:
        gradient = make(a)

        def summed() -> Any:
            dx, *others = gradient()
            return dx.add_(a.ds), *others

        return summed

    return made


def _offset_by_1(gradient: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *, scale, **given: gradient(scale=1 + scale, **given)


def _torch_offset_by_1(x: Any, scale: Any) -> Any:
    return _torch_rms_norm(x, 1 + scale)


# As transformers call gradients: beside a residual branch, and with scales that Gemma keeps less 1.
RESIDUAL: dict[str, Table] = {
    name: {
        "gradkit": getattr(gradkit, name),
        "naive": _and_ds(TABLES[name]["naive"]),
        "torch": _torch_and_ds(TABLES[name]["torch"]),
        **COMPILED,
    }
    for name in ("layer_norm_grad", "rms_norm_grad")
}
OFFSET: Table = {
    "gradkit": partial(gradkit.rms_norm_grad, scale_offset=1.0),
    "naive": _offset_by_1(_rms_norm_grad),
    "torch": lambda a: backward(_torch_offset_by_1, a.dy, a.x, a.scale),
    **COMPILED,
}
# Some of the gradients, of frozen weights and of weights alone: what is wanted, and arrays moved.
WANTED = {"dx alone": (("dx",), 3), "weights alone": (("dscale", "dbias"), 2)}
GRADIENTS = [name for name in TABLES if name.endswith("_grad")]
CPU_TARGETS = {"naive": 3.0, "torch": 1.3, "jax": 2.0, "onnxruntime": 5.0, AIM: 0.35}
COPIED = {
    "layer_norm_grad": 0.80,
    "rms_norm_grad": 0.85,
    "invertible_layer_norm_grad": 0.80,
    "invertible_rms_norm_grad": 0.85,
    "gated_rms_norm_grad": 0.70,
}
# Arrays of the data's size that are read or written.
MOVED = {"gated_rms_norm_grad": 5, "add_rms_norm": 4, "gated_rms_norm": 3}
DATA = ("x", "residual", "gate")


def cases(device: Device, *, quick: bool = False) -> Iterator[Case]:
    """Yield every gradient and every norm on its shapes and dtypes."""
    shapes = chosen(device)
    for name in GRADIENTS:
        wanted = shapes.norms[:3] if name.startswith(("invertible", "gated")) else shapes.norms
        for shape, dtype in shapes.pairs(wanted, shapes.others, quick=quick):
            yield _case(device, name, shape, dtype, MOVED.get(name, 3) * math.prod(shape))
        if name == "layer_norm_grad":
            yield from _of_some(device, shapes.norms[:2])
        if name == "rms_norm_grad" and device.name == "cpu":
            yield from _of_parts(device, shapes.norms[:2])
    for name in (each for each in TABLES if each not in GRADIENTS):
        others = ("bfloat16",) if device.name == "cpu" else ()
        for shape, dtype in shapes.pairs(shapes.norms[:2], others, quick=quick):
            yield _case(device, name, shape, dtype, MOVED.get(name, 2) * math.prod(shape))
    for name, table in RESIDUAL.items():
        for shape, dtype in shapes.pairs(shapes.norms[:2], (), quick=quick):
            yield _of_residuals(device, name, table, shape, dtype)
    for shape, dtype in shapes.pairs(shapes.norms[:2], (), quick=quick):
        case = _case(device, "rms_norm_grad", shape, dtype, 3 * math.prod(shape))
        yield replace(case, operation="rms_norm_grad, offset", table=OFFSET, targets={})
    for name in PER_SAMPLE:
        for shape, dtype in shapes.pairs(shapes.samples, (), quick=quick):
            yield _of_samples(device, name, shape, dtype)
    for name in ("layer_norm_grad", "layer_norm"):
        for shape, dtype in shapes.pairs(shapes.norms[:1], (), quick=quick):
            yield _channels_first(device, name, shape, dtype)


def _case(device: Device, name: str, shape: Shape, dtype: str, moved: int) -> Case:
    size, targets = moved * DTYPES[dtype].itemsize, dict[str, float]()
    if name in GRADIENTS and device.name == "cuda":
        targets = gpu_targets(COPIED[name], shape, size)
    elif name in GRADIENTS and device.name == "cpu":
        targets = CPU_TARGETS if (shape, dtype) == (chosen(device).norms[0], "float32") else {}
    make = gradient_arguments if name in GRADIENTS else norm_arguments
    arguments = partial(make, device, name, shape, dtype)
    rest = {"arguments": arguments, "bytes": size, "targets": targets}
    return on_array(device, name, TABLES[name], shape, dtype, **rest)


def _of_some(device: Device, shapes: Sequence[Shape]) -> Iterator[Case]:
    """Yield the gradient where only some of its results are wanted."""
    for shape, (title, (wanted, moved)) in product(shapes, WANTED.items()):
        dx, weights = "dx" in wanted, "dscale" in wanted
        table = {
            "gradkit": partial(gradkit.layer_norm_grad, wanted=wanted),
            "torch": partial(_torch_layer_norm_grad, dx=dx, weights=weights),
        }
        case = _case(device, "layer_norm_grad", shape, "float32", moved * math.prod(shape))
        yield replace(case, operation=f"layer_norm_grad, {title}", table=table, targets={})


def _of_residuals(device: Device, name: str, table: Table, shape: Shape, dtype: str) -> Case:
    """Return a gradient with that of the residual branch."""
    case = _case(device, name, shape, dtype, 4 * math.prod(shape))

    def arguments() -> Arguments:
        return case.arguments() | {"ds": device.normal(shape, dtype, 5)}

    changed: dict[str, Any] = {"arguments": arguments, "table": table, "targets": {}}
    return replace(case, operation=f"{name}, with ds", **changed)


def _of_samples(device: Device, name: str, shape: Shape, dtype: str) -> Case:
    """Return a case with a scale and bias of each sample."""
    samples, patches, width = shape

    def arguments() -> Arguments:
        make = gradient_arguments if name in GRADIENTS else norm_arguments
        found = make(device, name, (samples * patches, width), dtype)
        for each, array in found.items():
            if each in ("scale", "bias"):
                kind = array.dtype.name
                found[each] = device.normal((samples, 1, width), kind, 2 + (each == "bias"))
            else:
                found[each] = array.reshape(shape[:2] if array.ndim == 1 else shape)
        return found

    size = (3 if name in GRADIENTS else 2) * math.prod(shape) * DTYPES[dtype].itemsize
    rest = {"arguments": arguments, "bytes": size, "targets": {}}
    return on_array(device, f"{name}, per sample", PER_SAMPLE[name], shape, dtype, **rest)


def _channels_first(device: Device, name: str, shape: Shape, dtype: str) -> Case:
    """Return a case whose rows have neighbours in memory that are of other rows, as images do."""
    case = _case(device, name, shape, dtype, (3 if name in GRADIENTS else 2) * math.prod(shape))

    def arguments() -> Arguments:
        return {
            each: array.T.copy().T if array.shape == shape else array
            for each, array in case.arguments().items()
        }

    changed: dict[str, Any] = {"arguments": arguments, "targets": {}, "out": False}
    return replace(case, operation=f"{name}, channels first", **changed)


def norm_arguments(device: Device, name: str, shape: Shape, dtype: str) -> Arguments:
    """Return a norm's arguments by name."""
    return {
        each: device.normal(shape if each in DATA else shape[1:], dtype, seed)
        for seed, each in enumerate(_arrays_of(name))
    }


def gradient_arguments(device: Device, name: str, shape: Shape, dtype: str) -> Arguments:
    """Return a gradient's arguments by name, with the statistics of x."""
    x, dy = device.normal(shape, dtype, 0), device.normal(shape, dtype, 1)
    narrow = DTYPES[dtype].itemsize == 2
    kind = "float32" if narrow and device.wide_scale else dtype
    scale, bias = (device.normal(shape[1:], kind, seed) for seed in (2, 3))
    if name.startswith("invertible"):  # which divides by it: no quotient may leave float16's range
        scale = device.array((1 + device.exact(scale) / 8).astype(scale.dtype))
    values, statistic = device.exact(x), "float32" if narrow else dtype
    centred = "rms" not in name
    mean = values.mean(axis=1)
    squares = ((values - mean[:, None] if centred else values) ** 2).mean(axis=1)
    inv_std = 1 / (squares + (1e-5 if centred else 1e-6)) ** 0.5
    mean, inv_std = (device.array(each.astype(statistic)) for each in (mean, inv_std))
    found = {"dy": dy, "x": x, "y": x, "scale": scale, "bias": bias, "mean": mean}
    found["gate"] = device.normal(shape, dtype, 4)
    return {each: {**found, "inv_std": inv_std}[each] for each in _arrays_of(name)}


def _arrays_of(name: str) -> list[str]:
    """Return the names of the arrays that a function takes."""
    given = inspect.signature(getattr(gradkit, name)).parameters.values()
    return [each.name for each in given if each.kind is not each.KEYWORD_ONLY]


def _of_parts(device: Device, shapes: Sequence[Shape]) -> Iterator[Case]:
    """Yield the gradient on rows that lie in rows three times as long."""
    for shape in shapes:
        case = _case(device, "rms_norm_grad", shape, "float32", 3 * math.prod(shape))
        whole = case.arguments

        def arguments(whole: Callable[[], Arguments] = whole) -> Arguments:
            found = whole()
            for name in ("dy", "x"):
                rows, width = found[name].shape
                wide = np.zeros((rows, 3 * width), np.float32)
                wide[:, width : 2 * width] = found[name]
                found[name] = wide[:, width : 2 * width]
            return found

        title = f"{case.shape} of rows 3 times as long"
        yield replace(case, shape=title, arguments=arguments, targets={}, out=False)


def gpu_targets(best: float, shape: Shape, size: int) -> dict[str, float]:
    """Return the targets for a shape, by its size in bytes and its columns."""
    rows, width = shape
    if size < 2e6:
        return {"ms": 0.008, "wall ms": 0.020, "torch": 1.0, "torch.compile": 1.0, "liger": 1.0}
    if width <= 256:
        return {"copy": 0.65, "torch.compile": 1.5}
    if size <= 50e6:
        return {"copy": 0.55, "torch": 1.5}
    if width >= 12288:
        return {"copy": 0.72, "torch.compile": 1.5}
    if width >= 4096 and rows >= 8192:
        return {"copy": best, "torch": 2.0, "torch.compile": 1.8, "liger": 1.0}
    return {"copy": 0.75, "torch": 2.0} if size >= 100e6 else {}

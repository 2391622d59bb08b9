"""Norms over the channels of images: batch norm and group norm.

A gradient must have read all of dy and x of a channel or a group before it writes the first dx: if
they fit into a cache, 3 elements per element move through memory, otherwise 5. In the same way a
norm moves 2 or 3.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import gradkit
from benchmarks.devices import DTYPES, Device
from benchmarks.peers import COMPILED, Arguments, Module, Table, backward, onnxruntime, torch
from benchmarks.shapes import Shape, chosen, list_bytes
from benchmarks.timing import Case, on_array

liger_group_norm = Module("liger_kernel.ops.group_norm")
GROUPS = 32
ALL = [True, True, True]  # dx, dscale and dbias are wanted
SPACE = (0, 2, 3)  # all axes but the channels'


def _affine(x: Any, scale: Any, bias: Any) -> Any:
    return x * scale[:, None, None] + bias[:, None, None]


def _batch_norm(x: Any, scale: Any, bias: Any, running_mean: Any, running_var: Any) -> Any:
    mean, n = x.mean(axis=SPACE), x.size // x.shape[1]
    centred = x - mean[:, None, None]
    var = (centred * centred).mean(axis=SPACE)
    inv_std = 1 / (var + 1e-5) ** 0.5
    running_mean *= 0.9
    running_mean += 0.1 * mean
    running_var *= 0.9
    running_var += 0.1 * var * (n / (n - 1))
    y = _affine(centred * inv_std[:, None, None], scale, bias)
    return y, mean, inv_std, running_mean, running_var


def _batch_norm_inference(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    factor = scale / (var + 1e-5) ** 0.5
    return _affine(x, factor, bias - mean * factor)


def _batch_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
    c, n = (slice(None), None, None), x.size // x.shape[1]
    xhat = (x - mean[c]) * inv_std[c]
    dscale, dbias = (dy * xhat).sum(axis=SPACE), dy.sum(axis=SPACE)
    dx = (scale * inv_std)[c] * (dy - dbias[c] / n - xhat * dscale[c] / n)
    return dx, dscale, dbias


def _group_norm(x: Any, num_groups: int, scale: Any, bias: Any) -> Any:
    groups = x.reshape(x.shape[0], num_groups, -1)
    mean = groups.mean(axis=2)
    centred = groups - mean[:, :, None]
    inv_std = 1 / ((centred * centred).mean(axis=2) + 1e-5) ** 0.5
    return _affine((centred * inv_std[:, :, None]).reshape(x.shape), scale, bias), mean, inv_std


def _group_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
    groups = (*mean.shape, -1)
    xhat = (x.reshape(groups) - mean[..., None]) * inv_std[..., None]
    w = (dy * scale[:, None, None]).reshape(groups)
    product = (w * xhat).mean(axis=2, keepdims=True)
    dx = inv_std[..., None] * (w - w.mean(axis=2, keepdims=True) - xhat * product)
    return dx.reshape(x.shape), (dy * xhat.reshape(x.shape)).sum(axis=SPACE), dy.sum(axis=SPACE)


def _cudnn_batch_norm(x: Any, scale: Any) -> Any:
    bias = torch.zeros_like(scale, requires_grad=True)
    y = torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True)
    if x.is_cuda and "Cudnn" not in y.grad_fn.name():
        raise RuntimeError(f"PyTorch chose {y.grad_fn.name()}, not cuDNN")
    return y


def _liger_group_norm(groups: int, x: Any, scale: Any, bias: Any = None) -> Any:
    bias = torch.zeros_like(scale, requires_grad=True) if bias is None else bias
    apply = liger_group_norm.LigerGroupNormFunction.apply
    return apply(x, scale, bias, x.shape[1], groups, 1e-5)


def _for_group_norm(a: Any, *vectors: Any) -> list[Any]:
    """Return parameters and statistics as PyTorch takes them: on a GPU, in the dtype of x alone."""
    return [each.to(a.x.dtype) if a.x.is_cuda else each for each in vectors]


def _torch_group_norm(a: Any) -> Any:
    scale, bias = _for_group_norm(a, a.scale, a.bias)
    sizes = *_sizes(a.x), a.num_groups
    return partial(torch.ops.aten.native_group_norm, a.x, scale, bias, *sizes, 1e-5)


def _torch_group_norm_grad(a: Any) -> Any:
    given = _for_group_norm(a, a.mean, a.inv_std, a.scale)
    sizes = *_sizes(a.x), a.mean.shape[1]
    return partial(torch.ops.aten.native_group_norm_backward, a.dy, a.x, *given, *sizes, ALL)


def _sizes(x: Any) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


TABLES: dict[str, Table] = {
    "batch_norm_grad": {
        "gradkit": partial(gradkit.batch_norm_grad, engine="native"),
        "cuDNN through gradkit": partial(gradkit.batch_norm_grad, engine="cudnn"),
        "torch": lambda a: partial(
            torch.ops.aten.native_batch_norm_backward,
            *(a.dy, a.x, a.scale, None, None, a.mean, a.inv_std, True, 1e-5, ALL),
        ),
        "torch cuDNN": lambda a: backward(_cudnn_batch_norm, a.dy, a.x, a.scale),
        "onnxruntime": lambda a: onnxruntime("BatchNormalizationGrad", 3, a, epsilon=1e-5),
        "naive": _batch_norm_grad,
        **COMPILED,
    },
    "group_norm_grad": {  # ONNX Runtime has no kernel for it
        "gradkit": gradkit.group_norm_grad,
        "torch": _torch_group_norm_grad,
        "liger": lambda a: backward(
            partial(_liger_group_norm, a.mean.shape[1]), a.dy, a.x, a.scale
        ),
        "naive": _group_norm_grad,
        **COMPILED,
    },
    "group_norm": {
        "gradkit": gradkit.group_norm,
        "torch": _torch_group_norm,
        "liger": lambda a: partial(_liger_group_norm, a.num_groups, a.x, a.scale, a.bias),
        "naive": _group_norm,
        **COMPILED,
    },
    "batch_norm": {
        "gradkit": partial(gradkit.batch_norm, engine="native"),
        "cuDNN through gradkit": partial(gradkit.batch_norm, engine="cudnn"),
        "torch": lambda a: partial(
            torch.ops.aten.native_batch_norm,
            *(a.x, a.scale, a.bias, a.running_mean, a.running_var, True, 0.1, 1e-5),
        ),
        "naive": _batch_norm,
        **COMPILED,
    },
    "batch_norm_inference": {
        "gradkit": partial(gradkit.batch_norm_inference, engine="native"),
        "cuDNN through gradkit": partial(gradkit.batch_norm_inference, engine="cudnn"),
        "torch": lambda a: partial(
            torch.nn.functional.batch_norm, a.x, a.mean, a.var, a.scale, a.bias, eps=1e-5
        ),
        "naive": _batch_norm_inference,
        **COMPILED,
    },
}
# The arguments of each norm; those of both gradients are dy, x, scale, mean and inv_std.
NORMS = {
    "group_norm": "x num_groups scale bias",
    "batch_norm": "x scale bias running_mean running_var",
    "batch_norm_inference": "x scale bias mean var",
}
GRADIENTS = ("batch_norm_grad", "group_norm_grad")
RUNNING = ("running_mean", "running_var")


def cases(device: Device, *, quick: bool = False) -> Iterator[Case]:
    """Yield both gradients, on a GPU channels first and last, and the norms."""
    shapes, on_cpu = chosen(device), device.name == "cpu"
    for name in GRADIENTS:
        others = shapes.others[:1] if name == "batch_norm_grad" else ()
        pairs = shapes.pairs(shapes.images, shapes.others if on_cpu else others, quick=quick)
        for (shape, dtype), last in product(pairs, (False,) if on_cpu else (False, True)):
            yield _gradient(device, name, shape, dtype, last=last)
    for name in NORMS:
        others = ("bfloat16",) if on_cpu else ()
        for shape, dtype in shapes.pairs(shapes.images[:3], others, quick=quick):
            moved, written = (3, RUNNING) if name == "batch_norm" else (2, ())
            arguments = partial(norm_arguments, device, name, shape, dtype)
            rest = {"arguments": arguments, "bytes": moved * list_bytes([shape], dtype)}
            yield on_array(device, name, TABLES[name], shape, dtype, written=written, **rest)


def _gradient(device: Device, name: str, shape: Shape, dtype: str, *, last: bool) -> Case:
    moved, targets, table = 5, dict[str, float](), dict(TABLES[name])
    if dtype == "bfloat16":  # PyTorch has its own kernels compute it
        table.pop("torch cuDNN", None)
    if device.name == "cpu":
        moved = 3
        targets = {"naive": 2.0} if (shape, dtype) == (chosen(device).images[0], "float32") else {}
    elif device.name == "cuda":
        targets = {"copy": 0.80}
        if "torch cuDNN" in table and not last:
            targets["torch cuDNN"] = 1.2  # it reaches 0.65 of the copy on an H200
    arguments = partial(gradient_arguments, device, name, shape, dtype, last=last)
    rest = {"arguments": arguments, "bytes": moved * list_bytes([shape], dtype), "targets": targets}
    case = on_array(device, name, table, shape, dtype, **rest)
    return replace(case, shape=f"{case.shape} channels last") if last else case


def gradient_arguments(
    device: Device, name: str, shape: Shape, dtype: str, *, last: bool = False
) -> Arguments:
    """Return a gradient's arguments; ``last``: channels last in memory."""
    n, c, h, w = shape
    x, dy = (device.normal((n, h, w, c) if last else shape, dtype, seed) for seed in (0, 1))
    if last:
        x, dy = (array.transpose(0, 3, 1, 2) for array in (x, dy))
    kind = "float32" if DTYPES[dtype].itemsize == 2 else dtype
    channels = (c,) if name == "batch_norm_grad" else (n, min(GROUPS, c))
    mean, inv_std = (device.array(device.xp.full(channels, v, kind)) for v in (0, 1))
    scale = device.normal((c,), kind, 2)
    return {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_std": inv_std}


def norm_arguments(device: Device, name: str, shape: Shape, dtype: str) -> Arguments:
    """Return a norm's arguments by name; parameters and statistics are float32."""
    found: Arguments = {"x": device.normal(shape, dtype), "num_groups": min(GROUPS, shape[1])}
    for seed, each in enumerate(("scale", "bias", "mean", "var"), 1):
        found[each] = device.normal(shape[1:2], "float32", seed)
    found["var"] *= found["var"]
    found |= {"running_mean": found["mean"], "running_var": found["var"]}
    return {each: found[each] for each in NORMS[name].split()}

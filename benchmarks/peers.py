"""The libraries that gradkit is measured against. Each peer imports its library when created.

A peer has one method per operation, which takes gradkit's arguments as NumPy arrays. It returns a
call without arguments that does the work once and waits for the result. Conversions happen before
that, as in a program written for that library. A peer has no method for what it cannot do.
"""

# ruff: noqa: D102  (the methods are the operations)

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import forward

Array = np.ndarray[Any, Any]
Call = Callable[[], object]
Limit = Callable[[], float]  # gives max_norm for the next call on gradients clipped in place


class Naive(forward.Formulas):
    """The formulas, one NumPy expression each (CuPy for CuPy arrays)."""

    name = "naive"

    def __init__(self, xp: Any = np) -> None:
        self.np = xp

    def _formula(self, formula: Callable[..., Any], *arrays: Any) -> Call:
        return lambda: formula(self.np, *arrays)

    def layer_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        def call() -> object:
            xhat = (x - mean[:, None]) * inv_std[:, None]
            w = dy * scale
            product = (w * xhat).mean(axis=1, keepdims=True)
            dx = inv_std[:, None] * (w - w.mean(axis=1, keepdims=True) - xhat * product)
            return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)

        return call

    def invertible_layer_norm_grad(
        self, dy: Array, y: Array, scale: Array, bias: Array, inv_std: Array
    ) -> Call:
        def call() -> object:
            xhat = (y - bias) / scale
            w = dy * scale
            product = (w * xhat).mean(axis=1, keepdims=True)
            dx = inv_std[:, None] * (w - w.mean(axis=1, keepdims=True) - xhat * product)
            return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)

        return call

    def rms_norm_grad(self, dy: Array, x: Array, scale: Array, inv_std: Array) -> Call:
        def call() -> object:
            xhat = x * inv_std[:, None]
            w = dy * scale
            dx = inv_std[:, None] * (w - xhat * (w * xhat).mean(axis=1, keepdims=True))
            return dx, (dy * xhat).sum(axis=0)

        return call

    def batch_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        def call() -> object:
            c = (slice(None),) + (None,) * (x.ndim - 2)
            axes = (0, *range(2, x.ndim))
            xhat = (x - mean[c]) * inv_std[c]
            dscale, dbias = (dy * xhat).sum(axis=axes), dy.sum(axis=axes)
            n = x.size // x.shape[1]
            dx = (scale * inv_std)[c] * (dy - dbias[c] / n - xhat * dscale[c] / n)
            return dx, dscale, dbias

        return call

    def group_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        def call() -> object:
            groups, c = (*mean.shape, -1), scale.reshape(-1, *(1,) * (x.ndim - 2))
            space = (0, *range(2, x.ndim))
            xhat = (x.reshape(groups) - mean[..., None]) * inv_std[..., None]
            w = (dy * c).reshape(groups)
            product = (w * xhat).mean(axis=2, keepdims=True)
            dx = inv_std[..., None] * (w - w.mean(axis=2, keepdims=True) - xhat * product)
            return dx.reshape(x.shape), (dy * xhat.reshape(x.shape)).sum(space), dy.sum(space)

        return call

    def grad_norm(self, grads: Sequence[Array]) -> Call:
        return lambda: self.np.sqrt(sum((g * g).sum() for g in grads))

    def clip_grad_norm(self, grads: Sequence[Array], limit: Limit) -> Call:
        def call() -> None:
            norm = self.np.sqrt(sum((g * g).sum() for g in grads))
            coefficient = (limit() / norm).astype(np.float32)
            if coefficient < 1:
                for g in grads:
                    g *= coefficient

        return call

    def accumulate_grad(self, buffer: Array, grad: Array) -> Call:
        return lambda: self.np.add(buffer, grad, out=buffer)

    def zero_grad(self, grads: Sequence[Array]) -> Call:
        def call() -> None:
            for g in grads:
                g[...] = 0

        return call


class Torch(forward.TorchNorms):
    """PyTorch, eager, on all threads."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))

    def _tensor(self, array: Array) -> Any:
        """A tensor over an array's memory."""
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def layer_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        backward = self.torch.ops.aten.native_layer_norm_backward
        t_dy, t_x, weight = map(self._tensor, (dy, x, scale))
        t_mean, rstd = (self._tensor(a[:, None]) for a in (mean, inv_std))
        wanted = [True, True, True]
        return lambda: backward(t_dy, t_x, [x.shape[1]], t_mean, rstd, weight, weight, wanted)

    def rms_norm_grad(self, dy: Array, x: Array, scale: Array, inv_std: Array) -> Call:  # noqa: ARG002
        t_dy, t_x, weight = map(self._tensor, (dy, x, scale))
        t_x, weight = t_x.requires_grad_(), weight.requires_grad_()
        y = self.torch.nn.functional.rms_norm(t_x, (x.shape[1],), weight, 1e-6)
        return lambda: self.torch.autograd.grad(y, (t_x, weight), t_dy, retain_graph=True)

    def batch_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        backward = self.torch.ops.aten.native_batch_norm_backward
        t_dy, t_x, weight, t_mean, rstd = map(self._tensor, (dy, x, scale, mean, inv_std))
        wanted = [True, True, True]
        return lambda: backward(t_dy, t_x, weight, None, None, t_mean, rstd, True, 1e-5, wanted)

    def group_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        backward = self.torch.ops.aten.native_group_norm_backward
        t_dy, t_x, weight, t_mean, rstd = map(self._tensor, (dy, x, scale, mean, inv_std))
        n, c = x.shape[:2]
        sizes = n, c, x.size // (n * c), mean.shape[1]
        wanted = [True, True, True]
        return lambda: backward(t_dy, t_x, t_mean, rstd, weight, *sizes, wanted)

    def grad_norm(self, grads: Sequence[Array]) -> Call:
        tensors = list(map(self._tensor, grads))
        return lambda: self.torch.nn.utils.get_total_norm(tensors)

    def clip_grad_norm(self, grads: Sequence[Array], limit: Limit) -> Call:
        parameters = []
        for g in grads:
            gradient = self._tensor(g)
            parameter = self.torch.nn.Parameter(self.torch.empty_like(gradient))
            parameter.grad = gradient
            parameters.append(parameter)
        return lambda: self.torch.nn.utils.clip_grad_norm_(parameters, limit())

    def accumulate_grad(self, buffer: Array, grad: Array) -> Call:
        into, addend = self._tensor(buffer), self._tensor(grad)
        return lambda: into.add_(addend)

    def zero_grad(self, grads: Sequence[Array]) -> Call:
        tensors = list(map(self._tensor, grads))
        return lambda: self.torch._foreach_zero_(tensors)

    # What bench_step.py measures; a caller's numbers change from call to call.

    def scaled_clip(self, grads: Sequence[Array], scale: Limit) -> Call:
        tensors, clip = list(map(self._tensor, grads)), self.clip_grad_norm(grads, lambda: 1e9)

        def call() -> object:
            self.torch._foreach_mul_(tensors, scale())
            return clip()

        return call

    def accumulate_with_norm(self, grads: Sequence[Array], buffers: Sequence[Array]) -> Call:
        added, into = (list(map(self._tensor, arrays)) for arrays in (grads, buffers))

        def call() -> object:
            self.torch._foreach_add_(into, added)
            return self.torch.nn.utils.get_total_norm(into)

        return call

    def tensor_norms(self, grads: Sequence[Array]) -> Call:
        tensors = list(map(self._tensor, grads))
        return lambda: self.torch._foreach_norm(tensors)

    def clip_blocks(self, grads: Sequence[Array], limit: Limit) -> Call:
        tensors = list(map(self._tensor, grads))
        roots = [tensor.numel() ** 0.5 for tensor in tensors]

        def call() -> None:
            largest, norms = limit(), self.torch._foreach_norm(tensors)
            factors = [
                (largest * root / norm).clamp(max=1)
                for root, norm in zip(roots, norms, strict=True)
            ]
            self.torch._foreach_mul_(tensors, factors)

        return call

    def clip_adaptive(self, grads: Sequence[Array], params: Sequence[Array], limit: Limit) -> Call:
        """As timm does it."""
        tensors, held = (list(map(self._tensor, arrays)) for arrays in (grads, params))

        def unit_norm(tensor: Any) -> Any:
            dims = tuple(range(1, tensor.ndim)) or (0,)
            return tensor.norm(2, dim=dims, keepdim=tensor.ndim > 1)

        def call() -> None:
            ratio = limit()
            for grad, param in zip(tensors, held, strict=True):
                largest, norm = unit_norm(param).clamp_(min=1e-3).mul_(ratio), unit_norm(grad)
                clipped = grad * (largest / norm.clamp(min=1e-6))
                grad.copy_(self.torch.where(norm < largest, grad, clipped))

        return call

    def guarded_clip(self, grads: Sequence[Array]) -> Call:
        """A rule in Python, for which the host waits for the norm."""
        tensors, mean = list(map(self._tensor, grads)), [0.0]
        find, utils = self.grad_norm(grads), self.torch.nn.utils
        parameters = [self.torch.nn.Parameter(self.torch.empty_like(t)) for t in tensors]
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor

        def call() -> None:
            norm: Any = find()
            mean[0] += 0.03 * (norm.item() - mean[0])
            utils.clip_grads_with_norm_(parameters, max(norm.item(), 2 * mean[0]), norm)

        return call


class Jax(forward.Formulas):
    """The formulas under jax.jit on the CPU; results are always new arrays."""

    name = "jax"

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        self.jax, self.np = jax, jax.numpy

    def _jit(self, function: Callable[..., Any], *arrays: Any) -> Call:
        compiled = self.jax.jit(function)
        placed = self.jax.tree.map(self.np.asarray, arrays)
        return lambda: self.jax.block_until_ready(compiled(*placed))

    def _formula(self, formula: Callable[..., Any], *arrays: Any) -> Call:
        return self._jit(partial(formula, self.np), *arrays)

    def layer_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        def grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
            xhat = (x - mean[:, None]) * inv_std[:, None]
            w = dy * scale
            product = (w * xhat).mean(axis=1, keepdims=True)
            dx = inv_std[:, None] * (w - w.mean(axis=1, keepdims=True) - xhat * product)
            return dx.astype(x.dtype), (dy * xhat).sum(axis=0), dy.sum(axis=0)

        return self._jit(grad, dy, x, scale, mean, inv_std)

    def invertible_layer_norm_grad(
        self, dy: Array, y: Array, scale: Array, bias: Array, inv_std: Array
    ) -> Call:
        def grad(dy: Any, y: Any, scale: Any, bias: Any, inv_std: Any) -> Any:
            xhat = (y - bias) / scale
            w = dy * scale
            product = (w * xhat).mean(axis=1, keepdims=True)
            dx = inv_std[:, None] * (w - w.mean(axis=1, keepdims=True) - xhat * product)
            return dx.astype(y.dtype), (dy * xhat).sum(axis=0), dy.sum(axis=0)

        return self._jit(grad, dy, y, scale, bias, inv_std)

    def rms_norm_grad(self, dy: Array, x: Array, scale: Array, inv_std: Array) -> Call:
        def grad(dy: Any, x: Any, scale: Any, inv_std: Any) -> Any:
            xhat = x * inv_std[:, None]
            w = dy * scale
            dx = inv_std[:, None] * (w - xhat * (w * xhat).mean(axis=1, keepdims=True))
            return dx.astype(x.dtype), (dy * xhat).sum(axis=0)

        return self._jit(grad, dy, x, scale, inv_std)

    def batch_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        def grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
            c = (slice(None),) + (None,) * (x.ndim - 2)
            axes = (0, *range(2, x.ndim))
            xhat = (x - mean[c]) * inv_std[c]
            dscale, dbias = (dy * xhat).sum(axis=axes), dy.sum(axis=axes)
            n = x.size // x.shape[1]
            dx = (scale * inv_std)[c] * (dy - dbias[c] / n - xhat * dscale[c] / n)
            return dx, dscale, dbias

        return self._jit(grad, dy, x, scale, mean, inv_std)

    def group_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        def grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
            groups, c = (*mean.shape, -1), scale.reshape(-1, *(1,) * (x.ndim - 2))
            space = (0, *range(2, x.ndim))
            xhat = (x.reshape(groups) - mean[..., None]) * inv_std[..., None]
            w = (dy * c).reshape(groups)
            product = (w * xhat).mean(axis=2, keepdims=True)
            dx = inv_std[..., None] * (w - w.mean(axis=2, keepdims=True) - xhat * product)
            return dx.reshape(x.shape), (dy * xhat.reshape(x.shape)).sum(space), dy.sum(space)

        return self._jit(grad, dy, x, scale, mean, inv_std)

    def grad_norm(self, grads: Sequence[Array]) -> Call:
        return self._jit(lambda gs: self.np.sqrt(sum((g * g).sum() for g in gs)), list(grads))

    def clip_grad_norm(self, grads: Sequence[Array], limit: Limit) -> Call:
        max_norm = limit()

        def clip(grads: Any) -> Any:
            norm = self.np.sqrt(sum((g * g).sum() for g in grads))
            coefficient = self.np.minimum(1, max_norm / norm)
            return [g * coefficient for g in grads]

        return self._jit(clip, list(grads))

    def accumulate_grad(self, buffer: Array, grad: Array) -> Call:
        return self._jit(lambda a, b: a + b, buffer, grad)


class Optax:
    """Optax's transformations under jax.jit."""

    name = "optax"

    def __init__(self) -> None:
        import optax

        self.optax, self._jit = optax, Jax()._jit

    def _update(self, transform: Any, grads: Sequence[Array], params: Any = None) -> Call:
        state = transform.init(params if params is not None else list(grads))
        return self._jit(lambda g, p: transform.update(g, state, p)[0], list(grads), params)

    def scaled_clip(self, grads: Sequence[Array], scale: Limit) -> Call:
        optax = self.optax
        chain = optax.chain(optax.scale(scale()), optax.clip_by_global_norm(1e9))
        return self._update(chain, grads)

    def accumulate_with_norm(self, grads: Sequence[Array], buffers: Sequence[Array]) -> Call:
        def add(buffers: Any, grads: Any) -> Any:
            total = [b + g for b, g in zip(buffers, grads, strict=True)]
            return total, self.optax.global_norm(total)

        return self._jit(add, list(buffers), list(grads))

    def clip_blocks(self, grads: Sequence[Array], limit: Limit) -> Call:
        return self._update(self.optax.clip_by_block_rms(limit()), grads)

    def clip_adaptive(self, grads: Sequence[Array], params: Sequence[Array], limit: Limit) -> Call:
        """By columns: its weights have inputs in all axes but the last."""
        return self._update(self.optax.adaptive_grad_clip(limit()), grads, list(params))


def available(wanted: Sequence[str]) -> tuple[list[Any], dict[str, str]]:
    """The peers that are available, and for each of the others the reason why not."""
    from benchmarks.ort import OnnxRuntime

    found, missing = [], {}
    for peer in (Naive, Torch, Jax, Optax, OnnxRuntime):
        if peer.name not in wanted:
            continue
        try:
            found.append(peer())
        except (ImportError, OSError) as error:
            missing[peer.name] = str(error)
    return found, missing


def calls(peers: Sequence[Any], operation: str, **arguments: Any) -> dict[str, Call]:
    """The call of each peer that has the operation."""
    return {
        peer.name: getattr(peer, operation)(**arguments)
        for peer in peers
        if hasattr(peer, operation)
    }

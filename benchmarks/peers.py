"""The libraries that gradkit is measured against. Each peer imports its library when created.

A peer has one method per operation, which takes gradkit's arguments as NumPy arrays. It returns a
call without arguments that does the work once and waits for the result. Conversions happen before
that, as in a program written for that library. A peer has no method for what it cannot do.
"""

# ruff: noqa: D102  (the methods are the operations)

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[[], object]
Limit = Callable[[], float]  # gives max_norm for the next call on gradients clipped in place


class Naive:
    """The formulas, one NumPy expression each (CuPy for CuPy arrays)."""

    name = "naive"

    def __init__(self, xp: Any = np) -> None:
        self.np = xp

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


class Torch:
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


class Jax:
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


def available(wanted: Sequence[str]) -> tuple[list[Any], dict[str, str]]:
    """The peers that are available, and for each of the others the reason why not."""
    from benchmarks.ort import OnnxRuntime

    found, missing = [], {}
    for peer in (Naive, Torch, Jax, OnnxRuntime):
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

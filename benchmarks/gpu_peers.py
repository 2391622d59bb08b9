"""The libraries that gradkit is measured against on a GPU, in this process and stream.

As in peers.py, a peer has one method per operation, which returns a call. Arguments are CuPy
arrays; PyTorch's tensors share their memory. A call queues its work and does not wait for it. On
the emulator's arrays everything here runs on the CPU, as a test of this code.
"""

# ruff: noqa: D102  (the methods are the operations)

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import forward, peers
from benchmarks.places import Arrays

Array = Any
Call = peers.Call


class Plain(peers.Naive):
    """The formulas in CuPy, one expression each."""

    name = "cupy"

    def __init__(self, place: Arrays):
        super().__init__(place.xp)


class _Tensors:
    """What the PyTorch peers share: the module, and tensors over other arrays' memory."""

    def __init__(self, place: Arrays):  # noqa: ARG002
        import torch

        self.torch = torch

    def _tensor(self, array: Array) -> Any:
        bits = array.view(np.int16) if array.dtype.name == "bfloat16" else array
        if isinstance(array, np.ndarray):
            tensor = self.torch.from_numpy(np.asarray(bits))
        else:
            tensor = self.torch.from_dlpack(bits)
        return tensor if bits is array else tensor.view(self.torch.bfloat16)

    def _backward(self, y: Any, inputs: Sequence[Any], dy: Array) -> Call:
        """The gradients of an output with respect to tensors that require grad."""
        t_dy = self._tensor(dy)
        return lambda: self.torch.autograd.grad(y, inputs, t_dy, retain_graph=True)


class Torch(_Tensors, peers.Torch):
    """PyTorch eager: its backward kernels; clipping by ``clip_grad_norm_`` (foreach)."""


class TorchCudnn(_Tensors):
    """PyTorch's batch norm as its modules run it: through cuDNN."""

    name = "torch cuDNN"

    def batch_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,  # noqa: ARG002
        inv_std: Array,  # noqa: ARG002
    ) -> Call:
        t_x, weight = (self._tensor(array).requires_grad_() for array in (x, scale))
        bias = self.torch.zeros_like(weight, requires_grad=True)
        y = self.torch.nn.functional.batch_norm(t_x, None, None, weight, bias, training=True)
        if t_x.is_cuda and "Cudnn" not in y.grad_fn.name():
            raise RuntimeError(f"PyTorch chose {y.grad_fn.name()}, not cuDNN")
        return self._backward(y, (t_x, weight, bias), dy)


class TorchCompiled(_Tensors, forward.TorchNorms):
    """``torch.compile`` of the gradients, compiled anew for each shape."""

    name = "torch.compile"

    def layer_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        # Decomposed as autograd's compilation does it, from the same saved tensors.
        backward = self.torch.ops.aten.native_layer_norm_backward.default
        width, wanted = [x.shape[1]], [True, True, True]

        def grad(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
            return backward(dy, x, width, mean, rstd, weight, weight, wanted)

        return self._compiled(grad, dy, x, scale, mean[:, None], inv_std[:, None])

    def rms_norm_grad(self, dy: Array, x: Array, scale: Array, inv_std: Array) -> Call:
        def grad(dy: Any, x: Any, weight: Any, rstd: Any) -> Any:
            xhat = x.float() * rstd
            w = dy.float() * weight.float()
            dx = rstd * (w - xhat * (w * xhat).mean(dim=1, keepdim=True))
            return dx.to(x.dtype), (dy.float() * xhat).sum(dim=0).to(weight.dtype)

        return self._compiled(grad, dy, x, scale, inv_std[:, None])

    def batch_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        backward, wanted = self.torch.ops.aten.native_batch_norm_backward.default, [True] * 3

        def grad(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
            return backward(dy, x, weight, None, None, mean, rstd, True, 1e-5, wanted)

        return self._compiled(grad, dy, x, scale, mean, inv_std)

    def group_norm_grad(
        self, dy: Array, x: Array, scale: Array, mean: Array, inv_std: Array
    ) -> Call:
        backward, wanted = self.torch.ops.aten.native_group_norm_backward.default, [True] * 3
        n, c = x.shape[:2]
        sizes = n, c, x.size // (n * c), mean.shape[1]

        def grad(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
            return backward(dy, x, mean, rstd, weight, *sizes, wanted)

        return self._compiled(grad, dy, x, scale, mean, inv_std)

    def _forward(self, function: Callable[..., Any], *arrays: Array) -> Call:
        return self._compiled(function, *arrays)

    def _compiled(self, function: Callable[..., Any], *arrays: Array) -> Call:
        self.torch._dynamo.reset()
        compiled = self.torch.compile(function, dynamic=False)
        tensors = list(map(self._tensor, arrays))

        def call() -> object:
            with self.torch.no_grad():
                return compiled(*tensors)

        return call


class Liger(_Tensors):
    """Liger-Kernel's Triton kernels, through its autograd functions."""

    name = "liger"

    def __init__(self, place: Arrays):
        super().__init__(place)
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.group_norm import LigerGroupNormFunction
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        self._layer_norm, self._rms_norm = LigerLayerNormFunction, LigerRMSNormFunction
        self._add_rms_norm, self._group_norm = LigerFusedAddRMSNormFunction, LigerGroupNormFunction

    def layer_norm(self, x: Array, scale: Array, bias: Array) -> Call:
        tensors = map(self._tensor, (x, scale, bias))
        return partial(self._layer_norm.apply, *tensors, 1e-5)

    def rms_norm(self, x: Array, scale: Array) -> Call:
        tensors = map(self._tensor, (x, scale))
        return partial(self._rms_norm.apply, *tensors, 1e-6, 0.0, "llama", False)

    def add_rms_norm(self, x: Array, residual: Array, scale: Array) -> Call:
        tensors = map(self._tensor, (x, residual, scale))
        return partial(self._add_rms_norm.apply, *tensors, 1e-6, 0.0, "llama", False)

    def layer_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,  # noqa: ARG002
        inv_std: Array,  # noqa: ARG002
    ) -> Call:
        t_x, weight = (self._tensor(array).requires_grad_() for array in (x, scale))
        bias = self.torch.zeros_like(weight, requires_grad=True)
        return self._backward(
            self._layer_norm.apply(t_x, weight, bias, 1e-5), (t_x, weight, bias), dy
        )

    def rms_norm_grad(self, dy: Array, x: Array, scale: Array, inv_std: Array) -> Call:  # noqa: ARG002
        t_x, weight = (self._tensor(array).requires_grad_() for array in (x, scale))
        in_place = False  # otherwise it would overwrite dy, which the next call reads
        y = self._rms_norm.apply(t_x, weight, 1e-6, 0.0, "llama", in_place)
        return self._backward(y, (t_x, weight), dy)

    def group_norm(self, x: Array, num_groups: int, scale: Array, bias: Array) -> Call:
        tensors = map(self._tensor, (x, scale, bias))
        return partial(self._group_norm.apply, *tensors, x.shape[1], num_groups, 1e-5)

    def group_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,
        inv_std: Array,  # noqa: ARG002
    ) -> Call:
        t_x, weight = (self._tensor(array).requires_grad_() for array in (x, scale))
        bias = self.torch.zeros_like(weight, requires_grad=True)
        y = self._group_norm.apply(t_x, weight, bias, x.shape[1], mean.shape[1], 1e-5)
        return self._backward(y, (t_x, weight, bias), dy)


EVERYONE = (Plain, Torch, TorchCudnn, TorchCompiled, Liger)


def available(wanted: Sequence[str], place: Arrays) -> tuple[list[Any], dict[str, str]]:
    """The peers that are available, and for each of the others the reason why not."""
    found, missing = [], {}
    for peer in EVERYONE:
        if peer.name not in wanted:
            continue
        try:
            found.append(peer(place))
        except Exception as error:  # an import may raise anything
            missing[peer.name] = f"{type(error).__name__}: {error}"
    return found, missing


def calls(everyone: Sequence[Any], operation: str, **arguments: Any) -> dict[str, Call]:
    """The call of each peer that has the operation; preparation is part of the first call."""
    return {
        peer.name: _Lazy(getattr(peer, operation), arguments)
        for peer in everyone
        if hasattr(peer, operation)
    }


class _Lazy:
    """A call that is built at its first use, so a failure to build it is the call's failure."""

    def __init__(self, make: Callable[..., Call], arguments: dict[str, Any]):
        self._make, self._arguments = make, arguments
        self._call: Call | None = None

    def __call__(self) -> object:
        if self._call is None:
            self._call = self._make(**self._arguments)
        return self._call()

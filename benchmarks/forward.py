"""What the peers run of the norms themselves: formulas for NumPy, CuPy and JAX, PyTorch's kernels.

Each class is the forward half of peers that peers.py and gpu_peers.py complete. Methods take
gradkit's arguments and return a call, as theirs do.
"""

# ruff: noqa: D102  (the methods are the operations)

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.places import Array, Call


def _inverse(np: Any, squares: Any, eps: float) -> Any:
    return 1 / np.sqrt(squares + eps)


def layer_norm(np: Any, x: Any, scale: Any, bias: Any) -> Any:
    """Over the last axis: y, mean and inv_std."""
    mean = x.mean(axis=1)
    centred = x - mean[:, None]
    inv_std = _inverse(np, (centred * centred).mean(axis=1), 1e-5)
    return centred * inv_std[:, None] * scale + bias, mean, inv_std


def rms_norm(np: Any, x: Any, scale: Any) -> Any:
    """Over the last axis: y and inv_std."""
    inv_std = _inverse(np, (x * x).mean(axis=1), 1e-6)
    return x * inv_std[:, None] * scale, inv_std


def add_rms_norm(np: Any, x: Any, residual: Any, scale: Any) -> Any:
    """The norm of a sum: y, the sum and inv_std."""
    s = x + residual
    y, inv_std = rms_norm(np, s, scale)
    return y, s, inv_std


def group_norm(np: Any, x: Any, num_groups: int, scale: Any, bias: Any) -> Any:
    """Of images, channels in axis 1: y, mean and inv_std."""
    groups = x.reshape(x.shape[0], num_groups, -1)
    mean = groups.mean(axis=2)
    centred = groups - mean[:, :, None]
    inv_std = _inverse(np, (centred * centred).mean(axis=2), 1e-5)
    y = (centred * inv_std[:, :, None]).reshape(x.shape)
    return _affine(y, scale, bias), mean, inv_std


def batch_norm(np: Any, x: Any, scale: Any, bias: Any, running_mean: Any, running_var: Any) -> Any:
    """Of images, channels in axis 1: y, mean, inv_std and new running statistics."""
    axes, n = (0, 2, 3), x.size // x.shape[1]
    mean = x.mean(axis=axes)
    centred = x - mean[:, None, None]
    var = (centred * centred).mean(axis=axes)
    inv_std = _inverse(np, var, 1e-5)
    running = 0.9 * running_mean + 0.1 * mean, 0.9 * running_var + 0.1 * var * (n / (n - 1))
    return _affine(centred * inv_std[:, None, None], scale, bias), mean, inv_std, *running


def batch_norm_inference(np: Any, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    """Of images, channels in axis 1, by statistics that are known."""
    factor = scale * _inverse(np, var, 1e-5)
    return _affine(x, factor, bias - mean * factor)


def _affine(x: Any, scale: Any, bias: Any) -> Any:
    return x * scale[:, None, None] + bias[:, None, None]


class Formulas:
    """The formulas on a library like NumPy; ``_formula`` makes a call of one."""

    def _formula(self, formula: Callable[..., Any], *arrays: Any) -> Call:
        raise NotImplementedError

    def layer_norm(self, x: Array, scale: Array, bias: Array) -> Call:
        return self._formula(layer_norm, x, scale, bias)

    def rms_norm(self, x: Array, scale: Array) -> Call:
        return self._formula(rms_norm, x, scale)

    def add_rms_norm(self, x: Array, residual: Array, scale: Array) -> Call:
        return self._formula(add_rms_norm, x, residual, scale)

    def group_norm(self, x: Array, num_groups: int, scale: Array, bias: Array) -> Call:
        def formula(np: Any, x: Any, scale: Any, bias: Any) -> Any:
            return group_norm(np, x, num_groups, scale, bias)

        return self._formula(formula, x, scale, bias)

    def batch_norm(
        self, x: Array, scale: Array, bias: Array, running_mean: Array, running_var: Array
    ) -> Call:
        return self._formula(batch_norm, x, scale, bias, running_mean, running_var)

    def batch_norm_inference(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array
    ) -> Call:
        return self._formula(batch_norm_inference, x, scale, bias, mean, var)


class TorchNorms:
    """PyTorch's own norms; ``_forward`` makes a call of a function of tensors."""

    torch: Any

    def _tensor(self, array: Array) -> Any:
        raise NotImplementedError

    def _forward(self, function: Callable[..., Any], *arrays: Array) -> Call:
        tensors = list(map(self._tensor, arrays))
        return lambda: function(*tensors)

    def layer_norm(self, x: Array, scale: Array, bias: Array) -> Call:
        norm, width = self.torch.ops.aten.native_layer_norm, [x.shape[1]]
        return self._forward(lambda x, w, b: norm(x, width, w, b, 1e-5), x, scale, bias)

    def rms_norm(self, x: Array, scale: Array) -> Call:
        norm, width = self.torch.nn.functional.rms_norm, (x.shape[1],)
        return self._forward(lambda x, w: norm(x, width, w, 1e-6), x, scale)

    def add_rms_norm(self, x: Array, residual: Array, scale: Array) -> Call:
        norm, width = self.torch.nn.functional.rms_norm, (x.shape[1],)

        def call(x: Any, residual: Any, w: Any) -> Any:
            s = x + residual
            return norm(s, width, w, 1e-6), s

        return self._forward(call, x, residual, scale)

    def group_norm(self, x: Array, num_groups: int, scale: Array, bias: Array) -> Call:
        norm, (n, c), space = self.torch.ops.aten.native_group_norm, x.shape[:2], x[0, 0].size
        sizes = n, c, space, num_groups
        return self._forward(lambda x, w, b: norm(x, w, b, *sizes, 1e-5), x, scale, bias)

    def batch_norm(
        self, x: Array, scale: Array, bias: Array, running_mean: Array, running_var: Array
    ) -> Call:
        norm = self.torch.ops.aten.native_batch_norm
        call = lambda *tensors: norm(*tensors, True, 0.1, 1e-5)  # noqa: E731
        return self._forward(call, x, scale, bias, running_mean.copy(), running_var.copy())

    def batch_norm_inference(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array
    ) -> Call:
        norm = self.torch.nn.functional.batch_norm
        return self._forward(partial(norm, training=False, eps=1e-5), x, mean, var, scale, bias)

"""Batch norm, forward and backward, by cuDNN's own functions.

cuDNN needs data of one dtype and layout, and parameters and statistics in float32 (float64 for
float64 data). Any other array goes through scratch on the device: 16-bit vectors, data that is not
dense, a ``dy`` or an output whose strides differ from those of ``x``, and a ``dx`` that is ``dy``
(cuDNN does not document that it is allowed). So do running statistics, which a call that fails must
not have moved.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from gradkit._backend import Array
from gradkit._calls.channels import BatchNorm, BatchNormGrad, BatchNormInference
from gradkit._cuda.cudnn.descriptions import Dense
from gradkit._cuda.cudnn.face import BN_MIN_EPSILON, SPATIAL, SPATIAL_PERSISTENT
from gradkit._cuda.cudnn.library import Cudnn
from gradkit._cuda.launch.device import Device, scratch
from gradkit._dtypes import DType, dtype_named, float_of
from gradkit.errors import CudnnError

# Unused if statistics are passed, but cuDNN compares it with CUDNN_BN_MIN_EPSILON.
_BACKWARD_EPSILON = 1e-5
_ALIGNMENT = 16  # bytes: a kernel's widest access
# handle, mode, alpha, beta, xDesc, x, yDesc, y, bnScaleBiasMeanVarDesc, bnScale, bnBias
_Forward: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int]
_HOST_SCALARS = {
    "float32": (ctypes.c_float(1), ctypes.c_float(0)),
    "float64": (ctypes.c_double(1), ctypes.c_double(0)),
}


def batch_norm_grad(
    cudnn: Cudnn, device: Device, call: BatchNormGrad, *, persistent: bool = False
) -> None:
    """Write ``dx``, ``dscale`` and ``dbias`` (``=``), unless cuDNN returns an error."""
    work = _Work(cudnn, device, call.x, call.channel_axis, persistent)
    x, dy = work.dense(call.x), work.dense(call.dy)
    dx = work.dense_output(call.dx, (call.x, call.dy))
    dscale, dbias = work.wide_output(call.dscale), work.wide_output(call.dbias)
    scale = work.parameter(call.scale, 1)
    mean, inv_std = work.wide(call.mean), work.wide(call.inv_std)
    at = device.pointer
    with work.descriptors() as (data, parameter):
        cudnn.bindings.batchNormalizationBackward(
            *(work.handle(), work.mode),
            *(work.one, work.zero, work.one, work.zero),  # alpha and beta of data, of parameters
            *(data, at(x), data, at(dy), data, at(dx)),
            *(parameter, at(scale), at(dscale), at(dbias)),
            *(_BACKWARD_EPSILON, at(mean), at(inv_std)),
        )
    work.deliver()


def batch_norm(cudnn: Cudnn, device: Device, call: BatchNorm, *, persistent: bool = False) -> None:
    """Write ``y``, ``mean`` and ``inv_std``, and move ``running``, unless there is an error."""
    _check_eps("cudnnBatchNormalizationForwardTraining", call.eps)
    work = _Work(cudnn, device, call.x, call.channel_axis, persistent)
    mean, inv_std = work.wide_output(call.mean), work.wide_output(call.inv_std)
    factor, running_mean, running_var = work.moved(call)
    at = device.pointer
    with work.forward(call) as arguments:
        moved = factor, running_mean, running_var
        saved = call.eps, at(mean), at(inv_std)
        cudnn.bindings.batchNormalizationForwardTraining(*arguments, *moved, *saved)
    work.deliver()


def batch_norm_inference(
    cudnn: Cudnn, device: Device, call: BatchNormInference, *, persistent: bool = False
) -> None:
    """Write ``y``, unless cuDNN returns an error."""
    _check_eps("cudnnBatchNormalizationForwardInference", call.eps)
    work = _Work(cudnn, device, call.x, call.channel_axis, persistent)
    mean, var = work.wide(call.mean), work.wide(call.var)
    at = device.pointer
    with work.forward(call) as arguments:
        cudnn.bindings.batchNormalizationForwardInference(*arguments, at(mean), at(var), call.eps)
    work.deliver()


def _check_eps(function: str, eps: float) -> None:
    if eps < BN_MIN_EPSILON:
        reason = f"CUDNN_STATUS_NOT_SUPPORTED: eps {eps} is below {BN_MIN_EPSILON}"
        raise CudnnError(function, None, reason)


class _Work:
    """One call's layout, types and scratch.

    Scratch may be freed as soon as the work is queued, because the device's memory pool reuses it
    in stream order. ``scratch`` keeps what a graph will use again.
    """

    def __init__(self, cudnn: Cudnn, device: Device, x: Array, channel_axis: int, persistent: bool):
        row = float_of(x.dtype)
        self._cudnn, self._device = cudnn, device
        self._dense = Dense.of(x, channel_axis)
        self._data_type = row.cudnn
        self._wide = dtype_named(row.accumulation)
        self._channels = x.shape[channel_axis]
        self.one, self.zero = map(ctypes.addressof, _HOST_SCALARS[row.accumulation])
        if persistent and not self._dense.channels_last:
            raise ValueError(
                f"engine='cudnn-persistent' needs channels-last data of 3 or more dimensions; x "
                f"has shape {x.shape}, strides {x.strides} and channel axis {channel_axis}"
            )
        self.mode = SPATIAL_PERSISTENT if persistent else SPATIAL
        self._to_deliver: list[tuple[Array, Array]] = []

    def handle(self) -> int:
        stream = self._device.cuda_stream()
        assert stream is not None  # cuDNN is never called on an emulated device
        return self._cudnn.handles.get(self._device.number, stream)

    def dense(self, array: Array) -> Array:
        """The array in the layout of x; a copy unless it already has that layout."""
        view = array.transpose(self._dense.order)
        return view if self._contiguous_aligned(view) else self._copy(view, view.dtype)

    def dense_output(self, array: Array, inputs: tuple[Array, ...]) -> Array:
        """Memory for an output in the layout of x: its own, unless an input shares it."""
        view = array.transpose(self._dense.order)
        address = self._device.pointer
        shared = any(address(array) == address(other) for other in inputs)
        if self._contiguous_aligned(view) and not shared:
            return view
        return self._scratch_for(view, view.dtype)

    def wide(self, vector: Array) -> Array:
        """A vector of one number per channel, contiguous and in cuDNN's dtype for it."""
        if vector.dtype == self._wide and vector.flags.c_contiguous:
            return vector
        return self._copy(vector, self._wide)

    def wide_output(self, vector: Array | None) -> Array:
        """Memory for one result per channel; ``None`` gets scratch, because cuDNN requires it."""
        if vector is None:
            return scratch(self._device, (self._channels,), self._wide)
        if vector.dtype == self._wide and vector.flags.c_contiguous:
            return vector
        return self._scratch_for(vector, self._wide)

    def moved(self, call: BatchNorm) -> tuple[float, int, int]:
        """The factor, and addresses of copies of running statistics, or null pointers.

        cuDNN weights with 0 too, and 0 * NaN is NaN.
        """
        if call.running_mean is None or call.momentum == 0:
            return 1.0, 0, 0
        running: tuple[Array, Array] = call.running_mean, call.running_var
        if running[0].dtype.itemsize > self._wide.itemsize:
            reason = f"running statistics in {running[0].dtype} would be rounded"
            function = "cudnnBatchNormalizationForwardTraining"
            raise CudnnError(function, None, f"CUDNN_STATUS_NOT_SUPPORTED: {reason}")
        made = [self._scratch_for(array, self._wide) for array in running]
        for copy, array in zip(made, running, strict=True):
            copy[...] = 0 if call.momentum == 1 else array
        mean, var = made
        return call.momentum, self._device.pointer(mean), self._device.pointer(var)

    def parameter(self, vector: Array | None, value: float) -> Array:
        """A scale or bias; ``value`` in each channel if there is none."""
        if vector is not None:
            return self.wide(vector)
        made = scratch(self._device, (self._channels,), self._wide)
        made[...] = value
        return made

    def deliver(self) -> None:
        """Copy results from scratch to the outputs, rounded once."""
        for wanted, made in self._to_deliver:
            wanted[...] = made

    def _scratch_for(self, wanted: Array, dtype: DType) -> Array:
        made = scratch(self._device, wanted.shape, dtype)
        self._to_deliver.append((wanted, made))
        return made

    def _copy(self, array: Array, dtype: DType) -> Array:
        made = scratch(self._device, array.shape, dtype)
        made[...] = array
        return made

    def _contiguous_aligned(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous and self._device.pointer(array) % _ALIGNMENT == 0)

    @contextmanager
    def forward(self, call: BatchNorm | BatchNormInference) -> Iterator[_Forward]:
        """The first arguments of cuDNN's forward functions."""
        x, y = self.dense(call.x), self.dense_output(call.y, (call.x,))
        scale, bias = self.parameter(call.scale, 1), self.parameter(call.bias, 0)
        at = self._device.pointer
        with self.descriptors() as (data, parameter):
            settings = (self.handle(), self.mode, self.one, self.zero)
            yield (*settings, data, at(x), data, at(y), parameter, at(scale), at(bias))

    @contextmanager
    def descriptors(self) -> Iterator[tuple[int, int]]:
        """Descriptors of the data and of the vectors of one number per channel."""
        bindings, dense = self._cudnn.bindings, self._dense
        made: list[int] = []
        try:
            made.append(bindings.createTensorDescriptor())
            made.append(bindings.createTensorDescriptor())
            bindings.setTensor4dDescriptorEx(made[0], self._data_type, *dense.dims, *dense.strides)
            bindings.deriveBNTensorDescriptor(made[1], made[0], self.mode)
            yield made[0], made[1]
        finally:
            for descriptor in made:
                bindings.destroyTensorDescriptor(descriptor)

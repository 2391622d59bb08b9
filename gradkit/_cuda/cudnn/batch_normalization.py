"""Batch norm, forward and backward, by cuDNN's own functions.

cuDNN needs data of one dtype and layout, and parameters and statistics in float32 (float64 for
float64 data). Any other array goes through scratch on the device: 16-bit vectors, data that is not
dense, a ``dy`` or an output whose strides differ from those of ``x``, and a ``dx`` that is ``dy``
(cuDNN does not document that it is allowed). So do running statistics, which a call that fails must
not have moved.

A call whose arrays cuDNN takes as they are is repeated, with a plan like it, on addresses alone:
``Ready``. cuDNN then moves running statistics where they lie.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from gradkit._backend import Address, Array
from gradkit._calls.channels import BatchNorm, BatchNormGrad, BatchNormInference
from gradkit._cuda.cudnn import library
from gradkit._cuda.cudnn.descriptions import Dense
from gradkit._cuda.cudnn.face import BN_MIN_EPSILON, SPATIAL, SPATIAL_PERSISTENT, Bindings
from gradkit._cuda.cudnn.library import Cudnn
from gradkit._cuda.launch.buffers import assign
from gradkit._cuda.launch.device import Device, scratch
from gradkit._dtypes import DType, dtype_named, float_of
from gradkit.errors import CudnnError

# Unused if statistics are passed, but cuDNN compares it with CUDNN_BN_MIN_EPSILON.
_BACKWARD_EPSILON = 1e-5
_ALIGNMENT = 16  # bytes: a kernel's widest access
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
    work.run(_GRADIENT, call, (x, dy, dx), (scale, dscale, dbias, mean, inv_std))


def batch_norm(cudnn: Cudnn, device: Device, call: BatchNorm, *, persistent: bool = False) -> None:
    """Write ``y``, ``mean`` and ``inv_std``, and move ``running``, unless there is an error."""
    _check_eps("cudnnBatchNormalizationForwardTraining", call.eps)
    work = _Work(cudnn, device, call.x, call.channel_axis, persistent)
    mean, inv_std = work.wide_output(call.mean), work.wide_output(call.inv_std)
    moved = work.moved(call)
    function = _MOVING if moved else _FORWARD
    x, y = work.dense(call.x), work.dense_output(call.y, (call.x,))
    scale, bias = work.parameter(call.scale, 1), work.parameter(call.bias, 0)
    work.run(function, call, (x, y), (scale, bias, mean, inv_std, *moved))


def batch_norm_inference(
    cudnn: Cudnn, device: Device, call: BatchNormInference, *, persistent: bool = False
) -> None:
    """Write ``y``, unless cuDNN returns an error."""
    _check_eps("cudnnBatchNormalizationForwardInference", call.eps)
    work = _Work(cudnn, device, call.x, call.channel_axis, persistent)
    mean, var = work.wide(call.mean), work.wide(call.var)
    x, y = work.dense(call.x), work.dense_output(call.y, (call.x,))
    scale, bias = work.parameter(call.scale, 1), work.parameter(call.bias, 0)
    work.run(_INFERENCE, call, (x, y), (scale, bias, mean, var))


def _check_eps(function: str, eps: float) -> None:
    if eps < BN_MIN_EPSILON:
        reason = f"CUDNN_STATUS_NOT_SUPPORTED: eps {eps} is below {BN_MIN_EPSILON}"
        raise CudnnError(function, None, reason)


class _Function:
    """One of cuDNN's functions, and where the addresses of a call's arrays are in its arguments.

    ``data`` are the call's fields of the shape of x, of which the last is written, and ``vectors``
    those with a number for each channel.
    """

    def __init__(self, name: str, arrange: Callable[..., tuple[Any, ...]], data: str, vectors: str):
        self.arrange = arrange
        self.arrays = attrgetter(*data.split(), *vectors.split())
        self.count = len(data.split())  # of arrays of data, which come first
        self.of: Callable[[Bindings], Callable[..., None]] = attrgetter(name)


def _gradient(layout: "_Layout", _: Any, *addresses: int) -> tuple[Any, ...]:
    x, dy, dx, scale, dscale, dbias, *statistics = addresses
    data, parameter = layout.descriptors
    return (
        *(layout.mode, layout.one, layout.zero, layout.one, layout.zero),  # of data, of parameters
        *(data, x, data, dy, data, dx),
        *(parameter, scale, dscale, dbias, _BACKWARD_EPSILON, *statistics),
    )


def _forward(layout: "_Layout", call: Any, *addresses: int) -> tuple[Any, ...]:
    *rest, mean, inv_std = addresses
    return *_normalise(layout, *rest), 1.0, 0, 0, call.eps, mean, inv_std


def _moving(layout: "_Layout", call: Any, *addresses: int) -> tuple[Any, ...]:
    *rest, mean, inv_std, running_mean, running_var = addresses
    moved = call.momentum, running_mean, running_var
    return *_normalise(layout, *rest), *moved, call.eps, mean, inv_std


def _inference(layout: "_Layout", call: Any, *addresses: int) -> tuple[Any, ...]:
    *rest, mean, var = addresses
    return *_normalise(layout, *rest), mean, var, call.eps


def _normalise(layout: "_Layout", x: int, y: int, scale: int, bias: int) -> tuple[Any, ...]:
    data, parameter = layout.descriptors
    return layout.mode, layout.one, layout.zero, data, x, data, y, parameter, scale, bias


_GRADIENT = _Function(
    "batchNormalizationBackward", _gradient, "x dy dx", "scale dscale dbias mean inv_std"
)
_FORWARD = _Function(
    "batchNormalizationForwardTraining", _forward, "x y", "scale bias mean inv_std"
)
_MOVING = _Function(
    "batchNormalizationForwardTraining",
    _moving,
    "x y",
    "scale bias mean inv_std running_mean running_var",
)
_INFERENCE = _Function(
    "batchNormalizationForwardInference", _inference, "x y", "scale bias mean var"
)


def _weighs_both(call: BatchNorm) -> bool:
    """Return whether cuDNN may move running statistics: it multiplies by a weight of 0 too."""
    return 0 < call.momentum < 1


class Ready:
    """A call whose arrays cuDNN took as they are: the next of its plan needs addresses alone."""

    def __init__(self, cudnn: Cudnn, layout: "_Layout", function: _Function):
        self._cudnn, self._layout, self._function = cudnn, layout, function
        self._run, self._failed = function.of(cudnn.bindings), False

    def run(self, device: Device, call: Any) -> bool:
        """Have cuDNN compute a call; false if it does not, and then nothing was written.

        An error of cuDNN's is raised if running statistics may have moved.
        """
        function, at, stream = self._function, device.pointer, device.cuda_stream()
        moving = function is _MOVING
        if self._failed or not library.is_used(self._cudnn) or (moving and not _weighs_both(call)):
            return False
        addresses = [a if type(a) is Address else at(a) for a in function.arrays(call)]
        *read, written = addresses[: function.count]
        aligned = not any(address % _ALIGNMENT for address in (*read, written))
        if stream is None or not aligned or written in read:
            return False
        arguments = function.arrange(self._layout, call, *addresses)
        try:
            self._run(self._cudnn.handles.get(device.number, stream), *arguments)
        except CudnnError as error:  # which a call on arrays raises too, or answers
            self._failed = True
            if moving and not error.unsupported:
                raise  # they must not move twice
            return False
        return True


class _Layout:
    """The description of arrays for cuDNN, decided by shapes, strides and dtypes."""

    def __init__(self, bindings: Bindings, x: Array, channel_axis: int, persistent: bool):
        row = float_of(x.dtype)
        self.dense, self.wide = Dense.of(x, channel_axis), dtype_named(row.accumulation)
        self.one, self.zero = map(ctypes.addressof, _HOST_SCALARS[row.accumulation])
        if persistent and not self.dense.channels_last:
            raise ValueError(
                f"engine='cudnn-persistent' needs channels-last data of 3 or more dimensions; x "
                f"has shape {x.shape}, strides {x.strides} and channel axis {channel_axis}"
            )
        self.mode = SPATIAL_PERSISTENT if persistent else SPATIAL
        self._bindings, self._data_type = bindings, row.cudnn
        self._handles: list[int] = []

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors of the data, and of vectors of one number per channel."""
        if not self._handles:
            self._describe()
        data, parameter = self._handles
        return data, parameter

    def _describe(self) -> None:
        bindings, dense = self._bindings, self.dense
        self._handles.append(bindings.createTensorDescriptor())
        self._handles.append(bindings.createTensorDescriptor())
        data, parameter = self._handles
        bindings.setTensor4dDescriptorEx(data, self._data_type, *dense.dims, *dense.strides)
        bindings.deriveBNTensorDescriptor(parameter, data, self.mode)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for descriptor in getattr(self, "_handles", ()):
                self._bindings.destroyTensorDescriptor(descriptor)


class _Work:
    """One call's scratch.

    Scratch may be freed as soon as the work is queued, because the device's memory pool reuses it
    in stream order. ``scratch`` keeps what a graph will use again.
    """

    def __init__(self, cudnn: Cudnn, device: Device, x: Array, channel_axis: int, persistent: bool):
        self._cudnn, self._device = cudnn, device
        self._layout = _Layout(cudnn.bindings, x, channel_axis, persistent)
        self._channels = x.shape[channel_axis]
        self._to_deliver: list[tuple[Array, Array]] = []
        self._in_place = True  # nothing was copied

    def run(
        self, function: _Function, call: Any, data: Sequence[Array], vectors: Sequence[Array]
    ) -> None:
        """Call cuDNN, and copy results from scratch to the outputs, rounded once."""
        stream = self._device.cuda_stream()
        assert stream is not None  # cuDNN is never called on an emulated device
        addresses = map(self._device.pointer, (*data, *vectors))
        arguments = function.arrange(self._layout, call, *addresses)
        handle = self._cudnn.handles.get(self._device.number, stream)
        function.of(self._cudnn.bindings)(handle, *arguments)
        for target, source in self._to_deliver:
            assign(target, source)
        if self._in_place:
            call.plan.launcher = Ready(self._cudnn, self._layout, function)

    def dense(self, array: Array) -> Array:
        """The array in the layout of x; a copy unless it already has that layout."""
        view = array.transpose(self._layout.dense.order)
        return view if self._contiguous_aligned(view) else self._copy(view, view.dtype)

    def dense_output(self, array: Array | None, inputs: tuple[Array, ...]) -> Array:
        """Memory for an output in the layout of x: its own, unless an input shares it.

        ``None`` gets scratch, because cuDNN requires it.
        """
        if array is None:
            x = inputs[0]
            return self._scratch(x.transpose(self._layout.dense.order).shape, x.dtype)
        view = array.transpose(self._layout.dense.order)
        address = self._device.pointer
        shared = any(address(array) == address(other) for other in inputs)
        if self._contiguous_aligned(view) and not shared:
            return view
        return self._scratch_for(view, view.dtype)

    def wide(self, vector: Array) -> Array:
        """A vector of one number per channel, contiguous and in cuDNN's dtype for it."""
        wide = self._layout.wide
        return vector if self._is_wide(vector) else self._copy(vector, wide)

    def wide_output(self, vector: Array | None) -> Array:
        """Memory for one result per channel; ``None`` gets scratch, because cuDNN requires it."""
        wide = self._layout.wide
        if vector is None:
            return self._scratch((self._channels,), wide)
        return vector if self._is_wide(vector) else self._scratch_for(vector, wide)

    def moved(self, call: BatchNorm) -> tuple[Array, ...]:
        """Copies of the running statistics that are to be moved."""
        running: list[Array] = [call.running_mean, call.running_var]
        if call.running_mean is None:
            return ()
        in_place = self._in_place and all(map(self._is_wide, running))
        self._in_place = False
        if call.momentum == 0:
            return ()
        if running[0].dtype.itemsize > self._layout.wide.itemsize:
            reason = f"running statistics in {running[0].dtype} would be rounded"
            function = "cudnnBatchNormalizationForwardTraining"
            raise CudnnError(function, None, f"CUDNN_STATUS_NOT_SUPPORTED: {reason}")
        copies = [self._scratch_for(array, self._layout.wide) for array in running]
        for copy, array in zip(copies, running, strict=True):
            if call.momentum == 1:
                copy.fill(0)
            else:
                assign(copy, array)
        self._in_place = in_place  # the next call needs no copies
        return (*copies,)

    def parameter(self, vector: Array | None, value: float) -> Array:
        """A scale or bias; ``value`` in each channel if there is none."""
        if vector is not None:
            return self.wide(vector)
        constant = self._scratch((self._channels,), self._layout.wide)
        constant[...] = value
        return constant

    def _scratch_for(self, wanted: Array, dtype: DType) -> Array:
        stand_in = self._scratch(wanted.shape, dtype)
        self._to_deliver.append((wanted, stand_in))
        return stand_in

    def _copy(self, array: Array, dtype: DType) -> Array:
        copy = self._scratch(array.shape, dtype)
        assign(copy, array)
        return copy

    def _scratch(self, shape: tuple[int, ...], dtype: DType) -> Array:
        self._in_place = False
        return scratch(self._device, shape, dtype)

    def _is_wide(self, vector: Array) -> bool:
        return bool(vector.dtype == self._layout.wide and vector.flags.c_contiguous)

    def _contiguous_aligned(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous and self._device.pointer(array) % _ALIGNMENT == 0)

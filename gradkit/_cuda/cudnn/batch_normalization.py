"""Batch norm, forward and backward, by cuDNN's own functions.

cuDNN takes data of one type T and layout, and parameters and statistics in float32 (float64
beside float64 data). What differs goes through scratch on the device: 16-bit vectors, data
that is not dense, a ``dy`` or an output laid out otherwise than ``x``, and a ``dx`` that is
``dy`` (cuDNN does not say that it may be).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from gradkit import _memory
from gradkit._cuda.cudnn.face import BN_MIN_EPSILON, DATA_TYPES, SPATIAL, SPATIAL_PERSISTENT
from gradkit._cuda.cudnn.layout import Layout
from gradkit._cuda.cudnn.load import Cudnn
from gradkit._cuda.device import Array, StreamDevice, scratch
from gradkit._dtypes import DType, accumulation_name, dtype_named, float_name
from gradkit.errors import CudnnError

# Unused beside saved statistics, and yet checked against CUDNN_BN_MIN_EPSILON.
_BACKWARD_EPSILON = 1e-5
_ALIGNMENT = 16  # bytes: the widest access of a kernel
_HOST_SCALARS = {
    "float32": (ctypes.c_float(1), ctypes.c_float(0)),
    "float64": (ctypes.c_double(1), ctypes.c_double(0)),
}


def batch_norm_grad(
    cudnn: Cudnn,
    device: StreamDevice,
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    channel_axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
    *,
    persistent: bool = False,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``) once cuDNN has taken the call."""
    call = _Call(cudnn, device, x, channel_axis, persistent)
    sources = call.dense(x), call.dense(dy)
    result = call.dense_output(dx, (x, dy))
    gradients = call.wide_output(dscale), call.wide_output(dbias)
    scales = call.filled(1) if scale is None else call.wide(scale)
    statistics = call.wide(mean), call.wide(inv_std)
    at = device.pointer
    with call.descriptors() as (data, parameter):
        cudnn.bindings.batchNormalizationBackward(
            call.handle(),
            call.mode,
            call.one,
            call.zero,
            call.one,
            call.zero,
            data,
            at(sources[0]),
            data,
            at(sources[1]),
            data,
            at(result, write=True),
            parameter,
            at(scales),
            at(gradients[0], write=True),
            at(gradients[1], write=True),
            _BACKWARD_EPSILON,
            at(statistics[0]),
            at(statistics[1]),
        )
    call.deliver()


def batch_norm(
    cudnn: Cudnn,
    device: StreamDevice,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    channel_axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
    *,
    persistent: bool = False,
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written once cuDNN has taken the call."""
    if eps < BN_MIN_EPSILON:
        raise CudnnError(
            "cudnnBatchNormalizationForwardTraining",
            None,
            f"CUDNN_STATUS_NOT_SUPPORTED: eps {eps} is below {BN_MIN_EPSILON}",
        )
    call = _Call(cudnn, device, x, channel_axis, persistent)
    source, result = call.dense(x), call.dense_output(y, (x,))
    statistics = call.wide_output(mean), call.wide_output(inv_std)
    scales = call.filled(1) if scale is None else call.wide(scale)
    biases = call.filled(0) if bias is None else call.wide(bias)
    at = device.pointer
    with call.descriptors() as (data, parameter):
        cudnn.bindings.batchNormalizationForwardTraining(
            call.handle(),
            call.mode,
            call.one,
            call.zero,
            data,
            at(source),
            data,
            at(result, write=True),
            parameter,
            at(scales),
            at(biases),
            1.0,  # running statistics are the caller's affair: null pointers
            0,
            0,
            eps,
            at(statistics[0], write=True),
            at(statistics[1], write=True),
        )
    call.deliver()


class _Call:
    """One call's layout, types and scratch.

    Scratch may go as soon as the work is queued: the device's memory pool hands it on in the
    order of the stream. ``scratch`` keeps what a graph will use again.
    """

    def __init__(
        self, cudnn: Cudnn, device: StreamDevice, x: Array, channel_axis: int, persistent: bool
    ):
        data = float_name(x.dtype) or ""
        wide = accumulation_name(data)
        self._cudnn, self._device = cudnn, device
        self._layout = Layout.of(x, channel_axis)
        self._data_type = DATA_TYPES[data]
        self._wide = dtype_named(wide)
        self._channels = x.shape[channel_axis]
        self.one, self.zero = map(ctypes.addressof, _HOST_SCALARS[wide])
        if persistent and not self._layout.channels_last:
            raise ValueError(
                f"engine='cudnn-persistent' takes channels-last data of 3 or more dimensions; x "
                f"has shape {x.shape}, strides {x.strides} and channel axis {channel_axis}"
            )
        self.mode = SPATIAL_PERSISTENT if persistent else SPATIAL
        self._to_deliver: list[tuple[Array, Array]] = []

    def handle(self) -> int:
        return self._cudnn.handles.get(self._device.number, self._device.cuda_stream())

    def dense(self, array: Array) -> Array:
        """The array's elements in the layout, copied unless they lie so already."""
        view = array.transpose(self._layout.order)
        return view if _is_plain(view) else self._copy(view, view.dtype)

    def dense_output(self, array: Array, inputs: tuple[Array, ...]) -> Array:
        """Room for an output in the layout: its own memory, if no input shares that."""
        view = array.transpose(self._layout.order)
        shared = any(_memory.overlap(view, other) for other in inputs)
        if _is_plain(view) and not shared:
            return view
        return self._scratch_for(view, view.dtype)

    def wide(self, vector: Array) -> Array:
        """One number a channel as cuDNN wants it."""
        if vector.dtype == self._wide and vector.flags.c_contiguous:
            return vector
        return self._copy(vector, self._wide)

    def wide_output(self, vector: Array | None) -> Array:
        """Room for one result a channel; also where nobody wants it, for cuDNN insists."""
        if vector is None:
            return scratch(self._device, (self._channels,), self._wide)
        if vector.dtype == self._wide and vector.flags.c_contiguous:
            return vector
        return self._scratch_for(vector, self._wide)

    def filled(self, value: float) -> Array:
        made = scratch(self._device, (self._channels,), self._wide)
        made[...] = value
        return made

    def deliver(self) -> None:
        """Copy results out of scratch, rounded once."""
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

    @contextmanager
    def descriptors(self) -> Iterator[tuple[int, int]]:
        """Of the data and of the vectors."""
        bindings, layout = self._cudnn.bindings, self._layout
        made: list[int] = []
        try:
            made.append(bindings.createTensorDescriptor())
            made.append(bindings.createTensorDescriptor())
            bindings.setTensor4dDescriptorEx(
                made[0], self._data_type, *layout.dims, *layout.strides
            )
            bindings.deriveBNTensorDescriptor(made[1], made[0], self.mode)
            yield made[0], made[1]
        finally:
            for descriptor in made:
                bindings.destroyTensorDescriptor(descriptor)


def _is_plain(array: Array) -> bool:
    return bool(array.flags.c_contiguous and _memory.address_of(array) % _ALIGNMENT == 0)

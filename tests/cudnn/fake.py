"""A cuDNN over host memory with the face of the real bindings, as strict as the real one.

It is written from cuDNN's documentation, in other terms than gradkit's reference: strided
views of memory that descriptors tell of, and nothing of what the caller meant.
"""

import ctypes
import itertools
import threading
from contextlib import nullcontext

import ml_dtypes
import numpy as np

from gradkit.errors import CudnnError

TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 9: ml_dtypes.bfloat16}


class HostDevice:
    """A device whose memory is the host's."""

    xp = np
    multiprocessors, sharing, max_shared_memory = 4, 4, 48 << 10

    def __init__(self, number=0):
        self.number = number
        self.current = threading.local()

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def pointer(self, array):
        return array.ctypes.data

    def cuda_stream(self):
        return getattr(self.current, "stream", 7)

    def capturing(self):
        return False

    def active(self):
        return nullcontext()


class FakeCudnn:
    """NumPy behind the face of the bindings."""

    name, path = "fake", "/nowhere/libcudnn.so"

    def __init__(self, *, most=None, fails=None):
        self.most = most  # the largest batch that it takes
        self.fails = fails  # the status text that batch norm fails with
        self.asked = 0  # batch norm calls, refused ones too
        self.calls = []  # (function, handle, mode, stream)
        self.handles, self.descriptors = {}, {}
        self.busy = set()
        self._numbers = itertools.count(1000)
        self._lock = threading.Lock()

    def getVersion(self):
        return 92800

    def create(self):
        with self._lock:
            handle = next(self._numbers)
            self.handles[handle] = None
            return handle

    def destroy(self, handle):
        del self.handles[handle]

    def setStream(self, handle, stream):
        assert handle in self.handles
        self.handles[handle] = stream

    def createTensorDescriptor(self):
        with self._lock:
            number = next(self._numbers)
            self.descriptors[number] = None
            return number

    def destroyTensorDescriptor(self, descriptor):
        del self.descriptors[descriptor]

    def setTensor4dDescriptorEx(self, descriptor, kind, *sizes):
        assert descriptor in self.descriptors
        assert len(sizes) == 8
        assert all(type(size) is int for size in sizes)
        if min(sizes) < 1:
            raise CudnnError("cudnnSetTensor4dDescriptorEx", 2000, "CUDNN_STATUS_BAD_PARAM")
        if 1 + sum((d - 1) * s for d, s in zip(sizes[:4], sizes[4:], strict=True)) > 2**31 - 1:
            raise CudnnError("cudnnSetTensor4dDescriptorEx", 3000, "CUDNN_STATUS_NOT_SUPPORTED")
        self.descriptors[descriptor] = (kind, sizes[:4], sizes[4:])

    def deriveBNTensorDescriptor(self, derived, source, mode):
        assert mode in (1, 2)
        kind, (_, c, _, _), _ = self.descriptors[source]
        self.descriptors[derived] = (1 if kind == 1 else 0, (1, c, 1, 1), (c, 1, 1, 1))

    def batchNormalizationForwardTraining(self, *arguments):
        self._run("Forward", self._forward, arguments)

    def batchNormalizationForwardInference(self, *arguments):
        self._run("Inference", self._inference, arguments)

    def batchNormalizationBackward(self, *arguments):
        self._run("Backward", self._backward, arguments)

    def _forward(self, *arguments):
        _, _, alpha, beta, xd, x, yd, y, vd, scale, bias, factor, *rest = arguments
        running_mean, running_variance, epsilon, mean, inv_std = rest
        self._accept("ForwardTraining", xd, yd)
        assert 0 <= factor <= 1
        x, y = self._data(xd, x), self._data(yd, y)
        vectors = [self._vector(vd, pointer) for pointer in (scale, bias, mean, inv_std)]
        scale, bias, mean, inv_std = vectors
        one, zero = self._scalars(vd, alpha, beta)
        assert (one, zero) == (1, 0)
        wide = x.astype(np.float64)
        centre = wide.mean(axis=(0, 2, 3), keepdims=True)
        variance = np.square(wide - centre).mean(axis=(0, 2, 3), keepdims=True)
        deviation = 1 / np.sqrt(variance + epsilon)
        y[...] = (wide - centre) * deviation * scale + bias
        mean[...], inv_std[...] = centre, deviation
        assert bool(running_mean) == bool(running_variance)
        if not running_mean:
            return
        count = x.size // x.shape[1]
        moved = (running_mean, centre), (running_variance, variance * (count / (count - 1)))
        for pointer, new in moved:
            running = self._vector(vd, pointer)
            running[...] = running.astype(np.float64) * (1 - factor) + new * factor

    def _inference(self, *arguments):
        _, _, alpha, beta, xd, x, yd, y, vd, scale, bias, mean, variance, epsilon = arguments
        self._accept("ForwardInference", xd, yd)
        x, y = self._data(xd, x), self._data(yd, y)
        assert not np.shares_memory(x, y)
        vectors = [self._vector(vd, pointer) for pointer in (scale, bias, mean, variance)]
        scale, bias, mean, variance = (vector.astype(np.float64) for vector in vectors)
        assert self._scalars(vd, alpha, beta) == (1, 0)
        y[...] = (x.astype(np.float64) - mean) * scale / np.sqrt(variance + epsilon) + bias

    def _backward(self, *arguments):
        scalars = arguments[2:6]
        xd, x, dyd, dy, dxd, dx, vd, scale, dscale, dbias, epsilon, mean, inv_std = arguments[6:]
        self._accept("Backward", xd, dyd, dxd)
        assert epsilon >= 0
        x, dy, dx = self._data(xd, x), self._data(dyd, dy), self._data(dxd, dx)
        assert not np.shares_memory(dx, x)
        assert not np.shares_memory(dx, dy)
        vectors = [self._vector(vd, p) for p in (scale, mean, inv_std, dscale, dbias)]
        scale, mean, inv_std, dscale, dbias = vectors
        assert self._scalars(vd, *scalars[:2]) == self._scalars(vd, *scalars[2:]) == (1, 0)
        dx[...], dscale[...], dbias[...] = np.nan, np.nan, np.nan  # beta 0: nothing is read
        work = np.float64
        x, dy = x.astype(work), dy.astype(work)
        scale, mean, inv_std = (v.astype(work) for v in (scale, mean, inv_std))
        count = x.size // x.shape[1]
        xhat = (x - mean) * inv_std
        of_scale = (dy * xhat).sum(axis=(0, 2, 3), keepdims=True)
        of_bias = dy.sum(axis=(0, 2, 3), keepdims=True)
        dx[...] = scale * inv_std * (dy - (of_bias + xhat * of_scale) / count)
        dscale[...], dbias[...] = of_scale, of_bias

    def _run(self, function, work, arguments):
        handle, mode = arguments[:2]
        with self._lock:
            self.asked += 1
            self.calls.append((function, handle, mode, self.handles[handle]))
            assert handle not in self.busy, "a handle in two threads"
            self.busy.add(handle)
        try:
            work(*arguments)
        finally:
            self.busy.discard(handle)

    def _accept(self, function, *descriptors):
        name = f"cudnnBatchNormalization{function}"
        described = {self.descriptors[number] for number in descriptors}
        if len(described) != 1:
            raise CudnnError(name, 2000, "CUDNN_STATUS_BAD_PARAM")
        if self.most is not None and next(iter(described))[1][0] > self.most:
            raise CudnnError(name, 3000, "CUDNN_STATUS_NOT_SUPPORTED")
        if self.fails is not None:
            raise CudnnError(name, 5000, self.fails)

    def _data(self, descriptor, pointer):
        kind, dims, strides = self.descriptors[descriptor]
        assert pointer % 16 == 0  # a kernel's widest access
        return _memory(pointer, np.dtype(TYPES[kind]), dims, strides)

    def _vector(self, descriptor, pointer):
        kind, dims, strides = self.descriptors[descriptor]
        assert kind in (0, 1)
        return _memory(pointer, np.dtype(TYPES[kind]), dims, strides)

    def _scalars(self, descriptor, *pointers):
        kind = ctypes.c_double if self.descriptors[descriptor][0] == 1 else ctypes.c_float
        return tuple(kind.from_address(pointer).value for pointer in pointers)


def _memory(pointer, dtype, dims, strides):
    assert pointer, "a null pointer"
    length = 1 + sum((d - 1) * s for d, s in zip(dims, strides, strict=True))
    room = (ctypes.c_char * (length * dtype.itemsize)).from_address(pointer)
    return np.ndarray(dims, dtype, room, 0, [s * dtype.itemsize for s in strides])

"""Any other array with DLPack, on the host or on a CUDA device."""

import ctypes
import sys
from contextlib import AbstractContextManager, suppress
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from gradkit import _host
from gradkit._arrays import cuda
from gradkit._arrays.base import NOTHING, Framework
from gradkit._backend import Array, Shape, Spec
from gradkit._dtypes import FLOATS, dtype_named

_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_INT = 0  # kDLInt
_READ_ONLY, _IS_COPIED = 1, 2  # flags of DLManagedTensorVersioned
_BYTE = np.dtype(np.uint8)
_ALIGNMENT = 64  # bytes: with less, TensorFlow aborts the process and JAX copies


class DLPack(Framework):
    """Any object with ``__dlpack__``; its library's ``from_dlpack`` makes the results."""

    name = "DLPack"

    def owns(self, kind: type) -> bool:
        return hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Array:
        kind, _ = device_of(array)
        if kind not in _HOST + _CUDA:
            raise TypeError(
                f"is on DLPack device type {kind}; gradkit computes on the CPU and on CUDA devices"
            )
        consumer = np if kind in _HOST else cuda.cupy()
        is_bfloat16 = "bfloat16" in str(getattr(array, "dtype", ""))
        exporter = Exporter(array, _INT if is_bfloat16 else None) if is_bfloat16 or write else array
        try:
            view = consumer.from_dlpack(exporter)
        except (BufferError, RuntimeError) as error:
            if kind in _CUDA:
                cuda.check_driver()
            raise TypeError(f"cannot be read through DLPack: {error}") from error
        if is_bfloat16:
            view = view.view(dtype_named("bfloat16"))
        if write and not exporter.may_be_written():
            if kind in _CUDA:
                return cuda.read_only(view)
            view.flags.writeable = False
        return view

    def empty(self, spec: Spec, like: Any) -> tuple[Array, Any] | None:
        on_device = device_of(like)[0] in _CUDA
        return spec.allocate(cuda.unpooled if on_device else aligned), None

    def wrap(self, result: Array, like: Any) -> Any:
        if hasattr(like, "__array_namespace__"):
            library = like.__array_namespace__()
        else:
            library = sys.modules[type(like).__module__.partition(".")[0]]
        if not hasattr(library, "from_dlpack"):
            return result  # a NumPy or CuPy array
        return library.from_dlpack(exportable(result))

    def widest(self, like: Any) -> str:
        """Some libraries convert float64 to float32 when they import it, as MLX does."""
        if device_of(like)[0] in _CUDA:
            return "float64"
        return str(self.view(self.wrap(np.zeros(1), like), write=False).dtype)

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        kind, number = device_of(like)
        return cuda.producer_waits(like, number) if kind in _CUDA else NOTHING


class OwnMemory(DLPack):
    """A library whose allocator makes the results on a CUDA device.

    It may hold all of the device's memory, and reuses its own in the order of its own streams.
    """

    def allocate(self, shape: Shape, dtype: np.dtype[Any], like: Any) -> Any:
        """A new array on the device of ``like``, whose contents are undefined."""
        raise NotImplementedError

    def empty(self, spec: Spec, like: Any) -> tuple[Array, Any] | None:
        if device_of(like)[0] not in _CUDA:
            return super().empty(spec, like)
        shape, dtype = spec.shape, spec.dtype  # in C order: these libraries have no strides
        if 0 in shape or dtype.itemsize > np.dtype(self.widest(like)).itemsize:
            return None
        array = self.allocate(shape, dtype, like)
        return self.view(array, write=False), array  # written: it is nobody's yet

    def wrap(self, result: Array, like: Any) -> Any:
        if isinstance(result, np.ndarray):
            return super().wrap(result, like)
        dtype = min(result.dtype, np.dtype(self.widest(like)), key=attrgetter("itemsize"))
        array = self.allocate(result.shape, dtype, like)
        if result.size:
            target = self.view(array, write=False)
            if dtype.kind not in "fb":  # CuPy 13 has no bfloat16
                target, result = target.view(np.int16), result.view(np.int16)
            target[...] = result
        return array


def device_of(array: Any) -> tuple[int, int]:
    """The DLPack type and number of the device that an array is on."""
    kind, number = array.__dlpack_device__()
    return int(kind), int(number)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """New host memory that every library imports without a copy."""
    size = prod(shape) * dtype.itemsize
    memory: Array = _host.backend().outputs([Spec("", (size + _ALIGNMENT,), _BYTE)])[0]
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def exportable(result: Array) -> Any:
    """A result as an object whose memory and dtype every library can import."""
    if isinstance(result, np.ndarray) and result.ctypes.data % _ALIGNMENT:
        copy = aligned(result.shape, result.dtype)
        copy[...] = result
        result = copy
    if result.dtype.kind in "fb":
        return result
    return Exporter(result.view(np.int16), FLOATS["bfloat16"].dlpack)


class Exporter:
    """An array's exports under another type code if one is given, with a look at their flags.

    NumPy, and CuPy before 14, do not support bfloat16 in DLPack. Changing the type code in a
    capsule is safe, because every export makes a new capsule.
    """

    def __init__(self, array: Any, code: int | None):
        self._array, self._code = array, code
        self._flags: int | None = None

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        tensor = self._tensor_in(capsule)
        if self._code is not None:
            tensor.code = self._code
        if "max_version" not in options:  # NumPy before 2.1 and CuPy before 14 ask for no flags
            with suppress(TypeError):
                self._tensor_in(self._array.__dlpack__(**options, max_version=(1, 0)))
        return capsule

    def may_be_written(self) -> bool:
        """True if the last export was the array's own memory, and not read-only.

        Without flags, as before DLPack 1.0, the array's CUDA interface says so, or nothing does.
        """
        if self._flags is None:
            interface = getattr(self._array, "__cuda_array_interface__", {})
            return not interface.get("data", (0, True))[1]
        return not self._flags & (_READ_ONLY | _IS_COPIED)

    def _tensor_in(self, capsule: Any) -> "_Tensor":
        name = _name_in(capsule)
        address = _pointer_in(capsule, name)
        if name == b"dltensor_versioned":  # version, manager_ctx, deleter, flags; then the tensor
            self._flags = ctypes.c_uint64.from_address(address + 24).value
            address += 32
        return _Tensor.from_address(address)


class _Tensor(ctypes.Structure):
    """The head of ``DLTensor``, up to the type code."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


_name_in = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

"""The CUDA backend: the operations of each file beside this one, on one device.

``launch`` has the machinery that they share, ``cudnn`` NVIDIA's library for batch norm.
"""

from collections.abc import Iterable, Set
from typing import Any

import numpy as np

from gradkit._backend import Array, Shape
from gradkit._cuda.accumulation import Accumulation
from gradkit._cuda.batch_normalization import BatchNormalization
from gradkit._cuda.clipping import Clipping
from gradkit._cuda.launch.buffers import address_of
from gradkit._cuda.launch.device import CupyDevice, keep_if_captured, scratch
from gradkit._cuda.launch.warmup import warmup
from gradkit._cuda.layer_normalization import LayerNormalization
from gradkit._cuda.rms_normalization import RmsNormalization
from gradkit.errors import BackendUnavailableError

__all__ = ["CudaBackend", "backend_of"]


class CudaBackend(Accumulation, BatchNormalization, Clipping, LayerNormalization, RmsNormalization):
    """A ``gradkit._backend.Backend`` whose arrays are on one device."""

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """A new array whose contents are undefined."""
        return scratch(self.device, shape, dtype)

    def scalar(self, value: Any) -> Array:
        """A NumPy scalar as a 0-d array on the device, by a kernel: nothing is uploaded."""
        return keep_if_captured(self.device, self.device.xp.full((), value[()], value.dtype))

    def as_float64(self, value: Any) -> Array:
        """A number or an array as a float64 array on the device."""
        return keep_if_captured(self.device, self.device.xp.asarray(value, "float64"))

    def address(self, array: Array) -> int:
        """The address of an array's first element."""
        return address_of(array)

    def read(self, array: Array) -> np.ndarray[Any, Any]:
        """An array's values on the host, once the current stream has written them."""
        values: np.ndarray[Any, Any] = self.device.xp.asnumpy(array)
        return values

    def warmup(self, operations: Iterable[str], dtypes: Set[str]) -> int:
        """Compile what operations on arrays of some dtypes need, and load cuDNN for them."""
        names = set(operations)
        if names & {"batch_norm", "batch_norm_grad"}:
            self.load_cudnn()
        return warmup(self.device, names, dtypes)


_backends: dict[int, CudaBackend] = {}


def backend_of(array: Array) -> CudaBackend:
    """The backend for the device that a CuPy array is on."""
    number = array.data.device_id
    try:
        return _backends[number]
    except KeyError:
        return _backends.setdefault(number, CudaBackend(_device(number)))


def _device(number: int) -> CupyDevice:
    try:
        return CupyDevice(number)
    except Exception as error:
        raise BackendUnavailableError(
            f"CuPy is installed, but CUDA device {number} cannot be used: {error}. See that "
            "nvidia-smi lists it and that its driver is as new as CuPy's CUDA, or pass NumPy "
            "arrays (cupy.asnumpy)."
        ) from error

"""Arrays that live on the emulated device, so that the public functions run kernels on them.

To gradkit they are the arrays of one more library: their own framework, and a CUDA backend
whose device is the emulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradkit import _host
from gradkit._arrays import NOTHING, Framework, register
from gradkit._cuda import CudaBackend
from testbed.emulator import EmulatedDevice
from testbed.ptx import PtxDevice


class DeviceArray(np.ndarray[Any, Any]):
    """An array that ``backend`` computes on; views and results of NumPy's functions are too."""

    backend: Any = None

    def __array_finalize__(self, other: Any) -> None:
        self.backend = getattr(other, "backend", None)


class Emulated(Framework):
    """The library of ``DeviceArray``."""

    name = module = "emulated"

    def owns(self, kind: type) -> bool:
        """Say whether this library makes arrays of that type."""
        return issubclass(kind, DeviceArray)

    def computes_on(self, kind: type) -> bool:  # noqa: ARG002
        """Say that kernels take arrays as they are."""
        return True

    def on_one_device(self, views: Iterable[Any]) -> bool:
        """Compare what computes on them."""
        return len({id(view.backend) for view in views}) == 1

    def view(self, array: Any, *, write: bool, detach: bool = False) -> Any:  # noqa: ARG002
        """Return the array itself: kernels take it as it is."""
        return array

    def backend_of(self, view: Any) -> Any:
        """Return the backend of the device that an array lies on."""
        return view.backend

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:
        """Return a context in which the device that an array lies on is current."""
        device: AbstractContextManager[Any] = like.backend.device.active()
        return device

    def wrap(self, result: Any, like: Any) -> Any:
        """Return a result as an array of the device that ``like`` lies on."""
        return on_device(result, like.backend)


def on_device(
    array: npt.NDArray[Any], backend: Any, kind: type[DeviceArray] = DeviceArray
) -> DeviceArray:
    """The same memory as an array of the emulated device."""
    view = array.view(kind)
    view.backend = backend
    return view


def emulated_backend(**options: Any) -> Any:
    """A CUDA backend on an emulated device of its own."""
    return CudaBackend(EmulatedDevice(**options))


def ptx_backend(**options: Any) -> Any:
    """A CUDA backend on a device of its own that runs NVRTC's code."""
    return CudaBackend(PtxDevice(**options))


_devices: dict[Any, int] = {}  # the number of each backend's


class _Pointer(NamedTuple):
    """Address of an array's first element, as CuPy has it."""

    ptr: int
    device_id: int


class IdleArray(DeviceArray):
    """An array that is described as CuPy's are."""

    @property
    def _c_contiguous(self) -> bool:
        return self.flags.c_contiguous

    @property
    def data(self) -> Any:
        """Its address, on a device of each backend's own."""
        device = _devices.setdefault(self.backend, len(_devices))
        return _Pointer(self.__array_interface__["data"][0], device)


class Idle(Emulated):
    """The library of ``IdleArray``."""

    returns_views = True

    def on_stream(self, like: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return what changes nothing: every device is current."""
        return NOTHING


register(DeviceArray, Emulated())
register(IdleArray, Idle())
if _host.code is not None:
    _host.code.use_device_arrays(IdleArray)

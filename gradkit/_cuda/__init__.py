"""The CUDA backend: launchers with the names and signatures of ``gradkit._numpy``.

Each launcher takes a ``Device`` first; ``Backend`` binds them all to one.
"""

from collections.abc import Callable, Iterable, Set
from functools import wraps
from typing import Any

from gradkit._cuda import accumulation, clipping, engines, normalization
from gradkit._cuda.device import CupyDevice, Device, kept, scratch
from gradkit._cuda.warming import combinations, warm_up
from gradkit.errors import BackendUnavailableError

_OPERATIONS: dict[str, Callable[..., None]] = {
    "accumulate_grad": accumulation.accumulate_grad,
    "accumulate_grad_v2": accumulation.accumulate_grad_v2,
    "batch_norm": engines.batch_norm,
    "batch_norm_grad": engines.batch_norm_grad,
    "clip_by_norm": clipping.clip_by_norm,
    "clip_coefficient": clipping.clip_coefficient,
    "clip_grad_value": clipping.clip_grad_value,
    "grad_norm": clipping.grad_norm,
    "invertible_layer_norm_grad": normalization.invertible_layer_norm_grad,
    "layer_norm": normalization.layer_norm,
    "layer_norm_grad": normalization.layer_norm_grad,
    "layer_norm_inverse": normalization.layer_norm_inverse,
    "norm_of_shares": clipping.norm_of_shares,
    "norm_shares": clipping.norm_shares,
    "rms_norm": normalization.rms_norm,
    "rms_norm_grad": normalization.rms_norm_grad,
    "scale_grads": clipping.scale_grads,
    "zero_grad": accumulation.zero_grad,
}

__all__ = ["Backend", "backend_of", "combinations"]


class Backend:
    """The launchers bound to one device, callable as the functions of ``gradkit._numpy`` are."""

    def __init__(self, device: Device):
        self.device = device
        for name, launcher in _OPERATIONS.items():
            setattr(self, name, _bound(launcher, device))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory on the device whose contents are undefined."""
        with self.device.active():
            return scratch(self.device, shape, dtype)

    def as_scalar(self, value: Any) -> Any:
        """A NumPy scalar as a 0-d array on the device, by a kernel: nothing is uploaded."""
        with self.device.active():
            return kept(self.device, self.device.xp.full((), value[()], value.dtype))

    def as_float64(self, value: Any) -> Any:
        """A number or an array as a float64 array on the device."""
        with self.device.active():
            return kept(self.device, self.device.xp.asarray(value, "float64"))

    def warm_up(self, operations: Iterable[str], dtypes: Set[str]) -> int:
        """Compile what operations on arrays of some dtypes need."""
        return warm_up(self.device, operations, dtypes)


def _bound(launcher: Callable[..., None], device: Device) -> Callable[..., None]:
    @wraps(launcher)
    def bound(*args: Any, **kwargs: Any) -> None:
        with device.active():
            launcher(device, *args, **kwargs)

    return bound


_backends: dict[int, Backend] = {}


def backend_of(native: Any) -> Backend:
    """The backend for the device that a CuPy array is on."""
    number = native.device.id
    try:
        return _backends[number]
    except KeyError:
        return _backends.setdefault(number, Backend(_device(number)))


def _device(number: int) -> CupyDevice:
    try:
        return CupyDevice(number)
    except Exception as error:
        raise BackendUnavailableError(
            f"CuPy is installed, but CUDA device {number} cannot be used: {error}. See that "
            "nvidia-smi lists it and that its driver is as new as CuPy's CUDA, or pass NumPy "
            "arrays (cupy.asnumpy)."
        ) from error

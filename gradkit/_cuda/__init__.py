"""The CUDA backend: the operations in this folder, on one device.

``launch`` has the code that they share; ``cudnn`` calls NVIDIA's library for batch norm.
"""

from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np

from gradkit._backend import Array, Shape, Spec
from gradkit._calls.lists import AccumulateGrad, AccumulateGradV2
from gradkit._calls.record import Call
from gradkit._cuda.channel_launches import Launches
from gradkit._cuda.channels import ChannelNorms
from gradkit._cuda.cudnn.batch_normalization import Ready
from gradkit._cuda.cudnn.engines import may_be_cudnns
from gradkit._cuda.gated_norm import GatedNorms
from gradkit._cuda.launch.buffers import address_of, as_readable, on_device, upload
from gradkit._cuda.launch.device import CupyDevice, keep_if_captured, note_others
from gradkit._cuda.launch.replay import Replay
from gradkit._cuda.launch.warmup import compile_all
from gradkit._cuda.lists import Lists
from gradkit._cuda.row_launches import RowLaunches
from gradkit._cuda.rows import RowNorms
from gradkit.errors import BackendUnavailableError

__all__ = ["CudaBackend", "backend_of"]


class CudaBackend(ChannelNorms, GatedNorms, Lists, RowNorms):
    """A ``gradkit._backend.Backend`` whose arrays are on one device."""

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """A new array whose contents are undefined."""
        return keep_if_captured(self.device, self.device.empty(shape, dtype))

    def outputs(self, specs: Iterable[Spec | None]) -> list[Array | None]:
        """New arrays as these specs say; it is asked once whether a call is captured."""
        empty = self.device.empty
        arrays = []
        for spec in specs:
            new = spec and (spec.allocate(empty) if spec.order else empty(spec.shape, spec.dtype))
            arrays.append(new)
        return keep_if_captured(self.device, arrays)

    def scalar(self, value: Any) -> Array:
        """A NumPy scalar as a 0-d array on the device, written by a kernel, without an upload."""
        note_others()
        return keep_if_captured(self.device, self.device.xp.full((), value[()], value.dtype))

    def as_float64(self, value: Any) -> Array:
        """A number, host numbers or an array as a float64 array on the device."""
        note_others()
        if type(value) is np.ndarray:
            return on_device(self.device, value)
        xp = self.device.xp
        readable = as_readable(value) if isinstance(value, xp.ndarray) else value
        return keep_if_captured(self.device, xp.asarray(readable, "float64"))

    def again(self, compute: Callable[[Call], None]) -> Callable[[Call], None]:
        """A plan's function, or what makes its launches again, if the device allows that."""
        return Replay(compute, self.device) if self.device.replays else compute

    def take(self, array: Array, places: Array) -> Array:
        """A vector's elements at these places, gathered on the device."""
        note_others()
        index = upload(self.device, places).view(places.dtype)
        return keep_if_captured(self.device, array[keep_if_captured(self.device, index)])

    def address(self, array: Array) -> int:
        """The address of an array's first element."""
        return address_of(array)

    def takes_memory(self, call: Any) -> bool:
        """True if kernels are launched on the call's arrays as they are, which are aligned then."""
        if call.plan.widened:
            return False
        if isinstance(call, (AccumulateGrad, AccumulateGradV2)):
            return call.plan.launcher is not None
        launcher = call.plan.launcher
        if isinstance(launcher, Ready):
            return True
        if may_be_cudnns(call):
            return False  # it needs arrays
        return isinstance(launcher, (RowLaunches, Launches)) and bool(launcher.all_usable.gapless)

    def warmup(self, operations: Iterable[str], dtypes: Set[str]) -> int:
        """Compile what operations on arrays of these dtypes need; load cuDNN for batch norm."""
        from gradkit._cuda.dry_run import DryDevice, needed_by  # which few processes need

        names = set(operations)
        if names & {"batch_norm", "batch_norm_grad", "batch_norm_inference"}:
            self.load_cudnn()
        combinations = needed_by(CudaBackend(DryDevice(self.device)), names, dtypes)
        compile_all(self.device, combinations)
        return len(combinations)


backends: dict[int, CudaBackend] = {}  # those of devices that were used


def backend_of(array: Array) -> CudaBackend:
    """The backend for the device that a CuPy array is on."""
    number = array.data.device_id
    try:
        return backends[number]
    except KeyError:
        return backends.setdefault(number, CudaBackend(_device(number)))


def _device(number: int) -> CupyDevice:
    try:
        return CupyDevice(number)
    except Exception as error:
        raise BackendUnavailableError(
            f"CuPy is installed, but CUDA device {number} cannot be used: {error}. Check "
            "that nvidia-smi lists it and that its driver supports CuPy's CUDA version, or pass "
            "NumPy arrays (cupy.asnumpy)."
        ) from error

"""Batch norm by cuDNN if it is installed and takes the case, by our own kernels otherwise.

cuDNN's limits are not known here: it is asked. It refuses on the host, before anything is
launched, and a case that it has refused once goes to our kernel straight away.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from gradkit._backend import Array, Engine
from gradkit._cuda.cudnn import batch_normalization as by_cudnn
from gradkit._cuda.cudnn import library
from gradkit._cuda.cudnn.library import Cudnn
from gradkit._cuda.launch import channels
from gradkit._cuda.launch.channels import Forward, Gradient, combinations
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.operations import OnDevice
from gradkit._cuda.launch.warmup import asks_for
from gradkit.errors import BackendUnavailableError, CudnnError

_MOST_REFUSED = 4096  # cases remembered

# What runs a call by cuDNN; ``persistent`` chooses its algorithm.
ByCudnn: TypeAlias = Callable[..., None]

_warned = False


class BatchNormalization(OnDevice):
    """Chooses the engine of each call."""

    @asks_for(partial(combinations, "batch_norm"))
    def batch_norm(
        self,
        x: Array,
        scale: Array | None,
        bias: Array | None,
        channel_axis: int,
        eps: float,
        y: Array,
        mean: Array,
        inv_std: Array,
        engine: Engine | None = None,
    ) -> Engine:
        """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
        call = Forward(x, scale, bias, channel_axis, eps, y, mean, inv_std)
        case = ("batch_norm", x.shape, x.strides, x.dtype, channel_axis, eps)
        if _done_by_cudnn(self.device, engine, partial(by_cudnn.batch_norm, call=call), case):
            return "cudnn"
        channels.batch_norm(self.device, call)
        return "native"

    @asks_for(partial(combinations, "batch_norm_grad"))
    def batch_norm_grad(
        self,
        dy: Array,
        x: Array,
        scale: Array | None,
        mean: Array,
        inv_std: Array,
        channel_axis: int,
        dx: Array,
        dscale: Array | None,
        dbias: Array | None,
        engine: Engine | None = None,
    ) -> Engine:
        """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
        call = Gradient(dy, x, scale, mean, inv_std, channel_axis, dx, dscale, dbias)
        case = ("batch_norm_grad", x.shape, x.strides, x.dtype, channel_axis)
        if _done_by_cudnn(self.device, engine, partial(by_cudnn.batch_norm_grad, call=call), case):
            return "cudnn"
        channels.batch_norm_grad(self.device, call)
        return "native"

    def load_cudnn(self) -> None:
        """Load cuDNN, if it is installed, and make this thread's handle."""
        with self.device.active():
            stream = self.device.cuda_stream()
            if stream is None:
                return
            try:
                library.cudnn().handles.get(self.device.number, stream)
            except BackendUnavailableError:
                return


def _done_by_cudnn(
    device: Device, engine: Engine | None, run: ByCudnn, case: tuple[Any, ...]
) -> bool:
    """Whether cuDNN was wanted, is there and has done the work."""
    if engine == "native":
        return False
    if engine is None:
        return _taken_by_cudnn(device, run, case)
    if device.cuda_stream() is None:
        raise BackendUnavailableError(f"engine={engine!r} needs a CUDA device")
    run(library.cudnn(), device, persistent=engine == "cudnn-persistent")
    return True


def _taken_by_cudnn(device: Device, run: ByCudnn, case: tuple[Any, ...]) -> bool:
    """Whether cuDNN is there and has done the work."""
    if device.cuda_stream() is None:
        return False
    try:
        cudnn = library.cudnn()
    except BackendUnavailableError as missing:
        _warn_once(str(missing))
        return False
    cudnn.handles.check_process()
    case = (device.number, *case)
    if case in cudnn.refused:
        return False
    try:
        run(cudnn, device)
    except CudnnError as error:
        # Nothing was written: outputs that share memory with inputs are written last.
        if not error.unsupported:
            _warn_once(_failure(error, cudnn))
        elif len(cudnn.refused) < _MOST_REFUSED:
            cudnn.refused.add(case)
        return False
    return True


def _failure(error: CudnnError, cudnn: Cudnn) -> str:
    version = library.version_text(cudnn.bindings.getVersion())
    return (
        f"cuDNN failed: {error} (cuDNN {version}, {cudnn.bindings.path}). Check that its CUDA "
        "version is the driver's and CuPy's"
    )


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{message}. Batch norm runs on gradkit's own kernels meanwhile, which are equally "
            'accurate; engine="native" asks for that without this warning',
            RuntimeWarning,
            stacklevel=6,  # out of gradkit, to whoever called batch_norm
        )

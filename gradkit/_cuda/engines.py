"""Batch norm by cuDNN where it is installed and takes the case, by our own kernels elsewhere.

cuDNN's limits are not known here: it is asked. It refuses on the host, before anything is
launched, and a case that it has refused once goes to our kernel straight away.
"""

import warnings
from typing import Any

from gradkit import _engine
from gradkit._cuda import batch_normalization as native
from gradkit._cuda.cudnn import batch_normalization, load
from gradkit._cuda.cudnn.load import Cudnn
from gradkit._cuda.device import Array, Device, has_streams
from gradkit.errors import BackendUnavailableError, CudnnError

_MOST_REFUSED = 4096  # cases remembered

_warned = False


def batch_norm_grad(
    device: Device,
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    inv_std: Array,
    channel_axis: int,
    dx: Array,
    dscale: Array | None,
    dbias: Array | None,
    engine: str | None = None,
) -> None:
    """``dx``, ``dscale`` and ``dbias`` are written (``=``); ``dx`` may be ``dy``."""
    arrays = (dy, x, scale, mean, inv_std, channel_axis, dx, dscale, dbias)
    case = (x.shape, x.strides, x.dtype, channel_axis)
    _run("batch_norm_grad", device, engine, case, arrays)


def batch_norm(
    device: Device,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    channel_axis: int,
    eps: float,
    y: Array,
    mean: Array,
    inv_std: Array,
    engine: str | None = None,
) -> None:
    """``y``, ``mean`` and ``inv_std`` are written; ``y`` may be ``x``."""
    arrays = (x, scale, bias, channel_axis, eps, y, mean, inv_std)
    case = (x.shape, x.strides, x.dtype, channel_axis, eps)
    _run("batch_norm", device, engine, case, arrays)


def warm_up(device: Device) -> None:
    """Load cuDNN, where it is installed, and make this thread's handle."""
    if not has_streams(device):
        return
    try:
        cudnn = load.cudnn()
    except BackendUnavailableError:
        return
    with device.active():
        cudnn.handles.get(device.number, device.cuda_stream())


def _run(
    name: str, device: Device, engine: str | None, case: tuple[Any, ...], arrays: tuple[Any, ...]
) -> None:
    if engine is None:
        by_cudnn = _taken_by_cudnn(name, device, case, arrays)
    elif engine != "native":
        _insist(device, engine, name, arrays)
        by_cudnn = True
    else:
        by_cudnn = False
    if not by_cudnn:
        getattr(native, name)(device, *arrays)
    _engine.ran("cudnn" if by_cudnn else "native")


def _insist(device: Device, engine: str, name: str, arrays: tuple[Any, ...]) -> None:
    if not has_streams(device):
        raise BackendUnavailableError(f"engine={engine!r} needs a CUDA device")
    persistent = engine == "cudnn-persistent"
    getattr(batch_normalization, name)(load.cudnn(), device, *arrays, persistent=persistent)


def _taken_by_cudnn(
    name: str, device: Device, case: tuple[Any, ...], arrays: tuple[Any, ...]
) -> bool:
    """Whether cuDNN is there and has done the work."""
    if not has_streams(device):
        return False
    try:
        cudnn = load.cudnn()
    except BackendUnavailableError as missing:
        _warn_once(str(missing))
        return False
    cudnn.handles.check_process()
    case = (name, device.number, *case)
    if case in cudnn.refused:
        return False
    try:
        getattr(batch_normalization, name)(cudnn, device, *arrays)
    except CudnnError as error:
        _note(error, cudnn, case)
        return False
    return True


def _note(error: CudnnError, cudnn: Cudnn, case: tuple[Any, ...]) -> None:
    """Remember what cuDNN does not take; warn of whatever else went wrong.

    Nothing was written: outputs that share memory with inputs are written last.
    """
    if not error.unsupported:
        _warn_once(
            f"cuDNN failed: {error} (cuDNN {load.version_text(cudnn.bindings.getVersion())}, "
            f"{cudnn.bindings.path}). Check that its CUDA version is the driver's and CuPy's"
        )
    elif len(cudnn.refused) < _MOST_REFUSED:
        cudnn.refused.add(case)


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{message}. Batch norm runs on gradkit's own kernels meanwhile, which is as right; "
            'engine="native" asks for that without this warning',
            RuntimeWarning,
            stacklevel=6,  # out of gradkit, to whoever called batch_norm
        )

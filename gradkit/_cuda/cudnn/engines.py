"""The choice of cuDNN for a call: if it is installed, supports the case and is fast enough.

gradkit does not know cuDNN's limits: it calls cuDNN. For an unsupported case cuDNN returns an error
on the host before it launches anything; the case is remembered, and the next such call goes
straight to our kernel. So is a case that failed in any other way, because each attempt takes time
and our kernel is at least as accurate. Only if memory ran out will the next call try again.

Data whose channels are innermost in memory are left to our kernel: cuDNN's functions that need no
reserve space from the forward pass take 10 to 80 times as long there (docs/cudnn.md). So are
gradients of parameters alone: cuDNN would compute ``dx`` too.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from gradkit._cuda.cudnn import library
from gradkit._cuda.cudnn.descriptions import channels_innermost
from gradkit._cuda.cudnn.library import Cudnn
from gradkit._cuda.launch.device import Device
from gradkit.errors import BackendUnavailableError, CudnnError

_MOST_REFUSED = 4096  # how many cases are remembered
_OUT_OF_MEMORY = "ALLOC"  # in the text of each status that says so: ALLOC_FAILED and two more in 9

# A function that calls cuDNN; ``persistent`` selects the algorithm.
ByCudnn: TypeAlias = Callable[..., None]

_warned = False


def may_be_cudnns(call: Any) -> bool:
    """True if cuDNN may compute the next call like this one, of any operation."""
    engine = getattr(call, "engine", "native")
    if engine == "native" or library.is_missing():
        return False
    return engine is not None or not _is_native_faster(call)


def _is_native_faster(call: Any) -> bool:
    wanted = getattr(call, "wanted", None)
    without_dx = wanted is not None and "dx" not in wanted
    return without_dx or channels_innermost(call.x, call.channel_axis)


def run_by_cudnn(device: Device, call: Any, run: ByCudnn, more: tuple[Any, ...]) -> bool:
    """Run the call by cuDNN if its ``engine`` allows it; return whether it ran.

    ``more``: what decides whether cuDNN supports the call, besides its kind, ``x`` and the axis.
    """
    engine, x, axis = call.engine, call.x, call.channel_axis
    if engine == "native" or (engine is None and _is_native_faster(call)):
        return False
    if engine is None:
        return _try_cudnn(device, run, (type(call), x.shape, x.strides, x.dtype, axis, *more))
    if device.cuda_stream() is None:
        raise BackendUnavailableError(f"engine={engine!r} needs a CUDA device")
    run(library.cudnn(), device, persistent=engine == "cudnn-persistent")
    return True


def _try_cudnn(device: Device, run: ByCudnn, case: tuple[Any, ...]) -> bool:
    """Run the call by cuDNN if that is possible; return whether it ran."""
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
        if _OUT_OF_MEMORY not in error.text and len(cudnn.refused) < _MOST_REFUSED:
            cudnn.refused.add(case)
        return False
    return True


def _failure(error: CudnnError, cudnn: Cudnn) -> str:
    version = library.version_text(cudnn.bindings.getVersion())
    return (
        f"cuDNN failed: {error} (cuDNN {version}, {cudnn.bindings.path}). Check that its CUDA "
        "version matches the driver's and CuPy's"
    )


def _frames_of_gradkit() -> int:
    """Return the stack level of the line that called gradkit, counted from ``_warn_once``."""
    frame, level = sys._getframe(2), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("gradkit."):
        frame, level = frame.f_back, level + 1
    return level


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{message}. Batch norm runs on gradkit's own kernels instead, which are at "
            'least as accurate; engine="native" selects them without this warning',
            RuntimeWarning,
            stacklevel=_frames_of_gradkit(),
        )

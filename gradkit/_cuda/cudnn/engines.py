"""Whether cuDNN runs a call: if it is installed and supports the case.

gradkit does not know cuDNN's limits: it calls cuDNN. For an unsupported case cuDNN returns an error
on the host before it launches anything; the case is remembered, and the next such call goes
straight to our kernel. So is a case that failed in any other way, because each attempt takes time
and our kernel gives equally accurate results. Only if memory ran out will the next call try again.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from gradkit._backend import Engine
from gradkit._cuda.cudnn import library
from gradkit._cuda.cudnn.library import Cudnn
from gradkit._cuda.launch.device import Device
from gradkit.errors import BackendUnavailableError, CudnnError

_MOST_REFUSED = 4096  # how many cases are remembered
_OUT_OF_MEMORY = "ALLOC"  # in the text of each status that says so: ALLOC_FAILED and two more in 9

# A function that calls cuDNN; ``persistent`` selects the algorithm.
ByCudnn: TypeAlias = Callable[..., None]

_warned = False


def done_by_cudnn(
    device: Device, engine: Engine | None, run: ByCudnn, case: tuple[Any, ...]
) -> bool:
    """Run the call by cuDNN if ``engine`` allows it; return whether it ran."""
    if engine == "native":
        return False
    if engine is None:
        return _taken_by_cudnn(device, run, case)
    if device.cuda_stream() is None:
        raise BackendUnavailableError(f"engine={engine!r} needs a CUDA device")
    run(library.cudnn(), device, persistent=engine == "cudnn-persistent")
    return True


def _taken_by_cudnn(device: Device, run: ByCudnn, case: tuple[Any, ...]) -> bool:
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
    """How far up the stack the line is that called gradkit, from ``_warn_once``."""
    frame, level = sys._getframe(2), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("gradkit."):
        frame, level = frame.f_back, level + 1
    return level


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{message}. Batch norm runs on gradkit's own kernels instead, which are equally "
            'accurate; engine="native" selects them without this warning',
            RuntimeWarning,
            stacklevel=_frames_of_gradkit(),
        )

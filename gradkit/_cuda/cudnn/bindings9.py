"""cuDNN 9 through ctypes.

It works with any CuPy. It is the only binding for CuPy 14, which no longer has its own.
"""

import ctypes
from collections.abc import Callable, Iterable
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_void_p
from typing import Any

from gradkit._cuda.cudnn import search
from gradkit._cuda.cudnn.face import FUNCTIONS, Bindings, name_of
from gradkit.errors import CudnnError

SONAME = "libcudnn.so.9"

# cudnn_ops.h and cudnn_graph.h of cuDNN 9: handles, descriptors, arrays and host scalars are
# pointers, enumerations are ints.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": (POINTER(c_void_p),),
    "cudnnDestroy": (c_void_p,),
    "cudnnSetStream": (c_void_p, c_void_p),
    "cudnnCreateTensorDescriptor": (POINTER(c_void_p),),
    "cudnnSetTensor4dDescriptorEx": (c_void_p, c_int, *(c_int,) * 4, *(c_int,) * 4),
    "cudnnDeriveBNTensorDescriptor": (c_void_p, c_void_p, c_int),
    "cudnnDestroyTensorDescriptor": (c_void_p,),
    "cudnnBatchNormalizationForwardTraining": (
        *(c_void_p, c_int),  # handle, mode
        *(c_void_p, c_void_p),  # alpha, beta
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # xDesc, x, yDesc, y
        *(c_void_p, c_void_p, c_void_p),  # bnScaleBiasMeanVarDesc, bnScale, bnBias
        *(c_double, c_void_p, c_void_p),  # exponentialAverageFactor, running mean and variance
        *(c_double, c_void_p, c_void_p),  # epsilon, saved mean and inv_std
    ),
    "cudnnBatchNormalizationForwardInference": (
        *(c_void_p, c_int),  # handle, mode
        *(c_void_p, c_void_p),  # alpha, beta
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # xDesc, x, yDesc, y
        *(c_void_p, c_void_p, c_void_p),  # bnScaleBiasMeanVarDesc, bnScale, bnBias
        *(c_void_p, c_void_p, c_double),  # estimatedMean, estimatedVariance, epsilon
    ),
    "cudnnBatchNormalizationBackward": (
        *(c_void_p, c_int),  # handle, mode
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # alpha and beta of data, of parameters
        *(c_void_p,) * 6,  # xDesc, x, dyDesc, dy, dxDesc, dx
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # dBnScaleBiasDesc, bnScale, dscale, dbias
        *(c_double, c_void_p, c_void_p),  # epsilon, saved mean and inv_std
    ),
}


def load(places: Iterable[search.Place]) -> Bindings:
    """Load the library from the first place that has it.

    Raises ``search.UnusableError`` with the reason if that is not a usable cuDNN 9.
    """
    library, path = search.open_first(SONAME, places)
    try:
        bindings = bindings_of(library, path)
    except AttributeError as error:
        raise search.UnusableError(f"{path} lacks a function of cuDNN 9: {error}") from error
    version = bindings.getVersion()
    if not 90000 <= version < 100000:
        raise search.UnusableError(f"{path} is cuDNN {version}; gradkit needs cuDNN 9")
    return bindings


def bindings_of(library: Any, path: str) -> Bindings:
    """The library's functions, whose statuses become ``CudnnError``."""
    version, text = library.cudnnGetVersion, library.cudnnGetErrorString
    version.restype, version.argtypes = c_size_t, ()
    text.restype, text.argtypes = c_char_p, (c_int,)
    functions = {name: _checked(library, name_of(name)) for name in FUNCTIONS[1:]}
    return Bindings("ctypes", path, version, **functions)


def _checked(library: Any, name: str) -> Callable[..., Any]:
    function, types = getattr(library, name), PROTOTYPES[name]
    function.restype, function.argtypes = c_int, types

    def call(*args: Any) -> None:
        status = function(*args)
        if status:
            text = library.cudnnGetErrorString(status).decode(errors="replace")
            raise CudnnError(name, status, text)

    def make() -> int:
        handle = c_void_p()
        call(ctypes.byref(handle))
        return handle.value or 0

    return make if types == (POINTER(c_void_p),) else call
